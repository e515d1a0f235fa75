"""Waiting for the attempts of a swarm, on all hosts where it has some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Cluster
from kimi_ray.hosts.specs import Outcome
from kimi_ray.hosts.waiting import OutcomeWaiter, PromptKey


class SwarmWaits:
    """One ``OutcomeWaiter`` a host, made when somebody is first waited for there.

    Args:
        cluster: Where the hosts are.
        came_back: Called with the outcomes of each answer.
        lost: Called with a host that could not be asked, why, and the prompts that are no longer waited for.
    """

    def __init__(
        self,
        cluster: Cluster,
        came_back: Callable[[list[Outcome]], None],
        lost: Callable[[str, KimiRayError, list[PromptKey]], None],
    ) -> None:
        self._cluster = cluster
        self._came_back = came_back
        self._lost = lost
        self._waiters: dict[str, OutcomeWaiter] = {}
        self.calls = 0
        """Calls to hosts so far."""

    def add(self, host: str, keys: Iterable[PromptKey]) -> None:
        """Wait for these, which run on ``host``."""
        waiter = self._waiters.get(host)
        if waiter is None:
            waiter = self._waiters[host] = OutcomeWaiter(
                self._cluster.peer(host),
                self._came_back,
                lambda error, keys: self._lost(host, error, keys),
                on_call=self._count,
            )
        waiter.add(keys)

    def discard(self, host: str, key: PromptKey) -> None:
        """Nobody waits for this one any more."""
        waiter = self._waiters.get(host)
        if waiter is not None:
            waiter.discard(key)

    async def leave(self, host: str) -> None:
        """Nobody is waited for on a host any more."""
        waiter = self._waiters.pop(host, None)
        if waiter is not None:
            await waiter.close()

    async def close(self) -> None:
        """Wait for nobody any more. Idempotent."""
        await asyncio.gather(*(waiter.close() for waiter in self._waiters.values()))

    def _count(self) -> None:
        self.calls += 1
