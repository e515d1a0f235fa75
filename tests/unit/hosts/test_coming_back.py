"""An agent that is wanted again on the host where it is just ending: the end first, then a new life."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.hosts.specs import PromptSpec, RunRequest
from tests.unit.hosts.test_agent_host import Place, checked, ended, place, ran

__all__ = ["place"]


def core_of(place: Place) -> Any:
    return place.cluster._held[f"{place.home_id}/agents-a"].core


async def lived(place: Place) -> Any:
    """A host on which main has done something; its core."""
    await ran(place.peer(), RunRequest(place.spec(), (PromptSpec("p", "hi"),)))
    await ended(place.peer(), place.stream("main"), "p")
    return core_of(place)


async def test_an_agent_that_is_closing_is_brought_to_life_after_its_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await lived(place)
    give_back, gate, asked = core._opener.give_back, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> None:
        asked.set()
        await gate.wait()
        await give_back(*args, **options)

    monkeypatch.setattr(core._opener, "give_back", slow)
    closing = asyncio.create_task(place.peer().call("close_agents", [place.stream("main")], False, timeout_s=20))
    async with asyncio.timeout(5):
        await asked.wait()
    coming = asyncio.create_task(ran(place.peer(), RunRequest(place.spec(new=False), (PromptSpec("q", "again"),))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not coming.done()
    gate.set()
    await coming
    assert [ack.error for ack in await closing] == [None]
    assert (await ended(place.peer(), place.stream("main"), "q")).result.state == "completed"
    assert [event.type for event in checked(await place.lines())].count("runtime/activated") == 2


async def test_an_agent_that_could_not_be_closed_is_closed_before_it_lives_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await lived(place)
    give_back, left = core._opener.give_back, 2

    async def refuses_twice(*args: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise StoreError("the store is away", code="store.unavailable", retryable=True)
        await give_back(*args, **options)

    monkeypatch.setattr(core._opener, "give_back", refuses_twice)
    [ack] = await place.peer().call("close_agents", [place.stream("main")], False, timeout_s=20)
    assert ack.error is not None and ack.error["code"] == "store.unavailable"
    [ack] = await place.peer().call("run_many", [RunRequest(place.spec(new=False), ())], timeout_s=20)
    assert ack.error is not None and ack.error["code"] == "store.unavailable"
    await ran(place.peer(), RunRequest(place.spec(new=False), (PromptSpec("q", "again"),)))
    assert (await ended(place.peer(), place.stream("main"), "q")).result.state == "completed"


async def test_a_fenced_agent_that_ends_slowly_does_not_take_its_successor_along(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await lived(place)
    stream = place.stream("main")
    agent = core._agents[stream]
    close, gate = agent.close, asyncio.Event()

    async def slow(**options: Any) -> None:
        await gate.wait()
        await close(**options)

    monkeypatch.setattr(agent, "close", slow)
    # Another host had the log meanwhile.
    elsewhere = await place.host("b")
    await ran(elsewhere, RunRequest(place.spec(new=False), (PromptSpec("b", "there"),)))
    await ended(elsewhere, stream, "b")
    place.kill("b")
    coming = asyncio.create_task(ran(place.peer(), RunRequest(place.spec(new=False), (PromptSpec("q", "back"),))))
    async with asyncio.timeout(5):
        while stream in core._agents:
            await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0.002)
    gate.set()
    await coming
    assert (await ended(place.peer(), stream, "q")).result.state == "completed"
    await place.peer().call("flush", [stream], timeout_s=10)
    assert [event.type for event in checked(await place.lines())].count("prompt/completed") == 3


async def test_an_agent_that_is_just_coming_to_life_is_closed_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(place)
    open_log, gate, asked = core._opener.open, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        asked.set()
        await gate.wait()
        return await open_log(*args, **options)

    monkeypatch.setattr(core._opener, "open", slow)
    coming = asyncio.create_task(place.peer().call("run_many", [RunRequest(place.spec(), ())], timeout_s=20))
    async with asyncio.timeout(5):
        await asked.wait()
    closing = asyncio.create_task(place.peer().call("close_agents", [place.stream("main")], False, timeout_s=20))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    gate.set()
    await coming
    assert [ack.error for ack in await closing] == [None]
    assert (await place.peer().call("ping", timeout_s=5))["agents"] == 0


async def test_an_agent_that_is_closed_while_it_is_looked_at_is_brought_to_life_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await lived(place)
    is_newest, gate, asked = core._is_newest, asyncio.Event(), asyncio.Event()

    async def slow(agent: Any) -> bool:
        asked.set()
        await gate.wait()
        return await is_newest(agent)

    monkeypatch.setattr(core, "_is_newest", slow)
    coming = asyncio.create_task(ran(place.peer(), RunRequest(place.spec(new=False), (PromptSpec("q", "again"),))))
    async with asyncio.timeout(5):
        await asked.wait()
    await place.peer().call("close_agents", [place.stream("main")], False, timeout_s=20)
    gate.set()
    await coming
    assert (await ended(place.peer(), place.stream("main"), "q")).result.state == "completed"
