"""The places on agent hosts are counted anew after a session host was lost: it took some of them along.

Whoever takes a place gives it back when its agent is gone. A session host that dies in between cannot, and an agent
that ended meanwhile tells nobody else: its host would seem fuller than it is for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.pool import HostPool

LOOKS = 60
"""So often are the hosts asked after a loss, a second apart: by then those that were at work have ended or have been
taken over."""
_PAUSE_S = 1.0
_DEDICATED_LOOKS = 10
"""A dedicated host ends with its count, so it must have been empty for longer: an agent may be on its way to it."""


class PlaceCount:
    """Compares what hosts hold with what is counted for them.

    Args:
        pool: The agent hosts.
        ask: What a host tells of itself; its ``agents`` are those that live there.
        let_go: Gives back so many places of a host.
    """

    def __init__(
        self,
        pool: HostPool,
        ask: Callable[[str], Awaitable[dict[str, Any]]],
        let_go: Callable[[str, int], None],
    ) -> None:
        self._pool = pool
        self._ask = ask
        self._let_go = let_go
        self._looks = 0
        self._seen: dict[str, tuple[int, int, int]] = {}

    @property
    def begun(self) -> bool:
        """Whether it is under way."""
        return self._looks > 0

    def wanted(self) -> bool:
        """A session host was lost: look for a while from now on. Returns whether ``run`` is to be called for it."""
        was_begun, self._looks = self.begun, LOOKS
        return not was_begun

    async def run(self) -> None:
        """Look, until nobody has wanted it for a while."""
        while self._looks > 0:
            await asyncio.sleep(_PAUSE_S)
            self._looks -= 1
            await asyncio.gather(*(self._look(name) for name in list(self._pool.hosts)))
        self._seen.clear()

    async def _look(self, name: str) -> None:
        """Nobody's places are those that two looks found without an agent, with nothing placed in between."""
        try:
            living = int((await self._ask(name)).get("agents") or 0)
        except KimiRayError:
            return  # a silent host is looked after by whoever needs it
        host = self._pool.hosts.get(name)
        if host is None:
            return
        taken, nobodys, looks = self._seen.get(name, (-1, 0, 0))
        surplus = host.load - living
        if surplus <= 0 or nobodys == 0 or taken != host.taken:
            self._seen[name] = (host.taken, max(0, surplus), 1)
            return
        nobodys, looks = min(nobodys, surplus), looks + 1
        self._seen[name] = (taken, nobodys, looks)
        if looks > (_DEDICATED_LOOKS if host.dedicated else 1):
            self._seen.pop(name)
            self._let_go(name, nobodys)
