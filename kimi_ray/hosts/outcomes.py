"""Outcomes of a host: what has ended, and who waits for it."""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict, deque

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.errors import KimiRayError
from kimi_ray.store.seam import Stream

KEPT = 20_000
"""How many outcomes of a host stay in memory; an older one is told from its agent's log while that lives here."""

KEPT_OF_AGENT = 256
"""Of these, how many of one agent."""

WHOLE = 1024
"""Of these, how many newest are objects; an older one is bytes, a fifth of the size."""

GATHER_S = 0.005
"""How long a wait for several prompts gathers more once the first has ended: one call then answers many."""

Key = tuple[Stream, str]


class Outcomes:
    """The ended prompts of a host: of each agent the newest ``KEPT_OF_AGENT``, of all agents ``KEPT``.

    What is too much goes where nothing has ended for the longest time.

    Args:
        kept: How many.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._ended: OrderedDict[Stream, OrderedDict[str, Outcome | bytes]] = OrderedDict()
        self._size = 0
        self._whole: deque[Key] = deque()
        self._waits: dict[Stream, set[_Wait]] = {}

    def get(self, key: Key) -> Outcome | None:
        """The outcome of a prompt, if it is remembered."""
        of_agent = self._ended.get(key[0])
        found = of_agent.get(key[1]) if of_agent is not None else None
        return pickle.loads(found) if isinstance(found, bytes) else found

    def put(self, key: Key, outcome: Outcome) -> None:
        """A prompt has ended."""
        self.remember(key, outcome)
        for wait in self._waits.get(key[0], ()):
            wait.take(outcome)

    def remember(self, key: Key, outcome: Outcome) -> None:
        """Keep what was told already."""
        stream, prompt_id = key
        of_agent = self._ended.get(stream)
        if of_agent is None:
            of_agent = self._ended[stream] = OrderedDict()
        else:
            self._ended.move_to_end(stream)
        self._size += prompt_id not in of_agent
        of_agent[prompt_id] = outcome
        self._whole.append(key)
        if len(self._whole) > WHOLE:
            self._pack(*self._whole.popleft())
        if len(of_agent) > KEPT_OF_AGENT:
            of_agent.popitem(last=False)
            self._size -= 1
        if self._size > self._kept:
            oldest, of_oldest = next(iter(self._ended.items()))
            of_oldest.popitem(last=False)
            self._size -= 1
            if not of_oldest:
                del self._ended[oldest]

    def _pack(self, stream: Stream, prompt_id: str) -> None:
        of_agent = self._ended.get(stream)
        found = of_agent.get(prompt_id) if of_agent is not None else None
        if of_agent is not None and isinstance(found, Outcome):
            of_agent[prompt_id] = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)

    def drop(self, stream: Stream, error: KimiRayError) -> None:
        """The agent does not live here any more: whoever still waits for its prompts hears the error."""
        for wait in self._waits.get(stream, ()):
            for prompt_id in wait.prompts[stream]:
                wait.take(self.get((stream, prompt_id)) or failed_outcome(stream, prompt_id, error))

    async def wait(self, prompts: dict[Stream, set[str]], timeout_s: float) -> list[Outcome]:
        """The first of these prompts to end, with those that end right behind it; empty at the time-out."""
        wait = _Wait(prompts)
        for stream in prompts:
            self._waits.setdefault(stream, set()).add(wait)
        try:
            async with asyncio.timeout(timeout_s):
                await wait.ready.wait()
        except TimeoutError:
            pass
        finally:
            wait.cancel()
            for stream in prompts:
                waits = self._waits[stream]
                waits.discard(wait)
                if not waits:
                    del self._waits[stream]
        return list(wait.outcomes.values())


class _Wait:
    __slots__ = ("_gather", "_timer", "outcomes", "prompts", "ready")

    def __init__(self, prompts: dict[Stream, set[str]]) -> None:
        self.prompts = prompts
        self.outcomes: dict[Key, Outcome] = {}
        self.ready = asyncio.Event()
        self._gather = len(prompts) > 1
        self._timer: asyncio.TimerHandle | None = None

    def take(self, outcome: Outcome) -> None:
        if outcome.prompt_id not in self.prompts[outcome.stream]:
            return
        self.outcomes[outcome.stream, outcome.prompt_id] = outcome
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
