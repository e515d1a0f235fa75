"""A host's places: in order, no call a request, and none lost however a request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, ProviderError, RuntimeFault
from kimi_ray.hosts import limiter_leases
from kimi_ray.hosts.limiter_leases import LeasedPlace, LeasedSlots, LimiterLeases
from kimi_ray.hosts.limiter_ledger import LimiterLedger
from kimi_ray.llm.models import ModelSettings, ResolvedModel, resolve_model

LOCAL = "http://127.0.0.1:9/v1"


class Registry:
    """The registry's end, with its calls counted and failing at will."""

    def __init__(self) -> None:
        self.ledger = LimiterLedger()
        self.calls: list[str] = []
        self.failure: KimiRayError | None = None
        self.left: list[str] = []
        self.home_id, self.node_id = "home", "node"

    def peer(self, _name: str) -> Registry:
        return self

    async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        self.calls.append(method)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if method == "leave_places":
            self.left.append(args[0])
            return self.ledger.leave(*args)
        return self.ledger.exchange(*args)


def model(most: int | None = 2, **settings: Any) -> ResolvedModel:
    table = ModelSettings(base_url=LOCAL, max_connections=most, **settings)
    return resolve_model("m", {"m": table}, None, {})


@asynccontextmanager
async def leasing(registry: Registry) -> AsyncGenerator[LimiterLeases]:
    leases = LimiterLeases(registry)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(20):
            yield leases
    finally:
        await leases.close()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def slots_for(leases: LimiterLeases, wanted: ResolvedModel) -> LeasedSlots:
    found = leases.slots(wanted)
    assert found is not None
    return found


def end(place: LeasedPlace, error: BaseException | None = None) -> None:
    place.__exit__(None if error is None else type(error), error, None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_leases, "REPORT_S", 0.04)
    monkeypatch.setattr(limiter_leases, "SOON_S", 0.01)


def test_models_whose_requests_nobody_counts_have_no_slots() -> None:
    scripted = resolve_model("scripted", {}, None, {})
    leases = LimiterLeases(Registry())  # type: ignore[arg-type]
    assert leases.slots(scripted) is None
    assert leases.slots(model(None, adaptive_connections=False)) is None


async def test_places_are_given_in_order_and_without_a_call_each() -> None:
    registry = Registry()
    async with leasing(registry) as leases:
        slots = slots_for(leases, model(2))
        assert slots.take_now() is None, "the registry has not been asked yet"
        order: list[int] = []
        gates = [asyncio.Event() for _ in range(200)]

        async def request(number: int) -> None:
            with await slots.take():
                order.append(number)
                await gates[number].wait()

        tasks = [asyncio.create_task(request(number)) for number in range(200)]
        await until(lambda: len(order) == 2)
        await asyncio.sleep(0.1)
        assert order == [0, 1], "two at once"
        before = len(registry.calls)
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)
        assert order == list(range(200))
        assert len(registry.calls) - before < 20


async def test_nothing_is_said_without_traffic_and_everything_is_given_back() -> None:
    registry = Registry()
    async with leasing(registry) as leases:
        slots = slots_for(leases, model(2))
        end(await slots.take())
        await until(lambda: not slots.has_news)
        count = len(registry.calls)
        await asyncio.sleep(0.2)
        assert len(registry.calls) <= count + 1
        other = slots_for(LimiterLeases(registry), model(2))  # type: ignore[arg-type]
        places = [await other.take() for _ in range(2)]
        assert len(places) == 2, "nothing is held back by the quiet one"


async def test_a_request_that_is_cancelled_in_the_queue_or_just_served_loses_no_place() -> None:
    async with leasing(Registry()) as leases:
        slots = slots_for(leases, model(1))
        held = await slots.take()
        waiters = [asyncio.create_task(slots.take()) for _ in range(4)]
        await asyncio.sleep(0)
        waiters[1].cancel()
        end(held)  # goes to the first
        waiters[0].cancel()  # which is cancelled before it wakes up
        await asyncio.wait(waiters[:2])
        third = await waiters[2]
        assert not waiters[3].done()
        end(third)
        end(await waiters[3])
        assert slots.waiting == 0
        end(await slots.take())


async def test_refusals_cut_at_once_and_retry_after_holds_everybody() -> None:
    async with leasing(Registry()) as leases:
        slots = slots_for(leases, model(None))
        places = [await slots.take() for _ in range(5)]
        refusal = ProviderError("no", code="provider.rate_limit", details={"retry_after_ms": 150}, retryable=True)
        loop = asyncio.get_running_loop()
        began = loop.time()
        end(places[0], refusal)
        end(places[1])
        assert slots.take_now() is None, "paused"
        waiter = await slots.take()
        assert loop.time() - began >= 0.14
        for place in [*places[2:], waiter]:
            end(place)


async def test_the_way_a_body_ends_is_the_result() -> None:
    async with leasing(Registry()) as leases:
        slots = slots_for(leases, model(4))

        async def body(error: BaseException | None) -> None:
            with suppress(ProviderError, KeyError), await slots.take():
                if error is not None:
                    raise error

        for error in (
            None,
            ProviderError("x", code="provider.bad_request"),
            ProviderError("x", code="provider.server"),
            ProviderError("x", code="provider.rate_limit"),
            KeyError("ours"),
        ):
            await body(error)
        tally = slots.report().tally
        assert (tally.served, tally.faltered, sum(tally.refused.values())) == (2, 1, 1)


async def test_a_silent_registry_is_asked_again_and_nothing_is_forgotten() -> None:
    registry = Registry()
    async with leasing(registry) as leases:
        slots = slots_for(leases, model(3))
        end(await slots.take())
        registry.failure = RuntimeFault("gone", code="infra.actor_died")
        places = [await slots.take() for _ in range(2)]
        assert places, "the portion that it has is good"
        waiter = asyncio.create_task(slots.take())
        waiter2 = asyncio.create_task(slots.take())
        calls = len(registry.calls)
        await until(lambda: len(registry.calls) > calls + 2)
        registry.failure = None
        for place in places:
            end(place)
        end(await waiter)
        end(await waiter2)


async def test_who_waits_hears_of_a_registry_that_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_leases, "UNREACHABLE_S", 0.1)
    registry = Registry()
    registry.failure = RuntimeFault("gone", code="infra.actor_died")
    async with leasing(registry) as leases:
        slots = slots_for(leases, model(3))
        with pytest.raises(RuntimeFault) as caught:
            await slots.take()
        assert caught.value.code == "infra.actor_died"
        registry.failure = None
        end(await slots.take())


async def test_two_hosts_together_keep_the_bound_and_both_get_on() -> None:
    registry = Registry()
    under_way = most = 0
    done = {"one": 0, "two": 0}
    async with leasing(registry) as one, leasing(registry) as two:

        async def request(name: str, slots: LeasedSlots) -> None:
            nonlocal under_way, most
            with await slots.take():
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.005)
                under_way -= 1
                done[name] += 1

        jobs = [
            request(name, slots_for(leases, model(3)))
            for name, leases in (("one", one), ("two", two))
            for _ in range(60)
        ]
        await asyncio.gather(*jobs)
    assert done == {"one": 60, "two": 60}
    assert most == 3


async def test_close_leaves_the_registry() -> None:
    registry = Registry()
    async with leasing(registry) as leases:
        await slots_for(leases, model(3)).take()
    assert len(registry.left) == 1
