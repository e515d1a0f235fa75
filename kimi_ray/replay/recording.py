"""A log as a script: its turns, their steps, what was asked and answered in each, and what came from outside.

Positions, not contents: an attempt knows the seq below which everything stands that its request was made of. What the
loop makes anew in a replay (answers, results) is told from what it cannot make (what users, features and the runtime
said, and what compactions put in the place of something): the latter are ``Entry`` objects, to be put back where they
were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.events import CORE, SURFACE_TYPES, LogHeader, SessionEvent, read_stored, type_key
from kimi_ray.log import Surface
from kimi_ray.replay.malformed import MALFORMED, wrong_shape

_INTERRUPTION, _CORRECTION = "interruption", "output_schema"
"""Sources of messages that the loop says itself: that the user cancelled the turn, and that an answer does not fit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event on the surface that came from outside.

    Attributes:
        event: As it was recorded.
        span: The places on the surface, from the first to behind the last, that it took over; None: it was appended.
    """

    event: SessionEvent
    span: tuple[int, int] | None = None


@dataclass(slots=True)
class Attempt:
    """One request and what came of it.

    Attributes:
        seq: Everything that the request was made of stands below it.
        number: As it was recorded, from 1.
        time: When what came of it was recorded, epoch milliseconds.
        response: What ``llm/response`` says, or None where there is none.
        message: The data of the ``assistant/message``, or None.
        retried: The same request was made again.
        behind: What came from outside between this attempt and the next one of its step.
    """

    seq: int
    number: int
    time: int
    response: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    retried: bool = False
    behind: list[Entry] = field(default_factory=list[Entry])

    @property
    def failed(self) -> bool:
        """Whether it ended in an error."""
        return self.response is not None and "error" in self.response

    @property
    def answered(self) -> bool:
        """Whether a whole answer came of it."""
        return not self.failed and self.message is not None and not self.message.get("interrupted")

    @property
    def content(self) -> list[dict[str, Any]]:
        """The blocks of its message."""
        return [] if self.message is None else self.message["message"]["content"]

    @property
    def calls(self) -> list[str]:
        """The ids of the tool calls that it asks for."""
        return [block["id"] for block in self.content if block["type"] == "tool-call"]


@dataclass(slots=True)
class RecordedStep:
    """One step.

    Attributes:
        number: As it was recorded.
        said: What came from outside at its start, in order, up to the first that is not a plain user message.
        inside: What came from outside then, before its first request.
        attempts: Its requests.
        results: The data of each ``tool/result`` by call id.
        interrupted: It alone was stopped.
    """

    number: int
    said: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    inside: list[Entry] = field(default_factory=list[Entry])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    results: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    interrupted: bool = False


@dataclass(slots=True)
class RecordedTurn:
    """One turn.

    Attributes:
        number: As it was recorded.
        prompts: The ids of the prompts that began it.
        continuation: Why it began without one, or None.
        before: What came from outside between the turn before and this one.
        submitted: The data of the ``prompt/submitted`` events since the turn before began.
        completed: The ids of the prompts that reached their final state since then.
        steps: Its steps.
        behind: What came from outside behind its last request.
        reason: How it ended; None: the log ends first.
        end: The seq behind its last event.
        time: When the last event of it that was read was recorded, epoch milliseconds.
        model: The model that was bound when it began.
        header: The request header of its requests, as it was recorded.
    """

    number: int
    prompts: list[str]
    continuation: str | None
    before: list[Entry]
    submitted: list[dict[str, Any]]
    completed: list[str]
    model: str | None = None
    header: dict[str, Any] | None = None
    steps: list[RecordedStep] = field(default_factory=list[RecordedStep])
    behind: list[Entry] = field(default_factory=list[Entry])
    reason: dict[str, Any] | None = None
    end: int = 0
    time: int = 0

    @property
    def attempts(self) -> Iterator[tuple[int, RecordedStep, Attempt]]:
        """All its requests, each with the place of its step."""
        for place, step in enumerate(self.steps):
            for attempt in step.attempts:
                yield place, step, attempt

    @property
    def is_stopped(self) -> bool:
        """Whether something stopped it that a replay does not have: a user, a crash, a limit, a store, the log's end.

        What the model and the loop themselves end, or fail at, they do again.
        """
        reason = self.reason
        if reason is None:
            return True
        if reason["kind"] == "failed":
            return (code_of(reason) or "").startswith(("store.", "infra.", "internal", "hook.", "session.", "runtime."))
        return reason["kind"] in ("cancelled", "interrupted", "limit", "blocked")


@dataclass(slots=True)
class SummaryAsked:
    """A request for the summary of a compaction.

    Attributes:
        event: The ``compaction/request``.
        first: The seq of the first node that is to be summarized.
        last: That of the last one.
        header: The request header that counted.
        response: The ``compaction/response`` to it, or None.
        summary: The ``compaction/summary`` that it led to, or None.
    """

    event: SessionEvent
    first: int
    last: int
    header: dict[str, Any] | None
    response: SessionEvent | None = None
    summary: SessionEvent | None = None


@dataclass(slots=True)
class Recording:
    """The script of one log.

    Attributes:
        header: The log's.
        seed: The lines that it began with: another log's, which are not replayed.
        surface: All events that were on its surface at some time, the seed's among them, in order.
        turns: What there is to replay.
        summaries: The requests for summaries, in order.
        bind: How the agent is bound.
        next_seq: The seq behind its last event.
        stray: The seqs of answers outside of any step: what they were asked for is in no turn.
    """

    header: LogHeader
    seed: list[bytes] = field(default_factory=list[bytes])
    surface: list[SessionEvent] = field(default_factory=list[SessionEvent])
    turns: list[RecordedTurn] = field(default_factory=list[RecordedTurn])
    summaries: list[SummaryAsked] = field(default_factory=list[SummaryAsked])
    bind: dict[str, Any] | None = None
    next_seq: int = 0
    stray: list[int] = field(default_factory=list[int])

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return sum(len(step.attempts) for turn in self.turns for step in turn.steps)


def code_of(data: dict[str, Any]) -> str | None:
    """The code of the error that an event's data has, or None."""
    error: dict[str, Any] = data.get("error") or {}
    return error.get("code")


def source_kind(message: dict[str, Any]) -> str | None:
    """The kind of a message's source."""
    source: dict[str, Any] = message.get("source") or {}
    return source.get("kind")


class RecordingReader:
    """Reads the script of a log, a run of lines at a time.

    Args:
        header: The log's.
        whole: The seed is part of the script: what another log's agent was asked, too.
    """

    def __init__(self, header: LogHeader, *, whole: bool = False) -> None:
        bind: dict[str, Any] | None = (header.model_extra or {}).get("bind")
        self._made = Recording(header, bind=bind)
        self._seed_length = 0 if whole else header.seed_length or 0
        self._surface = Surface()
        self._turn: RecordedTurn | None = None
        self._step: RecordedStep | None = None
        self._loose: list[Entry] = []
        """From outside, and not put anywhere yet."""
        self._submitted: list[dict[str, Any]] = []
        self._completed: list[str] = []
        self._compacting: tuple[int, int] | None = None
        self._model: str | None = None if bind is None else bind.get("model")
        self._header: dict[str, Any] | None = None

    def feed(self, lines: Sequence[bytes]) -> None:
        """The next lines, canonical and without newline.

        Raises:
            LogError: ``log.not_json``, ``log.bad_envelope``, ``log.bad_surface``, ``log.bad_payload``.
        """
        first = self._made.next_seq
        self._made.next_seq += len(lines)
        if first < self._seed_length:
            self._made.seed.extend(lines[: self._seed_length - first])
        for event in read_stored(lines, first, _KNOWN, _PASSED):
            try:
                self._take(event)
            except MALFORMED as error:
                what = f"event {event.seq} ({event.type})"
                raise wrong_shape(what, error, seq=event.seq, type=event.type) from error

    def finish(self) -> Recording:
        """There are no more lines."""
        if self._turn is not None:
            self._close_turn(self._made.next_seq)
        return self._made

    def _take(self, event: SessionEvent) -> None:
        kind, span = event.type, None
        if kind in SURFACE_TYPES:
            plan = self._surface.check(event)
            if plan is not None:
                span = (plan.start, plan.end) if event.replaced is not None else None
                self._surface.apply(plan)
                self._made.surface.append(event)
        if kind == "request/header":
            self._header = event.data["header"]
            if self._turn is not None:
                self._turn.header = self._header
        if event.seq >= self._seed_length:
            if self._turn is not None:
                self._turn.time = event.time
            handler = _HANDLERS.get(kind)
            if handler is not None:
                handler(self, event, span)

    def _bind(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._made.bind = event.data
        self._model = event.data.get("model")

    def _switched(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._model = event.data["model"]

    def _submission(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._submitted.append(event.data)

    def _compaction(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        found = event.data.get("shadowed_range")
        self._compacting = None if found is None else (found["start"], found["end"])

    def _summary(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._compacting is not None:
            self._made.summaries.append(SummaryAsked(event, *self._compacting, self._header))

    def _summarized(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        asked = self._made.summaries[-1] if self._made.summaries else None
        if asked is None or asked.event.data["compaction_id"] != event.data["compaction_id"]:
            return  # a summarizer that asks no model
        if event.type == "compaction/summary":
            asked.summary = event
        elif asked.event.data["attempt"] == event.data["attempt"]:
            asked.response = event

    def _completion(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._completed.append(event.data["prompt_id"])

    def _turn_start(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._turn is not None:
            self._close_turn(event.seq)
        data = event.data
        before, self._loose = self._loose, []
        submitted, self._submitted = self._submitted, []
        completed, self._completed = self._completed, []
        self._turn = RecordedTurn(
            data["turn"],
            list(data.get("prompts") or ()),
            data.get("continuation"),
            before,
            submitted,
            completed,
            model=self._model,
            header=self._header,
        )
        self._step = None

    def _turn_end(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._turn is not None:
            self._turn.reason = event.data["reason"]
            self._close_turn(event.seq + 1)

    def _close_turn(self, end: int) -> None:
        turn, self._turn, self._step = self._turn, None, None
        assert turn is not None
        turn.behind, self._loose = self._loose, []
        if (turn.reason or {}).get("cause") == "user":
            turn.behind = [entry for entry in turn.behind if source_kind(entry.event.data) != _INTERRUPTION]
        turn.end = end
        self._made.turns.append(turn)

    def _step_start(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._turn is None:
            return
        self._step = RecordedStep(event.data["step"])
        self._turn.steps.append(self._step)
        # What was said behind the last step's results stands before what this one begins with.
        loose, self._loose = self._loose, []
        for entry in loose:
            self._enter(entry)

    def _step_end(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._step is not None:
            self._step.interrupted = bool(event.data.get("interrupted"))
            self._step = None

    def _enter(self, entry: Entry) -> None:
        """Something from outside, where the log stands now."""
        step = self._step
        if step is None or (step.attempts and step.attempts[-1].answered):
            self._loose.append(entry)
        elif step.attempts:
            step.attempts[-1].behind.append(entry)
        elif entry.event.type == "user/message" and entry.span is None and not step.inside:
            step.said.append(entry.event.data)
        else:
            step.inside.append(entry)

    def _user(self, event: SessionEvent, span: tuple[int, int] | None) -> None:
        kind = source_kind(event.data)
        if kind == _CORRECTION and span is None and self._turn is not None:
            return
        self._enter(Entry(event, span))

    def _cut(self, event: SessionEvent, span: tuple[int, int] | None) -> None:
        self._enter(Entry(event, span))

    def _message(self, event: SessionEvent, span: tuple[int, int] | None) -> None:
        step = self._step
        if step is None or span is not None:
            self._enter(Entry(event, span))
            return
        last = step.attempts[-1] if step.attempts else None
        if last is None or last.message is not None or last.retried:
            number = event.data.get("attempt") or len(step.attempts) + 1
            last = Attempt(event.seq, number, event.time)
            step.attempts.append(last)
        last.message = event.data

    def _response(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._step is None:
            self._made.stray.append(event.seq)
        else:
            self._step.attempts.append(Attempt(event.seq, event.data["attempt"], event.time, event.data))

    def _retry(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._step is None:
            return
        attempts = self._step.attempts
        if not attempts or attempts[-1].retried or not attempts[-1].failed:
            # Of another program, which says of an attempt that failed only that there was another.
            said = {"error": event.data["error"]}
            attempts.append(Attempt(event.seq, event.data["attempt"], event.time, said))
        attempts[-1].retried = True

    def _result(self, event: SessionEvent, span: tuple[int, int] | None) -> None:
        block = event.data["message"]["content"][0]
        if span is not None or self._step is None:
            self._enter(Entry(event, span))
        else:
            self._step.results.setdefault(block["tool_call_id"], event.data)


_HANDLERS: dict[str, Any] = {
    "profile/bind": RecordingReader._bind,  # pyright: ignore[reportPrivateUsage]
    "profile/model": RecordingReader._switched,  # pyright: ignore[reportPrivateUsage]
    "prompt/submitted": RecordingReader._submission,  # pyright: ignore[reportPrivateUsage]
    "compaction/start": RecordingReader._compaction,  # pyright: ignore[reportPrivateUsage]
    "compaction/request": RecordingReader._summary,  # pyright: ignore[reportPrivateUsage]
    "compaction/response": RecordingReader._summarized,  # pyright: ignore[reportPrivateUsage]
    "compaction/summary": RecordingReader._summarized,  # pyright: ignore[reportPrivateUsage]
    "prompt/completed": RecordingReader._completion,  # pyright: ignore[reportPrivateUsage]
    "turn/start": RecordingReader._turn_start,  # pyright: ignore[reportPrivateUsage]
    "turn/end": RecordingReader._turn_end,  # pyright: ignore[reportPrivateUsage]
    "step/start": RecordingReader._step_start,  # pyright: ignore[reportPrivateUsage]
    "step/end": RecordingReader._step_end,  # pyright: ignore[reportPrivateUsage]
    "user/message": RecordingReader._user,  # pyright: ignore[reportPrivateUsage]
    "surface/cut": RecordingReader._cut,  # pyright: ignore[reportPrivateUsage]
    "assistant/message": RecordingReader._message,  # pyright: ignore[reportPrivateUsage]
    "llm/response": RecordingReader._response,  # pyright: ignore[reportPrivateUsage]
    "llm/retry": RecordingReader._retry,  # pyright: ignore[reportPrivateUsage]
    "tool/result": RecordingReader._result,  # pyright: ignore[reportPrivateUsage]
}

_KNOWN = {type_key(entry.name): entry.name for entry in CORE}
_READ = SURFACE_TYPES | {"request/header"} | _HANDLERS.keys()
_PASSED = frozenset(key for key, name in _KNOWN.items() if name not in _READ)
