"""``sessions list``: the sessions of a home, from its index or else from their documents, without Ray."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import clock_time, one_line, print_json, say, table, tell, terminal_width
from kimi_ray.errors import ConfigError, SessionError, StoreError
from kimi_ray.wall_clock import epoch_ms

if TYPE_CHECKING:
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.session_index_reader import SessionsReader
    from kimi_ray.store.session_index_rows import SessionSummary

_AGO = re.compile(r"\A(?P<number>\d{1,9})(?P<unit>[smhdw])\Z")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_WORKSPACE_ID = re.compile(r"\A(?:wd_[^/\\]+|no_workspace)\Z")
TITLE_COLUMNS = 100
"""Of a title in a table, wherever it is printed to: a first prompt may be long."""

_WINDOWS = re.compile(r"\A(?:[A-Za-z]:[\\/]|\\\\)")


def list_sessions(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="At most so many.")] = 20,
    workspace: Annotated[
        str | None, typer.Option("--workspace", "-w", metavar="PATH|ID", help="Those of a directory, however spelled.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only archived ones.")] = False,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Archived ones too.")] = False,
    parent: Annotated[str | None, typer.Option("--parent", metavar="SESSION", help="Children of this one.")] = None,
    forks_of: Annotated[str | None, typer.Option("--forks-of", metavar="SESSION", help="Forks of this one.")] = None,
    fork_group: Annotated[
        str | None, typer.Option("--fork-group", metavar="ID", help="Those that one fork made together.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="Those with this tag; may be repeated.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Those of a run: directory or id.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="TEXT", help="In title or last prompt.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="2h|DATE", help="Something happened since: 30m, 2h, 7d, a date.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="SESSION", help="Only older ones: where the last page ended.")
    ] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """The newest sessions: workspace, title, agents, when something last happened. Every filter must hold.

    With --json: {"home", "total", "sessions": [{"session_id", "workspace_id", "cwd", "title", "agents", "created_at",
    "updated_at", "archived", "last_turn_reason", "run_id", "tags", ...}], "next_cursor": null | what --after takes,
    "index": "ready" | "degraded" (not to be believed: the documents were read) | "none"}.
    """
    from kimi_ray.config import load_config
    from kimi_ray.store.open import open_store

    config = load_config(home)
    filters: dict[str, Any] = {
        "limit": limit,
        "archived": None if all_ else archived,
        "tags": dict(_tag(one) for one in tag or ()),
        "run_id": None if run is None else _run(run),
        "text": text,
        "fork_group": fork_group,
        "since": None if since is None else _since(since),
    }
    try:
        store = open_store(config.home, network_home=config.network_home)
        named = {"child_of": parent, "forked_from": forks_of, "after": after}
        found: dict[str, Any] = asyncio.run(_find(store, filters, workspace=workspace, named=named))
    except StoreError as error:
        if error.code != "store.not_found":
            raise
        found = {"total": 0, "sessions": [], "next_cursor": None, "index": "none"}  # nothing has been run here yet
    if json:
        print_json({"home": config.home, **found, "sessions": [listed(one) for one in found["sessions"]]})
    else:
        _print(
            config.home,
            found,
            filtered=archived
            or any(one is not None for one in (workspace, parent, forks_of, fork_group, tag, run, text, since, after)),
        )


async def _find(
    store: ReadStore, filters: dict[str, Any], *, workspace: str | None, named: dict[str, str | None]
) -> dict[str, Any]:
    from kimi_ray.store.session_index_query import SessionQuery
    from kimi_ray.store.session_index_reader import SessionsReader

    sessions = SessionsReader(store)
    query = SessionQuery.model_validate(
        {
            **filters,
            "workspace_ids": None if workspace is None else await _workspaces(sessions, store.home, workspace),
            **{key: None if text is None else await _session(store, text) for key, text in named.items()},
        }
    )
    page = await sessions.page(query)
    total = await sessions.count(query)
    return {
        "total": total,
        "sessions": list(page.items),
        "next_cursor": page.next_cursor,
        "index": sessions.standing,
    }


async def _workspaces(sessions: SessionsReader, home: str, text: str) -> tuple[str, ...]:
    """The ids under which sessions of a directory are kept."""
    from kimi_ray.ids import workspace_id
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.workspace_registry import Registry, alias_ids, read_registry

    registry = read_registry(RealFs(), home) or Registry()
    places = await sessions.places()
    if _WORKSPACE_ID.match(text):
        return alias_ids([text], registry, places)
    path = _path(text)
    return alias_ids([workspace_id(path)], registry, [*places, (workspace_id(path), path)])


def _path(text: str) -> str:
    """A directory as sessions name it; it need not exist here."""
    return text if _WINDOWS.match(text) else os.path.abspath(os.path.expanduser(text))


async def _session(store: ReadStore, text: str) -> str:
    from kimi_ray.cli.lookup import find_session

    try:
        return await find_session(store, text)
    except SessionError as error:
        if error.code != "session.not_found":
            raise
        return text  # one that is deleted may have children


def _run(text: str) -> str:
    from pathlib import Path

    from kimi_ray.cli.lookup import is_run
    from kimi_ray.runs.run_directory import read_manifest

    return str(read_manifest(Path(text).expanduser())["run_id"]) if is_run(text) else text


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--tag {text!r} has no key and value",
            code="request.bad_usage",
            hint="write --tag KEY=VALUE",
            details={"option": "--tag", "value": text},
        )
    return key, value


def _since(text: str) -> int:
    """The time that a person means, in epoch milliseconds.

    Raises:
        ConfigError: ``request.bad_usage``.
    """
    ago = _AGO.match(text)
    try:
        if ago:
            return epoch_ms() - int(timedelta(**{_UNITS[ago["unit"]]: int(ago["number"])}) / timedelta(milliseconds=1))
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"--since {text!r} is no time",
            code="request.bad_usage",
            hint="write how long ago (30m, 2h, 7d) or a date (2026-11-30, 2026-11-30T12:00)",
            details={"option": "--since", "value": text},
        ) from None


def listed(one: SessionSummary) -> dict[str, Any]:
    """A session as ``--json`` shows it."""
    shown: dict[str, Any] = {
        "session_id": one.id,
        "workspace_id": one.workspace_id,
        "cwd": one.cwd,
        "title": one.title,
        "agents": one.agent_count,
        "created_at": one.created_at or None,
        "updated_at": one.updated_at or None,
        "archived": one.archived,
        "last_turn_reason": one.last_turn_reason,
        "run_id": one.run_id,
        "tags": one.tags,
    }
    for name in ("archived_at", "parent_session_id", "forked_from", "fork_group", "fork_index", "error"):
        if getattr(one, name) is not None:
            shown[name] = getattr(one, name)
    return shown


def _print(home: str, found: dict[str, Any], *, filtered: bool) -> None:
    shown: list[SessionSummary] = found["sessions"]
    if not shown:
        say(f"no sessions in {home}" + (" match" if filtered else ""))
        return
    rows = [
        [
            one.id.removeprefix("session_")[-10:],
            one_line(one.cwd or one.workspace_id),
            one_line(one.title or "" if one.error is None else str(one.error.get("message")), TITLE_COLUMNS),
            str(one.agent_count),
            clock_time(one.updated_at, "%Y-%m-%d %H:%M:%S") if one.updated_at else "",
            one_line(one.run_id or ""),
        ]
        for one in shown
    ]
    head = ["session", "workspace", "title", "agents", "updated", "run"]
    say(table(head, rows, width=terminal_width(sys.stdout), right="...r"))
    if found["next_cursor"]:
        tell(f"{found['total']} in all; the older ones: --after {found['next_cursor']}")
