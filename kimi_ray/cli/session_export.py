"""``sessions export``: a session as one file, and whether such a file is whole. Without Ray."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from kimi_ray.cli.exits import FAILED
from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import counted, one_line, print_json, say, tell
from kimi_ray.errors import ConfigError

_PROBLEMS_SHOWN = 20
_STDOUT = "-"
_TEXT_FORMATS = ("openai", "sharegpt", "atif")


def export(
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]",
            help="@last, an id or its end, or RUN (zip: its newest session; else all its rollouts). Not for zip:"
            " SESSION/AGENT, RUN:ITEM[#REPEAT].",
        ),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="zip, or one JSON a line: openai, sharegpt, atif.")
    ] = "zip",
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="The file; - is stdout. [ID.zip, ID.openai.jsonl]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    check: Annotated[
        str | None, typer.Option("--check", metavar="FILE", help="Check such a file instead of making one.")
    ] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Write a session into one zip: its document, the events of all agents, the large contents that they name; or its
    conversations, or those of a run, in a format that others read (docs/frames.md).

    The same content gives the same bytes. Exit code 1 when something could not be read; the rest is in the file, and
    manifest.json says what is not. With --json: {"out", "ok", "session", "agents": [{"agent_id", "events", "prefix"}],
    "blobs", "files", "problems"}, of the other formats {"out", "format", "conversations", "ok", "problems"}; with
    --check {"ok", "session_id", "agents", "events", "blobs", "problems"}.
    """
    if check is not None:
        if session is not None or out is not None:
            raise ConfigError("--check takes a file and nothing else", code="request.conflict", hint="--check FILE")
        _check(check, as_json=json)
        return
    if session is None:
        raise ConfigError(
            "name a session", code="request.bad_usage", hint="kimi-ray sessions export @last, or --check FILE"
        )
    if format_ not in ("zip", *_TEXT_FORMATS):
        raise ConfigError(
            f"there is no format {format_[:40]!r}",
            code="request.bad_usage",
            hint=f"use --format zip, {', '.join(_TEXT_FORMATS)}",
        )
    if out == _STDOUT and json:
        raise ConfigError("--json and --out - both want stdout", code="request.conflict", hint="leave one out")
    if format_ != "zip":
        _export_text(session, format_, home, out, force=force, as_json=json)
        return
    place, manifest = asyncio.run(_export(session, home, out, force=force))
    if json:
        print_json({"out": place, **manifest})
    else:
        _told(place, manifest)
    if not manifest["ok"]:
        raise typer.Exit(FAILED)


async def _export(session: str, home: str | None, out: str | None, *, force: bool) -> tuple[str, dict[str, Any]]:
    from kimi_ray.cli.lookup import find_session, open_home
    from kimi_ray.exchange import export_session

    store, _ = open_home(home, session)
    session_id = await find_session(store, session)
    if out == _STDOUT:
        manifest = await export_session(store, session_id, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return out, manifest
    place = out if out is not None else f"{session_id}.zip"
    return place, await export_session(store, session_id, place, force=force)


def _export_text(session: str, format_: str, home: str | None, out: str | None, *, force: bool, as_json: bool) -> None:
    from kimi_ray.cli.conversation_export import export_text

    place, report = asyncio.run(export_text(session, format_, home, out, force=force))
    if as_json:
        print_json({"out": place, **report.to_data()})
    else:
        line = counted(report.conversations, "conversation")
        if place == _STDOUT:
            tell(line)
        else:
            say(f"{line} in {one_line(place)}")
        _tell_problems(list(report.problems))
    if not report.ok:
        raise typer.Exit(FAILED)


def _check(file: str, *, as_json: bool) -> None:
    from kimi_ray.exchange import verify_archive

    found = verify_archive(file)
    if as_json:
        print_json(found.model_dump(mode="json", exclude={"manifest"}))
    else:
        say(f"{one_line(file)}: {'ok' if found.ok else 'damaged'}, {_counts(found.agents, found.events, found.blobs)}")
        _tell_problems(list(found.problems))
    if not found.ok:
        raise typer.Exit(FAILED)


def _told(place: str, manifest: dict[str, Any]) -> None:
    events = sum(one["events"] for one in manifest["agents"])
    counts = _counts(len(manifest["agents"]), events, len(manifest["blobs"]))
    line = f"{manifest['session']['session_id']}: {counts}"
    if place == _STDOUT:
        tell(line)
    else:
        say(f"{line} in {one_line(place)}")
    _tell_problems(manifest["problems"])


def _counts(agents: int, events: int, blobs: int) -> str:
    return f"{counted(agents, 'agent')}, {counted(events, 'event')}, {counted(blobs, 'blob')}"


def _tell_problems(problems: list[dict[str, Any]]) -> None:
    for problem in problems[:_PROBLEMS_SHOWN]:
        path = problem.get("details", {}).get("path")
        tell(one_line(f"{problem['code']}: {path + ': ' if path else ''}{problem['message']}"))
    if len(problems) > _PROBLEMS_SHOWN:
        tell(f"{len(problems) - _PROBLEMS_SHOWN} more: --json has them all")
