"""A tree of main and 20 subagents at three levels, prompts in flight, on Ray: SIGKILL of processes and of pairs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Profile, Runtime
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import registry_name
from kimi_ray.session_handle import Session
from tests.actors.fault_models import HELD
from tests.actors.faults import hosts_of, kill, read_session, store_of
from tests.actors.test_processes import ROOT
from tests.conformance.oracle_checker import check_home
from tests.trees import check_positions, check_prompts, grow, lineage, open_prompts, stored_logs, types

PROFILE = Profile(name="echo", system_prompt="You repeat.", tools=())
SPOKEN_TO = ("main", "agent-1", "agent-5", "agent-9", "agent-12", "agent-17", "agent-20")
KILLS = (
    ("sessions",),
    ("agents",),
    ("registry",),
    ("store",),
    ("sessions", "agents"),
    ("sessions", "registry"),
    ("agents", "store"),
    ("sessions", "agents", "registry", "store"),
)


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config, hosts_per_node=2) as runtime:
        yield runtime


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


async def kill_kind(runtime: Runtime, kind: str, dice: random.Random | None = None) -> None:
    """SIGKILL the processes of a kind, or with ``dice`` one of them."""
    if kind in ("store", "registry"):
        await kill(runtime, store_of(runtime) if kind == "store" else registry_name(runtime.connection.home_id))
        return
    pids = sorted(host["pid"] for host in await hosts_of(runtime, kind) if host["pid"] is not None)
    for pid in pids if dice is None else dice.sample(pids, min(1, len(pids))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def planted(runtime: Runtime, work: Path) -> tuple[Session, dict[str, dict[str, Any]]]:
    """A session with its tree grown."""
    session = await runtime.workspace(work).create_session(model=HELD, profile="bare")
    return session, await grow(session, profile=PROFILE, model=HELD)


async def spoken_to(session: Session, file: Path, names: tuple[str, ...] = SPOKEN_TO) -> dict[str, list[str]]:
    """Two prompts for each: one that runs until ``file`` is there, one behind it. The ids, all accepted."""
    ids: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        agent = session.agent(name)
        first = await agent.submit(f"held {file}", on_interrupt="continue" if number % 2 else "fail")
        ids[name] = [first.id, (await agent.submit(f"{name} behind")).id]
    return ids


async def until_all_ended(home: str, session_id: str, within_s: float = 60.0) -> None:
    """Nobody asks for the agents: their prompts end by themselves."""
    ends = time.monotonic() + within_s
    while left := open_prompts(await stored_logs(home, session_id)):
        assert time.monotonic() < ends, f"{len(left)} prompts did not end"
        await asyncio.sleep(0.1)


async def check(home: str, session_id: str, ids: dict[str, list[str]]) -> None:
    """All that was accepted ended once, in logs that are whole, told by parents as they are."""
    report = check_home(home, running=True)
    assert report.violations == [], report.summary()
    logs = await read_session(home, session_id)
    check_prompts(logs)
    check_positions(logs)
    for name, prompt_ids in ids.items():
        done = [event.data["prompt_id"] for event in logs[name] if event.type == "prompt/completed"]
        assert [one for one in done if one in prompt_ids] == prompt_ids, name


@pytest.mark.long
async def test_each_process_and_pairs_of_them(
    runtime: Runtime, config: RuntimeConfig, work: Path, tmp_path: Path
) -> None:
    session, before = await planted(runtime, work)
    ids: dict[str, list[str]] = {name: [] for name in SPOKEN_TO}
    for number, kinds in enumerate(KILLS):
        file = tmp_path / f"go on {number}".replace(" ", "-")
        for name, more in (await spoken_to(session, file)).items():
            ids[name] += more
        for kind in kinds:
            await kill_kind(runtime, kind)
        began = time.monotonic()
        again = await runtime.workspace(work).resume(session.id)
        assert again is session
        print(f"SIGKILL of {'+'.join(kinds)}: resumed after {time.monotonic() - began:.2f} s", end=", ")
        file.touch()
        await until_all_ended(config.home, session.id)
        print(f"all prompts ended after {time.monotonic() - began:.2f} s")
        assert await lineage(session) == before
    fresh = await (await session.agent("agent-15").submit("hello")).result(30)
    assert fresh.text == "did hello"
    await session.close()
    await check(config.home, session.id, ids)


DRIVER = """
import asyncio, json, sys
from pathlib import Path
from kimi_ray import Runtime
from tests.actors.fault_models import HELD
from tests.actors.test_tree_recovery import PROFILE, planted, spoken_to

settings, work, file, out = json.loads(sys.argv[1]), *map(Path, sys.argv[2:])

async def main():
    async with Runtime.connect(config=settings) as runtime:
        session, before = await planted(runtime, work)
        ids = await spoken_to(session, file)
        items = [f"held {file}" if n % 3 == 2 else f"thing {n}" for n in range(9)]
        handle = await session.start_swarm(
            "{{item}}", items, profile=PROFILE, model=HELD, parent="agent-3", out=out, max_concurrency=6
        )
        rows = 0
        async for row in handle:
            rows += 1
            if rows == 4:
                print(json.dumps({"id": session.id, "before": before, "ids": ids}), flush=True)
                await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("also", [(), ("sessions", "agents")], ids=["driver", "driver+sessions+agents"])
async def test_a_driver_is_killed_and_another_one_goes_on(
    runtime: Runtime, config: RuntimeConfig, local_ray: str, work: Path, tmp_path: Path, also: tuple[str, ...]
) -> None:
    names = ("home", "namespace", "close_timeout_s", "claim_timeout_s")
    settings = {name: getattr(config, name) for name in names} | {"address": local_ray, "hosts_per_node": 2}
    file, out = tmp_path / "go-on", tmp_path / "run"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, json.dumps(settings), work, file, out,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT, limit=1 << 24,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(90):
            line = await process.stdout.readline()
        assert line, (await process.stderr.read()).decode()
    finally:
        process.kill()
        await process.communicate()
    told = json.loads(line)
    for kind in also:
        await kill_kind(runtime, kind)
    began = time.monotonic()
    session = await runtime.workspace(work).resume(told["id"])
    after = await lineage(session)
    assert {name: after[name] for name in told["before"]} == told["before"]
    file.touch()
    items = [f"held {file}" if n % 3 == 2 else f"thing {n}" for n in range(9)]
    report = await session.swarm(
        "{{item}}", items, profile=PROFILE, model=HELD, parent="agent-3", out=out, max_concurrency=6, resume=True
    )
    print(f"driver{'+' * bool(also)}{'+'.join(also)}: swarm went on, done after {time.monotonic() - began:.2f} s")
    assert [row.status for row in report.rows] == ["completed"] * 9
    # Those that ran went on where they were, and no other attempt was made of any.
    assert [row.attempt for row in report.rows] == [1] * 9
    await until_all_ended(config.home, session.id)
    await session.close()
    await check(config.home, session.id, told["ids"])
    logs = await read_session(config.home, session.id)
    spawned = [e.data["agent_id"] for e in logs["agent-3"] if e.type == "subagent/spawned"]
    assert len(spawned) == len(set(spawned)) == 9
    assert types(logs["agent-3"]).count("swarm/end") == 1


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_kills_at_random(runtime: Runtime, config: RuntimeConfig, work: Path, tmp_path: Path, budget) -> None:
    session, before = await planted(runtime, work)
    ids: dict[str, list[str]] = {name: [] for name in before}
    slowest = 0.0
    for dice in budget.rounds():
        file = tmp_path / f"go-on-{budget.round}"
        names = tuple(dice.sample(sorted(before), 6))
        for name, more in (await spoken_to(session, file, names)).items():
            ids[name] += more
        for kind in dice.sample(("sessions", "agents", "agents", "registry", "store"), dice.randint(1, 3)):
            await kill_kind(runtime, kind, dice)
            await asyncio.sleep(dice.random() / 5)
        began = time.monotonic()
        await runtime.workspace(work).resume(session.id)
        if dice.random() < 0.3:
            # Once more, in the middle of what is being brought back.
            await asyncio.sleep(dice.random() / 10)
            await kill_kind(runtime, dice.choice(("sessions", "agents")), dice)
            await runtime.workspace(work).resume(session.id)
        file.touch()
        await until_all_ended(config.home, session.id)
        slowest = max(slowest, time.monotonic() - began)
        assert await lineage(session) == before
    print(f"{budget.round + 1} rounds, slowest recovery with all prompts ended {slowest:.2f} s")
    await session.close()
    await check(config.home, session.id, ids)
