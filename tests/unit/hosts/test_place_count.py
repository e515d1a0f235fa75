"""Places that a lost session host took along are found again, and nobody else's are given away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kimi_ray.errors import RuntimeFault
from kimi_ray.hosts import place_count
from kimi_ray.hosts.place_count import PlaceCount
from kimi_ray.hosts.pool import HostPool, PooledHost
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_count, "_PAUSE_S", 0.01)
    monkeypatch.setattr(place_count, "LOOKS", 20)


def counted(host: PooledHost, *living: int | RuntimeFault | tuple[int, int]) -> tuple[PlaceCount, list[int]]:
    """A count of one host, and what it gives back. A pair is what lives there, and what was placed before the look."""
    pool = cast("HostPool", SimpleNamespace(hosts={host.name: host}))
    told, given = list(living), list[int]()

    async def ask(_name: str) -> dict[str, Any]:
        one = told.pop(0) if len(told) > 1 else told[0]
        if isinstance(one, RuntimeFault):
            raise one
        if isinstance(one, tuple):
            host.load, host.taken = host.load + one[1], host.taken + one[1]
        return {"agents": one[0] if isinstance(one, tuple) else one}

    def let_go(_name: str, count: int) -> None:
        given.append(count)
        host.load -= count

    return PlaceCount(pool, ask, let_go), given


SILENT = RuntimeFault("silent", code="infra.timeout")


@pytest.mark.parametrize(
    ("living", "left"),
    [
        ((1,), 1),
        ((5,), 5),
        ((7,), 5),
        ((4, 3, 2, 1), 1),
        ((SILENT,), 5),
        ((SILENT, 1, SILENT, 1), 1),
        # Something is placed between any two looks: what is on its way is not taken for nobody's.
        (tuple((1, 1) for _ in range(20)), 25),
    ],
)
async def test_what_two_looks_find_without_an_agent_is_given_back(living: Any, left: int) -> None:
    host = PooledHost("a", "n", False, load=5)
    count, _ = counted(host, *living)
    assert count.wanted() and not count.wanted()
    await count.run()
    assert not count.begun and host.load == left


async def test_a_dedicated_host_must_have_been_empty_for_longer() -> None:
    host = PooledHost("a", "n", True, load=1)
    count, given = counted(host, 0, 0, 0, 0, 0, 0, 1, 0)
    count.wanted()
    await count.run()
    assert given == [1]
    host = PooledHost("a", "n", True, load=1)
    count, given = counted(host, *([0, 0, 0, 0, 1] * 4))
    count.wanted()
    await count.run()
    assert given == []


async def test_rollouts_that_end_while_their_session_host_is_lost_keep_no_place(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):

        async def load() -> int:
            status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
            return sum(host["load"] for host in status["hosts"] if host["kind"] == "agents")

        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [*"abcd"], profile="bare")
        await stage.until_running(4)
        stage.gate.set()
        await asyncio.sleep(0)
        (host,) = await hosts_of(runtime, "sessions")
        cluster_of(runtime).kill_host(host)
        assert (await handle.result(30)).ok
        async with asyncio.timeout(10):
            while await load() != 1:
                await asyncio.sleep(0.02)
        await session.close()
        async with asyncio.timeout(10):
            while await load() != 0:
                await asyncio.sleep(0.02)
