"""The bytes that all logs of a host retain together, and who waits for them to become fewer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.store.clock import Clock


class Retainer(Protocol):
    """A log that was refused and will not try again by itself before its next event."""

    def try_again(self) -> None:
        """Send what is not durable, now."""
        ...


class HostBudget:
    """Counts retained bytes over every log and every sender of one host.

    Args:
        limit: Bytes above which loops wait.
    """

    __slots__ = ("_paused", "_waiting", "limit", "retained")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.retained = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._paused: dict[Retainer, None] = {}

    def paused(self, log: Retainer) -> None:
        """The log retains what was refused."""
        self._paused[log] = None

    def forget(self, log: Retainer) -> None:
        """The log retains nothing any more. Idempotent."""
        self._paused.pop(log, None)

    def wake_paused(self) -> None:
        """The host is full: have the paused logs try again, they may be what fills it."""
        paused, self._paused = self._paused, {}
        for log in paused:
            log.try_again()

    def wake_when_below(self, future: asyncio.Future[None]) -> None:
        """Resolve ``future`` as soon as less than the limit is retained."""
        if self.retained < self.limit:
            future.set_result(None)
        else:
            self._waiting = [waiting for waiting in self._waiting if not waiting.done()]
            self._waiting.append(future)

    def release(self, size: int) -> None:
        """``size`` bytes are retained no longer."""
        self.retained -= size
        if self._waiting and self.retained < self.limit:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


class RoomWaits:
    """The waits of one log for room, its own or the host's."""

    __slots__ = ("_clock", "_futures")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._futures: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._futures)

    async def wait(self, timeout_s: float, budget: HostBudget | None) -> None:
        """Return when woken, when ``budget`` has room again, or after ``timeout_s``: the caller looks again.

        Raises:
            KimiRayError: what ``interrupt`` was given meanwhile.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        alarm = self._clock.call_later(timeout_s, lambda: None if future.done() else future.set_result(None))
        if budget is not None:
            budget.wake_when_below(future)
        try:
            await future
        finally:
            alarm.cancel()
            self._futures.discard(future)

    def wake(self) -> None:
        """All look again."""
        for future in self._futures:
            if not future.done():
                future.set_result(None)

    def interrupt(self, error: KimiRayError) -> None:
        """All end with this error."""
        for future in self._futures:
            if not future.done():
                future.set_exception(error_from_data(error.to_data()))
