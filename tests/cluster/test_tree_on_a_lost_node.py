"""A tree with prompts in flight over two nodes, one of which is lost without grace: nothing accepted goes with it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from tests.actors.faults import read_session
from tests.cluster.test_local_sh import Cluster, free_base_port
from tests.cluster.test_swarm_on_two_nodes import _node_of
from tests.trees import check_positions, check_prompts

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="local.sh needs Linux"),
]

ROOT = Path(__file__).parents[2]
DRIVER = """
import asyncio, json, sys, time
from pathlib import Path
from kimi_ray import Runtime, Workdir
from tests.actors.fault_models import HELD
from tests.actors.test_tree_recovery import PROFILE, spoken_to, until_all_ended
from tests.trees import grow, lineage

address, home, file = sys.argv[1:]

async def main():
    async with Runtime.connect(home, address=address, hosts_per_node=2, lease_timeout_s=20) as runtime:
        work = runtime.workspace(home)
        options = dict(profile=PROFILE, model=HELD, workdir=Workdir.none())
        warm = await work.create_session(**options)
        await warm.swarm("{{item}}", [f"warm {n}" for n in range(32)], **options)
        session = await work.create_session(**options)
        before = await grow(session, **options)
        ids = await spoken_to(session, Path(file))
        told = await runtime.connection.registry.call("status", timeout_s=10)
        print(json.dumps({"hosts": told["hosts"], "nodes": told["nodes"]}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began = time.monotonic()
        await work.resume(session.id)
        resumed_s = time.monotonic() - began
        Path(file).touch()
        await until_all_ended(home, session.id, 90.0)
        ended_s = time.monotonic() - began
        assert await lineage(session) == before
        await session.close()
        print(json.dumps({"id": session.id, "ids": ids, "resumed_s": resumed_s, "ended_s": ended_s}), flush=True)

asyncio.run(main())
"""


@pytest.mark.long
async def test_a_node_of_a_tree_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    base, home = free_base_port(7 * 6), tmp_path / "home"
    up = await asyncio.to_thread(cluster.run, "up", "3", "--base-port", str(base), "--num-cpus", "2")
    assert up.returncode == 0, up.stderr
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, f"127.0.0.1:{base}", home, tmp_path / "go-on",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env={**cluster.joining(), "PYTHONPATH": str(ROOT)}, limit=1 << 24,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None and driver.stderr is not None
    try:
        async with asyncio.timeout(120):
            line = await driver.stdout.readline()
        assert line, (await driver.stderr.read()).decode()
        ready = json.loads(line)
        heads = {node["node_id"] for node in ready["nodes"] if node["is_head"]}
        workers = [host for host in ready["hosts"] if host["node_id"] not in heads and host["kind"] == "agents"]
        assert len({host["node_id"] for host in workers}) == 2
        fullest = max(workers, key=lambda host: host["load"])
        killed = await asyncio.to_thread(cluster.run, "kill", str(_node_of(cluster, fullest["pid"])))
        assert killed.returncode == 0, killed.stderr
        began = time.monotonic()
        async with asyncio.timeout(200):
            out, err = await driver.communicate(b"\n")
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.communicate()
    assert driver.returncode == 0, err.decode()
    told = json.loads(out.splitlines()[-1])
    print(
        f"node lost: resumed after {told['resumed_s']:.1f} s, all prompts ended after {told['ended_s']:.1f} s, "
        f"driver done after {time.monotonic() - began:.1f} s"
    )
    logs = await read_session(home, told["id"])
    check_prompts(logs)
    check_positions(logs)
    for name, prompt_ids in told["ids"].items():
        done = [event.data["prompt_id"] for event in logs[name] if event.type == "prompt/completed"]
        assert [one for one in done if one in prompt_ids] == prompt_ids, name
