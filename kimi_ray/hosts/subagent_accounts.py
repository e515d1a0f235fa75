"""What the subagents of a session have used, against the limits of all that is above them.

A limit binds an agent with everything below it. The session's own is main's (``TreeLimits``); an agent of a swarm
has its rollout's, and the run's behind that; any other one its profile's. Whoever is above is told what is used below,
and counts it as its own; when one of them reaches a limit, what runs below it is ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kimi_ray.agent.limits import limit_error
from kimi_ray.agent.specs import AgentProgress, AgentTotals
from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.swarm_attempts import spent_of, spent_so_far
from kimi_ray.hosts.swarm_events import limits_left
from kimi_ray.hosts.tree_limits import COUNTED, as_totals
from kimi_ray.ids import MAIN
from kimi_ray.runs.schedule import Spent
from kimi_ray.settings import Limits
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession
    from kimi_ray.hosts.subagent_words import ChildRun

_CALL_S = 5.0


class SubagentAccounts:
    """The accounts of one session's subagents.

    Args:
        live: The session.
    """

    def __init__(self, live: LiveSession) -> None:
        self._live = live
        self._spent: dict[str, Spent] = {}
        """What each child used in runs that have ended, in this life of the session."""
        self._now: dict[str, Spent] = {}
        """What each child has used in the run that is on."""
        self._callers: dict[str, str] = {}
        self._children: dict[str, set[str]] = {}

    def enter(self, run: ChildRun) -> None:
        """A run begins: whose child it is."""
        self._callers[run.agent_id] = run.caller
        self._children.setdefault(run.caller, set()).add(run.agent_id)

    def is_bound(self, run: ChildRun) -> bool:
        """Whether anything above a child has a limit that counts."""
        return self._live.tree.bound or any(self._limits_of(above) is not None for above in self._above(run.agent_id))

    async def limits_for(self, run: ChildRun) -> Limits | None:
        """What a child may use in all: what is left of each limit above it, and what it had used before.

        Raises:
            AgentError: ``limit.*`` when nothing is left.
        """
        run.before = spent_of(await self._totals(run.agent_id))
        left = await self._live.limits_left(None)
        for above in self._above(run.agent_id):
            limits = self._limits_of(above)
            if limits is not None:
                used = spent_of(await self._totals(above)).plus(self._below(above))
                error = _reached(limits, used)
                if error is not None:
                    raise error
                left = limits_left(left, limits.model_copy(update={"time_s": None, "working_time_s": None}), used, 0.0)
        if left is None:
            return None
        said = {name: value + getattr(run.before, name.removeprefix("max_"), 0) for name, value in left.said().items()}
        return Limits.model_validate(said)

    def count(self, run: ChildRun, life: Spent, *, over: bool = False) -> KimiRayError | None:
        """A child has used so much in its life; the session's limit that is reached with it, or None."""
        # What a running child tells counts the steps of its turn only: less than it had before is nothing yet.
        used = Spent._make(max(0, amount) for amount in life.minus(run.before))
        if over:
            self._now.pop(run.agent_id, None)
            self._spent[run.agent_id] = self._spent.get(run.agent_id, Spent()).plus(used)
        else:
            self._now[run.agent_id] = used
        if not self._live.tree.bound or any(self._live.in_swarm(above) for above in self._above(run.agent_id)):
            return None  # a swarm counts what is below its rollouts
        hit = self._live.tree.spend(run.agent_id, self._of(run.agent_id))
        return None if hit is None else limit_error(hit.name, hit.value, hit.used, "session")

    async def tell_above(self, agent_ids: Iterable[str]) -> None:
        """All above these children count what is used below them."""
        live = self._live
        await live.tell_main()
        for above in {above for agent_id in agent_ids for above in self._above(agent_id)}:
            below = self._below(above)
            for swarm in live.swarms.values():
                swarm.spend_below(above, below)
            host = live.host_of(above)
            if host is None or self._limits_of(above) is None:
                continue
            try:
                await live.services.cluster.peer(host).call(
                    "spent_elsewhere", Stream(live.id, above), as_totals(below), timeout_s=_CALL_S, group="control"
                )
            except KimiRayError as error:
                # One that is lost is told when the next child of it has ended.
                if not is_lost(error.code) and error.code != "agent.not_found":
                    raise

    def reached(
        self, runs: Mapping[str, ChildRun], progress: Mapping[str, AgentProgress]
    ) -> list[tuple[str, AgentError]]:
        """The runs that are to end since an agent above them has reached a limit, with that limit."""
        found: list[tuple[str, AgentError]] = []
        for agent_id in runs:
            for above in self._above(agent_id):
                limits, own = self._limits_of(above), progress.get(above)
                used = self._below(above) if own is None else self._below(above).plus(spent_so_far(own))
                error = None if limits is None else _reached(limits, used)
                if error is not None:
                    found.append((agent_id, error))
                    break
        return found

    def above(self, agent_ids: Iterable[str]) -> set[str]:
        """The agents above these, but main."""
        return {above for agent_id in agent_ids for above in self._above(agent_id)}

    def _above(self, agent_id: str) -> list[str]:
        found: list[str] = []
        above = self._callers.get(agent_id)
        while above is not None and above != MAIN:
            found.append(above)
            above = self._callers.get(above)
        return found

    def _below(self, agent_id: str) -> Spent:
        total = Spent()
        for child in self._children.get(agent_id, ()):
            total = total.plus(self._of(child)).plus(self._below(child))
        return total

    def _of(self, agent_id: str) -> Spent:
        return self._spent.get(agent_id, Spent()).plus(self._now.get(agent_id, Spent()))

    def _limits_of(self, agent_id: str) -> Limits | None:
        """The limits of an agent that count, or None."""
        agent = self._live.agents.get(agent_id)
        limits = agent.spec.limits if agent is not None else None
        for swarm in self._live.swarms.values():
            limits = swarm.limits_of(agent_id) if swarm.holds(agent_id) else limits
        counts = limits is not None and any(getattr(limits, f"max_{name}") is not None for name in COUNTED)
        return limits if counts else None

    async def _totals(self, agent_id: str) -> AgentTotals:
        stream = Stream(self._live.id, agent_id)
        return await self._live.call_agent(
            agent_id, "totals", stream, group="control", timeout_s=_CALL_S, directly=False
        )


def _reached(limits: Limits, used: Spent) -> AgentError | None:
    for name in COUNTED:
        value, amount = getattr(limits, f"max_{name}"), getattr(used, name)
        if value is not None and amount > 0 and amount >= value:
            return limit_error(f"max_{name}", value, amount)
    return None
