"""The places on agent hosts that a swarm's attempts have: taken from the registry, used again by those that follow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.hosts.swarm_attempts import Attempt
from kimi_ray.hosts.swarm_services import SwarmServices
from kimi_ray.hosts.swarm_words import SwarmSpec
from kimi_ray.tools.carried import fingerprint_of

_BALANCE_S = 0.25
_LOOKS_AT_ONCE = 16
"""So many logs are asked at the same time where their agents lived."""


class SwarmPlaces:
    """The places of one swarm.

    Args:
        spec: The swarm.
        services: What its session lends it.
    """

    def __init__(self, spec: SwarmSpec, services: SwarmServices) -> None:
        self._spec = spec
        self._services = services
        self._free: Counter[str] = Counter()
        self._codes: dict[str, str] = {}
        """The code that a host was last taken for."""
        self._balanced = 0.0

    async def take(self, attempts: list[Attempt]) -> None:
        """A host for each: places that other rollouts of this swarm left, else new ones from the registry.

        Now and then all free places go back first, so that the load follows hosts that came later. One that lived
        before in a directory of its own goes where that is, while there is that node.

        Raises:
            KimiRayError: what the registry raised, or the store about an agent that lived before.
        """
        now = time.monotonic()
        if now - self._balanced > _BALANCE_S:
            self._balanced = now
            await self.give_back()
        near = await self._directories(attempts)
        missing: list[Attempt] = []
        for attempt in attempts:
            host = self._free_for(self._code_of(attempt)) if attempt.agent_id not in near else None
            if host is None:
                missing.append(attempt)
                continue
            attempt.host = host
            self._free[host] -= 1
            if self._free[host] <= 0:
                del self._free[host]
        if missing:
            spec = self._spec
            wishes = [
                PlaceAgent(a.stream, spec.isolation, spec.node_id, self._code_of(a), near.get(a.agent_id))
                for a in missing
            ]
            for attempt, host in zip(missing, await self._services.registry.place_agents(wishes), strict=True):
                attempt.host = host
                self._codes[host] = self._code_of(attempt)

    def _code_of(self, attempt: Attempt) -> str:
        return fingerprint_of(self._spec.code, attempt.request.agent.workdir)

    def _free_for(self, code: str) -> str | None:
        return next((host for host in self._free if self._codes.get(host) == code), None)

    def leave(self, host: str) -> None:
        """Somebody needs a place no more: the next may have it."""
        self._free[host] += 1

    def lost(self, host: str) -> None:
        """A host is gone with all its places."""
        self._free.pop(host, None)
        self._codes.pop(host, None)

    async def give_back(self) -> None:
        """All free places go back to the registry."""
        free, self._free = self._free, Counter()
        await asyncio.gather(*(self._services.registry.released(host, count) for host, count in free.items()))

    async def _directories(self, attempts: list[Attempt]) -> dict[str, str]:
        """Where the directories of those are that lived before, by agent."""
        gate = asyncio.Semaphore(_LOOKS_AT_ONCE)

        async def look(attempt: Attempt) -> str | None:
            async with gate:
                return await self._services.node_of(attempt.stream, attempt.request.agent.workdir)

        revived = [attempt for attempt in attempts if attempt.lost]
        nodes = await asyncio.gather(*(look(attempt) for attempt in revived))
        return {attempt.agent_id: node for attempt, node in zip(revived, nodes, strict=True) if node is not None}
