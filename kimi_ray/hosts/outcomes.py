"""Outcomes of a host: what has ended, and who waits for it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.errors import KimiRayError
from kimi_ray.store.seam import Stream

KEPT = 20_000
"""How many outcomes stay in memory; an older one is told from its agent's log while that lives here."""

GATHER_S = 0.005
"""How long a wait for several prompts gathers more once the first has ended: one call then answers many."""

Key = tuple[Stream, str]


class Outcomes:
    """The ended prompts of a host, newest ``KEPT``."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Key, Outcome] = OrderedDict()
        self._waits: dict[Key, set[_Wait]] = {}

    def get(self, key: Key) -> Outcome | None:
        """The outcome of a prompt, if it is remembered."""
        return self._ended.get(key)

    def put(self, key: Key, outcome: Outcome) -> None:
        """A prompt has ended."""
        self._ended[key] = outcome
        if len(self._ended) > KEPT:
            self._ended.popitem(last=False)
        for wait in self._waits.pop(key, ()):
            wait.take(outcome)

    def drop(self, stream: Stream, error: KimiRayError) -> None:
        """The agent does not live here any more: whoever still waits for its prompts hears the error."""
        for key in [key for key in self._waits if key[0] == stream]:
            for wait in self._waits.pop(key):
                wait.take(failed_outcome(stream, key[1], error))

    async def wait(self, keys: list[Key], timeout_s: float) -> list[Outcome]:
        """The first of these prompts to end, with those that end right behind it; empty at the time-out."""
        wait = _Wait(gather=len(keys) > 1)
        for key in keys:
            self._waits.setdefault(key, set()).add(wait)
        try:
            async with asyncio.timeout(timeout_s):
                await wait.ready.wait()
        except TimeoutError:
            pass
        finally:
            wait.cancel()
            for key in keys:
                waits = self._waits.get(key)
                if waits is not None:
                    waits.discard(wait)
                    if not waits:
                        del self._waits[key]
        return wait.outcomes


class _Wait:
    __slots__ = ("_gather", "_timer", "outcomes", "ready")

    def __init__(self, *, gather: bool) -> None:
        self.outcomes: list[Outcome] = []
        self.ready = asyncio.Event()
        self._gather = gather
        self._timer: asyncio.TimerHandle | None = None

    def take(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if not self._gather:
            self.ready.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.ready.set)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def failed_outcome(stream: Stream, prompt_id: str, error: KimiRayError) -> Outcome:
    """The outcome of a prompt that could not be waited for; its position is -1."""
    result = PromptResult(prompt_id=prompt_id, state="failed", stop="failed", error=error.to_data())
    return Outcome(stream=stream, prompt_id=prompt_id, result=result, seq=-1, epoch=-1, totals=AgentTotals())
