"""A deadline is ``asyncio.timeout`` for many waits: its bounds hold, whoever cancels, and its timer is one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kimi_ray.llm.deadline import Deadline


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each timer that was set goes off."""
    made: list[float] = []
    call_at = asyncio.BaseEventLoop.call_at

    def counted(self: Any, when: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        made.append(when)
        return call_at(self, when, *args, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", counted)
    return made


async def hang() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_wait_beyond_its_bound_is_a_timeout_and_the_next_one_is_bounded_too() -> None:
    deadline, task = Deadline(), asyncio.current_task()
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(TimeoutError), deadline.within(0.02):
            await hang()
        assert 0.015 <= time.monotonic() - began < 5
        assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)
    deadline.close()


async def test_a_bound_that_was_put_off_is_kept_and_one_timer_does(timers: list[float]) -> None:
    deadline = Deadline()
    for _ in range(500):
        with deadline.within(5):
            await asyncio.sleep(0)
    assert len(timers) == 1
    deadline.close()


async def test_the_timer_of_an_earlier_wait_does_not_end_a_later_one() -> None:
    deadline = Deadline()
    with deadline.within(0.02):
        await asyncio.sleep(0)
    with deadline.within(30):
        await asyncio.sleep(0.06)
    began = time.monotonic()
    with pytest.raises(TimeoutError), deadline.within(0.02):
        await hang()
    assert time.monotonic() - began < 5


async def test_an_earlier_bound_than_the_timers_holds() -> None:
    deadline = Deadline()
    with deadline.within(600):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError), deadline.within(0.01):
            await hang()
    deadline.close()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_a_bound_that_has_passed_ends_the_wait_at_once(seconds: float) -> None:
    deadline = Deadline()
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError), deadline.within(seconds):
            await hang()


async def test_nothing_is_ended_between_two_waits() -> None:
    deadline = Deadline()
    with deadline.within(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    with deadline.within(5):
        await asyncio.sleep(0)
    deadline.close()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_cancel_from_elsewhere_stays_one() -> None:
    entered = asyncio.Event()

    async def wait() -> None:
        with Deadline().within(30):
            entered.set()
            await hang()

    task = asyncio.create_task(wait())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancel_together_with_the_bound_stays_one() -> None:
    deadline = Deadline()

    async def wait() -> None:
        with deadline.within(0.01):
            await hang()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    time.sleep(0.03)  # the timer is due in the very pass of the loop that delivers the cancel
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_that_comes_with_the_bound_stays_itself() -> None:
    async def broken() -> None:
        try:
            await hang()
        finally:
            raise OSError("gone")

    task = asyncio.current_task()
    with pytest.raises(OSError, match="gone"), Deadline().within(0.01):
        await broken()
    assert task is not None and task.cancelling() == 0


async def test_a_closed_one_leaves_no_timer(timers: list[float]) -> None:
    deadline = Deadline()
    with deadline.within(60):
        await asyncio.sleep(0)
    deadline.close()
    deadline.close()
    loop: Any = asyncio.get_running_loop()
    assert timers and all(handle.cancelled() for handle in loop._scheduled)
