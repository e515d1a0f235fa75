"""Several drivers of one home: joined at one Ray, refused, gone, and beside each other with a Ray each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Item, Profile, Runtime
from kimi_ray.config import RuntimeConfig
from tests.actors.fault_models import FAST_ECHO, HELD
from tests.actors.faults import assert_nothing_lost, read_session
from tests.actors.test_processes import ROOT

PROFILE = Profile(name="echo", system_prompt="You repeat.", tools=())
DRIVER = """
import asyncio, json, os, sys
from kimi_ray import KimiRayError, Profile, Runtime
from tests.actors.fault_models import ECHO

settings, do = json.loads(sys.argv[1]), json.loads(sys.argv[2])

async def main():
    told = {}
    try:
        async with Runtime.connect(config={"hosts_per_node": 1, **settings}) as runtime:
            told["home_id"] = runtime.connection.home_id
            if "resume" in do:
                try:
                    resumed = await runtime.workspace(do["work"]).resume(do["resume"])
                    told["resumed"] = (await (await resumed.main.submit("from afar")).result(30)).text
                except KimiRayError as error:
                    told["resume"] = error.to_data()
            session = await runtime.workspace(do["work"]).create_session(model=ECHO, profile="bare")
            told["session"] = session.id
            profile = Profile(name="echo", system_prompt="You repeat.", tools=())
            report = await session.swarm("{{item}}", [str(n) for n in range(do["items"])], profile=profile)
            told["totals"] = report.totals
            if do.get("vanish"):
                print(json.dumps(told), flush=True)
                os._exit(0)
    except KimiRayError as error:
        told["error"] = error.to_data()
    print(json.dumps(told), flush=True)

asyncio.run(main())
"""


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config) as runtime:
        yield runtime


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def _items(file: Path) -> list[Item]:
    """60 prompts; the first ones and the last ones are answered at once, those in the middle when ``file`` is there."""
    prompts = [f"held {file}" if 20 <= n < 24 else f"thing {n}" for n in range(60)]
    return [Item(id=f"i{n}", data=prompt) for n, prompt in enumerate(prompts)]


async def drive(settings: dict[str, Any], *, ray_of_its_own: bool = False, **do: Any) -> dict[str, Any]:
    """Run another driver to its end; what it told."""
    environment = {k: v for k, v in os.environ.items() if not (ray_of_its_own and k.startswith("RAY_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, json.dumps(settings), json.dumps(do),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT, env=environment,
    )  # fmt: skip
    try:
        async with asyncio.timeout(90):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.mark.long
async def test_drivers_come_and_go_while_a_swarm_runs(
    runtime: Runtime, config: RuntimeConfig, local_ray: str, work: Path
) -> None:
    same = {
        name: getattr(config, name)
        for name in ("home", "namespace", "hosts_per_node", "close_timeout_s", "claim_timeout_s")
    } | {"address": local_ray}
    session = await runtime.workspace(work).create_session(model=HELD, profile="bare")
    handle = await session.start_swarm("{{item}}", _items(work / "go on"), profile=PROFILE, max_concurrency=4)
    told = await asyncio.gather(
        drive(same, work=str(work), items=10, resume=session.id),
        drive({**same, "durability": "os"}, work=str(work), items=10),
    )
    vanished = await drive(same, work=str(work), items=10, vanish=True)
    assert not handle.done
    (work / "go on").touch()
    assert told[0]["home_id"] == vanished["home_id"] == runtime.connection.home_id
    assert told[0]["resumed"] == "did from afar"
    for one in (told[0], vanished):
        assert one["totals"]["completed"] == 10
        assert len(await read_session(config.home, one["session"])) == 11
    assert told[1]["error"]["code"] == "runtime.mismatch"
    assert told[1]["error"]["details"]["settings"] == {"durability": {"mine": "os", "theirs": "disk"}}
    report = await handle.result(60)
    assert report.totals["completed"] == 60
    assert sum(row.interruptions for row in report.rows) == 0
    assert (await (await session.main.submit("hello")).result(30)).text == "did hello"
    assert_nothing_lost(report.rows, await read_session(config.home, session.id))


@pytest.mark.long
async def test_two_rays_on_one_home(runtime: Runtime, config: RuntimeConfig, work: Path) -> None:
    session = await runtime.workspace(work).create_session(model=HELD, profile="bare")
    handle = await session.start_swarm("{{item}}", _items(work / "go on"), profile=PROFILE, max_concurrency=4)
    other = {"home": config.home, "claim_timeout_s": 1, "object_store_memory": 100 << 20}
    told = await drive(other, ray_of_its_own=True, work=str(work), items=20, resume=session.id)
    refused = told["resume"]
    assert refused["code"] == "session.in_use"
    assert refused["details"]["host"] == os.uname().nodename
    (store,) = [host for host in await runtime.connection.cluster.list_hosts() if host.kind == "store"]
    peer = runtime.connection.cluster.peer(store.name)
    assert refused["details"]["pid"] == (await peer.call("ping", timeout_s=10, group="control"))["pid"]
    assert str(refused["details"]["pid"]) in refused["message"]
    assert told["totals"]["completed"] == 20
    assert not handle.done
    (work / "go on").touch()
    report = await handle.result(60)
    assert report.totals["completed"] == 60
    assert_nothing_lost(report.rows, await read_session(config.home, session.id))
    assert len(await read_session(config.home, told["session"])) == 21
    resumed = await runtime.workspace(work).resume(told["session"])
    assert (await (await resumed.main.submit("mine now")).result(30)).text == "did mine now"


async def test_a_thousand_submits_that_nobody_awaits_run_in_order(config: RuntimeConfig, work: Path) -> None:
    async with Runtime.connect(config=config, checkpoint="turn") as runtime:
        session = await runtime.workspace(work).create_session(model=FAST_ECHO, profile="bare")
        handles = [session.main.submit(f"say {n}") for n in range(1000)]
        last = await handles[-1]
        assert (await last.result(90)).text == "did say 999"
    events = (await read_session(config.home, session.id))["main"]
    order = [event.data["prompt_id"] for event in events if event.type == "prompt/started"]
    texts = {
        event.data["prompt_id"]: event.data["content"][0]["text"]
        for event in events
        if event.type == "prompt/submitted"
    }
    assert [texts[prompt_id] for prompt_id in order] == [f"say {n}" for n in range(1000)]
    assert [event.data["turn"] for event in events if event.type == "turn/start"] == list(range(1000))


async def test_eight_hundred_seeds_and_the_same_again(
    runtime: Runtime, config: RuntimeConfig, work: Path, tmp_path: Path
) -> None:
    async def run(runtime: Runtime) -> dict[tuple[str, int], int]:
        session = await runtime.workspace(work).create_session(model=FAST_ECHO, profile="bare")
        report = await session.swarm(
            "say {{item}}", ["it"] * 100, repeats=8, seed=7, profile=PROFILE, max_concurrency=200
        )
        print("swarm", report.wall_s)
        assert report.totals["completed"] == 800 == len(report.rows)
        assert {row.text for row in report.rows} == {"did say it"}
        return {(row.item_id, row.repeat): row.seed for row in report.rows}

    first = await run(runtime)
    assert len(first) == 800 == len(set(first.values()))
    async with Runtime.connect(tmp_path / "other", "in-process", durability="none") as other:
        assert await run(other) == first
