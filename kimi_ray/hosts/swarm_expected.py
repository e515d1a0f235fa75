"""The agents of a swarm that was begun before: each is expected until its rollout's data come and it goes on."""

from __future__ import annotations

from kimi_ray.hosts.orphans import stop_agents
from kimi_ray.hosts.swarm_places import SwarmPlaces
from kimi_ray.hosts.swarm_services import SwarmServices
from kimi_ray.hosts.swarm_words import SwarmSpec

_CLOSE_S = 35.0


class SwarmExpected:
    """The agents of one swarm that live on, or will, and that nothing has asked for yet.

    Args:
        spec: The swarm, with what of it goes on.
        services: What its session lends it.
        places: Its places: each agent that lives on has one.
    """

    def __init__(self, spec: SwarmSpec, services: SwarmServices, places: SwarmPlaces) -> None:
        self._spec = spec
        self._services = services
        self._places = places
        self._hosts = {one.agent_id: one.host for one in spec.going_on.values() if one.ended is None}

    def __contains__(self, agent_id: object) -> bool:
        return agent_id in self._hosts

    def host_of(self, agent_id: str) -> str | None:
        """Where one lives, if it does."""
        return self._hosts.get(agent_id)

    def living(self) -> dict[str, str]:
        """Those that live, with their hosts."""
        return {agent_id: host for agent_id, host in self._hosts.items() if host is not None}

    def arrived(self, agent_id: str) -> None:
        """One goes on: the swarm has its attempt."""
        self._hosts.pop(agent_id, None)

    async def stop(self) -> None:
        """The run was stopped before these could go on: what lives of them ends, and its place is free.

        Raises:
            KimiRayError: an agent could not be closed.
        """
        living = self.living()
        self._hosts.clear()
        await stop_agents(self._services.cluster, self._spec.session_id, living, self._spec.claim, _CLOSE_S)
        for host in living.values():
            self._places.leave(host)
