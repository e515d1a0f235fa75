"""Quiescence: agents that stand still while somebody takes their measure (a fork without a point, a compaction).

A holder gets all the agents it names, each without a turn and without work that waits, or none. While they are held new
prompts are accepted durably and do not start. A hold ends when it is released, or by itself: a holder that dies keeps
nobody waiting longer than its lease. Whoever relies on it asks ``check`` right before the result counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.errors import SessionError
from kimi_ray.store.seam import Stream

LEASE_S = 10.0
"""How long agents are held for a holder that does not release them."""


@dataclass(slots=True)
class _Hold:
    agents: dict[Stream, LiveAgent]
    timer: asyncio.TimerHandle


class Quiescence:
    """The holds on the agents of one host.

    Args:
        living: Gives the agent that lives under a name, or None.
    """

    def __init__(self, living: Callable[[Stream], LiveAgent | None]) -> None:
        self._living = living
        self._holds: dict[str, _Hold] = {}

    def quiesce(self, streams: Iterable[Stream], holder: str, lease_s: float = LEASE_S) -> list[Stream]:
        """Hold agents for ``holder``, all or none; returns those that live here. Asked again the lease begins anew.

        Args:
            streams: Which; those that do not live here are left out.
            holder: Names the hold, for ``check`` and ``release``.
            lease_s: Seconds after which the hold ends by itself.

        Raises:
            SessionError: ``session.fork_active_turn`` {streams}, retryable: they run a turn or have one waiting.
        """
        found = {stream: agent for stream in streams if (agent := self._living(stream)) is not None}
        before = self._holds.get(holder)
        mine = before.agents if before is not None else {}
        active = [stream for stream, agent in found.items() if agent.busy and mine.get(stream) is not agent]
        if active:
            raise active_turn(active)
        self.release(holder, start=False)
        for agent in found.values():
            agent.hold(holder)
        timer = asyncio.get_running_loop().call_later(lease_s, self.release, holder)
        self._holds[holder] = _Hold(found, timer)
        for stream, agent in mine.items():
            if found.get(stream) is not agent:
                agent.release(holder)
        return list(found)

    def check(self, holder: str, lease_s: float | None = None) -> None:
        """See that what a holder holds stood still all the time; with ``lease_s`` it is held for so long from now on.

        Raises:
            SessionError: ``session.quiescence_lost``, retryable: the lease ran out, or an agent was lost meanwhile.
        """
        hold = self._holds.get(holder)
        lost = [] if hold is None else [s for s, agent in hold.agents.items() if self._living(s) is not agent]
        if hold is None or lost:
            raise quiescence_lost(holder, lost)
        if lease_s is not None:
            hold.timer.cancel()
            hold.timer = asyncio.get_running_loop().call_later(lease_s, self.release, holder)

    def release(self, holder: str, *, start: bool = True) -> None:
        """Let go; what waits at the agents starts. Idempotent."""
        hold = self._holds.pop(holder, None)
        if hold is None:
            return
        hold.timer.cancel()
        if start:
            for agent in hold.agents.values():
                agent.release(holder)

    def close(self) -> None:
        """End all holds."""
        for holder in list(self._holds):
            self.release(holder)


def active_turn(streams: list[Stream]) -> SessionError:
    """``session.fork_active_turn`` for agents that are at work."""
    return SessionError(
        f"{', '.join(map(str, streams[:5]))} {'has' if len(streams) == 1 else 'have'} a turn running or waiting",
        code="session.fork_active_turn",
        hint="wait for its prompts, or fork at a point that is past: at='3' or at='0.17'",
        details={"session_id": streams[0].session_id, "agents": [stream.agent_id for stream in streams]},
        retryable=True,
    )


def active_swarm(session_id: str, run_ids: list[str]) -> SessionError:
    """``session.fork_active_turn`` for a session whose swarms run."""
    return SessionError(
        f"session {session_id} has a swarm running: {', '.join(run_ids[:5])}",
        code="session.fork_active_turn",
        hint="wait until it is over, or fork at a point of main that is past, or one of its agents at a point",
        details={"session_id": session_id, "runs": run_ids},
        retryable=True,
    )


def quiescence_lost(holder: str, streams: list[Stream]) -> SessionError:
    """``session.quiescence_lost``: somebody may have moved meanwhile."""
    return SessionError(
        "the agents were not held still to the end: the work took longer than its lease, or a host was lost",
        code="session.quiescence_lost",
        hint="try again; nothing was made",
        details={"holder": holder, "streams": [str(stream) for stream in streams]},
        retryable=True,
    )
