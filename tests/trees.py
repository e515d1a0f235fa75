"""Trees of agents in tests: growing one, and what must be true of its logs whatever happened to its hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_ray.events import SessionEvent, parse_event
from kimi_ray.session_handle import Session
from kimi_ray.store import open_store

Logs = Mapping[str, Sequence[SessionEvent]]

GROWTH = (("main", 8), ("agent-1", 6), ("agent-2", 4), ("agent-9", 2))
"""The swarms of a tree with 20 subagents at three levels: each one's parent, and how many children."""


async def grow(session: Session, **options: Any) -> dict[str, dict[str, Any]]:
    """20 subagents at three levels below main; the lineage of each, as ``lineage`` gives it."""
    for parent, count in GROWTH:
        items = [f"{parent} {number}" for number in range(count)]
        assert (await session.swarm("{{item}}", items, parent=parent, **options)).ok
    return await lineage(session)


async def lineage(session: Session) -> dict[str, dict[str, Any]]:
    """What must be the same of each agent after any loss."""
    keys = ("labels", "item_id", "repeat", "attempt", "run_id", "parent_agent_id", "delegation_depth", "created_at")
    return {row["agent_id"]: {key: row[key] for key in keys} for row in await session.agents()}


async def stored_logs(home: str | Path, session_id: str) -> dict[str, list[SessionEvent]]:
    """All logs of a session as far as they are stored now, beside whoever writes them."""
    store = open_store(home)
    found: dict[str, list[SessionEvent]] = {}
    for log in await store.list(session_id):
        events = found[log.stream.agent_id] = []
        while True:
            page = await store.read_from(log.stream, len(events), 1000)
            events += [parse_event(line, at=len(events) + n) for n, line in enumerate(page.lines)]
            if not page.lines or len(events) >= page.next_seq:
                break
    return found


def types(events: Iterable[SessionEvent]) -> list[str]:
    """The types of events."""
    return [event.type for event in events]


def open_prompts(logs: Logs) -> set[str]:
    """The prompts that were accepted and have no final state."""
    return {
        event.data["prompt_id"] for events in logs.values() for event in events if event.type == "prompt/submitted"
    } - {event.data["prompt_id"] for events in logs.values() for event in events if event.type == "prompt/completed"}


def check_prompts(logs: Logs) -> None:
    """Every accepted prompt has exactly one final state, every turn is closed."""
    for agent_id, events in logs.items():
        submitted = [e.data["prompt_id"] for e in events if e.type == "prompt/submitted"]
        completed = [e.data["prompt_id"] for e in events if e.type == "prompt/completed"]
        assert sorted(submitted) == sorted(completed), agent_id
        found = types(events)
        assert found.count("turn/start") == found.count("turn/end"), agent_id


def check_positions(logs: Logs, *, ended: bool = True) -> None:
    """What parents recorded of children is what their logs hold, and the last of it is there for each child."""
    for parent, events in logs.items():
        last: dict[str, tuple[int, int]] = {}
        spawned: set[str] = set()
        for event in events:
            data = event.data
            if event.type == "subagent/spawned":
                spawned.add(data["agent_id"])
            elif event.type in ("subagent/completed", "subagent/failed", "subagent/suspended") and "seq" in data:
                last[data["agent_id"]] = (data["seq"], data["epoch"])
            elif event.type == "swarm/end":
                for child, position in data.get("agents", {}).items():
                    assert last[child] == (position["seq"], position["epoch"])
        for child, (seq, epoch) in last.items():
            child_events = logs[child]
            assert 0 < seq <= len(child_events), (parent, child)
            lives = [e.data["epoch"] for e in child_events[:seq] if e.type == "runtime/activated"]
            assert lives[-1] == epoch, (parent, child, seq, epoch, lives)
        if ended:
            assert {child for child in spawned if child in logs} <= last.keys(), parent
