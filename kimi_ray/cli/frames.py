"""``frames``: the tables of a run or a session as Parquet files. Without Ray."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_ray.cli.exits import FAILED
from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import counted, one_line, print_json, say, tell
from kimi_ray.errors import ConfigError, SessionError

if TYPE_CHECKING:
    from kimi_ray.frames import FramesReport

_PROBLEMS_SHOWN = 20


def frames(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Runs (directories or ids), sessions (@last, an id or its end), SESSION/AGENT, zips of an export.",
        ),
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Where the files go: DIR/steps.parquet, ...")],
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAMES", help="Only these frames, with commas: rows,tool_calls.")
    ] = None,
    copied: Annotated[
        bool, typer.Option("--copied", help="Of forks also what they began with; else every event counts once.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Write the rows, steps, model calls, tool calls and messages of runs and sessions as Parquet files.

    DuckDB, pandas and polars open them; docs/frames.md says what each column is. Exit code 1 when something could not
    be read; the rest is in the files. With --json: {"out", "files": {frame: path}, "rows": {frame: count}, "logs",
    "events", "ok", "problems"}.
    """
    from kimi_ray.frames import FRAMES, write_parquet

    names = FRAMES if only is None else [name.strip() for name in only.split(",") if name.strip()]
    if not names:
        raise ConfigError("--only names no frame", code="request.bad_usage", hint=f"of {', '.join(FRAMES)}")
    report = write_parquet(_found(sources, home), out, names, home=home, copied=copied, force=force)
    if json:
        print_json(report.to_data())
    else:
        _told(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _found(sources: list[str], home: str | None) -> list[str]:
    """The sources with the ends of ids, ``@last`` and rollouts resolved."""
    from pathlib import Path

    from kimi_ray.cli.lookup import is_run

    def is_whole(source: str) -> bool:
        return is_run(source) or source.startswith("run_") or Path(source).expanduser().exists()

    return [source if is_whole(source) else asyncio.run(_resolved(source, home)) for source in sources]


async def _resolved(source: str, home: str | None) -> str:
    from kimi_ray.cli.lookup import find_session, find_stream, open_home, split_agent

    store, place = open_home(home, source)
    agent = split_agent(source)[1]
    if ":" in source or agent:
        try:
            stream = await find_stream(store, source)
        except SessionError as error:
            if error.code != "session.not_found" or not agent:
                raise
            from kimi_ray.frames.sources import no_such_place

            raise no_such_place(source, place) from None
        return f"{stream.session_id}/{stream.agent_id}"
    return await find_session(store, source)


def _told(report: FramesReport) -> None:
    for name, path in report.files.items():
        say(f"{one_line(path)}: {counted(report.rows[name], 'row')}")
    tell(f"{counted(report.logs, 'log')}, {counted(report.events, 'event')}")
    for problem in report.problems[:_PROBLEMS_SHOWN]:
        details = problem["details"]
        agent = f"{details['session_id']}/{details.get('agent_id')}: " if "session_id" in details else ""
        tell(one_line(f"{problem['code']}: {agent}{problem['message']}"))
    if len(report.problems) > _PROBLEMS_SHOWN:
        tell(f"{len(report.problems) - _PROBLEMS_SHOWN} more: --json has them all")
