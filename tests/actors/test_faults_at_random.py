"""Any process of a runtime killed at any time of a swarm, for as long as the budget lasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from kimi_ray import Item, Profile, Runtime
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import registry_name
from kimi_ray.store import open_store
from tests.actors.fault_models import ONE_TOOL, look
from tests.actors.faults import assert_nothing_lost, counts, hosts_of, kill, read_session, store_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PROFILE = Profile(name="looker", system_prompt="You look at things.")
ROLLOUTS = 60
KINDS = ("store", "registry", "agents", "sessions")


async def test_kills_at_random(config: RuntimeConfig, tmp_path: Path, budget) -> None:
    (tmp_path / "work").mkdir()
    async with Runtime.connect(config=config, hosts_per_node=2) as runtime:
        for dice in budget.rounds():
            await _round(runtime, config, tmp_path / "work", dice)


async def _round(runtime: Runtime, config: RuntimeConfig, work: Path, dice: random.Random) -> None:
    session = await runtime.workspace(work).create_session(model=ONE_TOOL, profile="bare")
    items = [Item(id=f"i{n}", data=f"thing {n}") for n in range(ROLLOUTS)]
    handle = await session.start_swarm(
        "{{item}}", items, profile=PROFILE, model=ONE_TOOL, tools=[look], max_concurrency=dice.choice((4, 16, 60))
    )
    kills = [(dice.randrange(ROLLOUTS - 5), dice.choice(KINDS), dice.random() / 4) for _ in range(dice.randint(1, 4))]
    print("kills", sorted(kills))
    for rows, kind, pause_s in sorted(kills):
        seen = 0
        async with asyncio.timeout(90):
            while seen < rows and not handle.done:
                async for _ in handle:
                    seen += 1
                    if seen >= rows:
                        break
        await asyncio.sleep(pause_s)  # anywhere within a rollout
        await _kill(runtime, kind, dice)
    report = await handle.result(120)
    assert [row.item_id for row in report.rows] == [item.id for item in items]
    assert report.totals["completed"] == ROLLOUTS, [row.error for row in report.rows if row.error]
    assert (await (await session.main.submit("still here")).result(60)).state == "completed"
    await session.close()
    logs = await read_session(config.home, session.id)
    assert_nothing_lost(report.rows, logs)
    for agent_id, events in logs.items():
        found = counts(events)
        assert found["turn/start"] == found["turn/end"], agent_id
        if agent_id != "main":
            assert found["prompt/submitted"] <= 1, agent_id
            assert found["prompt/completed"] <= 1, agent_id
    named = [row.agent_id for row in report.rows]
    assert len(set(named)) == ROLLOUTS
    headers = [log.header for log in await open_store(config.home).list(session.id) if log.header]
    attempts = [(header["item_id"], header["attempt"]) for header in headers if "item_id" in header]
    assert len(set(attempts)) == len(attempts)


async def _kill(runtime: Runtime, kind: str, dice: random.Random) -> None:
    if kind in ("store", "registry"):
        await kill(runtime, store_of(runtime) if kind == "store" else registry_name(runtime.connection.home_id))
        return
    pids = sorted(host["pid"] for host in await hosts_of(runtime, kind) if host["pid"] is not None)
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(pids), signal.SIGKILL)
