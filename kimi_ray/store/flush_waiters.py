"""Who waits until a log is durable, through which seq, and until when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kimi_ray.errors import KimiRayError, StoreError, error_from_data


class Waiter(NamedTuple):
    """One flush."""

    target: int
    """It ends when everything below this seq is durable ..."""
    blobs: int
    """... and this many of the attached blobs."""
    deadline: float
    timeout_s: float
    future: asyncio.Future[None]


class FlushWaiters:
    """The flushes of one log, in the order they came, which is also that of their targets."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, target: int, blobs: int, deadline: float, timeout_s: float) -> asyncio.Future[None]:
        """A new flush; await the future. Cancelling it concerns nobody else."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(Waiter(target, blobs, deadline, timeout_s, future))
        return future

    def resolve(self, durable: int, blobs: int) -> None:
        """End those that are reached."""
        waiters = self._waiters
        while waiters and waiters[0].target <= durable and waiters[0].blobs <= blobs:
            future = waiters.popleft().future
            if not future.done():
                future.set_result(None)

    def reject(self, error: KimiRayError) -> bool:
        """End all with this error; whether anybody was still waiting."""
        waiters, self._waiters = self._waiters, deque()
        seen = False
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(fresh(error))
                seen = True
        return seen

    def expire(self, now: float, make_error: Callable[[Waiter], KimiRayError]) -> float | None:
        """End those whose time is over; the deadline of the next one, if any."""
        late = [waiter for waiter in self._waiters if waiter.deadline <= now]
        if late:
            self._waiters = deque(waiter for waiter in self._waiters if waiter.deadline > now)
            for waiter in late:
                if not waiter.future.done():
                    waiter.future.set_exception(make_error(waiter))
        return min((waiter.deadline for waiter in self._waiters), default=None)


def fresh(error: KimiRayError) -> KimiRayError:
    """A copy: one exception object must not travel up several tasks."""
    return error_from_data(error.to_data())


def late(message: str, details: dict[str, Any], cause: KimiRayError | None) -> StoreError:
    """``store.unavailable``: a wait is over, what it waited for is still on its way. ``cause`` says why, if known."""
    return StoreError(
        message,
        code="store.unavailable",
        hint="the events are retained and go on being sent; try again, or look at the store with `kimi-ray status`",
        details=details if cause is None else details | {"cause": cause.to_data()},
        retryable=True,
    )
