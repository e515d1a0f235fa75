"""A swarm over several raylets: one is killed in the middle, or falls silent and comes back when all is done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.actors.fault_models import wait_for
from tests.actors.faults import counts, read_session
from tests.cluster.test_local_sh import Cluster, free_base_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="local.sh needs Linux"),
]

ROOT = Path(__file__).parents[2]
ROLLOUTS = 120
DRIVER = """
import asyncio, json, sys
from kimi_ray import Item, Profile, Runtime, Workdir
from tests.actors.fault_models import ONE_TOOL, look

address, home, rollouts = sys.argv[1:]
PROFILE = Profile(name="looker", system_prompt="You look at things.")

async def main():
    async with Runtime.connect(home, address=address, hosts_per_node=2, lease_timeout_s=20) as runtime:
        session = await runtime.workspace(home).create_session(model=ONE_TOOL, profile="bare")
        options = dict(profile=PROFILE, model=ONE_TOOL, tools=[look], workdir=Workdir.none(), max_concurrency=16)
        # Fill both nodes' pools before the swarm that counts.
        await session.swarm("{{item}}", [f"warm {n}" for n in range(32)], **options)
        handle = await session.start_swarm("{{item}}", [f"thing {n}" for n in range(int(rollouts))], **options)
        seen = 0
        async for row in handle:
            seen += 1
            if seen == 20:
                told = await runtime.connection.registry.call("status", timeout_s=10)
                print(json.dumps({"ready": True, "hosts": told["hosts"], "nodes": told["nodes"]}), flush=True)
        report = await handle.result()
        again = await session.swarm("{{item}}", ["after"], **options)
        print(json.dumps({
            "session_id": session.id,
            "totals": report.totals,
            "rows": [[row.item_id, row.agent_id, row.last_seq, row.interruptions, row.node_id] for row in report.rows],
            "wall_s": report.wall_s,
            "after": again.totals,
        }), flush=True)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "how"), [(2, "killed"), (3, "frozen")])
async def test_a_worker_node_is_lost_and_all_rows_come(cluster: Cluster, tmp_path: Path, nodes: int, how: str) -> None:
    base = free_base_port(7 * nodes)
    up = await asyncio.to_thread(cluster.run, "up", str(nodes), "--base-port", str(base), "--num-cpus", "2")
    assert up.returncode == 0, up.stderr
    home = tmp_path / "home"
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, f"127.0.0.1:{base}", home, str(ROLLOUTS),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path, env={**cluster.joining(), "PYTHONPATH": str(ROOT)}, limit=1 << 24,
    )  # fmt: skip
    assert driver.stdout is not None and driver.stderr is not None
    try:
        async with asyncio.timeout(100):
            line = await driver.stdout.readline()
        assert line, (await driver.stderr.read()).decode()
        ready: dict[str, Any] = json.loads(line)
        heads = {node["node_id"] for node in ready["nodes"] if node["is_head"]}
        workers = [host for host in ready["hosts"] if host["node_id"] not in heads]
        assert len(ready["nodes"]) == nodes and workers
        lost_node = _node_of(cluster, workers[0]["pid"])
        if how == "killed":
            os.kill(_raylet_of(cluster, lost_node), signal.SIGKILL)
        else:
            _signal_all(cluster, lost_node, signal.SIGSTOP)
        began = time.monotonic()
        async with asyncio.timeout(130):
            out, err = await driver.communicate()
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.communicate()
    assert driver.returncode == 0, err.decode()
    told = json.loads(out.splitlines()[-1])
    print(f"{nodes} nodes, one {how}: swarm", told["wall_s"], "end after the kill", time.monotonic() - began)
    assert told["totals"]["completed"] == ROLLOUTS
    assert len({row[0] for row in told["rows"]}) == ROLLOUTS
    assert told["after"]["completed"] == 1
    if how == "frozen":
        # What was taken for dead wakes up, and may still want to write.
        _signal_all(cluster, lost_node, signal.SIGCONT)
        await asyncio.to_thread(wait_for, lambda: not _workers(cluster, lost_node), 60)
    logs = await read_session(home, told["session_id"])
    for _, agent_id, last_seq, _, _ in told["rows"]:
        assert logs[agent_id][last_seq].type in ("prompt/completed", "runtime/activated")
        assert counts(logs[agent_id][: last_seq + 1])["prompt/completed"] == 1
        assert counts(logs[agent_id])["prompt/submitted"] == 1


def _processes(cluster: Cluster) -> list[tuple[int, int, str]]:
    listed = cluster.run("status").stdout
    return [(int(n), int(pid), name) for n, pid, name in re.findall(r"^node (\d+)\s+pid (\d+)\s+(.*)$", listed, re.M)]


def _node_of(cluster: Cluster, pid: int) -> int:
    return next(node for node, one, _ in _processes(cluster) if one == pid)


def _on(cluster: Cluster, node: int) -> list[tuple[int, str]]:
    return [(pid, name) for one, pid, name in _processes(cluster) if one == node]


def _workers(cluster: Cluster, node: int) -> list[tuple[int, str]]:
    return [(pid, name) for pid, name in _on(cluster, node) if name.startswith(("ray::Agent", "ray::Session"))]


def _raylet_of(cluster: Cluster, node: int) -> int:
    (pid,) = [pid for pid, name in _on(cluster, node) if name == "raylet"]
    return pid


def _signal_all(cluster: Cluster, node: int, number: int) -> None:
    for pid, _ in _on(cluster, node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
