"""A tree over two nodes whose clocks are a minute apart, forked at every turn and step: each fork is what was there."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.events import SessionEvent, parse_header
from kimi_ray.log import EventLog, closing_events
from kimi_ray.store import open_store
from tests.actors.faults import read_session
from tests.cluster.test_local_sh import Cluster, free_base_port
from tests.cluster.test_soak import add_node
from tests.cluster.tree_driver import LONG_TURN, STEPS, TURNS
from tests.trees import GROWTH, check_positions, check_prompts

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="local.sh needs Linux"),
]

ROOT = Path(__file__).parents[2]
APART_MS = 60_000
HEADER: dict[str, Any] = {
    "type": "log", "version": 1, "session_id": "s", "agent_id": "a", "created_at": 0,
    "writer": {"name": "test", "version": "0"},
}  # fmt: skip

Logs = Mapping[str, Sequence[SessionEvent]]


@pytest.mark.long
async def test_forks_of_a_tree_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    base, home = free_base_port(7 * 6), tmp_path / "home"
    up = await asyncio.to_thread(cluster.run, "up", "2", "--base-port", str(base), "--num-cpus", "2")
    assert up.returncode == 0, up.stderr
    await asyncio.to_thread(add_node, cluster, APART_MS)
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.cluster.tree_driver", f"127.0.0.1:{base}", home,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env={**cluster.joining(), "PYTHONPATH": str(ROOT), "KIMI_RAY_CLOCK_OFFSET_MS": "0"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(300):
            out, err = await driver.communicate()
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.communicate()
    assert driver.returncode == 0, err.decode()
    told = json.loads(out.splitlines()[-1])
    source = await read_session(home, told["session_id"])
    check_prompts(source)
    check_positions(source)
    _check_clocks(source)
    assert len(source) == 1 + sum(count for _, count in GROWTH) == 21

    for at, fork_id in told["forks"].items():
        cut = _cut(source["main"], at)
        await _check_fork(home, fork_id, source, "main", cut, at)
    assert len(await _agents(home, told["forks"][""])) == 21
    assert len(told["forks"]) == TURNS + STEPS + 4
    await _check_fork(home, told["branch"], source, "agent-1", len(source["agent-1"]), "agent-1")
    for at, fork in told["live"].items():
        assert fork["messages"] == _messages(source["main"][: _cut(source["main"], at)]), at
        events = (await read_session(home, fork["id"]))["main"]
        ended = [event.data["reason"]["kind"] for event in events if event.type == "turn/end"]
        assert ended[-1] == "completed", at


def _check_clocks(source: Logs) -> None:
    """The tree lived on two nodes, and their clocks were a minute apart."""
    nodes: dict[str, list[int]] = {}
    for agent_id, events in source.items():
        if agent_id != "main":
            (first,) = [event for event in events if event.type == "runtime/activated"][:1]
            nodes.setdefault(first.data["node"], []).append(first.time)
    assert len(nodes) == 2, {node: len(times) for node, times in nodes.items()}
    spawned = [(e.data["agent_id"], e.time) for log in source.values() for e in log if e.type == "subagent/spawned"]
    gaps = [source[agent_id][0].time - at for agent_id, at in spawned]
    assert max(gaps) - min(gaps) > APART_MS * 0.8, gaps


def _cut(events: Sequence[SessionEvent], at: str) -> int:
    """How many events are in a fork at a point, said anew: by the events that stand there."""
    if not at:
        return len(events)
    if at.startswith("^"):
        turn = int(at[1:])
        start = next(e.seq for e in events if e.type == "turn/start" and e.data["turn"] == turn)
        return start - 1 if events[start - 1].type == "prompt/submitted" else start
    turn, _, step = at.partition(".")
    kind, wanted = ("step/end", (int(turn), int(step))) if step else ("turn/end", (int(turn), None))
    end = next(e.seq for e in events if e.type == kind and (e.data["turn"], e.data.get("step")) == wanted)
    while not step and end + 1 < len(events) and events[end + 1].type == "prompt/completed":
        end += 1
    return end + 1


def _children(events: Sequence[SessionEvent]) -> dict[str, int]:
    """Where each child stood by the last word on it."""
    found: dict[str, int] = {}
    for event in events:
        data = event.data
        if event.type in ("subagent/completed", "subagent/failed", "subagent/suspended") and "seq" in data:
            found[data["agent_id"]] = data["seq"]
        elif event.type == "swarm/end":
            found |= {agent_id: position["seq"] for agent_id, position in data.get("agents", {}).items()}
    return found


def _tree(source: Logs, root: str, cut: int) -> dict[str, int]:
    """How many events of each agent belong to a fork of ``root`` at ``cut``."""
    found = {root: cut}
    for child, seq in _children(source[root][:cut]).items():
        found |= _tree(source, child, seq)
    return found


def _folded(events: Sequence[SessionEvent]) -> EventLog:
    log = EventLog(parse_header(HEADER))
    for event in events:
        log.append(event.type, event.data, surface=event.surface, sources=event.sources)
    return log


def _messages(events: Sequence[SessionEvent]) -> list[dict[str, Any]]:
    """What the model would see behind these events, open calls answered as a recovery does."""
    log = _folded(events)
    for event in closing_events(log.order, next_seq=log.next_seq, recovered_at=0):
        log.append(event["type"], event["data"], surface=event.get("surface"), sources=event.get("sources"))
    return json.loads(json.dumps(log.messages()))


async def _agents(home: Path, session_id: str) -> list[str]:
    return [log.stream.agent_id for log in await open_store(home).list(session_id)]


async def _check_fork(home: Path, fork_id: str, source: Logs, root: str, cut: int, at: str) -> None:
    fork = await read_session(home, fork_id)
    wanted = _tree(source, root, cut)
    assert {("main" if agent_id == root else agent_id) for agent_id in wanted} == set(fork), at
    for agent_id, count in wanted.items():
        copied = fork["main" if agent_id == root else agent_id]
        assert [e.line for e in copied[:count]] == [e.line for e in source[agent_id][:count]], (at, agent_id)
        assert json.loads(json.dumps(_folded(copied).messages())) == _messages(source[agent_id][:count]), (at, agent_id)
    assert LONG_TURN < TURNS
