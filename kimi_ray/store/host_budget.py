"""The bytes that all logs of a host retain together, and who waits for them to become fewer."""

from __future__ import annotations

import asyncio


class HostBudget:
    """Counts retained bytes over every log and every sender of one host.

    Args:
        limit: Bytes above which loops wait.
    """

    __slots__ = ("_waiting", "limit", "retained")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.retained = 0
        self._waiting: list[asyncio.Future[None]] = []

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
