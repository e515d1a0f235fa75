"""How the attempts of a swarm end in the log of the agent that it belongs to: each with the position of its own log.

Forks cut a tree by these positions, so they are durable in the child's log before the parent's event says them. An
agent that did not say how it ended (a lost host, a cancel that was not answered) is closed, and then its log is looked
at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import Ack, LogEntry
from kimi_ray.hosts.swarm_attempts import Attempt, Ending
from kimi_ray.hosts.swarm_events import ended_event
from kimi_ray.hosts.swarm_services import SwarmServices
from kimi_ray.hosts.swarm_words import SwarmSpec

_CANCEL_S, _CLOSE_S = 10.0, 35.0
_CANCELS_AT_ONCE = 64
_POSITIONS_IN_END = 1000


class SwarmEnds:
    """The last words on the attempts of one swarm.

    Args:
        spec: The swarm.
        services: What its session lends it.
    """

    def __init__(self, spec: SwarmSpec, services: SwarmServices) -> None:
        self._spec = spec
        self._services = services
        self._positions: dict[str, dict[str, int]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self.calls = 0
        """Calls to agent hosts so far."""

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is under way."""
        return list(self._telling)

    def tell(self, attempt: Attempt, ending: Ending) -> None:
        """An attempt has ended."""
        outcome = ending.outcome
        if outcome is not None and outcome.seq >= 0:
            if not attempt.told:
                self._services.record([ended_event(attempt, ending)])
            self._note(attempt.agent_id, {"seq": outcome.seq, "epoch": outcome.epoch})
            return
        task = asyncio.get_running_loop().create_task(self._look(attempt, ending))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def close_agent(self, attempt: Attempt) -> None:
        """End an agent that does not let go by itself."""
        self.calls += 1
        try:
            acks: list[Ack] = await self._services.cluster.peer(attempt.host).call(
                "close_agents", [attempt.stream], True, self._spec.claim, timeout_s=_CLOSE_S, group="store"
            )
        except KimiRayError as error:
            if not is_lost(error.code):
                raise
            return
        refused = acks[0].error
        if refused is not None and refused["code"] == "session.fenced":
            self._services.fenced(error_from_data(refused))

    async def cancel_agents(self, attempts: Sequence[Attempt], limit: dict[str, Any] | None) -> None:
        """Cancel what these do, for the total limit that they have reached, if it is one."""
        gate = asyncio.Semaphore(_CANCELS_AT_ONCE)
        cause = "cancelled" if limit is None else "limit"

        async def send(attempt: Attempt) -> None:
            attempt.cancelling = True
            asked = (attempt.stream, attempt.prompt_id, cause, limit, self._spec.claim)
            async with gate:
                try:
                    await self._services.cluster.peer(attempt.host).call(
                        "cancel", *asked, timeout_s=_CANCEL_S, group="control"
                    )
                except KimiRayError as error:
                    if error.code == "session.fenced":
                        self._services.fenced(error)
                    elif not is_lost(error.code) and error.code != "agent.not_found":
                        raise

        await asyncio.gather(*(send(attempt) for attempt in attempts))

    async def finish(self, counts: Mapping[str, int]) -> None:
        """The swarm has ended: ``swarm/end``, behind the words on all attempts."""
        if self._telling:
            await asyncio.wait(self._telling)
        data: dict[str, Any] = {"run_id": self._spec.run_id, "counts": dict(counts)}
        if self._positions and len(self._positions) <= _POSITIONS_IN_END:
            # Above that the positions stand in the children's own events only: an event has a size.
            data["agents"] = self._positions
        self._services.record([LogEntry("swarm/end", data)])

    async def _look(self, attempt: Attempt, ending: Ending) -> None:
        position: Mapping[str, int] | None = None
        try:
            if attempt.accepted or not attempt.request.release:
                await self.close_agent(attempt)
            position = await self._services.position(attempt.stream)
        except KimiRayError as error:
            if error.code == "session.fenced":
                self._services.fenced(error)
                return
            # The end is told all the same; where the log stands is not known.
        except Exception as error:  # noqa: BLE001  logged; else the attempt's end would stand nowhere
            noted(error, f"the end of {attempt.agent_id}")
        self._services.record([ended_event(attempt, ending, position)])
        if position is not None:
            self._note(attempt.agent_id, dict(position))

    def _note(self, agent_id: str, position: dict[str, int]) -> None:
        if len(self._positions) <= _POSITIONS_IN_END:
            self._positions[agent_id] = position
