"""Outcomes of a host: what has ended, and whoever waits for it is told."""

from __future__ import annotations

from collections import OrderedDict

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.outcome_watches import OutcomeWatches
from kimi_ray.store.seam import Stream

KEPT = 20_000
"""How many outcomes stay in memory; an older one is told from its agent's log while that lives here."""

Key = tuple[Stream, str]


class Outcomes:
    """The ended prompts of a host, newest ``KEPT``."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Key, Outcome] = OrderedDict()
        self.watches = OutcomeWatches()

    def get(self, key: Key) -> Outcome | None:
        """The outcome of a prompt, if it is remembered."""
        return self._ended.get(key)

    def put(self, key: Key, outcome: Outcome) -> None:
        """A prompt has ended."""
        self._ended[key] = outcome
        if len(self._ended) > KEPT:
            self._ended.popitem(last=False)
        self.watches.tell(outcome)

    def drop(self, stream: Stream, error: KimiRayError) -> None:
        """The agent does not live here any more: whoever still waits for its prompts hears the error."""
        for prompt_id in self.watches.waited_for(stream):
            self.watches.tell(self._ended.get((stream, prompt_id)) or failed_outcome(stream, prompt_id, error))


def failed_outcome(stream: Stream, prompt_id: str, error: KimiRayError) -> Outcome:
    """The outcome of a prompt that could not be waited for; its position is -1."""
    result = PromptResult(prompt_id=prompt_id, state="failed", stop="failed", error=error.to_data())
    return Outcome(stream=stream, prompt_id=prompt_id, result=result, seq=-1, epoch=-1, totals=AgentTotals())
