"""Limits of a session's tree: what main and all agents of its swarms may use together.

The bound of the tree is main's own (``create_session(limits=...)``). A swarm starts under what is left of it and is
stopped when the tree reaches it; main is told what the others have used, and counts it as its own.
"""

from __future__ import annotations

from kimi_ray.agent.fold import AgentFold, fold_stored
from kimi_ray.agent.limits import limit_error
from kimi_ray.agent.specs import AgentTotals
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.hosts.swarm_attempts import spent_of
from kimi_ray.hosts.swarm_events import limits_left
from kimi_ray.llm.models import Price, cost_usd
from kimi_ray.runs.schedule import LimitHit, Spent
from kimi_ray.settings import Limits, Usage
from kimi_ray.store.seam import Stream

COUNTED = ("turns", "steps", "tool_calls", "output_tokens", "total_tokens", "cost_usd")
_PAGE = 2000


class TreeLimits:
    """The account of one session.

    Args:
        limits: The bound; None or empty is none.
    """

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits
        self._before = Spent()
        self._swarms: dict[str, Spent] = {}
        self._main = AgentTotals()
        self._recounted: dict[str, Spent] = {}
        """What a resume counted of each agent."""

    @property
    def bound(self) -> bool:
        """Whether anything of the tree is bounded."""
        return self.limits is not None and any(getattr(self.limits, f"max_{name}") is not None for name in COUNTED)

    @property
    def children(self) -> Spent:
        """What all agents but main have used."""
        total = self._before
        for spent in self._swarms.values():
            total = total.plus(spent)
        return total

    def elsewhere(self) -> AgentTotals:
        """The same, as main's meter takes it."""
        return as_totals(self.children)

    def spend(self, run_id: str, spent: Spent) -> LimitHit | None:
        """A swarm has used so much by now; the limit that the tree has reached with it, or None."""
        self._swarms[run_id] = spent
        return self._hit()

    def settle(self, run_id: str, spent: Spent) -> None:
        """A swarm is over, or another command takes it over: what its ended rollouts have used stays counted.

        Idempotent: a takeover that failed half way is asked for again.
        """
        if self._swarms.pop(run_id, None) is not None:
            self._before = self._before.plus(spent)

    def left(self, total: Limits | None, main: AgentTotals) -> Limits | None:
        """A swarm's own total limits under what is left of the tree's.

        Raises:
            AgentError: ``limit.*`` with scope ``session`` when nothing is left.
        """
        self._main = main
        if not self.bound:
            return total
        hit = self._hit()
        if hit is not None:
            raise limit_error(hit.name, hit.value, hit.used, "session")
        bound = self.limits.model_copy(update={"time_s": None, "working_time_s": None}) if self.limits else None
        return limits_left(total, bound, self.children.plus(spent_of(main)), 0.0)

    async def recount(self, store: StoreCalls, session_id: str, price: Price | None) -> None:
        """After a resume: what the agents of earlier swarms have used, from their logs."""
        for log in await store.list_logs(session_id):
            if log.header is None or log.stream.agent_id == "main":
                continue
            fold = await _folded(store, log.stream)
            used = self._recounted[log.stream.agent_id] = _used(fold, price)
            self._before = self._before.plus(used)

    def include(self, fold: AgentFold, price: Price | None) -> None:
        """An agent that no swarm has counted has ended."""
        if self.bound:
            self._before = self._before.plus(_used(fold, price))

    def exclude(self, agent_id: str, fold: AgentFold, price: Price | None) -> None:
        """An agent that is counted goes on in a swarm, which counts its whole life.

        What a resume counted of it is taken off, however far it has come since; of one that ended in a swarm of this
        life, which is settled, all.
        """
        if self.bound:
            counted = self._recounted.pop(agent_id, None)
            self._before = self._before.minus(_used(fold, price) if counted is None else counted)

    def _hit(self) -> LimitHit | None:
        if self.limits is None:
            return None
        used = self.children.plus(spent_of(self._main))
        for name in COUNTED:
            value, amount = getattr(self.limits, f"max_{name}"), getattr(used, name)
            if value is not None and amount > 0 and amount >= value:
                return LimitHit(f"max_{name}", value, amount)
        return None


def _used(fold: AgentFold, price: Price | None) -> Spent:
    return spent_of(fold.totals(cost_usd(fold.sums.usage(), price) if price is not None else None))


def as_totals(spent: Spent) -> AgentTotals:
    """What was used, as a meter takes it."""
    usage = Usage(input=spent.total_tokens - spent.output_tokens, output=spent.output_tokens)
    return AgentTotals(
        turns=spent.turns, steps=spent.steps, tool_calls=spent.tool_calls, usage=usage, cost_usd=spent.cost_usd
    )


async def _folded(store: StoreCalls, stream: Stream) -> AgentFold:
    fold, seq = AgentFold(), 0
    while True:
        page = await store.read_from(stream, seq, _PAGE)
        fold_stored(fold, page.lines, seq)
        seq += len(page.lines)
        if not page.lines:
            return fold
