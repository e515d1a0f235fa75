"""How late the event loops of agent hosts are, measured inside them: a Feature that only the bench names.

One sampler a host sleeps again and again and notes by how much too long it slept. Every agent writes what its host has
seen into its own log before a turn ends, so the figures come back with the logs, from wherever the host is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]
from pydantic import BaseModel

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots, StepStarting, TurnStopping
from kimi_ray.events.catalog import EventType
from kimi_ray.scopes import Feature, LifecycleScope

FEATURE = "kimi_ray.bench.loop_lag:LoopLagFeature"
EVENT = "bench/loop"
SAMPLE_S = 0.01


class LoopFacts(BaseModel):
    """What one host's loop has seen since its agents' turn began; milliseconds beyond the sleep that was asked for."""

    turn: int
    pid: int
    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class LoopLag:
    """Samples the loop that it runs on, one turn of all its agents after the other."""

    def __init__(self) -> None:
        self._turn = -1
        self._late: list[float] = []
        self._facts: LoopFacts | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(SAMPLE_S)
            self._late.append((time.perf_counter() - began - SAMPLE_S) * 1000)

    def begin(self, turn: int) -> None:
        """An agent begins this turn; the first one of the host forgets what was before."""
        if turn != self._turn:
            self._turn, self._late, self._facts = turn, [], None

    def facts(self) -> LoopFacts:
        """What was seen so far, counted anew only when there is something new."""
        if self._facts is None or self._facts.samples != len(self._late):
            late = sorted(self._late)
            self._facts = LoopFacts(
                turn=self._turn,
                pid=os.getpid(),
                samples=len(late),
                p50_ms=percentile(late, 0.5),
                p99_ms=percentile(late, 0.99),
                max_ms=percentile(late, 1.0),
            )
        return self._facts


class LoopNotes:
    """Writes what the host has seen into the agent's log as its turn ends."""

    def __init__(self, slots: AgentSlots, journal: Journal, lag: LoopLag) -> None:
        self._journal = journal
        self._lag = lag
        slots.step.register("loop lag", self._begin)
        slots.turn_stopping.register("loop lag", self._note)

    async def _begin(self, step: StepStarting) -> None:
        self._lag.begin(step.turn)

    async def _note(self, _turn: TurnStopping) -> None:
        self._journal.append(EVENT, self._lag.facts().model_dump())


class _App(Provider):
    scope = LifecycleScope.APP

    @provide
    async def lag(self) -> AsyncIterator[LoopLag]:
        """The sampler of this host."""
        lag = LoopLag()
        sampling = asyncio.create_task(lag.run(), name="kimi_ray.bench.loop_lag")
        yield lag
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


class LoopLagFeature(Feature):
    """The sampler, the notes and their type."""

    name: ClassVar[str] = "bench-loop-lag"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        return (_App(),)

    def on_agent(self) -> Sequence[type]:
        """See ``Feature.on_agent``."""
        return (LoopNotes,)

    def event_types(self) -> Sequence[EventType]:
        """See ``Feature.event_types``."""
        return (EventType(EVENT, LoopFacts, ignorable=True, doc="How late the host's loop was."),)


def percentile(ordered: Sequence[float], part: float) -> float:
    """The value below which that part of them lies; 0 for none."""
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) if ordered else 0.0
