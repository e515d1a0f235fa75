"""Reading the script of a log (``Recording``), forwards, a run of lines at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kimi_ray.events import CORE, SURFACE_TYPES, LogHeader, SessionEvent, read_stored, type_key
from kimi_ray.log import Surface
from kimi_ray.replay.malformed import MALFORMED, wrong_shape
from kimi_ray.replay.recording import (
    Attempt,
    Compaction,
    Entry,
    NewLife,
    Outside,
    RecordedStep,
    RecordedTurn,
    Recording,
    Shortening,
    SummaryAsked,
    source_kind,
)

_INTERRUPTION, _CORRECTION = "interruption", "output_schema"
"""Sources of messages that the loop says itself: that the user cancelled the turn, and that an answer does not fit."""

_BY_CALL = ("manual", "region")
"""Triggers of compactions that somebody asked for: each is one for itself."""


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
        self._loose: list[Outside] = []
        """From outside, and not put anywhere yet."""
        self._submitted: list[dict[str, Any]] = []
        self._completed: list[str] = []
        self._compacting: tuple[int, int] | None = None
        self._compaction_open: Compaction | None = None
        self._pruning = False
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
        self._made.tail, self._loose = self._loose, []
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
            if self._step is not None:
                self._step.headed = True
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
        self._made.waiting.append(event.data["prompt_id"])

    def _activated(self, _event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._loose.append(NewLife())

    def _salvaged(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if event.data["lost"]:
            self._made.lost.append(event)

    def _todo(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._step is not None:
            self._step.todos.append(event.data)

    def _compaction(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        found = event.data.get("shadowed_range")
        self._compacting = None if found is None else (found["start"], found["end"])
        seqs, span = self._surface.seqs, None
        if self._compacting is not None and all(seq in seqs for seq in self._compacting):
            span = (seqs.index(self._compacting[0]), seqs.index(self._compacting[1]) + 1)
        opened = self._compaction_open = Compaction(event, span, self._model, self._header)
        place, kind = self._place(), event.data.get("trigger")
        last = place[-1] if place else None
        if not isinstance(last, Shortening) or kind in _BY_CALL or last.trigger in _BY_CALL:
            last = Shortening(event.seq, event.time)
            place.append(last)
        last.compactions.append(opened)

    def _ended(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        opened = self._open_compaction(event.data["compaction_id"])
        if opened is not None:
            opened.end = event
            self._compaction_open = None

    def _open_compaction(self, compaction_id: object) -> Compaction | None:
        opened = self._compaction_open
        return opened if opened is not None and opened.start.data["compaction_id"] == compaction_id else None

    def _prune(self, _event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._pruning = True

    def _pruned(self, entry: Entry) -> None:
        place, self._pruning = self._place(), False
        last = place[-1] if place else None
        if not isinstance(last, Shortening) or last.compactions:
            last = Shortening(entry.event.seq, entry.event.time)
            place.append(last)
        last.prunes.append(entry)

    def _summary(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._compacting is not None:
            asked = SummaryAsked(event, *self._compacting, self._header)
            self._made.summaries.append(asked)
            opened = self._open_compaction(event.data["compaction_id"])
            if opened is not None:
                opened.requests.append(asked)

    def _summarized(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        opened = self._open_compaction(event.data["compaction_id"])
        if opened is not None and event.type == "compaction/summary":
            opened.summary = event
        asked = self._made.summaries[-1] if self._made.summaries else None
        if asked is None or asked.event.data["compaction_id"] != event.data["compaction_id"]:
            return  # a summarizer that asks no model
        if event.type == "compaction/summary":
            asked.summary = event
        elif asked.event.data["attempt"] == event.data["attempt"]:
            asked.response = event

    def _begun(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        for prompt_id in event.data.get("prompt_ids") or [event.data["prompt_id"]]:
            self._no_longer_waits(prompt_id)

    def _no_longer_waits(self, prompt_id: str) -> None:
        if prompt_id in self._made.waiting:
            self._made.waiting.remove(prompt_id)

    def _completion(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        self._no_longer_waits(event.data["prompt_id"])
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
            turn.behind = [one for one in turn.behind if not _is_interruption(one)]
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
            if isinstance(entry, Entry):
                self._enter(entry)
            else:
                self._place().append(entry)

    def _step_end(self, event: SessionEvent, _span: tuple[int, int] | None) -> None:
        if self._step is not None:
            self._step.interrupted = bool(event.data.get("interrupted"))
            self._step = None

    def _enter(self, entry: Entry) -> None:
        """Something from outside, where the log stands now."""
        step = self._step
        place = self._place()
        if step is not None and place is step.inside and not place and _is_plain(entry):
            step.said.append(entry.event.data)
        else:
            place.append(entry)

    def _place(self) -> list[Outside]:
        """Where something from outside belongs, where the log stands now."""
        step = self._step
        if step is None or (step.attempts and step.attempts[-1].answered):
            return self._loose
        return step.attempts[-1].behind if step.attempts else step.inside

    def _user(self, event: SessionEvent, span: tuple[int, int] | None) -> None:
        kind = source_kind(event.data)
        if kind == _CORRECTION and span is None and self._turn is not None:
            return
        source: dict[str, Any] = event.data.get("source") or {}
        opened = self._open_compaction(source.get("compaction_id")) if span is not None else None
        if opened is not None and opened.message is None:
            opened.message = Entry(event, span)
        else:
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
        if span is not None and self._pruning:
            self._pruned(Entry(event, span))
        elif span is not None or self._step is None:
            self._enter(Entry(event, span))
        else:
            self._step.results.setdefault(block["tool_call_id"], event.data)


def _is_plain(entry: Entry) -> bool:
    return entry.event.type == "user/message" and entry.span is None


def _is_interruption(one: Outside) -> bool:
    return isinstance(one, Entry) and source_kind(one.event.data) == _INTERRUPTION


_HANDLERS: dict[str, Any] = {
    "profile/bind": RecordingReader._bind,  # pyright: ignore[reportPrivateUsage]
    "profile/model": RecordingReader._switched,  # pyright: ignore[reportPrivateUsage]
    "prompt/submitted": RecordingReader._submission,  # pyright: ignore[reportPrivateUsage]
    "compaction/start": RecordingReader._compaction,  # pyright: ignore[reportPrivateUsage]
    "compaction/prune": RecordingReader._prune,  # pyright: ignore[reportPrivateUsage]
    "compaction/end": RecordingReader._ended,  # pyright: ignore[reportPrivateUsage]
    "runtime/activated": RecordingReader._activated,  # pyright: ignore[reportPrivateUsage]
    "log/salvaged": RecordingReader._salvaged,  # pyright: ignore[reportPrivateUsage]
    "todo/write": RecordingReader._todo,  # pyright: ignore[reportPrivateUsage]
    "compaction/request": RecordingReader._summary,  # pyright: ignore[reportPrivateUsage]
    "compaction/response": RecordingReader._summarized,  # pyright: ignore[reportPrivateUsage]
    "compaction/summary": RecordingReader._summarized,  # pyright: ignore[reportPrivateUsage]
    "prompt/started": RecordingReader._begun,  # pyright: ignore[reportPrivateUsage]
    "prompt/steered": RecordingReader._begun,  # pyright: ignore[reportPrivateUsage]
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
