"""Hosts of one fingerprint: who may live where, what makes room, and what a registry that comes back knows."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts import registry as registry_module
from kimi_ray.hosts.registry import Registry
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.store.seam import Stream
from tests.unit.hosts.fakes import FakeCore, Nodes, node, until

REGISTRY = "h/registry"


class CodedCore(FakeCore):
    """A host that tells the code it has loaded."""

    loaded: ClassVar[dict[str, str]] = {}

    async def ping(self):
        return {**await super().ping(), "fingerprint": self.loaded.get(self.name, ""), "environment": ""}


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(registry_module, "ASK_BOUND_S", 0.05)
    monkeypatch.setattr(registry_module, "ROUND_S", 0.05)
    FakeCore.made.clear()
    CodedCore.loaded.clear()
    clusters: list[Nodes] = []

    async def make(nodes=None, **settings) -> Nodes:
        settings.setdefault("close_timeout_s", 1)
        cluster = Nodes("h", RuntimeConfig(**settings), nodes or [node("a", head=True)])
        cluster._factories |= {"agents": CodedCore, "sessions": CodedCore}
        clusters.append(cluster)
        await cluster.start_host("registry", REGISTRY)
        return cluster

    yield make
    for cluster in clusters:
        await cluster.close()


def call(cluster: Nodes, method: str, *args):
    return cluster.peer(REGISTRY).call(method, *args, timeout_s=5, group=Registry.PORT[method])


async def place(cluster: Nodes, *codes: str, **said) -> list[str]:
    wishes = [PlaceAgent(Stream(f"s{n}", "main"), fingerprint=code, **said) for n, code in enumerate(codes)]
    return await call(cluster, "place_agents", wishes)


async def hosts(cluster: Nodes) -> dict[str, dict]:
    return {one["name"]: one for one in (await call(cluster, "status"))["hosts"] if one["kind"] == "agents"}


async def test_other_code_never_comes_to_a_warm_host(world):
    cluster = await world(hosts_per_node=1)
    (old,) = await place(cluster, "old")
    (new,) = await place(cluster, "new")
    assert old != new
    assert await place(cluster, "old", "new", "old") == [old, new, old]
    assert {name: one["fingerprint"] for name, one in (await hosts(cluster)).items()} == {old: "old", new: "new"}


async def test_who_needs_no_code_goes_anywhere_and_leaves_fresh_hosts_fresh(world):
    cluster = await world(hosts_per_node=2)
    await until(lambda: len(cluster.on("agents")) >= 1)
    (coded,) = await place(cluster, "code")
    await until(lambda: len(cluster.on("agents")) == 2)
    await call(cluster, "released", coded, 1)
    assert await place(cluster, "") == [coded]
    (other,) = await place(cluster, "other")
    assert other != coded


async def test_an_idle_host_of_old_code_is_stopped_to_make_room(world):
    cluster = await world(hosts_per_node=1)
    (old,) = await place(cluster, "old")
    await call(cluster, "released", old, 1)
    core = FakeCore.made[old]
    (new,) = await place(cluster, "new")
    await until(lambda: core.closed and old not in cluster._held)
    assert list(await hosts(cluster)) == [new]


async def test_a_busy_host_of_old_code_is_left_alone(world):
    cluster = await world(hosts_per_node=1)
    (old,) = await place(cluster, "old")
    (new,) = await place(cluster, "new")
    assert new != old
    assert not FakeCore.made[old].closed and old in await hosts(cluster)


async def test_a_pool_of_old_code_turns_over_as_new_agents_come(world):
    cluster = await world(hosts_per_node=3)
    old: set[str] = set()
    for n in range(3):
        old |= set(await place(cluster, "old"))
        await until(lambda n=n: len(cluster.on("agents")) >= min(3, n + 2))
    for name in old:
        await call(cluster, "released", name, 1)
    assert len(old) == 3
    new: set[str] = set()
    async with asyncio.timeout(5):
        while len(new) < 3:
            new |= set(await place(cluster, "new"))
            await asyncio.sleep(0.01)
    assert not new & old
    await until(lambda: not old & set(cluster._held))
    assert set(await hosts(cluster)) == new


async def test_a_dedicated_host_is_of_its_agents_code(world):
    cluster = await world(hosts_per_node=1)
    (own,) = await place(cluster, "mine", isolation="dedicated")
    assert (await hosts(cluster))[own]["fingerprint"] == "mine"
    assert await place(cluster, "mine") != [own]


async def test_code_of_another_environment_is_other_code(world):
    cluster = await world(hosts_per_node=1)
    settings = RuntimeConfig(hosts_per_node=1, close_timeout_s=1).runtime_fingerprint()
    first = {"fingerprint": settings, "code": "env1", "runtime_env": {"py_modules": ["one"]}}
    lease = (await call(cluster, "hello", first))["lease_id"]
    (old,) = await place(cluster, "tools")
    shown = (await call(cluster, "status"))["leases"]
    assert "runtime_env" not in shown[0]
    await call(cluster, "goodbye", lease)
    await call(cluster, "hello", {"fingerprint": settings, "code": "env2", "runtime_env": {"py_modules": ["two"]}})
    (new,) = await place(cluster, "tools")
    assert new != old
    told = await hosts(cluster)
    assert told[new]["environment"] == "env2"
    (any_host,) = await place(cluster, "")
    assert any_host in {old, new}


async def test_a_registry_that_comes_back_asks_the_hosts_for_their_code(world):
    cluster = await world(hosts_per_node=1)
    (old,) = await place(cluster, "old")
    FakeCore.made[old].agents = 1
    CodedCore.loaded[old] = "old"
    cluster.kill_host(REGISTRY)
    await cluster.start_host("registry", REGISTRY)
    assert (await hosts(cluster))[old]["fingerprint"] == "old"
    assert await place(cluster, "new") != [old]
    assert await place(cluster, "old") == [old]
