"""Emptying a node: nobody new comes, the idle leave, what runs is waited for, told or cancelled, and hosts end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import RuntimeFault
from kimi_ray.hosts import draining
from kimi_ray.hosts import registry as registry_module
from kimi_ray.hosts.draining import Leavers
from kimi_ray.hosts.pool import named_node
from kimi_ray.hosts.ports import Group
from kimi_ray.hosts.registry import Registry
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from tests.unit.hosts.fakes import FakeCore, Nodes, node, until

REGISTRY = "h/registry"
A, B, HEAD = "aaaaaaaa1", "bbbbbbbb2", "head00000"


class Leaver(FakeCore):
    """A host that lets go of what is in ``idle`` and keeps what is in ``busy`` and ``pinned``."""

    PORT: ClassVar[dict[str, Group]] = {**FakeCore.PORT, "let_go": "store", "hand_over": "default"}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.idle, self.busy, self.pinned = [], [], []

    async def ping(self):
        where = {host.name: host.node_id for host in self.cluster._cluster.started}
        return {**await super().ping(), "node_id": where[self.name]}

    async def let_go(self):
        moved, self.idle = len(self.idle), []
        return moved, list(self.busy), list(self.pinned)

    async def hand_over(self):
        gone, self.idle = self.idle, []
        for session_id in gone:
            await self.cluster.peer(REGISTRY).call("forget_session", session_id, timeout_s=5, group="control")
        return gone, list(self.busy)


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(registry_module, "ASK_BOUND_S", 0.05)
    monkeypatch.setattr(registry_module, "ROUND_S", 0.05)
    monkeypatch.setattr(draining, "ROUND_S", 0.02)
    monkeypatch.setattr(draining, "SETTLED_S", 0.05)
    FakeCore.made.clear()
    clusters: list[Nodes] = []

    async def make(nodes=None, **settings) -> Nodes:
        settings = {"close_timeout_s": 1, "hosts_per_node": 1, **settings}
        cluster = Nodes("h", RuntimeConfig(**settings), nodes or [node(HEAD, head=True), node(A), node(B)])
        cluster._factories |= {"agents": Leaver, "sessions": Leaver}
        clusters.append(cluster)
        await cluster.start_host("registry", REGISTRY)
        return cluster

    yield make
    for cluster in clusters:
        await cluster.close()


def call(cluster: Nodes, method: str, *args):
    return cluster.peer(REGISTRY).call(method, *args, timeout_s=8, group=Registry.PORT[method])


async def place(cluster: Nodes, *nodes: str | None) -> list[str]:
    return await call(cluster, "place_agents", [PlaceAgent(Stream("s", "main"), None, one) for one in nodes])


def where(cluster: Nodes) -> dict[str, str | None]:
    return {host.name: host.node_id for host in cluster.started if host.name in cluster._held}


async def test_the_idle_leave_hosts_end_and_nobody_comes_again(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].idle = [Stream("s", "main"), Stream("s", "agent-1")]
    report = await call(cluster, "drain_node", A, 5.0)
    assert (report["done"], report["moved"], report["running"]) == (True, 2, [])
    assert report["stopped"][-1] == there or there in report["stopped"]
    assert FakeCore.made[there].closed and A not in where(cluster).values()
    placed = await place(cluster, *[None] * 6)
    placed += await call(cluster, "place_agents", [PlaceAgent(Stream("s", "main"), near=A)])
    assert {where(cluster)[name] for name in placed} == {B}
    told = {one["node_id"]: one["draining"] for one in (await call(cluster, "status"))["nodes"]}
    assert told[A]["done"] and told[B] is None
    with pytest.raises(RuntimeFault) as caught:
        await place(cluster, A)
    assert caught.value.code == "infra.node_draining"


async def test_what_runs_is_waited_for(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].busy = [Stream("s", "agent-4")]
    waiting = asyncio.create_task(call(cluster, "drain_node", A, 5.0))
    await asyncio.sleep(0.2)
    assert not waiting.done() and not FakeCore.made[there].closed
    FakeCore.made[there].busy = []
    assert (await waiting)["done"]


async def test_what_runs_at_the_deadline_is_told_and_goes_on(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].busy = [Stream("s", "agent-4")]
    FakeCore.made[there].pinned = [Stream("s", "agent-5")]
    began = time.monotonic()
    report = await call(cluster, "drain_node", A, 0.2)
    assert time.monotonic() - began < 2
    assert (report["done"], report["running"], report["pinned"]) == (False, ["s/agent-4"], ["s/agent-5"])
    assert not FakeCore.made[there].closed and report["cancelled"] == []
    FakeCore.made[there].busy = FakeCore.made[there].pinned = []
    await until(lambda: FakeCore.made[there].closed)
    assert (await call(cluster, "drain_node", A, 1.0))["done"]


async def test_force_cancels_at_the_deadline_and_not_before(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].busy = [Stream("s", "agent-4")]
    FakeCore.made[there].pinned = [Stream("s", "agent-5")]
    waiting = asyncio.create_task(call(cluster, "drain_node", A, 0.3, True))
    await asyncio.sleep(0.15)
    assert not FakeCore.made[there].closed
    report = await waiting
    assert report["done"] and FakeCore.made[there].closed
    assert report["cancelled"] == ["s/agent-4", "s/agent-5"]


async def test_sessions_are_handed_over_and_those_with_a_swarm_stay(world):
    cluster = await world()
    host = await call(cluster, "place_session", "session_x")
    FakeCore.made[host].idle, FakeCore.made[host].busy = ["session_x"], ["session_y"]
    at = str(where(cluster)[host])
    report = await call(cluster, "drain_node", at, 0.2)
    assert (report["handed_over"], report["sessions"], report["done"]) == (1, ["session_y"], False)
    again = await call(cluster, "place_session", "session_x")
    assert where(cluster)[again] != at
    FakeCore.made[host].busy = []
    await until(lambda: host not in cluster._held)


async def test_a_drain_outlives_the_registry(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].busy = [Stream("s", "agent-4")]
    FakeCore.made[there].agents = 1
    assert not (await call(cluster, "drain_node", A, 0.1))["done"]
    cluster.kill_host(REGISTRY)
    await cluster.start_host("registry", REGISTRY)
    placed = await place(cluster, *[None] * 4)
    assert A not in {where(cluster)[name] for name in placed}
    FakeCore.made[there].busy = []
    await until(lambda: there not in cluster._held)


async def test_undo_lets_a_node_work_again_and_forgets_it(world):
    cluster = await world()
    await call(cluster, "drain_node", A, 1.0)
    await call(cluster, "undrain_node", A)
    await call(cluster, "undrain_node", A)
    (again,) = await place(cluster, A)
    assert where(cluster)[again] == A
    cluster.kill_host(REGISTRY)
    await cluster.start_host("registry", REGISTRY)
    assert all(one["draining"] is None for one in (await call(cluster, "status"))["nodes"])


async def test_the_last_node_and_unknown_ones_are_refused(world):
    cluster = await world([node(A, head=True)])
    with pytest.raises(RuntimeFault) as caught:
        await call(cluster, "drain_node", A, 1.0)
    assert caught.value.code == "infra.last_node"
    with pytest.raises(RuntimeFault) as caught:
        await call(cluster, "drain_node", "cccc", 1.0)
    assert caught.value.code == "infra.unknown_node"
    assert caught.value.details["nodes"][0]["node_id"] == A


async def test_without_workers_the_head_takes_the_work(world):
    cluster = await world([node(HEAD, head=True), node(A)])
    (there,) = await place(cluster, None)
    assert where(cluster)[there] == A
    assert (await call(cluster, "drain_node", A, 3.0))["done"]
    (again,) = await place(cluster, None)
    assert where(cluster)[again] == HEAD


async def test_a_node_that_the_cluster_takes_away_is_drained_by_itself(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].idle = [Stream("s", "main")]
    deadline = time.time() + 5
    cluster.known = [replace(one, draining=one.node_id == A, drain_deadline=deadline) for one in cluster.known]
    await until(lambda: there not in cluster._held)
    told = {one["node_id"]: one["draining"] for one in (await call(cluster, "status"))["nodes"]}
    assert (told[A]["by"], told[A]["deadline"]) == ("cluster", deadline)
    cluster.known = [one for one in cluster.known if one.node_id != A]
    registry = cluster._held[REGISTRY].core
    await until(lambda: not registry._drains.nodes)


async def test_a_host_that_dies_in_the_middle_is_no_hindrance(world):
    cluster = await world()
    (there,) = await place(cluster, A)
    FakeCore.made[there].busy = [Stream("s", "agent-4")]
    waiting = asyncio.create_task(call(cluster, "drain_node", A, 6.0))
    await asyncio.sleep(0.1)
    cluster.kill_host(there)
    assert (await waiting)["done"]


@pytest.mark.parametrize(
    ("failure", "code"),
    [(RuntimeFault("no answer", code="infra.timeout", retryable=True), "infra.timeout"), (KeyError("odd"), "internal")],
)
async def test_a_cluster_that_does_not_answer_is_asked_again(world, monkeypatch, failure, code):
    cluster = await world()
    (there,) = await place(cluster, A)
    stop, failures = cluster.stop_host, iter([True])

    async def stop_host(name: str) -> None:
        if name == there and next(failures, False):
            raise failure
        await stop(name)

    monkeypatch.setattr(cluster, "stop_host", stop_host)
    report = await call(cluster, "drain_node", A, 6.0)
    assert report["done"] and report["errors"]["cluster"]["code"] == code
    assert there not in cluster._held


async def test_a_host_on_its_way_comes_up_and_goes(world):
    cluster = await world()
    cluster.open.clear()
    wish = PlaceAgent(Stream("s", "main"), "dedicated", A)
    coming = asyncio.create_task(call(cluster, "place_agents", [wish]))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(call(cluster, "drain_node", A, 5.0))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    cluster.open.set()
    report = await waiting
    assert report["done"] and A not in where(cluster).values()
    with pytest.raises(RuntimeFault) as caught:
        await coming
    assert caught.value.code == "infra.node_draining"


def test_a_node_is_named_by_id_beginning_or_address():
    nodes = [node(A), node(B), node("aaaaaaaa9"), replace(node("gone00000"), alive=False)]
    assert named_node(nodes, A).node_id == A
    assert named_node(nodes, "bbbbbbbb").node_id == B
    for name in ("aaaaaaaa", "bbbb", "gone00000", ""):
        with pytest.raises(RuntimeFault) as caught:
            named_node(nodes, name)
        assert caught.value.code == "infra.unknown_node"


def agent(*, busy: bool = False, workdir: Workdir | None = None, path: str | None = "/w") -> Any:
    journal = SimpleNamespace(log=SimpleNamespace(next_seq=5), durable_seq=5)
    return SimpleNamespace(busy=busy, spec=SimpleNamespace(workdir=workdir), workdir_path=path, journal=journal)


def test_an_agent_leaves_when_nobody_had_to_do_with_it_for_a_while(monkeypatch):
    now = 100.0
    monkeypatch.setattr(draining.time, "monotonic", lambda: now)
    one, two = Stream("s", "main"), Stream("s", "agent-1")
    agents = {one: agent(), two: agent(busy=True)}
    leavers = Leavers(workspace_shared=False)
    leavers.touch(one)
    leavers.touch(two)
    now += draining.UNTOUCHED_S / 2
    assert leavers.split(agents) == ([], [one, two], [])
    now += draining.UNTOUCHED_S
    assert leavers.split(agents) == ([one], [two], [])
    agents[two].busy = False
    leavers.touch(one)
    assert leavers.split(agents) == ([two], [one], [])
    leavers.forget(one)
    assert leavers.split(agents) == ([one, two], [], [])
    agents[one].journal.log.next_seq += 1
    assert leavers.split(agents) == ([two], [one], []), "somebody waits until it is durable"


def test_an_agent_whose_directory_is_only_here_is_pinned():
    def kinds(*, shared: bool) -> tuple[int, int]:
        agents = {
            Stream("s", "a"): agent(workdir=Workdir.copy("/src")),
            Stream("s", "b"): agent(workdir=Workdir.shared("/src")),
            Stream("s", "c"): agent(workdir=Workdir.none(), path=None),
            Stream("s", "d"): agent(workdir=Workdir.copy("/src"), busy=True),
        }
        leavers = Leavers(workspace_shared=shared)
        leaving, running, pinned = leavers.split(agents)
        assert running == [Stream("s", "d")]
        return len(leaving), len(pinned)

    assert kinds(shared=False) == (1, 2)
    assert kinds(shared=True) == (2, 1)
