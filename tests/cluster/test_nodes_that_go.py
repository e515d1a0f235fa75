"""Three raylets and a swarm of a hundred agents with directories of their own: one node is drained, one is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.actors.faults import counts, read_session
from tests.cluster.test_local_sh import Cluster, free_base_port
from tests.cluster.test_swarm_on_two_nodes import _node_of, _on, _workers

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="local.sh needs Linux"),
]

ROOT = Path(__file__).parents[2]
ROLLOUTS = 100
HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray's own defaults, said aloud: by these it takes half a minute to believe that a silent node is gone."""
DRIVER = """
import asyncio, json, os, sys
from kimi_ray import KimiRayError, Profile, Runtime, Workdir
from tests.actors.fault_models import ONE_TOOL, SLOW_TOOL, look

address, home, source, rollouts = sys.argv[1:]
PROFILE = Profile(name="looker", system_prompt="You look at things.")

def tell(**told):
    print(json.dumps(told), flush=True)

async def main():
    async with Runtime.connect(home, address=address, hosts_per_node=2, lease_timeout_s=20) as runtime:
        for mode in ("drain", "lose"):
            await run(runtime, mode)

async def steadily(runtime, method):
    while True:
        try:
            return await runtime.connection.registry.call(method, timeout_s=10)
        except KimiRayError as error:
            if not error.code.startswith("infra."):
                raise
        await asyncio.sleep(0.2)

async def run(runtime, mode):
    session = await runtime.workspace(home).create_session(model=ONE_TOOL, profile="bare")
    options = dict(profile=PROFILE, model=ONE_TOOL, tools=[look], max_concurrency=30)
    nowhere = Workdir.none()
    while True:
        await session.swarm("{{item}}", [f"warm {n}" for n in range(30)], workdir=nowhere, **options)
        status = await runtime.connection.registry.call("status", timeout_s=10)
        workers = {node["node_id"] for node in status["nodes"] if node["alive"] and not node["is_head"]}
        there = {host["node_id"]: host for host in status["hosts"] if host["kind"] == "agents"}
        if workers <= set(there):
            break
        print([(host["kind"], host["node_id"][:6], host["load"]) for host in status["hosts"]], file=sys.stderr)
    chosen = [there[node_id] for node_id in workers - {runtime.connection.cluster.node_id}]
    tell(node_id=chosen[0]["node_id"], pid=chosen[0]["pid"])
    await asyncio.to_thread(sys.stdin.readline)
    items = [f"thing {n}" for n in range(int(rollouts))]
    options |= {"model": ONE_TOOL if mode == "drain" else SLOW_TOOL}
    handle = await session.start_swarm("{{item}}", items, workdir=Workdir.copy(source), **options)
    seen, drained = 0, None
    async for row in handle:
        seen += 1
        if seen == 20:
            tell(seen=seen)
            if mode == "drain":
                drained = asyncio.create_task(runtime.drain_node(chosen[0]["node_id"], 40.0))
    report = await handle.result()
    after = await session.swarm("{{item}}", ["after"], workdir=nowhere, **options)
    told = {"drained": await drained} if drained is not None else {}
    prompt = await (await session.main.submit("hello")).result(30)
    if drained is not None:
        # Whoever comes after the registry knows which nodes are drained.
        os.kill((await runtime.connection.registry.call("ping", timeout_s=10))["pid"], 9)
    status = await steadily(runtime, "status")
    tell(
        session_id=session.id, totals=report.totals, wall_s=report.wall_s, after=after.totals, said=prompt.text,
        rows=[row.model_dump(mode="json") for row in report.rows], hosts=status["hosts"],
        nodes=status["nodes"], **told,
    )
    await asyncio.to_thread(sys.stdin.readline)
    if drained is not None:
        await runtime.undrain_node(chosen[0]["node_id"])

asyncio.run(main())
"""


@dataclass
class Nodes:
    """A head that keeps the home, and two workers, each with a directory for temporary files of its own."""

    cluster: Cluster
    address: str
    exports: dict[str, str]
    places: dict[int, Path]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    cluster = Cluster(tmp_path / "cluster")
    cluster.environment |= HEALTH
    base = free_base_port(7 * 4)
    try:
        up = cluster.run("up", "1", "--base-port", str(base), "--num-cpus", "2")
        assert up.returncode == 0, up.stderr
        exports = cluster.exports()
        places: dict[int, Path] = {}
        for number in (1, 2):
            places[number] = tmp_path / f"disk of {number}"
            places[number].mkdir()
            cluster.environment["TMPDIR"] = str(places[number])
            added = cluster.run("add")
            assert added.returncode == 0, added.stderr
        del cluster.environment["TMPDIR"]
        yield Nodes(cluster, f"127.0.0.1:{base}", exports, places)
    finally:
        cluster.run("down")


async def told_by(driver: asyncio.subprocess.Process) -> dict[str, Any]:
    assert driver.stdout is not None and driver.stderr is not None
    line = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            line = await driver.stdout.readline()
    if not line:
        if driver.returncode is None:
            driver.kill()
        pytest.fail((await driver.stderr.read()).decode())
    return json.loads(line)


async def go_on(driver: asyncio.subprocess.Process) -> None:
    assert driver.stdin is not None
    driver.stdin.write(b"\n")
    await driver.stdin.drain()


@pytest.mark.long
async def test_a_node_is_drained_under_a_swarm_and_another_is_lost_with_its_disk(nodes: Nodes, tmp_path: Path) -> None:
    source, home = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    (source / "file.txt").write_text("to be copied")
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, nodes.address, home, source, str(ROLLOUTS),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path, env={**nodes.cluster.environment, **nodes.exports, "PYTHONPATH": str(ROOT)}, limit=1 << 24,
    )  # fmt: skip
    try:
        ready = await told_by(driver)
        number = _node_of(nodes.cluster, ready["pid"])
        await go_on(driver)
        await told_by(driver)
        await check_drained(nodes, home, ready["node_id"], number, await told_by(driver))

        await go_on(driver)
        ready = await told_by(driver)
        number = _node_of(nodes.cluster, ready["pid"])
        pids = [pid for pid, _ in _on(nodes.cluster, number)]
        await go_on(driver)
        await told_by(driver)
        killed_at = time.time()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(nodes.places[number])
        await check_lost(home, killed_at, await told_by(driver))
    finally:
        if driver.returncode is None:
            driver.kill()
        await driver.communicate()


async def check_drained(nodes: Nodes, home: Path, node_id: str, number: int, told: dict[str, Any]) -> None:
    """No attempt was lost, no row has an error, and the node is empty."""
    drained = told["drained"]
    print(f"drain: {drained['elapsed_s']} s, {len(drained['stopped'])} hosts ended; swarm {told['wall_s']} s")
    assert drained["done"] and not drained["errors"] and not drained["cancelled"]
    assert len(drained["stopped"]) >= 1
    assert told["totals"]["completed"] == ROLLOUTS == len(told["rows"])
    for row in told["rows"]:
        assert (row["error"], row["interruptions"], len(row["attempts"])) == (None, 0, 1), row
    assert told["after"]["completed"] == 1 and told["said"] == "did hello"
    assert node_id not in {host["node_id"] for host in told["hosts"]}
    kept = {node["node_id"]: node["draining"] for node in told["nodes"]}
    assert kept[node_id] is not None, "a registry that comes back knows of it"
    assert not _workers(nodes.cluster, number), "no host is left on the node"
    on_it = sum(row["node_id"] == node_id for row in told["rows"])
    assert 0 < on_it < ROLLOUTS * 0.7, "some ended there before the drain, and the rest elsewhere"
    logs = await read_session(home, told["session_id"])
    for row in told["rows"]:
        assert counts(logs[row["agent_id"]])["prompt/completed"] == 1


async def check_lost(home: Path, killed_at: float, told: dict[str, Any]) -> None:
    """Every row is there; what ran on the node began again as a new attempt, and its old log is kept."""
    took_s = time.time() - killed_at
    assert told["totals"]["completed"] == ROLLOUTS == len(told["rows"])
    assert len({row["item_id"] for row in told["rows"]}) == ROLLOUTS
    assert told["after"]["completed"] == 1 and told["said"] == "did hello"
    logs = await read_session(home, told["session_id"])  # each log verified, contiguous, in order
    again: list[float] = []
    for row in told["rows"]:
        agent = logs[row["agent_id"]]
        assert counts(agent)["prompt/completed"] == 1
        *lost, last = row["attempts"]
        assert last["agent_id"] == row["agent_id"]
        for attempt in lost:
            assert attempt["agent_id"] != row["agent_id"]
            assert (attempt["error"]["code"], attempt["error"]["class"]) == ("workdir.lost", "infra"), attempt
            old = logs[attempt["agent_id"]]
            assert counts(old)["prompt/submitted"] == 1, "the old log is kept and says what was asked"
            again.append(agent[0].time / 1000 - killed_at)
    assert again, ("the loss hit rollouts that ran", Counter(row["node_id"] for row in told["rows"]), took_s)
    print(
        f"lost node: {len(again)} rollouts of {ROLLOUTS} began again, after {statistics.median(again):.2f} s in the"
        f" median and {max(again):.2f} s at most; all rows {took_s:.2f} s after the kill; health checks: {HEALTH}"
    )
