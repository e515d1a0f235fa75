"""Limits of one agent: what is counted, when it is looked at, and the timers of the two time limits.

Counts are looked at before each model request and each batch of tool calls, so a turn overshoots by at most one
request. Times interrupt what is running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from kimi_ray.agent.fold import AgentFold, Sums
from kimi_ray.agent.specs import AgentTotals
from kimi_ray.agent.turn_signal import TurnSignal
from kimi_ray.errors import AgentError
from kimi_ray.llm.models import Price, cost_usd
from kimi_ray.settings import Limits

LimitScope = Literal["agent", "session", "swarm"]


def limit_error(name: str, value: float, used: float, scope: LimitScope = "agent") -> AgentError:
    """The error of a reached limit: ``limit.<name>`` with ``{name, value, used, scope}``."""
    return AgentError(
        f"the {scope}'s limit {name}={value:g} is reached ({used:g} used)",
        code=f"limit.{name}",
        details={"name": name, "value": value, "used": used, "scope": scope},
    )


class LimitMeter:
    """Measures one agent against its limits.

    Args:
        limits: The agent's limits, and a turn's on top (``for_turn``).
        fold: The agent's totals: a resumed agent goes on counting where it was.
        price: The model's price, for ``max_cost_usd``.
    """

    def __init__(self, limits: Limits | None, fold: AgentFold, price: Price | None) -> None:
        self.limits = limits or Limits()
        self._fold = fold
        self.price = price
        self.elsewhere: AgentTotals | None = None
        """What others use that counts here too: all agents of its tree for main, those below it for another one."""
        self.scope: LimitScope = "session"
        """Whose limit it is that counts others too."""
        self._base_wall_ms = fold.sums.wall_ms
        self._base_working_ms = fold.sums.model_ms + fold.sums.tools_ms
        self._working_s = 0.0
        self._work_began = self._rested_s = 0.0
        self._turn_began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._phase_timer: asyncio.TimerHandle | None = None

    @property
    def _scope(self) -> LimitScope:
        return "agent" if self.elsewhere is None else self.scope

    @property
    def cost_usd(self) -> float | None:
        """What the agent has cost so far, or None without a price."""
        return self.cost_of(self._fold.sums)

    def cost_of(self, sums: Sums) -> float | None:
        """What an agent with these sums costs, or None without a price."""
        return None if self.price is None else cost_usd(sums.usage(), self.price)

    def check_turn(self) -> None:
        """At a turn's start, the turn itself already counted.

        Raises:
            AgentError: ``limit.max_turns``.
        """
        other = self.elsewhere
        before = self._fold.sums.turns - 1 + (other.turns if other is not None else 0)
        if self.limits.max_turns is not None and before >= self.limits.max_turns:
            raise limit_error("max_turns", self.limits.max_turns, before, self._scope)

    def check_request(self, steps_of_turn: int = 0) -> None:
        """Before a model request.

        Args:
            steps_of_turn: The steps that the turn has made so far.

        Raises:
            AgentError: ``limit.*``.
        """
        limits, other = self.limits, self.elsewhere
        steps = self._fold.sums.steps + (other.steps if other is not None else 0)
        if limits.max_steps is not None and steps >= limits.max_steps:
            raise limit_error("max_steps", limits.max_steps, steps, self._scope)
        if limits.max_steps_per_turn is not None and steps_of_turn >= limits.max_steps_per_turn:
            raise limit_error("max_steps_per_turn", limits.max_steps_per_turn, steps_of_turn)
        self.check_tokens()

    def check_tokens(self) -> None:
        """What an answer may have exhausted.

        Raises:
            AgentError: ``limit.max_output_tokens``, ``limit.max_total_tokens``, ``limit.max_cost_usd``.
        """
        limits, sums, other = self.limits, self._fold.sums, self.elsewhere
        output = sums.output + (other.usage.output if other is not None else 0)
        if limits.max_output_tokens is not None and output >= limits.max_output_tokens:
            raise limit_error("max_output_tokens", limits.max_output_tokens, output, self._scope)
        total = sums.input + sums.cached + sums.cache_write + sums.output
        total += other.usage.total if other is not None else 0
        if limits.max_total_tokens is not None and total >= limits.max_total_tokens:
            raise limit_error("max_total_tokens", limits.max_total_tokens, total, self._scope)
        cost = self.cost_usd if limits.max_cost_usd is not None else None
        if limits.max_cost_usd is not None and cost is not None:
            cost += (other.cost_usd or 0.0) if other is not None else 0.0
            if cost >= limits.max_cost_usd:
                raise limit_error("max_cost_usd", limits.max_cost_usd, cost, self._scope)

    def check_tool_calls(self, wanted: int) -> None:
        """Before ``wanted`` tool calls run.

        Raises:
            AgentError: ``limit.max_tool_calls``.
        """
        limit, other = self.limits.max_tool_calls, self.elsewhere
        used = self._fold.sums.tool_calls + (other.tool_calls if other is not None else 0)
        if limit is not None and used + wanted > limit:
            raise limit_error("max_tool_calls", limit, used, self._scope)

    def start_turn(self, signal: TurnSignal) -> None:
        """Arm ``time_s`` for a turn."""
        self._turn_began = time.monotonic()
        if self.limits.time_s is not None:
            left = self.limits.time_s - self._base_wall_ms / 1000
            error = limit_error("time_s", self.limits.time_s, self.limits.time_s)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, left), lambda: signal.stop("limit", limit=error))

    def end_turn(self) -> int:
        """Disarm the timers of a turn; returns its milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.end_work()
        if self._turn_began is None:
            return 0
        spent_ms = round((time.monotonic() - self._turn_began) * 1000)
        self._base_wall_ms += spent_ms
        self._turn_began = None
        return spent_ms

    def start_work(self, signal: TurnSignal) -> float:
        """Working time begins (a request, tools); returns the monotonic start."""
        self._rested_s = 0.0
        self._work_began = time.monotonic()
        self._arm(signal, 0.0)
        return self._work_began

    @contextmanager
    def resting(self, signal: TurnSignal, planned_s: float | None = None) -> Generator[None]:
        """Waiting inside working time that is no work: for the limiter, for another attempt.

        With ``planned_s`` no more than that counts as rest: what a busy process adds to a sleep is not in the sums of
        waits either.
        """
        since = time.monotonic()
        self._disarm()
        try:
            yield
        finally:
            self._arm(signal, since - self._work_began - self._rested_s)
            rested = time.monotonic() - since
            self._rested_s += rested if planned_s is None else min(rested, planned_s)

    def end_work(self, began: float | None = None) -> int:
        """Working time pauses; returns the milliseconds of work since ``began``."""
        self._disarm()
        if began is None:
            return 0
        spent = time.monotonic() - began - self._rested_s
        self._working_s += spent
        return round(spent * 1000)

    def _arm(self, signal: TurnSignal, spent_s: float) -> None:
        limit = self.limits.working_time_s
        if limit is not None:
            left = limit - self._base_working_ms / 1000 - self._working_s - spent_s
            error = limit_error("working_time_s", limit, limit)
            loop = asyncio.get_running_loop()
            self._phase_timer = loop.call_later(max(0.0, left), lambda: signal.stop("limit", limit=error))

    def _disarm(self) -> None:
        if self._phase_timer is not None:
            self._phase_timer.cancel()
            self._phase_timer = None
