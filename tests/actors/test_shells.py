"""What a shell promises about calls: groups, one loop, errors, bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from kimi_ray.actors.ray_cluster import RayCluster, RaySpec
from kimi_ray.errors import ConfigError, KimiRayError, ProviderError, RuntimeFault, ToolError
from kimi_ray.ids import new_ulid
from tests.actors.conftest import until
from tests.actors.probe import start_probe


@pytest.fixture
def cluster(config):
    cluster = RayCluster(RaySpec(f"h{new_ulid()}", config.namespace, config))
    yield cluster
    cluster.close()


@pytest.fixture
async def probe(cluster):
    peer = start_probe(cluster, "probe-1")
    await peer.call("ping", timeout_s=60, group="control")
    yield peer
    await cluster.stop_host(peer.name)


async def test_errors_cross_whole(probe, cluster):
    with pytest.raises(ProviderError) as caught:
        await probe.call("fail", timeout_s=10)
    error = caught.value
    assert type(error) is ProviderError
    assert (error.code, error.hint, error.retryable) == ("provider.overloaded", "sing", True)
    assert error.details == {"status": 529, "retry_after_ms": 250}
    assert error.retry_after_ms == 250
    with pytest.raises(ProviderError) as again:
        await probe.call("relay", probe.name, "fail", timeout_s=20)
    assert again.value.to_data() == error.to_data()


async def test_a_crash_is_internal_with_type_and_traceback(probe):
    with pytest.raises(KimiRayError) as caught:
        await probe.call("crash", timeout_s=10)
    assert caught.value.code == "internal"
    assert caught.value.details["exception"] == "LookupError"
    assert "probe.py" in caught.value.details["traceback"]


async def test_an_answer_that_cannot_be_sent_is_an_error_and_the_actor_lives(probe):
    with pytest.raises(KimiRayError) as caught:
        await probe.call("unpicklable", timeout_s=10)
    assert caught.value.code == "internal"
    assert await probe.call("echo", 1, timeout_s=10) == 1


async def test_an_argument_that_cannot_be_sent_is_the_callers_mistake(probe):
    with pytest.raises(ConfigError) as caught:
        await probe.call("echo", (n for n in range(3)), timeout_s=10)
    assert caught.value.code == "request.not_picklable"


class OnlyHere:
    """Pickles as code of a module that no host has."""

    def __reduce__(self):
        return (__import__, ("a_module_that_no_host_has",))


async def test_code_that_a_host_does_not_have_is_named_and_the_actor_lives(probe):
    with pytest.raises(ToolError) as caught:
        await probe.call("echo", OnlyHere(), timeout_s=10)
    assert caught.value.code == "tool.not_importable"
    assert "a_module_that_no_host_has" in caught.value.message
    assert caught.value.hint is not None and "runtime_env" in caught.value.hint
    assert await probe.call("echo", 1, timeout_s=10) == 1


async def test_a_method_that_is_not_in_the_port_is_refused(probe):
    for method in ("start", "__init__", "kept", "_answer"):
        with pytest.raises(KimiRayError) as caught:
            await probe.call(method, timeout_s=10)
        assert caught.value.code == "internal"


async def test_a_ping_gets_through_while_long_polls_hang(probe):
    hanging = [asyncio.create_task(probe.call("hang", timeout_s=60, group="wait")) for _ in range(50)]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await probe.call("ping", timeout_s=2, group="control")
    took = time.monotonic() - began
    assert took < 2
    assert not any(task.done() for task in hanging)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_all_groups_share_the_cores_one_loop_and_it_starts_once(cluster):
    peer = start_probe(cluster, "probe-2")
    told = await asyncio.gather(
        *(peer.call("ping", timeout_s=60, group=g) for g in ("default", "wait", "store", "control") for _ in range(5))
    )
    assert {answer["starts"] for answer in told} == {1}
    assert await peer.call("where", timeout_s=10, group="control") == 1
    await cluster.stop_host(peer.name)


async def test_a_call_that_hangs_ends_at_its_bound(probe):
    began = time.monotonic()
    with pytest.raises(RuntimeFault) as caught:
        await probe.call("hang", timeout_s=0.3, group="wait")
    assert caught.value.code == "infra.timeout"
    assert time.monotonic() - began < 5


async def test_order_within_one_call_holds_and_every_caller_gets_its_own_answer(probe):
    rows = list(range(1000))
    await probe.call("add", rows, timeout_s=10, group="store")
    assert await probe.call("rows", timeout_s=10) == rows
    answers = await asyncio.gather(*(probe.call("echo", n, timeout_s=60) for n in range(300)))
    assert answers == list(range(300))


async def test_a_big_argument_goes_as_one_blob(probe):
    assert await probe.call("size", b"x" * (8 << 20), timeout_s=30, group="store") == 8 << 20


async def test_a_killed_host_is_dead_and_stays_dead(cluster, probe):
    pid = (await probe.call("ping", timeout_s=10, group="control"))["pid"]
    hanging = asyncio.create_task(probe.call("hang", timeout_s=60, group="wait"))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeFault) as caught:
        await hanging
    assert caught.value.code in ("infra.actor_died", "infra.actor_unavailable")

    async def is_dead() -> bool:
        try:
            await probe.call("ping", timeout_s=5, group="control")
        except RuntimeFault as error:
            return error.code == "infra.actor_died"
        return False

    await until(is_dead)


async def test_nobody_of_that_name(cluster):
    with pytest.raises(RuntimeFault) as caught:
        await cluster.peer(f"{cluster.home_id}/agents-none").call("ping", timeout_s=5, group="control")
    assert caught.value.code == "infra.actor_died"
    await cluster.stop_host(f"{cluster.home_id}/agents-none")


async def test_a_node_that_is_not_there_is_unschedulable(cluster):
    with pytest.raises(RuntimeFault) as caught:
        await cluster.start_host("agents", f"{cluster.home_id}/agents-1", node_id="ab" * 28)
    assert caught.value.code == "infra.unschedulable"
    assert await cluster.list_hosts() == []
