"""The in-process cluster keeps the promises of a real boundary."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, RuntimeFault, ToolError
from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.hosts.ports import HostKind
from tests.unit.hosts.fakes import FakeCore, until

KINDS: tuple[HostKind, ...] = ("agents", "sessions", "store", "registry")


@pytest.fixture
async def cluster():
    cluster = LocalCluster("h", RuntimeConfig(close_timeout_s=1), factories=dict.fromkeys(KINDS, FakeCore))
    await cluster.start_host("agents", "h/agents-1")
    await cluster.start_host("store", "h/store-0")
    yield cluster
    await cluster.close()


async def test_an_error_crosses_whole_and_is_not_the_same_object(cluster):
    peer = cluster.peer("h/agents-1")
    with pytest.raises(ToolError) as caught:
        await peer.call("fail", timeout_s=1)
    error = caught.value
    assert (error.code, error.hint, error.details, error.retryable) == ("tool.broken", "buy one", {"n": [1]}, True)
    assert error.__traceback__ is not None
    assert "fail" not in [frame.name for frame in __import__("traceback").extract_tb(error.__traceback__)]


async def test_an_unexpected_exception_is_internal_with_its_traceback(cluster):
    with pytest.raises(KimiRayError) as caught:
        await cluster.peer("h/agents-1").call("crash", timeout_s=1)
    assert caught.value.code == "internal"
    assert caught.value.details["exception"] == "ZeroDivisionError"
    assert "deep inside" in caught.value.details["traceback"]


async def test_only_the_port_may_be_called(cluster):
    peer = cluster.peer("h/agents-1")
    for method in ("__init__", "made", "start", "_no", "nothing"):
        with pytest.raises(KimiRayError) as caught:
            await peer.call(method, 1, timeout_s=1)
        assert caught.value.code == "internal"
    assert (await peer.call("ping", timeout_s=1, group="control"))["kind"] == "agents"


async def test_a_caller_that_gives_up_does_not_end_the_work(cluster):
    core = FakeCore.made["h/agents-1"]
    with pytest.raises(RuntimeFault) as caught:
        await cluster.peer("h/agents-1").call("hang", timeout_s=0.01, group="wait")
    assert caught.value.code == "infra.timeout"
    waiting = asyncio.create_task(cluster.peer("h/agents-1").call("hang", timeout_s=60, group="wait"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not core.closed


async def test_arguments_are_not_shared(cluster):
    mine = [1]
    theirs = await cluster.peer("h/agents-1").call("echo", mine, timeout_s=1)
    mine.append(2)
    assert theirs == [1]


async def test_an_unknown_name_is_a_dead_actor(cluster):
    with pytest.raises(RuntimeFault) as caught:
        await cluster.peer("h/nobody").call("ping", timeout_s=1, group="control")
    assert caught.value.code == "infra.actor_died"


async def test_a_killed_core_stops_writing_and_its_callers_are_told(cluster):
    store = FakeCore.made["h/store-0"]
    await cluster.peer("h/agents-1").call("work", "h/store-0", timeout_s=1)
    waiting = asyncio.create_task(cluster.peer("h/agents-1").call("hang", timeout_s=60, group="wait"))
    await until(lambda: len(store.rows) > 3)
    core = FakeCore.made["h/agents-1"]
    cluster.kill_host("h/agents-1")
    written = len(store.rows)
    with pytest.raises(RuntimeFault) as caught:
        await asyncio.wait_for(waiting, 2)
    assert caught.value.code == "infra.actor_died"
    with pytest.raises(RuntimeFault):
        await core.cluster.peer("h/store-0").call("append", "ghost", timeout_s=1, group="store")
    await until(lambda: core.inner.done())
    assert "ghost" not in store.rows
    assert len(store.rows) <= written + 1
    assert not core.closed
    cluster.kill_host("h/agents-1")


async def test_close_closes_every_core_and_gives_the_loop_back(cluster):
    before = asyncio.get_running_loop().get_task_factory()
    own = LocalCluster("o", RuntimeConfig(close_timeout_s=1), factories=dict.fromkeys(KINDS, FakeCore))
    for kind in KINDS:
        await own.start_host(kind, f"o/{kind}-x")
    await own.close()
    assert all(FakeCore.made[f"o/{kind}-x"].closed for kind in KINDS)
    assert await own.list_hosts() == []
    assert asyncio.get_running_loop().get_task_factory() is before


async def test_starting_the_same_name_twice_at_once_gives_one_core(cluster):
    one, two = await asyncio.gather(
        cluster.start_host("agents", "h/agents-2"), cluster.start_host("agents", "h/agents-2")
    )
    assert one is two


async def test_a_start_that_fails_leaves_nothing(cluster):
    class Broken(FakeCore):
        async def start(self) -> None:
            raise ToolError("no", code="tool.no")

    own = LocalCluster("b", RuntimeConfig(), factories={"agents": Broken})
    with pytest.raises(ToolError):
        await own.start_host("agents", "b/agents-1")
    assert await own.list_hosts() == []
    await own.close()


async def test_another_node_is_unschedulable(cluster):
    with pytest.raises(RuntimeFault) as caught:
        await cluster.start_host("agents", "h/agents-3", node_id="elsewhere")
    assert caught.value.code == "infra.unschedulable"


async def test_the_parts_of_a_core_answer_their_calls_and_no_others():
    from kimi_ray.hosts.boundary import answer

    class Part:
        PORT: ClassVar[dict[str, str]] = {"extra": "control"}

        async def extra(self, value):
            return value + 1

        async def hidden(self):
            return "seen"

    class Whole(FakeCore):
        parts = (Part(),)

    core = Whole("h/agents-1", None, RuntimeConfig())  # type: ignore[arg-type]
    assert await answer(core, "extra", (1,)) == ("ok", 2)
    assert (await answer(core, "echo", ("x",))) == ("ok", "x")
    for method in ("hidden", "parts", "nothing"):
        kind, told = await answer(core, method, ())
        assert kind == "err" and told["code"] == "internal" and "extra" in told["details"]["port"]


async def test_a_core_that_cannot_start_leaves_no_task_behind():
    running: list[asyncio.Task[None]] = []

    class Broken(FakeCore):
        async def start(self) -> None:
            running.append(asyncio.get_running_loop().create_task(asyncio.Event().wait()))
            await asyncio.sleep(0)
            raise RuntimeFault("no", code="infra.unschedulable")

    cluster = LocalCluster("h", RuntimeConfig(close_timeout_s=1), factories=dict.fromkeys(KINDS, Broken))
    try:
        with pytest.raises(RuntimeFault):
            await cluster.start_host("agents", "h/agents-1")
        await until(lambda: all(task.done() for task in running))
        assert running and await cluster.list_hosts() == []
    finally:
        await cluster.close()
