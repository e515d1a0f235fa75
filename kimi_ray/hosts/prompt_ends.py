"""The ends of prompts for whoever waits for them: from memory, or, of prompts of long ago, from their agent's log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice

from kimi_ray.agent.fold import FOLLOWED, AgentFold, living_fold
from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.specs import Outcome
from kimi_ray.errors import AgentError, KimiRayError, StoreError
from kimi_ray.events import CORE, SessionEvent, read_stored, type_key
from kimi_ray.hosts.outcome_watches import Watch
from kimi_ray.hosts.outcomes import KEPT_OF_AGENT, Key, Outcomes, failed_outcome
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.store.seam import Stream

_READ_AHEAD = 1024
"""Ends that were read from logs and that nobody has asked for yet."""

_RECALL_S = 8.0
"""At least so long a log may be read for the ends that it tells of."""

_ROUND_S = 1.0
"""After so long no further log is read before the caller has its answer, or it would give the host up."""

_PAGE_EVENTS = 4000
_PAGE_BYTES = 4 << 20
_SLICE_EVENTS = 500
"""Events between two looks of the loop at others."""

_KNOWN = {type_key(entry.name): entry.name for entry in CORE}
_PASSED = frozenset(key for key, name in _KNOWN.items() if name not in FOLLOWED)


class PromptEnds:
    """Tells the ends of a host's prompts.

    Args:
        agents: The agents that live here.
        outcomes: What has ended, and is remembered.
        gone: The error of an agent that does not live here.
    """

    def __init__(
        self, agents: Mapping[Stream, LiveAgent], outcomes: Outcomes, gone: Callable[[Stream], AgentError]
    ) -> None:
        self._agents = agents
        self._outcomes = outcomes
        self._gone = gone
        self._read_again = Outcomes(_READ_AHEAD)
        self._reading = asyncio.Lock()

    async def wait(
        self, waits: list[Key], timeout_s: float, store: StoreCalls, name: str | None, answers: int
    ) -> list[Outcome] | None:
        """The prompts of a watch that have ended since its last answer; waits for the first one.

        Args:
            waits: The prompts that the watch does not know yet.
            timeout_s: Seconds.
            store: Where ends of long ago are read.
            name: The watch's; None is one for a single question.
            answers: How many answers its caller has had.

        Returns:
            None where the watch is not known like that any more.
        """
        watches = self._outcomes.watches
        watch = watches.take_up(name, answers)
        if watch is None:
            return None
        try:
            for stream, prompt_id in waits:
                self._take(watch, stream, prompt_id)
            if watch.forgotten and not watch.has_news:
                await self._recall(watch, timeout_s, store)
            ended = await watch.answer(timeout_s)
        except BaseException:
            watch.end()
            raise
        watches.put_down(name, watch)
        return ended

    def _take(self, watch: Watch, stream: Stream, prompt_id: str) -> None:
        agent = self._agents.get(stream)
        if agent is not None and agent.is_waiting(prompt_id):
            watch.add(stream, prompt_id)
            return
        outcome = self._outcomes.get((stream, prompt_id))
        if outcome is None and agent is None:
            outcome = failed_outcome(stream, prompt_id, self._gone(stream))
        if outcome is None and agent is not None:
            try:
                outcome = agent.outcome(prompt_id)
            except AgentError as error:
                if error.code == "prompt.result_forgotten":
                    watch.forgotten.setdefault(stream, {})[prompt_id] = error
                    return
                outcome = failed_outcome(stream, prompt_id, error)
        if outcome is not None:
            watch.tell_now(outcome)
        else:
            watch.add(stream, prompt_id)

    async def _recall(self, watch: Watch, timeout_s: float, store: StoreCalls) -> None:
        """Read logs for what is forgotten; what there is no time for stays so, and comes with the next question."""
        now = asyncio.get_running_loop().time
        began = now()
        for stream, errors in list(watch.forgotten.items()):
            asked = dict(islice(errors.items(), KEPT_OF_AGENT))  # the others come next, and are near then
            try:
                async with asyncio.timeout_at(began + timeout_s):
                    await self._reading.acquire()
            except TimeoutError:  # others have logs read: that says nothing of this one
                return
            try:
                ends, cause = await self._read_within(max(began + timeout_s - now(), _RECALL_S), stream, asked, store)
            finally:
                self._reading.release()
            for prompt_id, error in asked.items():
                del errors[prompt_id]
                watch.tell_now(ends.get(prompt_id) or failed_outcome(stream, prompt_id, _unread(error, cause)))
            if not errors:
                del watch.forgotten[stream]
            if now() - began > _ROUND_S:
                return

    async def _read_within(
        self, seconds: float, stream: Stream, asked: dict[str, AgentError], store: StoreCalls
    ) -> tuple[dict[str, Outcome], KimiRayError | None]:
        """The ends that a log tells of; none and why, if it cannot be read."""
        try:
            async with asyncio.timeout(seconds):
                return await self._read(stream, asked, store), None
        except TimeoutError:
            return {}, StoreError(f"its log was not read within {seconds:.1f} s", code="store.unavailable")
        except KimiRayError as error:
            return {}, error

    async def _read(self, stream: Stream, asked: dict[str, AgentError], store: StoreCalls) -> dict[str, Outcome]:
        """Read a log up to the ends that are asked for, and some more: whoever asks for one asks for the next."""
        found: dict[str, Outcome] = {}
        for prompt_id in asked:
            known = self._read_again.get((stream, prompt_id))
            if known is not None:
                found[prompt_id] = known
        agent = self._agents.get(stream)
        if agent is None or len(found) == len(asked):
            return found
        unnamed = (prompt_id for prompt_id in asked if not agent.prompts.knows(prompt_id))
        by_turn = {asked[prompt_id].details["turn"]: prompt_id for prompt_id in unnamed}
        fold = living_fold((agent.journal.log.header.model_extra or {}).get("bind"))
        seq, ahead = 0, 0
        while ahead < KEPT_OF_AGENT:
            page = await store.read_from(stream, seq, _PAGE_EVENTS, _PAGE_BYTES)
            for start in range(0, len(page.lines), _SLICE_EVENTS):
                lines = page.lines[start : start + _SLICE_EVENTS]
                for event in read_stored(lines, seq + start, _KNOWN, _PASSED):
                    fold.apply(event)
                    outcome = _end_told_by(event, agent, fold, by_turn)
                    if outcome is None:
                        continue
                    if outcome.prompt_id in asked:
                        found[outcome.prompt_id] = outcome
                    elif len(found) == len(asked):
                        ahead += 1
                        self._read_again.remember((stream, outcome.prompt_id), outcome)
                await asyncio.sleep(0)
            seq += len(page.lines)
            if not page.lines or seq >= page.next_seq:
                break
        return found


def _end_told_by(event: SessionEvent, agent: LiveAgent, fold: AgentFold, by_turn: Mapping[int, str]) -> Outcome | None:
    if event.type == "prompt/completed":
        return agent.outcome_in(fold, event.data["prompt_id"], None)
    if event.type == "turn/end" and event.data["turn"] in by_turn:
        return agent.outcome_in(fold, by_turn[event.data["turn"]], event.data["turn"])
    return None


def _unread(error: AgentError, cause: KimiRayError | None) -> AgentError:
    if cause is None:
        return error
    return AgentError(
        f"{error.message}; {cause.message}",
        code=error.code,
        hint=error.hint,
        details={**error.details, "cause": cause.to_data()},
        retryable=cause.retryable,
    )
