"""SIGKILL of a real PersistenceActor under load, at any moment: what it acknowledged is what its home holds.

``KIMI_RAY_TEST_KILLS`` sets how many rounds (kills and checks) each way of storing gets, instead of the budget's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import store_name
from tests.actors.conftest import until
from tests.actors.store_load import StoreLoad
from tests.conformance.oracle_checker import Journal, check_home

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

WAYS = {
    "plain": {},
    "os": {"durability": "os"},
    "zstd": {"compression": "zstd"},
    "sqlite": {"backend": "sqlite"},
}
LEAST_ROUNDS = 5
"""Of each way; all together make the twenty of every run of the suite."""


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
async def test_acknowledged_is_readable_after_every_kill(
    config: RuntimeConfig, joined: Any, tmp_path: Path, budget: Any, way: str
) -> None:
    connection = await joined(**WAYS[way])
    peer = connection.cluster.peer(store_name(connection.home_id, 0))
    journal = Journal(tmp_path / "journal")
    load = StoreLoad(peer, journal, random.Random(f"{budget.seed}:{way}"))
    asked = int(os.environ.get("KIMI_RAY_TEST_KILLS") or 0)
    ends = time.monotonic() + budget.seconds
    kills = rounds = 0
    await load.start()
    try:
        while rounds < (asked or LEAST_ROUNDS) or (not asked and time.monotonic() < ends):
            dice = random.Random(f"{budget.seed}:{way}:{rounds}")
            rounds += 1
            await load.flushed_after(load.flushes + dice.randrange(40))
            for _ in range(dice.choice((1, 1, 1, 2))):  # a second one meets the store while it opens
                await asyncio.sleep(dice.random() * 0.05)  # anywhere within a commit
                kills += await _kill(peer)
            report = await asyncio.to_thread(check_home, config.home, [tmp_path / "journal"], running=True)
            assert report.violations == [], (rounds, report.violations[:10])
            await load.flushed_after(load.flushes + len(load.streams))
        await load.stop()
    finally:
        load.cancel()
    await joined.leave(end_runtime=True)
    report = await asyncio.to_thread(check_home, config.home, [tmp_path / "journal"])
    journal.close()
    print(
        f"{way}: seed {budget.seed}, {rounds} rounds, {kills} kills, {load.events} events, {load.flushes} flushes, "
        f"{sum(log.fenced for log in load.streams)} zombies told; {report.summary()}"
    )
    assert report.violations == []
    assert report.acknowledged == report.events > 0 and report.torn == 0
    assert sum(log.fenced for log in load.streams) > 0 or rounds < LEAST_ROUNDS


async def _kill(peer: Any) -> int:
    pid = (await until(lambda: peer.call("ping", timeout_s=5, group="control"), 120))["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return 1
    return 0
