"""The ``sessions`` group, what its commands take for a session, and ``sessions tail``. Without Ray."""

from __future__ import annotations

import asyncio
import difflib
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_ray.cli.options import Home
from kimi_ray.cli.printing import terminal_width
from kimi_ray.errors import ConfigError

if TYPE_CHECKING:
    from kimi_ray.events import Catalog
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Stream

sessions = typer.Typer(
    name="sessions",
    help="Look at sessions and their logs, fork, export, archive and delete them.",
    no_args_is_help=True,
)

_TAIL = 20

SessionArgument = Annotated[
    str,
    typer.Argument(
        metavar="SESSION",
        help="@last, an id or its end, RUN (the newest session of a run: its directory or id), SESSION/AGENT, or a"
        " rollout: RUN:ITEM[#REPEAT].",
    ),
]
AgentOption = Annotated[str | None, typer.Option("--agent", metavar="ID", help="This agent, e.g. agent-3 or 3.")]


def tail(
    session: SessionArgument,
    agent: AgentOption = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", min=0, help="Begin with so many of the newest [20], of --type; behind --from: so many."
        ),
    ] = None,
    from_seq: Annotated[
        int | None, typer.Option("--from", metavar="SEQ", min=0, help="Begin with this event instead.")
    ] = None,
    all_agents: Annotated[
        bool, typer.Option("--all-agents", help="Of the whole tree, by time; -f shows new agents too.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only this type, or family: turn/end, llm.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole texts of messages and results, and tracebacks.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The events as they are stored, one JSON a line.")] = False,
    home: Home = None,
) -> None:
    """The newest events of an agent's log (main's, unless said), and with -f those that come.

    With --json: the events as they are stored; with --all-agents {"agent_id", "event"}.
    """
    from kimi_ray.cli.logs_read import tree_lines
    from kimi_ray.cli.lookup import find_stream, find_tree, open_home

    for type_ in types or ():
        _check_type(type_, home)
    if all_agents and (agent is not None or from_seq is not None):
        raise ConfigError(
            "--all-agents shows every agent's newest events",
            code="request.conflict",
            hint="leave out --agent and --from",
        )
    store, _ = open_home(home, session)
    wanted = _of_types(types or [])

    async def print_events() -> None:
        if all_agents:
            session_id = await find_tree(store, session)
            newest = _TAIL if lines is None else lines
            async for agent_id, line in tree_lines(store, session_id, newest, wanted, follow=follow):
                _print_event(line, full=full, json=json, agent_id=agent_id)
            return
        stream = await find_stream(store, session, agent)
        async for line in _events(store, stream, from_seq, lines, wanted, follow):
            _print_event(line, full=full, json=json)

    asyncio.run(print_events())


def _check_type(text: str, home: str | None) -> None:
    """A misspelt type would show nothing, for ever."""
    from kimi_ray.events import CORE

    if text in _with_families(CORE):
        return
    from kimi_ray.cli.settings_of import runtime_config
    from kimi_ray.hosts.features import load_features

    known = _with_families(load_features(runtime_config(home)).catalog)
    if text in known:
        return
    close = difflib.get_close_matches(text, known, n=3, cutoff=0.5) or [
        name for name in known if name.startswith(text.partition("/")[0] + "/")
    ]
    raise ConfigError(
        f"there is no type of events {text[:60]!r}",
        code="request.unknown_type",
        hint=f"close ones: {', '.join(close[:5])}" if close else "types are like turn/end, families like llm",
        details={"type": text[:200], "close": close[:5]},
    )


def _with_families(catalog: Catalog) -> list[str]:
    names = {entry.name for entry in catalog}
    return sorted(names | {name.partition("/")[0] for name in names})


def _of_types(types: list[str]) -> Callable[[bytes], bool] | None:
    """Whether an event is of one of the types or families; None when all are wanted."""
    from kimi_ray.events import parse_event

    def wanted(line: bytes) -> bool:
        type_ = parse_event(line).type
        return type_ in types or type_.partition("/")[0] in types

    return wanted if types else None


async def _events(
    store: ReadStore,
    stream: Stream,
    from_seq: int | None,
    lines: int | None,
    wanted: Callable[[bytes], bool] | None,
    follow: bool,
) -> AsyncIterator[bytes]:
    from kimi_ray.cli import logs_read

    end = await logs_read.next_seq(store, stream)
    if from_seq is None:
        for line in await logs_read.newest_lines(store, stream, _TAIL if lines is None else lines, end, wanted):
            yield line
        if not follow:
            return
        from_seq, lines = end, None
    elif from_seq > end:
        raise ConfigError(
            f"{stream} has {end} events, none with seq {from_seq}",
            code="request.bad_seq",
            hint=f"seqs go from 0 to {end - 1}",
            details={"next_seq": end},
        )
    left = lines
    source = logs_read.follow(store, stream, from_seq) if follow else logs_read.lines_from(store, stream, from_seq, end)
    if left == 0:
        return
    async for line in source:
        if wanted is not None and not wanted(line):
            continue
        yield line
        left = None if left is None else left - 1
        if left == 0:
            return


def _print_event(line: bytes, *, full: bool, json: bool, agent_id: str | None = None) -> None:
    from kimi_ray.cli.event_lines import event_line, event_text
    from kimi_ray.events import parse_event

    event = parse_event(line)
    if json:
        whole = line if agent_id is None else b'{"agent_id":"%s","event":%s}' % (agent_id.encode(), line)
        sys.stdout.buffer.write(whole + b"\n")
        sys.stdout.buffer.flush()
        return
    whose = "" if agent_id is None else f"{agent_id:<9} "
    width = (terminal_width(sys.stdout) or 200) - len(whose)
    print(whose + (event_text(event) if full else event_line(event, max(width, 20))), flush=True)
