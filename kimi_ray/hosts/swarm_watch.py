"""Where a swarm stands: finished rollouts from its own counts, running ones from their hosts, a second old at most."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.hosts.specs import AgentProgress
from kimi_ray.hosts.swarm_attempts import Attempt
from kimi_ray.hosts.swarm_words import LONG_TURN_STEPS, LongTurn, Stalled, SwarmProgress
from kimi_ray.runs.schedule import Schedule, Spent
from kimi_ray.store.seam import Stream

_FRESH_S = 0.5
_ASK_S = 2.0
_WINDOW_S = 10.0
_STALLED_MS = 15_000
_STALLED_SHOWN = 20
_LONG_SHOWN = 20


class SwarmWatch:
    """Asks the hosts how their running attempts stand and makes one picture of it."""

    def __init__(self, cluster: Cluster, *, priced: bool) -> None:
        self._cluster = cluster
        self._priced = priced
        self._live: dict[Stream, AgentProgress] = {}
        self._asked = 0.0
        self._asking = asyncio.Lock()
        self._window: deque[tuple[float, int]] = deque()
        self._began = time.monotonic()
        self.calls = 0

    async def refresh(self, attempts: Iterable[Attempt], fresh_s: float = _FRESH_S) -> dict[Stream, AgentProgress]:
        """How the running attempts stand, at most ``fresh_s`` old; a host that does not answer is left out."""
        async with self._asking:
            if time.monotonic() - self._asked < fresh_s:
                return self._live
            by_host: dict[str, list[Stream]] = {}
            for attempt in attempts:
                if attempt.accepted:
                    by_host.setdefault(attempt.host, []).append(attempt.stream)
            found = await asyncio.gather(*(self._ask(host, streams) for host, streams in by_host.items()))
            self._live = {progress.stream: progress for part in found for progress in part}
            self._asked = time.monotonic()
            return self._live

    def picture(
        self, schedule: Schedule, past: Spent, attempts: dict[str, Attempt], interruptions: int
    ) -> SwarmProgress:
        """One picture of all counts. ``past`` is what ended attempts used."""
        counts = schedule.progress()
        live = [(attempts[p.stream.agent_id], p) for p in self._live.values() if p.stream.agent_id in attempts]
        output = past.output_tokens + sum(progress.output_tokens for _, progress in live)
        stalled = [
            Stalled(
                agent_id=attempt.agent_id,
                item_id=attempt.rollout.key.item_id,
                repeat=attempt.rollout.key.repeat,
                phase=progress.phase,
                since_ms=progress.since_ms,
            )
            for attempt, progress in live
            if progress.since_ms >= _STALLED_MS
        ]
        stalled.sort(key=lambda one: -one.since_ms)
        cost = past.cost_usd + sum(progress.cost_usd for _, progress in live)
        return SwarmProgress(
            total=counts.total,
            queued=counts.queued,
            running=counts.running,
            retrying=counts.retrying,
            retries=counts.retries,
            request_retries=sum(progress.retries for _, progress in live),
            done=sum(counts.done.values()),
            **counts.done,
            steps=past.steps + sum(progress.steps - (progress.step is not None) for _, progress in live),
            output_tokens=output,
            total_tokens=past.total_tokens + sum(progress.total_tokens for _, progress in live),
            tokens_per_s=self._rate(output),
            cost_usd=cost if self._priced else None,
            interruptions=interruptions,
            stalled=tuple(stalled[:_STALLED_SHOWN]),
            long_turns=_long_turns(live),
            elapsed_s=round(time.monotonic() - self._began, 3),
            stopped=counts.stopped,
        )

    def _rate(self, output: int) -> float:
        now = time.monotonic()
        if not self._window or now - self._window[-1][0] >= _FRESH_S:
            self._window.append((now, output))
        while len(self._window) > 2 and now - self._window[0][0] > _WINDOW_S:
            self._window.popleft()
        began, before = self._window[0]
        return round((output - before) / (now - began), 1) if now - began > _FRESH_S else 0.0

    async def _ask(self, host: str, streams: list[Stream]) -> list[AgentProgress]:
        self.calls += 1
        try:
            return await self._cluster.peer(host).call("progress", streams, timeout_s=_ASK_S, group="control")
        except KimiRayError as error:
            if not is_lost(error.code):
                raise
            # A host that is busy or gone: whoever waits for its results notices what is to be done.
            return []


def _long_turns(live: Iterable[tuple[Attempt, AgentProgress]]) -> tuple[LongTurn, ...]:
    long = [
        LongTurn(
            agent_id=attempt.agent_id,
            item_id=attempt.rollout.key.item_id,
            repeat=attempt.rollout.key.repeat,
            steps=progress.step,
        )
        for attempt, progress in live
        if progress.step is not None and progress.step >= LONG_TURN_STEPS
        if attempt.rollout.limits is None or attempt.rollout.limits.max_steps is None
    ]
    return tuple(sorted(long, key=lambda one: -one.steps)[:_LONG_SHOWN])
