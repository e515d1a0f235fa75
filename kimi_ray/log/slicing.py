"""Where a log can be cut, and what is known at the cut: one pass over stored lines, most of which are not parsed.

The rules of the places:

- through turn N: behind its ``turn/end`` and the ``prompt/completed`` events that settle it. What came between turns
  (an undo, another model) comes with the turn behind it.
- through step S of turn N: behind its ``step/end``, so with its tool results.
- before turn N: before its ``turn/start``, and before the submission of its prompt where that stands directly in
  front. A prompt that had waited was submitted far earlier: its submission is in the copy, and pending submissions
  end at ``log/end-seed``. Nothing that the model sees lies in between, so the messages are those that it had then.

Turns and steps without their end (a crash; another program's log) end where the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent, event_from_data, glance, type_key
from kimi_ray.ids import agent_number
from kimi_ray.log.order import Order

WhereKind = Literal["end", "turn", "step", "before", "seq", "time"]


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a log.

    ``end``: behind all of it; ``turn`` and ``step``: through these; ``before``: as the log was when the turn began;
    ``seq``: before the event with the seq ``number``; ``time``: before the first event later than ``number``.
    """

    kind: WhereKind
    number: int = 0
    """The turn, the seq, or epoch milliseconds."""
    step: int = 0


WHOLE = Where("end")


@dataclass(frozen=True, slots=True)
class ChildPosition:
    """Where a child stood, by the last word that its parent's log has on it; None where it says nothing.

    ``spawned`` is False for an agent whose position is told but not that it is a child of this one.
    """

    seq: int | None = None
    epoch: int | None = None
    spawned: bool = False


@dataclass(frozen=True, slots=True)
class LogSlice:
    """A log up to a cut.

    Attributes:
        cut: The seq after its last event.
        order: What is open there.
        last_time: Time of its last event, epoch milliseconds; 0 for none.
        latest_time: The latest time of any of its events.
        epoch: Of the writer of its last event, by ``runtime/activated``; None when the log does not say, as between
            the end of a seed and the first activation.
        node: The node of the last ``runtime/activated``.
        bind: The newest ``profile/bind`` that this life of the log wrote (behind its seed).
        model: The newest ``profile/model`` behind that.
        seed_bind: The newest ``profile/bind`` in the seed.
        seed_model: The newest ``profile/model`` behind that, in the seed.
        prompt: The content of the last message of the user.
        reason: Of the last ended turn.
        children: Agents that this log speaks of.
        highest_agent: The highest number of an agent that it names, 0 for none.
        lost: Whether a salvage lost events before the cut: seqs told elsewhere do not fit then.
    """

    cut: int
    order: Order
    last_time: int
    latest_time: int
    epoch: int | None
    node: str | None
    bind: dict[str, Any] | None
    model: str | None
    seed_bind: dict[str, Any] | None
    seed_model: str | None
    prompt: list[dict[str, Any]] | None
    reason: dict[str, Any] | None
    children: dict[str, ChildPosition]
    highest_agent: int
    lost: bool


@dataclass(slots=True)
class _Submission:
    """A ``prompt/submitted`` or ``prompt/queued``, and the times before it."""

    seq: int
    line: bytes
    last_time: int
    latest_time: int


@dataclass(slots=True)
class LogScanner:
    """Reads a log from its first line until it knows the slice.

    Args:
        where: The place to cut at.
        seed_length: The header's: what comes before is another log's.
        inherited: So many events are another agent's history: the children that they speak of are not this one's.
        ended: Nobody writes the log any more: a turn or step that is open at its end has ended there.
    """

    where: Where
    seed_length: int = 0
    inherited: int = 0
    ended: bool = False
    slice: LogSlice | None = None
    turns: int = 0
    """How many turns began: their numbers are below."""
    steps: int = 0
    """How many steps of the asked turn began."""
    _next_seq: int = 0
    _order: Order = field(default_factory=Order)
    _last_time: int = 0
    _latest_time: int = 0
    _epoch: int | None = None
    _node: str | None = None
    _binds: list[dict[str, Any] | None] = field(default_factory=lambda: [None, None])
    _models: list[str | None] = field(default_factory=lambda: [None, None])
    _prompt: list[dict[str, Any]] | None = None
    _reason: dict[str, Any] | None = None
    _children: dict[str, ChildPosition] = field(default_factory=dict[str, ChildPosition])
    _highest: int = 0
    _lost: bool = False
    _exchange: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """The open step's messages, calls and results: parsed only if the cut leaves them open."""
    _submissions: list[_Submission] = field(default_factory=list[_Submission])
    """Those that stand directly behind each other, up to the newest."""
    _settling: bool = False
    """The asked turn has ended; its prompts may still be settled."""
    _ends_behind: bool = False
    """The event that is being looked at is the last one."""

    @property
    def next_seq(self) -> int:
        """The seq of the next line that is wanted."""
        return self._next_seq

    @property
    def open_turn(self) -> int | None:
        """The turn that is open behind what was read."""
        return self._order.open_turn

    @property
    def open_step(self) -> int | None:
        """The step that is open behind what was read."""
        return self._order.open_step

    def feed(self, lines: Sequence[bytes]) -> bool:
        """The next lines, canonical and without newline; True when the slice is known and no more are wanted.

        Raises:
            LogError: ``log.not_json``, ``log.bad_envelope``, ``log.bad_payload``.
        """
        if self.slice is not None:
            return True
        stops_at = self.where.number if self.where.kind == "seq" else -1
        stops_after = self.where.number if self.where.kind == "time" else None
        for seq, line in enumerate(lines, self._next_seq):
            if seq == stops_at:
                return self._done(seq)
            parts = line.split(b",", 3)
            stamp = parts[1][7:] if len(parts) > 3 and parts[0] == b'{"seq":%d' % seq else b""
            if stamp.isdigit():
                time, handler = int(stamp), _HANDLERS.get(parts[2])
            else:
                event = glance(line, at=seq)  # another spelling, or not an event: which says why
                time, handler = event.time, _HANDLERS.get(type_key(event.type))
            if stops_after is not None and time > stops_after:
                return self._done(seq)
            if self._settling and handler is not _settled:
                return self._done(seq)
            self._next_seq = seq + 1
            if handler is not None:
                try:
                    if handler(self, seq, line):
                        return True
                except _MALFORMED as error:
                    raise _bad_payload(seq, error) from error
            self._last_time = time
            self._latest_time = max(self._latest_time, time)
            if self._ends_behind:
                return self._done(seq + 1)
        return False

    def finish(self) -> LogSlice | None:
        """There are no more lines: the slice, or None when the log has no such place."""
        if self.slice is None:
            where, order, end = self.where, self._order, self._next_seq
            reached = where.kind in ("end", "time") or (where.kind == "seq" and where.number == end) or self._settling
            if self.ended and where.kind in ("turn", "step") and order.open_turn == where.number:
                reached = reached or where.kind == "turn" or order.open_step == where.step
            if reached:
                self._done(end)
        return self.slice

    def _done(self, cut: int) -> bool:
        for seq, line in self._exchange:
            try:
                self._order.apply(_event(seq, line))
            except _MALFORMED as error:
                raise _bad_payload(seq, error) from error
        self.slice = LogSlice(
            cut=cut,
            order=self._order,
            last_time=self._last_time,
            latest_time=self._latest_time,
            epoch=self._epoch,
            node=self._node,
            bind=self._binds[1],
            model=self._models[1],
            seed_bind=self._binds[0],
            seed_model=self._models[0],
            prompt=self._prompt,
            reason=self._reason,
            children=self._children,
            highest_agent=self._highest,
            lost=self._lost,
        )
        return True

    # -- what is looked at; each returns True when the slice is known ------------------------------------------------

    def _turn_start(self, seq: int, line: bytes) -> bool:
        event = _event(seq, line)
        turn: int = event.data["turn"]
        where = self.where
        if where.kind == "before" and turn == where.number:
            return self._done(self._before_submissions(seq, set(event.data.get("prompts") or ())))
        if where.kind in ("turn", "step") and self._order.open_turn == where.number != turn and self._reached_open():
            return self._done(seq)
        self._submissions.clear()
        self._exchange.clear()
        self._order.open_step = None
        self._order.apply(event)
        self.turns = max(self.turns, turn + 1)
        return False

    def _reached_open(self) -> bool:
        """Whether the asked turn, or the asked step of it, is open."""
        return self.where.kind == "turn" or self._order.open_step == self.where.step

    def _turn_end(self, seq: int, line: bytes) -> bool:
        event = _event(seq, line)
        where, order = self.where, self._order
        asked = order.open_turn == where.number
        if asked and where.kind == "step" and order.open_step == where.step:
            return self._done(seq)
        self._exchange.clear()
        order.apply(event)
        self._reason = event.data["reason"]
        self._told(event)
        self._settling = asked and where.kind == "turn"
        return False

    def _step_start(self, seq: int, line: bytes) -> bool:
        event = _event(seq, line)
        where, order = self.where, self._order
        if order.open_turn == where.number and where.kind == "step" and order.open_step == where.step:
            return self._done(seq)
        if event.data["turn"] == where.number:
            self.steps = max(self.steps, int(event.data["step"]) + 1)
        self._exchange.clear()
        order.apply(event)
        return False

    def _step_end(self, seq: int, line: bytes) -> bool:
        event = _event(seq, line)
        where, data = self.where, event.data
        self._exchange.clear()
        self._order.apply(event)
        self._told(event)
        self._ends_behind = where.kind == "step" and (data["turn"], data["step"]) == (where.number, where.step)
        return False

    def _in_step(self, seq: int, line: bytes) -> bool:
        if self._order.open_step is not None:
            self._exchange.append((seq, line))
        return False

    def _compaction(self, seq: int, line: bytes) -> bool:
        self._order.apply(_event(seq, line))
        return False

    def _seeded(self, seq: int, line: bytes) -> bool:
        self._epoch = None  # written by whoever made the copy
        self._order.open_compaction = None
        return False

    def _user_message(self, seq: int, line: bytes) -> bool:
        event = _event(seq, line)
        source: dict[str, Any] = event.data.get("source") or {}
        if event.surface == "append" and source.get("kind", "user") == "user":
            content: Any = event.data["content"]
            self._prompt = content if isinstance(content, list) else None
        return False

    def _submission(self, seq: int, line: bytes) -> bool:
        if self.where.kind == "before":
            if self._submissions and self._submissions[-1].seq != seq - 1:
                self._submissions.clear()
            self._submissions.append(_Submission(seq, line, self._last_time, self._latest_time))
        return False

    def _before_submissions(self, seq: int, prompts: set[str]) -> int:
        """The seq of the first event, directly before ``seq``, that belongs to these prompts."""
        for one in reversed(self._submissions):
            if one.seq != seq - 1 or _event(one.seq, one.line).data["prompt_id"] not in prompts:
                break
            seq, self._last_time, self._latest_time = one.seq, one.last_time, one.latest_time
        return seq

    def _completed(self, seq: int, line: bytes) -> bool:
        if self._settling and _event(seq, line).data.get("turn") != self.where.number:
            self._next_seq = seq
            return self._done(seq)
        return False

    def _activated(self, seq: int, line: bytes) -> bool:
        data = _event(seq, line).data
        self._epoch, self._node = data["epoch"], data.get("node")
        self._order.open_compaction = None
        return False

    def _bind(self, seq: int, line: bytes) -> bool:
        own = seq >= self.seed_length
        self._binds[own] = _event(seq, line).data
        self._models[own] = None
        return False

    def _model(self, seq: int, line: bytes) -> bool:
        self._models[seq >= self.seed_length] = str(_event(seq, line).data["model"])
        return False

    def _child(self, seq: int, line: bytes) -> bool:
        event = _event(seq, line)
        self._position(seq, str(event.data["agent_id"]), event.data, spawned=event.type == "subagent/spawned")
        return False

    def _swarm_end(self, seq: int, line: bytes) -> bool:
        self._told(_event(seq, line))
        return False

    def _salvaged(self, seq: int, line: bytes) -> bool:
        self._lost = self._lost or bool(_event(seq, line).data.get("lost"))
        return False

    def _told(self, event: SessionEvent) -> None:
        positions: dict[str, Any] = event.data.get("agents") or {}
        for agent_id, position in positions.items():
            self._position(event.seq, agent_id, position, spawned=False)

    def _position(self, at: int, agent_id: str, told: dict[str, Any], *, spawned: bool) -> None:
        self._highest = max(self._highest, agent_number(agent_id) or 0)
        if at < self.inherited:
            return
        known = self._children.get(agent_id, ChildPosition())
        seq, epoch = told.get("seq"), told.get("epoch")
        if seq is None:
            seq, epoch = known.seq, known.epoch
        self._children[agent_id] = ChildPosition(seq, epoch, known.spawned or spawned)


_settled: Callable[[LogScanner, int, bytes], bool] = LogScanner._completed  # pyright: ignore[reportPrivateUsage]

_HANDLERS: dict[bytes, Callable[[LogScanner, int, bytes], bool]] = {
    type_key(name): handler
    for names, handler in {
        "turn/start": LogScanner._turn_start,  # pyright: ignore[reportPrivateUsage]
        "turn/end": LogScanner._turn_end,  # pyright: ignore[reportPrivateUsage]
        "step/start": LogScanner._step_start,  # pyright: ignore[reportPrivateUsage]
        "step/end": LogScanner._step_end,  # pyright: ignore[reportPrivateUsage]
        "assistant/message tool/call tool/result": LogScanner._in_step,  # pyright: ignore[reportPrivateUsage]
        "compaction/start compaction/end": LogScanner._compaction,  # pyright: ignore[reportPrivateUsage]
        "user/message": LogScanner._user_message,  # pyright: ignore[reportPrivateUsage]
        "prompt/submitted prompt/queued": LogScanner._submission,  # pyright: ignore[reportPrivateUsage]
        "prompt/completed": _settled,
        "runtime/activated": LogScanner._activated,  # pyright: ignore[reportPrivateUsage]
        "profile/bind": LogScanner._bind,  # pyright: ignore[reportPrivateUsage]
        "profile/model": LogScanner._model,  # pyright: ignore[reportPrivateUsage]
        "subagent/spawned subagent/started subagent/suspended subagent/completed subagent/failed": (
            LogScanner._child  # pyright: ignore[reportPrivateUsage]
        ),
        "swarm/end": LogScanner._swarm_end,  # pyright: ignore[reportPrivateUsage]
        "log/forked log/end-seed": LogScanner._seeded,  # pyright: ignore[reportPrivateUsage]
        "log/salvaged": LogScanner._salvaged,  # pyright: ignore[reportPrivateUsage]
    }.items()
    for name in names.split()
}


def slice_log(
    lines: Sequence[bytes], where: Where, *, seed_length: int = 0, inherited: int = 0, ended: bool = False
) -> LogSlice | None:
    """The slice of a whole log in memory, or None when it has no such place. See ``LogScanner``."""
    scanner = LogScanner(where, seed_length, inherited, ended)
    scanner.feed(lines)
    return scanner.finish()


_MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""What reading a payload of another shape raises."""


def _event(seq: int, line: bytes) -> SessionEvent:
    return event_from_data(from_json(line), line=line, at=seq)


def _bad_payload(seq: int, error: Exception) -> LogError:
    return LogError(
        f"event {seq} does not have the payload of its type: {error.__class__.__name__}: {error}",
        code="log.bad_payload",
        hint="kimi_ray.events.payloads says what each type carries",
        details={"seq": seq},
    )
