"""Placement, leases and recovery, on fake cores and made-up nodes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import RuntimeFault
from kimi_ray.hosts import pool
from kimi_ray.hosts import registry as registry_module
from kimi_ray.hosts.pool import YOUNG_LOAD
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.store.seam import Stream
from tests.unit.hosts.fakes import FakeCore, Nodes, node, until

REGISTRY = "h/registry"


def wish(n: int, **said) -> PlaceAgent:
    return PlaceAgent(Stream(f"session_{n}", "main"), **said)


class World:
    def __init__(self) -> None:
        self.clusters: list[Nodes] = []

    async def __call__(self, nodes=None, wait=True, **settings) -> Nodes:
        settings.setdefault("close_timeout_s", 1)
        cluster = Nodes("h", RuntimeConfig(**settings), nodes or [node("a", head=True)])
        self.clusters.append(cluster)
        if wait:
            await cluster.start_host("registry", REGISTRY)
        return cluster


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(registry_module, "ASK_BOUND_S", 0.05)
    monkeypatch.setattr(registry_module, "ROUND_S", 0.05)
    FakeCore.made.clear()
    world = World()
    yield world
    for cluster in world.clusters:
        await cluster.close()


def call(cluster: Nodes, method: str, *args, group: str | None = None):
    from kimi_ray.hosts.registry import Registry

    return cluster.peer(REGISTRY).call(method, *args, timeout_s=5, group=group or Registry.PORT[method])


async def place(cluster: Nodes, *wishes: PlaceAgent) -> list[str]:
    return await call(cluster, "place_agents", list(wishes))


async def test_the_first_agents_have_a_host_each_then_share_evenly(world):
    cluster = await world(hosts_per_node=3)
    placed: list[str] = []
    for n in range(3):
        placed += await place(cluster, wish(n))
        wanted = min(3, len(set(placed)) + 1)
        await until(lambda wanted=wanted: len(cluster.on("agents")) == wanted)
    assert len(set(placed)) == 3
    placed += await place(cluster, *(wish(n) for n in range(3, 30)))
    assert set(Counter(placed).values()) == {10}
    assert len(cluster.on("agents")) == 3


async def test_a_place_is_never_waited_for_while_a_host_is_below_its_soft_limit(world):
    cluster = await world(hosts_per_node=2, agents_per_host=4)
    first = await place(cluster, wish(0))
    cluster.open.clear()
    await asyncio.sleep(0)
    more = await asyncio.wait_for(place(cluster, *(wish(n) for n in range(1, 4))), 1)
    hosts = {host.name for host in cluster.on("agents")}
    assert set(first + more) <= hosts
    if len(hosts) == 1:
        waiting = asyncio.create_task(place(cluster, wish(5)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        cluster.open.set()
        assert await asyncio.wait_for(waiting, 2) != first
    cluster.open.set()


async def held_after_the_first(world, monkeypatch: pytest.MonkeyPatch, **settings) -> Nodes:
    """One agent host starts; those behind it wait for ``cluster.open``."""
    cluster = await world(wait=False, **settings)
    start_host, first = cluster.start_host, iter([True])

    async def start(kind, name, **how):
        listing = await start_host(kind, name, **how)
        if kind == "agents" and next(first, False):
            cluster.open.clear()
        return listing

    monkeypatch.setattr(cluster, "start_host", start)
    await cluster.start_host("registry", REGISTRY)
    return cluster


async def test_a_burst_on_a_young_pool_is_spread_over_the_hosts_on_their_way(world, monkeypatch):
    cluster = await held_after_the_first(world, monkeypatch, hosts_per_node=4)
    (first,) = await place(cluster, wish(0))
    few = await asyncio.wait_for(place(cluster, *(wish(n) for n in range(1, YOUNG_LOAD))), 1)
    assert set(few) == {first}, "a few wait for nobody"
    burst = [asyncio.create_task(place(cluster, wish(n))) for n in range(YOUNG_LOAD, 200)]
    await asyncio.sleep(0.1)
    cluster.open.set()
    placed = [first, *few, *(name for names in await asyncio.wait_for(asyncio.gather(*burst), 5) for name in names)]
    counts = Counter(placed)
    assert len(counts) == 4 and max(counts.values()) <= 60, counts


async def test_a_burst_waits_for_a_slow_start_only_once(world, monkeypatch):
    monkeypatch.setattr(pool, "SPREAD_S", 0.3)
    cluster = await held_after_the_first(world, monkeypatch, hosts_per_node=2)
    (first,) = await place(cluster, wish(0))
    burst = await asyncio.wait_for(place(cluster, *(wish(n) for n in range(1, 100))), 2)
    assert set(burst) == {first}
    began = time.monotonic()
    assert await place(cluster, *(wish(n) for n in range(100, 120))) == [first] * 20
    assert time.monotonic() - began < 0.25, "the start that is late is not waited for again"
    cluster.open.set()


async def test_a_burst_does_not_wait_for_a_host_that_cannot_start(world, monkeypatch):
    monkeypatch.setattr(pool, "SPREAD_S", 30.0)
    cluster = await held_after_the_first(world, monkeypatch, hosts_per_node=2)
    (first,) = await place(cluster, wish(0))
    burst = asyncio.create_task(place(cluster, *(wish(n) for n in range(1, 100))))
    await asyncio.sleep(0.05)
    assert not burst.done()
    cluster.refuse.add("a")
    cluster.open.set()
    assert set(await asyncio.wait_for(burst, 3)) == {first}


async def test_a_full_pool_goes_on_beyond_the_soft_limit(world):
    cluster = await world(hosts_per_node=1, agents_per_host=2)
    placed = await place(cluster, *(wish(n) for n in range(7)))
    assert len(set(placed)) == 1


async def test_a_hard_limit_of_one_is_an_actor_each_at_any_size(world):
    cluster = await world(hosts_per_node=2, max_agents_per_host=1)
    placed = await place(cluster, *(wish(n) for n in range(9)))
    assert len(set(placed)) == 9
    assert len(cluster.on("agents")) <= 12
    await call(cluster, "released", placed[4], 1)
    again = await place(cluster, wish(10))
    assert again[0] not in set(placed) - {placed[4]}


async def test_dedicated_has_its_own_host_that_ends_with_it(world):
    cluster = await world(hosts_per_node=1)
    shared, own = await place(cluster, wish(0), wish(1, isolation="dedicated"))
    assert own != shared
    assert (await place(cluster, wish(2)))[0] == shared
    core = FakeCore.made[own]
    await call(cluster, "released", own, 1)
    await until(lambda: core.closed and own not in cluster._held)
    await call(cluster, "released", own, 1)
    assert FakeCore.made[shared].closed is False


async def test_the_head_is_left_out_unless_alone_and_nodes_fill_by_their_size(world):
    nodes = [node("head", 8, head=True), node("bb", 2), node("ccc", 4), node("dead", 64, alive=False)]
    cluster = await world(nodes)
    placed = await place(cluster, *(wish(n) for n in range(3)))
    for n in range(3, 40):
        placed += await place(cluster, wish(n))
        await asyncio.sleep(0)
    await until(lambda: len(cluster.on("agents")) == 6)
    assert Counter(host.node_id for host in cluster.on("agents")) == {"bb": 2, "ccc": 4}


async def test_a_wanted_node_is_used_or_named(world):
    cluster = await world([node("a", head=True), node("bb")])
    placed = await place(cluster, wish(0, node_id="bb"), wish(1, node_id="a"))
    where = {host.name: host.node_id for host in cluster.started}
    assert [where[name] for name in placed] == ["bb", "a"]
    cluster.refuse.add("gone")
    with pytest.raises(RuntimeFault) as caught:
        await place(cluster, wish(2, node_id="gone"))
    assert caught.value.code == "infra.unschedulable"


async def test_a_near_node_is_tried_first_and_another_taken_when_it_cannot(world):
    cluster = await world([node("a", head=True), node("bb"), node("ccc")], hosts_per_node=1)
    await until(lambda: len(cluster.on("agents")) == 1)
    (warm,) = cluster.on("agents")
    other = "bb" if warm.node_id == "ccc" else "ccc"
    placed = await place(cluster, *(wish(n, near=other) for n in range(3)), wish(3, near="a"), wish(4, near="gone"))
    where = {host.name: host.node_id for host in cluster.started}
    assert [where[name] for name in placed[:4]] == [other, other, other, "a"]
    assert where[placed[4]] in ("bb", "ccc")
    cluster.refuse.add(other)
    (alone,) = await place(cluster, wish(5, near=other, isolation="dedicated"))
    assert {host.name: host.node_id for host in cluster.started}[alone] == warm.node_id
    assert (await place(cluster, wish(6, node_id=warm.node_id, near=other))) == [warm.name]


async def test_a_near_node_that_is_gone_is_not_waited_for(world):
    cluster = await world([node("bb", alive=False), node("ccc")], hosts_per_node=1)
    cluster.known = [node("bb", alive=False), node("ccc"), node("eeeee", alive=False)]
    placed = await place(cluster, wish(0, near="bb"), wish(1, near="eeeee"))
    assert {host.node_id for host in cluster.started if host.name in placed} == {"ccc"}
    assert (await call(cluster, "status"))["failures"] == {}, "nothing was tried on it"


async def test_a_node_that_cannot_is_passed_over(world):
    cluster = await world([node("bb"), node("ccc")], wait=False)
    cluster.refuse.add("bb")
    await cluster.start_host("registry", REGISTRY)
    placed = await place(cluster, *(wish(n) for n in range(4)))
    where = {host.name: host.node_id for host in cluster.started}
    assert {where[name] for name in placed} == {"ccc"}


async def test_a_failed_batch_takes_no_place(world):
    cluster = await world([node("bb")], hosts_per_node=1)
    cluster.refuse.add("gone")
    with pytest.raises(RuntimeFault):
        await place(cluster, wish(0), wish(1, node_id="gone"), wish(2))
    status = await call(cluster, "status")
    assert sum(host["load"] for host in status["hosts"]) == 0


async def test_a_session_has_one_place_whoever_asks(world):
    cluster = await world()
    places = await asyncio.gather(*(call(cluster, "place_session", "session_x") for _ in range(5)))
    assert len(set(places)) == 1
    assert await call(cluster, "find_session", "session_x") == places[0]
    assert await call(cluster, "find_session", "session_y") is None
    await call(cluster, "forget_session", "session_x")
    await call(cluster, "forget_session", "session_x")
    assert await call(cluster, "find_session", "session_x") is None


async def test_a_lost_host_is_looked_at_before_it_is_dropped(world):
    cluster = await world(hosts_per_node=1)
    (name,) = await place(cluster, wish(0))
    assert await call(cluster, "report_lost", name) is False
    FakeCore.made[name].silent.set()
    lost = await asyncio.gather(*(call(cluster, "report_lost", name) for _ in range(4)))
    assert lost == [True] * 4
    await until(lambda: name not in cluster._held)
    assert await call(cluster, "report_lost", name) is True
    assert (await place(cluster, wish(1)))[0] != name


async def test_a_silent_machine_is_left_alone(world):
    cluster = await world(nodes=[node("head", head=True), node("frozen"), node("well")], hosts_per_node=2)
    names = await place(cluster, *(wish(n, node_id="frozen") for n in range(2)))
    await place(cluster, *(wish(n + 2, node_id="well") for n in range(2)))
    frozen = {host.name for host in cluster.started if host.node_id == "frozen"}
    assert set(names) <= frozen
    for name in frozen:
        FakeCore.made[name].silent.set()
    assert await call(cluster, "report_lost", names[0]) is True
    await until(lambda: not frozen & set(cluster._held))
    before = len(cluster.started)
    await place(cluster, *(wish(n + 4, isolation="dedicated") for n in range(4)))
    assert {host.node_id for host in cluster.started[before:]} == {"well"}


async def test_a_busy_host_does_not_make_its_machine_silent(world):
    cluster = await world(nodes=[node("head", head=True), node("busy"), node("well")], hosts_per_node=1)
    (busy,) = await place(cluster, wish(0, node_id="busy", isolation="dedicated"))
    await place(cluster, wish(1, node_id="busy"))
    FakeCore.made[busy].silent.set()
    assert await call(cluster, "report_lost", busy) is True
    registry = cluster._held[REGISTRY].core
    await until(lambda: not registry._silent_nodes)


async def test_a_dead_session_host_frees_its_sessions(world):
    cluster = await world()
    name = await call(cluster, "place_session", "session_x")
    cluster.kill_host(name)
    assert await call(cluster, "report_lost", name) is True
    assert await call(cluster, "find_session", "session_x") is None
    assert await call(cluster, "place_session", "session_x") != name


async def test_a_session_is_not_looked_for_on_a_silent_host(world):
    cluster = await world()
    name = await call(cluster, "place_session", "session_x")
    assert await call(cluster, "place_session", "session_x") == name
    FakeCore.made[name].silent.set()
    places = await asyncio.gather(*(call(cluster, "place_session", "session_x") for _ in range(5)))
    assert len(set(places)) == 1 and places[0] != name
    await until(lambda: name not in cluster._held)


async def test_a_host_that_died_unreported_is_noticed(world):
    cluster = await world(lease_timeout_s=30)
    (name,) = await place(cluster, wish(0))
    cluster.kill_host(name)

    async def names() -> set[str]:
        return {host["name"] for host in (await call(cluster, "status"))["hosts"]}

    async with asyncio.timeout(5):
        while name in await names():
            await asyncio.sleep(0.01)


async def test_a_registry_that_comes_back_knows_hosts_sessions_and_leases(world):
    cluster = await world(hosts_per_node=1)
    (agents,) = await place(
        cluster,
        wish(0),
    )
    sessions = await call(cluster, "place_session", "session_x")
    FakeCore.made[agents].agents = 7
    FakeCore.made[sessions].sessions = ["session_x"]
    (own,) = await place(cluster, wish(1, isolation="dedicated"))
    FakeCore.made[own].agents = 1
    cluster.kill_host(REGISTRY)
    await cluster.start_host("registry", REGISTRY)
    await call(cluster, "renew", "lease_of_before", {"pid": 1})
    status = await call(cluster, "status")
    loads = {host["name"]: (host["load"], host["dedicated"]) for host in status["hosts"]}
    assert loads[agents] == (7, False)
    assert loads[own] == (1, True)
    assert await call(cluster, "find_session", "session_x") == sessions
    assert [lease["lease_id"] for lease in status["leases"]] == ["lease_of_before"]
    assert await place(cluster, wish(2)) == [agents]


async def test_recovery_is_not_held_up_by_silent_hosts(world):
    cluster = await world(hosts_per_node=1)
    names = [(await place(cluster, wish(n, isolation="dedicated")))[0] for n in range(5)]
    for name in names:
        FakeCore.made[name].silent.set()
    cluster.kill_host(REGISTRY)
    await asyncio.wait_for(cluster.start_host("registry", REGISTRY), 1)
    await until(lambda: not set(names) & set(cluster._held))


async def test_a_store_that_is_not_there_is_started_and_waited_for_only_so_long(world, monkeypatch):
    monkeypatch.setattr(registry_module, "STORE_BOUND_S", 0.05)
    cluster = await world(wait=False)
    cluster.store_open.clear()
    await asyncio.wait_for(cluster.start_host("registry", REGISTRY), 2)
    assert (await call(cluster, "status"))["stores"] == ["h/store-0"]
    cluster.store_open.set()
    await until(lambda: "h/store-0" in cluster._held)
    cluster.kill_host("h/store-0")
    await until(lambda: "h/store-0" in cluster._held)
    assert len(cluster.on("store")) == 2


async def test_other_settings_are_refused_by_name(world):
    cluster = await world()
    mine = RuntimeConfig(close_timeout_s=1)
    told = await call(cluster, "hello", {"fingerprint": mine.runtime_fingerprint(), "pid": 4})
    assert told["home_id"] == "h"
    other = RuntimeConfig(close_timeout_s=1, durability="none", shards=2).runtime_fingerprint()
    with pytest.raises(RuntimeFault) as caught:
        await call(cluster, "hello", {"fingerprint": other})
    assert caught.value.code == "runtime.mismatch"
    assert caught.value.details["settings"]["durability"] == {"mine": "none", "theirs": "disk"}
    assert set(caught.value.details["settings"]) == {"durability", "shards"}


async def test_the_runtime_ends_when_no_driver_is_heard(world):
    cluster = await world(lease_timeout_s=0.4)
    fingerprint = RuntimeConfig(lease_timeout_s=0.4, close_timeout_s=1).runtime_fingerprint()
    lease = (await call(cluster, "hello", {"fingerprint": fingerprint}))["lease_id"]
    (name,) = await place(cluster, wish(0))
    for _ in range(12):
        await asyncio.sleep(0.05)
        await call(cluster, "renew", lease, {})
    assert name in cluster._held
    cores = [FakeCore.made[held] for held in cluster._held if held in FakeCore.made]
    await call(cluster, "goodbye", lease)
    await until(lambda: not cluster._held)
    assert all(core.closed for core in cores)


async def test_what_cannot_be_closed_is_told_and_ended_anyway(world):
    cluster = await world()
    (name,) = await place(cluster, wish(0))

    async def close() -> None:
        raise RuntimeFault("not durable", code="store.unavailable", details={"streams": ["a/main"]})

    FakeCore.made[name].close = close
    (failure,) = await call(cluster, "shutdown")
    assert failure["code"] == "store.unavailable"
    assert failure["details"] == {"streams": ["a/main"], "host": name}
    await until(lambda: not cluster._held)


async def test_shutdown_ends_all_once_and_refuses_newcomers(world):
    cluster = await world()
    await place(cluster, wish(0))
    await asyncio.gather(call(cluster, "shutdown"), call(cluster, "shutdown"))
    await until(lambda: not cluster._held)
    with pytest.raises(RuntimeFault):
        await place(cluster, wish(1))


async def test_a_session_that_a_host_took_while_a_place_was_looked_for_keeps_its_host(world):
    cluster = await world(hosts_per_node=1)
    old = await call(cluster, "place_session", "other")
    cluster.open.clear()
    placing = asyncio.create_task(call(cluster, "place_session", "s1", "dedicated"))
    await asyncio.sleep(0.05)
    assert not placing.done()
    assert await call(cluster, "hold_session", "s1", old) == old
    cluster.open.set()
    assert await asyncio.wait_for(placing, 5) == old
    assert await call(cluster, "find_session", "s1") == old
    status = await call(cluster, "status")
    await until(lambda: all(host.name == old or host.name not in cluster._held for host in cluster.on("sessions")))
    assert [host["load"] for host in status["hosts"] if host["name"] == old] == [2]


async def test_a_session_that_the_very_host_took_while_a_place_was_looked_for_counts_once(world):
    cluster = await world(hosts_per_node=1)
    host = await call(cluster, "place_session", "other")
    for n in range(20):
        calls = [call(cluster, "place_session", f"s{n}"), call(cluster, "hold_session", f"s{n}", host)]
        assert await asyncio.gather(*calls) == [host, host]
        await call(cluster, "forget_session", f"s{n}", host)
    status = await call(cluster, "status")
    assert [each["load"] for each in status["hosts"] if each["name"] == host] == [1]


async def test_an_error_that_nobody_foresaw_does_not_end_the_watch(world):
    cluster = await world(lease_timeout_s=0.4)
    nodes, failed = cluster.nodes, 0

    async def odd():
        nonlocal failed
        failed += 1
        if failed < 3:
            raise ValueError("odd")
        return await nodes()

    cluster.nodes = odd
    await until(lambda: failed >= 1)
    told = (await call(cluster, "status"))["failures"].get("watch")
    assert told is None or told["details"]["exception"] == "ValueError"
    await until(lambda: REGISTRY not in cluster._held)  # nobody drives it: it ends by itself all the same


async def test_a_host_that_cannot_be_killed_does_not_keep_the_runtime_from_ending(world):
    cluster = await world(hosts_per_node=2)
    first, second = await place(cluster, wish(0), wish(1, isolation="dedicated"))
    stop = cluster.stop_host

    async def stuck(name: str) -> None:
        if name == first:
            raise RuntimeFault("the control store does not answer", code="infra.timeout", retryable=True)
        await stop(name)

    cluster.stop_host = stuck
    failures = await asyncio.wait_for(call(cluster, "shutdown"), 10)
    assert [failure["details"]["host"] for failure in failures if failure["code"] == "infra.timeout"]
    assert {failure["details"]["host"] for failure in failures} == {first}
    assert second not in cluster._held
    await until(lambda: REGISTRY not in cluster._held)
