"""Outcomes of a host: what has ended, and whoever waits for it is told."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.outcome_watches import OutcomeWatches
from kimi_ray.store.seam import Stream

KEPT = 20_000
"""How many outcomes of a host stay in memory; an older one is told from its agent's log while that lives here."""

KEPT_OF_AGENT = 256
"""Of these, how many of one agent."""

WHOLE = 1024
"""Of these, how many newest are objects; an older one is bytes, a fifth of the size."""

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
        self.watches = OutcomeWatches()

    def get(self, key: Key) -> Outcome | None:
        """The outcome of a prompt, if it is remembered."""
        of_agent = self._ended.get(key[0])
        found = of_agent.get(key[1]) if of_agent is not None else None
        return pickle.loads(found) if isinstance(found, bytes) else found

    def put(self, key: Key, outcome: Outcome) -> None:
        """A prompt has ended."""
        self.remember(key, outcome)
        self.watches.tell(outcome)

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
        for prompt_id in self.watches.waited_for(stream):
            self.watches.tell(self.get((stream, prompt_id)) or failed_outcome(stream, prompt_id, error))


def failed_outcome(stream: Stream, prompt_id: str, error: KimiRayError) -> Outcome:
    """The outcome of a prompt that could not be waited for; its position is -1."""
    result = PromptResult(prompt_id=prompt_id, state="failed", stop="failed", error=error.to_data())
    return Outcome(stream=stream, prompt_id=prompt_id, result=result, seq=-1, epoch=-1, totals=AgentTotals())
