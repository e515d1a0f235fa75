"""What shortens a conversation, done again: today's guard, pruner and compactor, where the recording has their work.

Today's code decides, selects and asks; what it does is compared with what was recorded, and so is each request for a
summary, whose recorded text is the answer. The settings are those of the recording (``context`` in its request
header), where it has any.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.slots import AgentSlots, Compacting, RequestFailed, StepStarting
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.summarizer import ModelSummarizer, Summarizer, Summary, SummaryTask
from kimi_ray.errors import AgentError, KimiRayError, ProviderError, error_from_data
from kimi_ray.events import SessionEvent, thaw
from kimi_ray.features.compaction import CompactionEngine, ContextSize, WindowGuard
from kimi_ray.llm.chat import ChatRequest, Chunk
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.recorded import RecordedAnswer
from kimi_ray.replay.difference import ABSENT, Found, first_difference
from kimi_ray.replay.injection import put_entry
from kimi_ray.replay.judge import Judge
from kimi_ray.replay.models import model_of_turn
from kimi_ray.replay.recording import (
    Attempt,
    Compaction,
    Entry,
    NewLife,
    Outside,
    RecordedStep,
    RecordedTurn,
    Shortening,
    SummaryAsked,
    code_of,
)
from kimi_ray.replay.report import Divergence
from kimi_ray.replay.sources import Blobs
from kimi_ray.replay.stage import AgentScope

IGNORED = "compaction"
"""The field that leaves the shortening of conversations as it was recorded."""

_DERIVED = (None, "compaction.summary")
"""Codes of ends that today's code comes to by itself; others are somebody's or something's doing."""

_UNKNOWN = [{"type": "text", "text": "(a summary that was not taken, and is not in the recording)"}]


@dataclass(slots=True)
class _Course:
    """What today's code does at one place, and what was recorded there."""

    recorded: Shortening
    turn: RecordedTurn | None
    step: RecordedStep | None
    prunes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    compactions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def compaction(self) -> Compaction | None:
        """The recorded one in the place of that which is under way."""
        at, known = len(self.compactions) - 1, self.recorded.compactions
        return known[at] if 0 <= at < len(known) else None


@dataclass(frozen=True, slots=True)
class Cues:
    """What the shortening asks of the replay of its agent.

    Attributes:
        leave: The replay is over.
        stop: The turn, or its step, was stopped here, if it was: then it does not return.
    """

    leave: Callable[[Divergence], None]
    stop: Callable[[RecordedStep | None], Awaitable[None]]


class ShorteningPlayer:
    """Does again what shortened the conversation of one agent. ``begin`` before anything else.

    Args:
        judge: Compares.
        blobs: Of the recording.
        models: The ``[models.X]`` tables of today.
        cues: What it asks of the replay.
        ignored: It is left as it was recorded.
    """

    def __init__(
        self, judge: Judge, blobs: Blobs, models: Mapping[str, ModelSettings], cues: Cues, *, ignored: bool
    ) -> None:
        self._judge = judge
        self._blobs = blobs
        self._models = models
        self._cues = cues
        self._ignored = ignored
        self._taken_all = ignored or judge.imported
        self._course: _Course | None = None
        self._is_known = False
        self._header: dict[str, Any] = {}
        self.requests = self.places = self.taken = 0
        """Requests for summaries that were as recorded; places where today's code did as recorded; those taken over."""

    async def begin(self, scope: AgentScope) -> None:
        """The agent is there."""
        self._journal = await scope.get(Journal)
        self._in_use = await scope.get(ModelInUse)
        try:
            self._engine = await scope.get(CompactionEngine)
            self._size = await scope.get(ContextSize)
        except KimiRayError:
            self._taken_all = True  # there is no such Feature today
            return
        self._slots = AgentSlots()
        self._guard = WindowGuard(self._engine, self._journal, self._in_use, self._slots)
        (await scope.get(AgentSlots)).compacting.register("replay", self._before_compaction)
        self._journal.log.observe(self._follow)

    def use(self, name: str | None, header: dict[str, Any], provider: Any) -> None:
        """The agent's model from here on, with the settings of that header."""
        chosen = model_of_turn(name, header, self._models)
        self._is_known = "context" in header or (name or "") in self._models
        self._in_use.switch(chosen.model, provider)

    # -- where it stands --------------------------------------------------------------------------------------------

    async def before_request(self, starting: StepStarting, turn: RecordedTurn, step: RecordedStep | None) -> None:
        """What came before the first request of a step."""
        items = step.inside if step is not None else []
        is_shortened = any(isinstance(one, Shortening) for one in items)
        was_due = not items or self._is_due
        for item in items:
            if isinstance(item, Shortening) and item.trigger != "region":
                await self._guarded(item, turn, step, lambda: self._slots.step.run(starting))
            else:
                await self.put(item, turn, step)
        # Who spoke before the guard and who behind it is not in the log: it is asked where both agree.
        if not is_shortened and was_due and self._guards and step is not None:
            nothing = Shortening(0, 0)
            await self._run(nothing, turn, step, lambda: self._slots.step.run(starting))

    async def after_failure(
        self, failed: RequestFailed, turn: RecordedTurn, step: RecordedStep, attempt: Attempt, *, again: bool
    ) -> None:
        """A request failed; it is made anew where what it had was mended."""
        asked = RequestFailed(failed.turn, failed.step, failed.error)
        is_shortened = any(isinstance(one, Shortening) for one in attempt.behind)
        runs = not self._taken_all and failed.error.code == "context.overflow" and not attempt.retried
        for item in attempt.behind:
            if runs and isinstance(item, Shortening):
                await self._run(item, turn, step, lambda: self._slots.request_failed.run(asked))
            else:
                await self.put(item, turn, step)
        if runs and not is_shortened and not turn.is_stopped:
            await self._run(Shortening(0, 0), turn, step, lambda: self._slots.request_failed.run(asked))
        if asked.retry or (again and not (runs and is_shortened)):
            failed.again()

    async def put(self, item: Outside, turn: RecordedTurn | None, step: RecordedStep | None = None) -> None:
        """Something from outside, where it stood. A compaction that was asked for is asked for again."""
        if isinstance(item, Entry):
            put_entry(self._journal, item)
        elif isinstance(item, NewLife):
            if not self._taken_all:
                self._size.begin_anew()
        elif self._taken_all or item.trigger is None:
            self._take(item)
        else:
            compaction = item.compactions[0]
            await self._run(item, turn, step, lambda: self._ask_for(compaction))

    async def _guarded(
        self, item: Shortening, turn: RecordedTurn, step: RecordedStep | None, act: Callable[[], Awaitable[object]]
    ) -> None:
        if self._taken_all or not (self._guards or self._is_known):
            self._take(item)
        else:
            await self._run(item, turn, step, act)

    def _take(self, item: Shortening) -> None:
        self.taken += 1
        if self._ignored:
            self._judge.skipped[IGNORED] += 1
        for entry in item.entries:
            put_entry(self._journal, entry)

    async def _ask_for(self, compaction: Compaction) -> None:
        if compaction.trigger == "region":
            seqs = self._journal.log.surface.seqs
            if compaction.span is not None and compaction.span[1] <= len(seqs):
                await self._engine.compact_region(seqs[compaction.span[0]], seqs[compaction.span[1] - 1])
            return
        said: Any = compaction.start.data.get("instruction")
        if isinstance(said, Mapping):
            kept = cast("Mapping[str, str]", said)
            said = (await self._blobs.read(kept["$blob"])).decode()
        await self._engine.compact_now(said)

    @property
    def _guards(self) -> bool:
        return not self._taken_all and bool(self._slots.step)

    @property
    def _is_due(self) -> bool:
        if not self._guards:
            return False
        threshold = self._engine.threshold
        return threshold is not None and self._size.total >= threshold

    # -- doing it, and comparing ------------------------------------------------------------------------------------

    async def _run(
        self,
        recorded: Shortening,
        turn: RecordedTurn | None,
        step: RecordedStep | None,
        act: Callable[[], Awaitable[object]],
    ) -> None:
        course = self._course = _Course(recorded, turn, step)
        why: KimiRayError | None = None
        try:
            await act()
        except KimiRayError as error:
            why = error  # what it did is compared, and that is said where it did not
        finally:
            self._course = None
        found = await self._difference(course, whole=True)
        if found is not None:
            if found[2] == ABSENT and why is not None:
                found = (found[0], found[1], why.to_data())
            self._differs(course, found)
        elif recorded.prunes or recorded.compactions:
            self.places += 1

    def _differs(self, course: _Course, found: Found) -> None:
        self._cues.leave(self._judge.shortened(found, course.recorded, course.turn, course.step))

    def _follow(self, event: SessionEvent) -> None:
        course = self._course
        if course is None:
            return
        if event.type == "tool/result" and event.replaced is not None:
            course.prunes.append(_prune(event))
        elif event.type == "compaction/start":
            seqs, found = self._journal.log.surface.seqs, event.data["shadowed_range"]
            span = (seqs.index(found["start"]), seqs.index(found["end"]) + 1)
            course.compactions.append({**_facts(event, span), "requests": 0, "error": None, "content": None})
        elif course.compactions and event.type == "user/message" and event.replaced is not None:
            course.compactions[-1].update(_message(event))
        elif course.compactions and event.type == "compaction/summary":
            course.compactions[-1]["shadowed_tokens"] = event.data["shadowed_tokens"]
        elif course.compactions and event.type == "compaction/end":
            course.compactions[-1]["error"] = code_of(event.data)

    async def _difference(self, course: _Course, *, whole: bool) -> Found | None:
        """The first difference of what was done so far; ``whole``: nothing more comes."""
        recorded = course.recorded
        for at in range(max(len(recorded.prunes), len(course.prunes))):
            then = _prune(recorded.prunes[at].event) if at < len(recorded.prunes) else None
            now = course.prunes[at] if at < len(course.prunes) else None
            if then is None or now is None:
                return f"prunes[{at}]", _told(then, ("result_of",)), _told(now, ("result_of",))
            found = first_difference(await self._full(then), await self._mine(now), f"prunes[{at}]")
            if found is not None:
                return found
        for at in range(max(len(recorded.compactions), len(course.compactions))):
            old = recorded.compactions[at] if at < len(recorded.compactions) else None
            new = course.compactions[at] if at < len(course.compactions) else None
            if old is None or new is None:
                if new is None and not whole:
                    return None
                facts = None if old is None else _facts(old.start, old.span)
                return f"compactions[{at}]", _told(facts, _SAID), _told(new, _SAID)
            is_over = whole or at < len(course.compactions) - 1
            found = await self._compaction_difference(old, new, f"compactions[{at}]", is_over=is_over)
            if found is not None:
                return found
        return None

    async def _compaction_difference(
        self, old: Compaction, new: dict[str, Any], path: str, *, is_over: bool
    ) -> Found | None:
        facts = _facts(old.start, old.span)
        if self._judge.ignores_size:
            facts.pop("tokens", None)
        if is_over:
            code = code_of(old.end.data) if old.end is not None else None
            facts["requests"] = len(old.requests)
            if code in _DERIVED and (old.end is not None or old.message is not None):
                facts["error"] = code
            facts["content"] = None
            if old.summary is not None:
                facts["shadowed_tokens"] = old.summary.data["shadowed_tokens"]
            if old.message is not None:
                facts |= _message(old.message.event)
        now = {key: new.get(key) for key in facts}
        return first_difference(await self._full(facts), await self._mine(now), path)

    async def _full(self, said: dict[str, Any]) -> dict[str, Any]:
        content = said.get("content")
        return said if content is None else {**said, "content": await self._blobs.blocks(content)}

    async def _mine(self, said: dict[str, Any]) -> dict[str, Any]:
        content = said.get("content")
        if content is None:
            return said
        [whole] = await self._journal.resolve([{"content": content}])
        return {**said, "content": whole["content"]}

    # -- summaries --------------------------------------------------------------------------------------------------

    def summarizer(self, journal: Journal, in_use: ModelInUse, spec: AgentSpec) -> Summarizer:
        """Writes the recorded summaries, asking for them as today's code does."""
        return _RecordedSummarizer(self, ModelSummarizer(journal, in_use, spec.stream, spec.nonce))

    async def _before_compaction(self, _event: Compacting) -> None:
        course = self._course
        if course is None:
            return
        found = await self._difference(course, whole=False)
        compaction = course.compaction
        if found is not None or compaction is None:
            if found is not None:
                self._differs(course, found)
            raise _over()
        if not compaction.requests and compaction.summary is None:
            error = compaction.error
            if error is None or error.get("code") == "compaction.cancelled":
                await self._cues.stop(course.step)
                raise _over()
            if error.get("code") != "compaction.summary":
                raise error_from_data(error)

    async def summary_of(self, task: SummaryTask, asking: ModelSummarizer) -> Summary:
        """The recorded summary of the compaction that is under way."""
        course = self._course
        compaction = None if course is None else course.compaction
        if compaction is None:
            raise _over()
        error = compaction.error or {}
        if compaction.requests:
            summary = await asking.summarize(task)
            if compaction.summary is None and error:
                raise error_from_data(error)  # what the model wrote then is not recorded
            return summary
        if compaction.summary is None:
            details: dict[str, Any] = error.get("details") or {}
            raise error_from_data(details.get("cause") or error)
        said = compaction.summary.data
        return Summary(await self._blobs.blocks(said["summary"]), said.get("model"), thaw(said.get("usage")))

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """The recorded answer to a request for a summary, which is compared with the recorded one."""
        course = self._course
        compaction = None if course is None else course.compaction
        if course is None or compaction is None:
            raise _unanswered()
        at: int = course.compactions[-1]["requests"]
        if at >= len(compaction.requests):
            path = f"compactions[{len(course.compactions) - 1}].requests[{at}]"
            self._differs(course, (path, ABSENT, f"{len(request.messages)} messages"))
            raise _unanswered()
        course.compactions[-1]["requests"] = at + 1
        asked = compaction.requests[at]
        try:
            found = await self._judge.compare_summary(request, asked)
        except KimiRayError as error:  # what the recording keeps by reference is not there
            self._cues.leave(self._judge.failed(course.turn, error.to_data(), asked.event.seq))
            raise _unanswered() from error
        if found is not None:
            self._cues.leave(self._judge.summary_differs(found, asked, course.turn, course.step))
            raise _unanswered()
        self.requests += 1
        if asked.response is None:
            await self._cues.stop(course.step)
            raise _unanswered()
        answer = await self._answer(asked, is_last=at + 1 == len(compaction.requests))
        for chunk in answer.chunks():
            yield chunk
        failure = answer.failure()
        if failure is not None:
            raise failure

    async def _answer(self, asked: SummaryAsked, *, is_last: bool) -> RecordedAnswer:
        assert asked.response is not None
        response = asked.response.data
        content = [] if "error" in response else _UNKNOWN
        if asked.summary is not None:
            content = await self._blobs.blocks(asked.summary.data["summary"])
        return RecordedAnswer.of(content, response, retried=not is_last)


class _RecordedSummarizer(Summarizer):
    def __init__(self, player: ShorteningPlayer, asking: ModelSummarizer) -> None:
        self._player = player
        self._asking = asking

    async def summarize(self, task: SummaryTask) -> Summary:
        return await self._player.summary_of(task, self._asking)


_SAID = ("trigger", "range", "threshold", "tokens")


def _facts(start: SessionEvent, span: tuple[int, int] | None) -> dict[str, Any]:
    """What a compaction is about; what is not said is left out."""
    facts = {key: start.data.get(key) for key in _SAID if key != "range"}
    facts["range"] = None if span is None else list(span)
    return {key: facts[key] for key in _SAID if facts[key] is not None}


def _message(event: SessionEvent) -> dict[str, Any]:
    """The message that stands for what went, and what its source says of it."""
    source: dict[str, Any] = event.data.get("source") or {}
    return {"content": event.data["content"], "kept": source.get("kept"), "answers": source.get("answers")}


def _prune(event: SessionEvent) -> dict[str, Any]:
    message = event.data["message"]
    return {"result_of": message["source"]["call_id"], "content": message["content"][0]["content"]}


def _told(said: dict[str, Any] | None, keys: Sequence[str]) -> Any:
    """What is shown of something that is on one side only."""
    return ABSENT if said is None else {key: said[key] for key in keys if key in said}


def _over() -> AgentError:
    return AgentError("the recording of this compaction ends here", code="compaction.cancelled")


def _unanswered() -> ProviderError:
    return ProviderError("the recording has no answer to this request", code="provider.recording_exhausted")
