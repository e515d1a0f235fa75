"""What a document remembers for the case of a crash, and how it takes its agents from the logs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.session import AgentEntry, InFlight, SessionDocument, entry_of_log, in_flight, new_document, parent_of_log

HEADER: dict[str, Any] = {
    "session_id": "s",
    "parent": {"session_id": "s", "agent_id": "agent-2"},
    "labels": {"item": "x"},
}


def value(**more: Any) -> dict[str, Any]:
    return {**new_document("s", workspace_id="w", cwd=None, now=1), **more}


class Disk:
    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    async def write(self, value: dict[str, Any], over: int) -> int:
        await asyncio.sleep(0)
        self.written.append(value)
        return over + 1


def document(disk: Disk, start: dict[str, Any]) -> SessionDocument:
    return SessionDocument(start, 1, disk.write, clock=lambda: 2)


async def test_it_is_on_disk_when_it_is_said_and_gone_when_it_is_over() -> None:
    disk = Disk()
    doc = document(disk, value())
    await doc.set_in_flight(InFlight(frozenset({"agent-2", "agent-1"}), {"r": "main"}))
    assert disk.written[-1]["in_flight"] == {"agents": ["agent-1", "agent-2"], "runs": {"r": "main"}}
    assert in_flight(disk.written[-1]) == InFlight(frozenset({"agent-1", "agent-2"}), {"r": "main"})
    await doc.set_in_flight(InFlight(frozenset({"agent-2", "agent-1"}), {"r": "main"}))
    assert len(disk.written) == 1
    await asyncio.gather(doc.set_in_flight(InFlight(runs={"r": "main"})), doc.set_in_flight(InFlight()))
    assert "in_flight" not in disk.written[-1] and not in_flight(disk.written[-1])
    assert disk.written[-1]["updated_at"] == 1


@pytest.mark.parametrize(
    "stored",
    [None, [], "x", {"agents": "main"}, {"agents": {"a": 1}, "runs": ["r"]}, {"runs": {"r": 7}}, {"agents": [7, None]}],
)
def test_what_has_another_shape_counts_as_nothing(stored: Any) -> None:
    assert not in_flight(value(in_flight=stored))


async def test_the_logs_win_for_agents_and_no_label_is_lost() -> None:
    disk = Disk()
    known = {"agent-3": {"type": "sub", "parent_agent_id": "main", "labels": {"mine": "1", "item": "old"}, "note": 1}}
    doc = document(disk, value(agents=known, agent_count=1))
    doc.reconcile([entry_of_log("main", {"session_id": "s"}), entry_of_log("agent-3", HEADER)])
    await doc.close()
    agents = disk.written[-1]["agents"]
    assert agents["agent-3"] == {
        "type": "sub", "parent_agent_id": "agent-2", "labels": {"mine": "1", "item": "x"}, "note": 1
    }  # fmt: skip
    assert agents["main"] == {"type": "main", "parent_agent_id": None}
    assert disk.written[-1]["agent_count"] == 2
    again = document(disk, disk.written[-1])
    again.reconcile([entry_of_log("main", {"session_id": "s"}), entry_of_log("agent-3", HEADER)])
    again.register([AgentEntry("agent-3")])
    await again.close()
    assert len(disk.written) == 1


def test_the_parent_of_an_agent() -> None:
    assert parent_of_log(HEADER) == "agent-2"
    # The copy of a tree: its parent is the source, the place in the tree is in its labels.
    copied = {**HEADER, "session_id": "fork"}
    assert parent_of_log(copied) == "main"
    assert parent_of_log({**copied, "labels": {"parent_agent_id": "agent-2"}}) == "agent-2"
    assert parent_of_log({"session_id": "s"}) == "main"
