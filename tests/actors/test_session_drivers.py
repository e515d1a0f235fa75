"""One session and several driver processes at one Ray."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Runtime
from kimi_ray.config import RuntimeConfig
from tests.actors.fault_models import ECHO
from tests.actors.test_processes import ROOT

DRIVER = """
import asyncio, json, os, sys
from kimi_ray import Runtime
from tests.actors.fault_models import ECHO

settings, do = json.loads(sys.argv[1]), json.loads(sys.argv[2])

async def main():
    async with Runtime.connect(config=settings) as runtime:
        work = runtime.workspace(do["work"])

        async def resume(number):
            session = await work.resume("shared", model=ECHO)
            await session.update(metadata={f"d{do['number']}n{number}": number})
            return session

        sessions = await asyncio.gather(*(resume(number) for number in range(5)))
        result = await (await sessions[0].main.submit(f"from {do['number']}")).result(60)
        print(json.dumps({
            "handles": len({id(one) for one in sessions}), "opened": sessions[0]._link.opened, "text": result.text,
            "hosts": [sessions[0]._link.host, sessions[0].main.route.host], "turn": result.turn,
        }), flush=True)
        while not os.path.exists(do["go_on"]):
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config) as runtime:
        yield runtime


async def _begin(settings: dict[str, Any], **do: Any) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, json.dumps(settings), json.dumps(do), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip


async def test_twenty_resumes_from_four_processes_make_one_live_session(
    runtime: Runtime, config: RuntimeConfig, local_ray: str, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    work = runtime.workspace(tmp_path / "work")
    session = await work.create_session("shared", model=ECHO, profile="bare")
    await session.close()
    settings = {
        name: getattr(config, name)
        for name in ("home", "namespace", "hosts_per_node", "close_timeout_s", "claim_timeout_s")
    } | {"address": local_ray}
    go_on = tmp_path / "go on"
    drivers = await asyncio.gather(
        *(_begin(settings, work=str(tmp_path / "work"), number=n, go_on=str(go_on)) for n in range(4))
    )
    try:
        async with asyncio.timeout(100):
            lines = await asyncio.gather(*(driver.stdout.readline() for driver in drivers if driver.stdout))
            told = [json.loads(line) for line in lines]
            assert [one["handles"] for one in told] == [1] * 4
            assert sum(one["opened"] for one in told) == 1
            assert len({tuple(one["hosts"]) for one in told}) == 1
            assert sorted(one["turn"] for one in told) == [0, 1, 2, 3]
            assert sorted(one["text"] for one in told) == [f"did from {n}" for n in range(4)]
            hosts = [host for host in await runtime.connection.cluster.list_hosts() if host.kind == "sessions"]
            pings = [
                await runtime.connection.cluster.peer(host.name).call("ping", timeout_s=10, group="control")
                for host in hosts
            ]
            assert sum("shared" in ping["sessions"] for ping in pings) == 1
            go_on.touch()
            ends = await asyncio.gather(*(driver.communicate() for driver in drivers))
        assert [driver.returncode for driver in drivers] == [0] * 4, [err.decode()[-2000:] for _, err in ends]
    finally:
        for driver in drivers:
            if driver.returncode is None:
                driver.kill()
    again = await work.resume("shared", model=ECHO)
    assert (await again.metadata())["custom"] == {f"d{d}n{n}": n for d in range(4) for n in range(5)}
    await work.archive("shared")
    assert (await runtime.sessions.get("shared")).archived  # type: ignore[union-attr]
    await work.delete("shared")
    assert await runtime.sessions.get("shared") is None
