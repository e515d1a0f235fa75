"""Time as the writer sees it: a monotonic now and a way to be called later. Tests drive their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Alarm(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None:
        """Never make the call. Idempotent."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> Alarm:
        """Call ``callback`` once, ``delay_s`` seconds from now."""
        ...


class LoopClock:
    """The running event loop's own clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self.now: Callable[[], float] = self._loop.time

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> Alarm:
        """Call ``callback`` once, ``delay_s`` seconds from now."""
        return self._loop.call_later(delay_s, callback)
