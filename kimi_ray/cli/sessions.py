"""``sessions show|tail``: what a session holds, read beside whoever writes it, without Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import clock_time, one_line, print_json, safe, say, table, tell, terminal_width
from kimi_ray.errors import ConfigError

if TYPE_CHECKING:
    from kimi_ray.cli.logs_read import AgentFacts
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Document, ListedLog, Stream

sessions = typer.Typer(name="sessions", help="Look at sessions and their logs, without Ray.", no_args_is_help=True)

_TAIL = 20
_AGENTS_SHOWN = 100
_FOLDS_AT_ONCE = 4

SessionArgument = Annotated[
    str,
    typer.Argument(
        metavar="SESSION",
        help="@last, an id or its end, RUN (the newest session of a run: its directory or id), SESSION/AGENT, or a"
        " rollout: RUN:ITEM[#REPEAT].",
    ),
]
AgentOption = Annotated[str | None, typer.Option("--agent", metavar="ID", help="This agent, e.g. agent-3 or 3.")]


@sessions.command("show")
def show(
    session: SessionArgument,
    agent: AgentOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many agents.")] = _AGENTS_SHOWN,
    json: Json = False,
    home: Home = None,
) -> None:
    """One session: its agents as a tree, with turns, steps, tokens and state, folded from their logs.

    With --json: {"session", "live", "agents": [{"agent_id", "parent", "profile", "model", "state", "turns", "steps",
    "tool_calls", "input_tokens", "output_tokens", "retries", "events", "last_text", "error", ...}], "more", "home"}.
    """
    from kimi_ray.cli.lookup import find_session, find_stream, is_run, open_home

    store, place = open_home(home, session)

    async def collect() -> dict[str, Any]:
        only: str | None = None
        if agent is not None or (not is_run(session) and (":" in session or "/" in session)):
            stream = await find_stream(store, session, agent)
            session_id, only = stream.session_id, stream.agent_id
        else:
            session_id = await find_session(store, session)
        return await _shown(store, place, session_id, only, limit)

    found = asyncio.run(collect())
    if json:
        facts = [one.to_data() for one in found["agents"]]
        print_json({**found, "home": place, "agents": facts})
    else:
        _print_session(found)


@sessions.command("tail")
def tail(
    session: SessionArgument,
    agent: AgentOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin with so many of the newest.")] = _TAIL,
    from_seq: Annotated[
        int | None, typer.Option("--from", metavar="SEQ", min=0, help="Begin with this event instead.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only this type, or family: turn/end, llm.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole texts of messages and results.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The events as they are stored, one JSON a line.")] = False,
    home: Home = None,
) -> None:
    """The newest events of an agent's log (main's, unless said), and with -f those that come."""
    from kimi_ray.cli.lookup import find_stream, open_home

    store, _ = open_home(home, session)

    async def print_events() -> None:
        stream = await find_stream(store, session, agent)
        async for line in _events(store, stream, from_seq, lines, follow):
            _print_event(line, types or [], full=full, json=json)

    asyncio.run(print_events())


async def _events(
    store: ReadStore, stream: Stream, from_seq: int | None, lines: int, follow: bool
) -> AsyncIterator[bytes]:
    from kimi_ray.cli import logs_read

    end = await logs_read.next_seq(store, stream)
    start = max(0, end - lines) if from_seq is None else from_seq
    if from_seq is not None and from_seq > end:
        raise ConfigError(
            f"{stream} has {end} events, none with seq {from_seq}",
            code="request.bad_seq",
            hint=f"seqs go from 0 to {end - 1}",
            details={"next_seq": end},
        )
    source = logs_read.follow(store, stream, start) if follow else logs_read.lines_from(store, stream, start, end)
    async for line in source:
        yield line


def _print_event(line: bytes, types: list[str], *, full: bool, json: bool) -> None:
    from kimi_ray.cli.event_lines import event_line, event_text
    from kimi_ray.events import parse_event

    event = parse_event(line)
    if types and event.type not in types and event.type.partition("/")[0] not in types:
        return
    if json:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
        return
    print(event_text(event) if full else event_line(event, terminal_width(sys.stdout) or 200), flush=True)


async def _shown(store: ReadStore, home: str, session_id: str, only: str | None, limit: int) -> dict[str, Any]:
    from kimi_ray.cli.logs_read import agent_facts, is_live
    from kimi_ray.cli.lookup import agent_order

    document = await store.read_document(session_id)
    live = await asyncio.to_thread(is_live, home, session_id)
    logs = sorted(await store.list(session_id), key=lambda log: agent_order(log.stream.agent_id))
    if only is not None:
        logs = [log for log in logs if log.stream.agent_id == only]
    gate = asyncio.Semaphore(_FOLDS_AT_ONCE)

    async def facts(log: ListedLog) -> AgentFacts:
        async with gate:
            return await agent_facts(store, log.stream, log.header or {}, live=live)

    readable = [log for log in logs if log.header is not None]
    broken = [
        {"agent_id": log.stream.agent_id, "error": log.error or {"message": "unreadable"}}
        for log in logs
        if log.header is None
    ]
    return {
        "session": _listed(document) if document is not None else {"session_id": session_id},
        "live": live,
        "agents": await asyncio.gather(*(facts(log) for log in readable[:limit])),
        "more": max(0, len(readable) - limit),
        "broken": broken,
    }


def _print_session(found: dict[str, Any]) -> None:
    session, agents = found["session"], found["agents"]
    say(f"{session['session_id']}  {'live' if found['live'] else 'cold'}")
    for name in ("title", "cwd", "run_id"):
        if session.get(name):
            say(f"  {name:<8} {one_line(str(session[name]), 200)}")
    if session.get("updated_at"):
        say(f"  updated  {_when(session['updated_at'])}")
    say()
    rows = [
        [
            ("" if one.parent is None else "└ ") + one.agent_id,
            one_line("" if one.item_id is None else f"{one.item_id}#{one.repeat or 0}", 24),
            one_line(one.profile or "", 16),
            one.state,
            str(one.turns),
            str(one.steps),
            str(one.tool_calls),
            str(one.input_tokens),
            str(one.output_tokens),
            str(one.events),
            one_line(f"{one.error['code']}: {one.error['message']}" if one.error else one.last_text or "", 100),
        ]
        for one in agents
    ]
    head = ["agent", "item", "profile", "state", "turns", "steps", "tools", "in", "out", "events", "last"]
    say(table(head, rows, width=terminal_width(sys.stdout), right="....rrrrrr"))
    for one in found["broken"]:
        say(f"{one['agent_id']}: {safe(one['error']['message'])}")
    if found["more"]:
        tell(f"{found['more']} more agents: --limit {len(agents) + found['more']}")


def _listed(document: Document) -> dict[str, Any]:
    from kimi_ray.cli.lookup import run_of

    value = document.value
    return {
        "session_id": document.session_id,
        "workspace_id": document.workspace_id,
        "cwd": value.get("cwd"),
        "title": value.get("title"),
        "agents": value.get("agent_count", len(value.get("agents") or {})),
        "created_at": value.get("created_at"),
        "updated_at": value.get("updated_at"),
        "archived": bool(value.get("archived")),
        "last_turn_reason": value.get("last_turn_reason"),
        "run_id": run_of(value),
        "tags": value.get("tags") or {},
    }


def _when(at: int | None) -> str:
    return "" if at is None else clock_time(at, "%Y-%m-%d %H:%M:%S")
