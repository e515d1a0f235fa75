"""What the hooks of one session share on a host: how long it lives here, and its heartbeat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

HEARTBEAT_S = 60.0


class SessionHooks:
    """Of one session, while agents of it live on this host.

    Args:
        heartbeat_s: Seconds between heartbeats.
    """

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._began = time.monotonic()
        self._timer: asyncio.Task[None] | None = None

    @property
    def uptime_ms(self) -> int:
        """How long the session has been on this host."""
        return round((time.monotonic() - self._began) * 1000)

    def beat(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Call ``tell`` at every heartbeat, until ``close``; one that takes longer than a beat delays the next."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().create_task(self._run(tell), name="hook heartbeat")

    async def close(self) -> None:
        """End the heartbeat. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            await asyncio.gather(timer, return_exceptions=True)

    async def _run(self, tell: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await tell()
