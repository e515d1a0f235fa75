"""``sessions show``: what a session holds, folded from its logs beside whoever writes them, without Ray."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import clock_time, one_line, print_json, safe, say, table, tell, terminal_width
from kimi_ray.cli.sessions import AgentOption, SessionArgument

if TYPE_CHECKING:
    from kimi_ray.cli.agent_facts import AgentFacts
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Document, ListedLog

_AGENTS_SHOWN = 100
_FOLDS_AT_ONCE = 4
_RELATIVES_SHOWN = 5
_RELATIVES = 1000


def show(
    session: SessionArgument,
    agent: AgentOption = None,
    turns: Annotated[
        bool, typer.Option("--turns", help="Each turn: prompt, steps, tokens, time, how it ended.")
    ] = False,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="POINT", help="What the model saw there: 3.2, as for fork; of a step also its request."
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=0, metavar="SEQ", help="What the model saw before this event, as --at.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many agents.")] = _AGENTS_SHOWN,
    json: Json = False,
    home: Home = None,
) -> None:
    """One session: its agents as a tree, with turns, steps, tokens, tools and state; forks and lineage.

    With --json: {"session", "live", "agents": [{"agent_id", "parent", "level", "profile", "model", "state", "turns",
    "steps", "tool_calls", "tools": {name: count}, "input_tokens", "output_tokens", "pending_prompts", "events",
    "workdir", "forked_from", "last_text", "error", ...}], "forks": [id], "children": [id], "more", "home"}; with
    --turns each agent has "turn_list": [{"turn", "prompts", "steps", "tool_calls", "input_tokens", "output_tokens",
    "duration_ms", "reason", "first_seq", "last_seq", "copied", "undone"}]. With --at or --seq instead: {"session_id",
    "agent_id", "at", "seq", "messages", "request": null | {"turn", "step", "attempt", "seq", "header", "messages"},
    "damage": null | why what follows cannot be read}.
    """
    from kimi_ray.cli.lookup import find_session, find_stream, is_run, open_home

    store, place = open_home(home, session)
    if at is not None or seq is not None:
        from kimi_ray.cli.session_at import show_at

        show_at(store, session, agent, at, seq, as_json=json)
        return

    async def collect() -> dict[str, Any]:
        only: str | None = None
        if agent is not None or (not is_run(session) and (":" in session or "/" in session)):
            stream = await find_stream(store, session, agent)
            session_id, only = stream.session_id, stream.agent_id
        else:
            session_id = await find_session(store, session)
        return await _collect(store, place, session_id, only, limit, turns=turns)

    found = asyncio.run(collect())
    if json:
        agents = [one.to_data() | {"level": level} for level, one in found["agents"]]
        print_json({**found, "home": place, "agents": agents})
    else:
        _print_session(found)


async def _collect(
    store: ReadStore, home: str, session_id: str, only: str | None, limit: int, *, turns: bool
) -> dict[str, Any]:
    from kimi_ray.cli.agent_facts import agent_facts, as_tree
    from kimi_ray.cli.logs_read import is_live
    from kimi_ray.cli.lookup import agent_order

    document = await store.read_document(session_id)
    live = await asyncio.to_thread(is_live, home, session_id)
    logs = sorted(await store.list(session_id), key=lambda log: agent_order(log.stream.agent_id))
    if only is not None:
        logs = [log for log in logs if log.stream.agent_id == only]
    gate = asyncio.Semaphore(_FOLDS_AT_ONCE)

    async def facts(log: ListedLog) -> AgentFacts:
        async with gate:
            return await agent_facts(store, log.stream, log.header or {}, live=live, turns=turns)

    readable = [log for log in logs if log.header is not None]
    broken = [
        {"agent_id": log.stream.agent_id, "error": log.error or {"message": "unreadable"}}
        for log in logs
        if log.header is None
    ]
    return {
        "session": _told(document) if document is not None else {"session_id": session_id},
        "live": live,
        "agents": as_tree(await asyncio.gather(*(facts(log) for log in readable[:limit]))),
        "more": max(0, len(readable) - limit),
        "broken": broken,
        **await _relatives(store, session_id),
    }


async def _relatives(store: ReadStore, session_id: str) -> dict[str, list[str]]:
    """The forks and the children of a session, the newest first."""
    from kimi_ray.store.session_index_query import SessionQuery
    from kimi_ray.store.session_index_reader import SessionsReader

    sessions = SessionsReader(store)
    forks = await sessions.page(SessionQuery(limit=_RELATIVES, archived=None, forked_from=session_id))
    children = await sessions.page(SessionQuery(limit=_RELATIVES, archived=None, child_of=session_id))
    child_ids = [one.id for one in children.items]
    return {"forks": [one.id for one in forks.items if one.id not in child_ids], "children": child_ids}


def _print_session(found: dict[str, Any]) -> None:
    session, agents = found["session"], found["agents"]
    state = "live" if found["live"] else "cold"
    say(f"{session['session_id']}  {state}{', archived' if session.get('archived') else ''}")
    for name, text in _head(found):
        say(f"  {name:<11} {one_line(text, 100 if name == 'title' else 200)}")
    say()
    rows = [_row(level, one) for level, one in agents]
    head = ["agent", "item", "profile", "state", "turns", "steps", "in", "out", "events", "tools", "last"]
    say(table(head, rows, width=terminal_width(sys.stdout), right="....rrrrr"))
    for _, one in agents:
        if one.turn_list is not None:
            _print_turns(one)
    for one in found["broken"]:
        say(f"{one['agent_id']}: {safe(one['error']['message'])}")
    if found["more"]:
        tell(f"{found['more']} more agents: --limit {len(agents) + found['more']}")


def _head(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said about the session as a whole, line by line."""
    session = found["session"]
    lines = [(name, str(session[name])) for name in ("title", "cwd", "run_id") if session.get(name)]
    if session.get("updated_at"):
        lines.append(("updated", clock_time(session["updated_at"], "%Y-%m-%d %H:%M:%S")))
    if session.get("tags"):
        lines.append(("tags", ", ".join(f"{key}={value}" for key, value in session["tags"].items())))
    source = session.get("forked_from")
    if source:
        at = "" if source.get("at") is None else f" at {source['at']}"
        lines.append(("forked from", f"{source.get('session_id')}/{source.get('agent_id') or 'main'}{at}"))
    if session.get("fork_group"):
        lines.append(("fork group", f"{session['fork_group']}, number {session.get('fork_index')}"))
    if session.get("parent_session_id"):
        lines.append(("child of", session["parent_session_id"]))
    for name in ("forks", "children"):
        ids: list[str] = found[name]
        if ids:
            more = f" and {len(ids) - _RELATIVES_SHOWN} more" if len(ids) > _RELATIVES_SHOWN else ""
            lines.append((name, ", ".join(ids[:_RELATIVES_SHOWN]) + more))
    main = next((one for _, one in found["agents"] if one.agent_id == "main"), None)
    if main is not None and main.workdir is not None and main.workdir.get("prepared"):
        gone = "" if main.workdir["here"] else " (not here)"
        lines.append(("workdir", f"{main.workdir['kind']} {main.workdir['prepared']}{gone}"))
    return lines


def _row(level: int, one: AgentFacts) -> list[str]:
    state = one.state + (f" +{one.pending_prompts}" if one.pending_prompts else "")
    last = f"{one.error['code']}: {one.error['message']}" if one.error else one.last_text or ""
    return [
        ("" if level == 0 else "  " * (level - 1) + "└ ") + one.agent_id,
        one_line("" if one.item_id is None else f"{one.item_id}#{one.repeat or 0}", 24),
        one_line(one.profile or "", 16),
        state,
        str(one.turns),
        str(one.steps),
        str(one.input_tokens),
        str(one.output_tokens),
        str(one.events),
        one_line(", ".join(f"{name} {count}" for name, count in one.tools.items()), 30),
        one_line(last, 100),
    ]


def _print_turns(one: AgentFacts) -> None:
    say(f"\n{one.agent_id}")
    rows = [
        [
            str(turn.turn) + ("*" if turn.copied else ""),
            turn.reason + (" (undone)" if turn.undone else ""),
            str(turn.steps),
            str(turn.tool_calls),
            str(turn.input_tokens),
            str(turn.output_tokens),
            "" if turn.duration_ms is None else f"{turn.duration_ms / 1000:.1f}",
            one_line(f"{turn.error['code']}: {turn.error['message']}" if turn.error else "; ".join(turn.prompts), 100),
        ]
        for turn in one.turn_list or ()
    ]
    head = ["turn", "ended", "steps", "tools", "in", "out", "s", "prompt"]
    say(table(head, rows, width=terminal_width(sys.stdout), right="r.rrrrr"))
    if any(turn.copied for turn in one.turn_list or ()):
        say("* ran in the session that this one was forked from")


def _told(document: Document) -> dict[str, Any]:
    from kimi_ray.cli.lookup import run_of
    from kimi_ray.session.document_value import lineage_of

    value = document.value
    lineage = lineage_of(value)
    told: dict[str, Any] = {
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
    for name in ("forked_from", "fork_group", "fork_index", "parent_session_id"):
        found = getattr(lineage, name)
        if found is not None:
            told[name] = found
    return told
