"""What many ask for in one call: whatever becomes of it, each of them is answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, RuntimeFault, StoreError
from kimi_ray.hosts.coalescing import Coalesced


async def ask(coalesced: Coalesced, count: int = 3) -> list[Any]:
    async with asyncio.timeout(5):
        return await asyncio.gather(*(coalesced.add(0, number) for number in range(count)), return_exceptions=True)


async def test_one_call_and_an_answer_for_each() -> None:
    calls: list[list[Any]] = []

    async def call(_shard: int, asked: list[Any]) -> list[Any]:
        calls.append(asked)
        return [number * 2 for number in asked]

    assert await ask(Coalesced(call)) == [0, 2, 4]
    assert calls == [[0, 1, 2]]


@pytest.mark.parametrize("error", [StoreError("no", code="store.busy"), ValueError("a defect")])
async def test_an_error_is_everybodys(error: Exception) -> None:
    async def call(_shard: int, _asked: list[Any]) -> list[Any]:
        raise error

    assert await ask(Coalesced(call)) == [error] * 3


async def test_too_few_answers_are_told_and_not_waited_for() -> None:
    async def call(_shard: int, _asked: list[Any]) -> list[Any]:
        return [1]

    assert all(isinstance(found, ValueError) for found in await ask(Coalesced(call)))


async def test_a_call_that_is_ended_is_told_as_an_error() -> None:
    began = asyncio.Event()

    async def call(_shard: int, _asked: list[Any]) -> list[Any]:
        began.set()
        await asyncio.Event().wait()
        return []

    coalesced = Coalesced(call)
    asking = asyncio.create_task(ask(coalesced))
    await began.wait()
    for task in list(coalesced._tasks):
        task.cancel()
    found = await asking
    assert [type(one) for one in found] == [RuntimeFault] * 3
    assert all(isinstance(one, KimiRayError) and one.code == "runtime.closed" for one in found)
