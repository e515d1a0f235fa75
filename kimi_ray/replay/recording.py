"""A log as a script: its turns, their steps, what was asked and answered in each, and what came from outside.

Positions, not contents: an attempt knows the seq below which everything stands that its request was made of. What the
loop makes anew in a replay (answers, results) is told from what it cannot make (what users, features and the runtime
said, and what compactions put in the place of something): the latter are ``Entry`` objects, to be put back where they
were. What shortened the conversation (``Shortening``) is in between: today's code does it again at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from kimi_ray.events import LogHeader, SessionEvent


@dataclass(frozen=True, slots=True)
class Entry:
    """An event on the surface that came from outside.

    Attributes:
        event: As it was recorded.
        span: The places on the surface, from the first to behind the last, that it took over; None: it was appended.
    """

    event: SessionEvent
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class NewLife:
    """Here a host took the log, and knew of it what it read."""


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
class Compaction:
    """One compaction, from its start.

    Attributes:
        start: The ``compaction/start``.
        span: The places on the surface, from the first to behind the last, that it is about; None: it does not say.
        model: The model that was bound.
        header: The request header that counted.
        requests: Those for its summary.
        summary: The ``compaction/summary``, or None.
        message: The message that it put in the place of something, or None.
        end: The ``compaction/end``, or None.
    """

    start: SessionEvent
    span: tuple[int, int] | None
    model: str | None
    header: dict[str, Any] | None
    requests: list[SummaryAsked] = field(default_factory=list[SummaryAsked])
    summary: SessionEvent | None = None
    message: Entry | None = None
    end: SessionEvent | None = None

    @property
    def trigger(self) -> str | None:
        """Why it began, as far as that is said."""
        return self.start.data.get("trigger")

    @property
    def error(self) -> dict[str, Any] | None:
        """With which error it ended, or None."""
        return None if self.end is None else self.end.data.get("error")


@dataclass(slots=True)
class Shortening:
    """What shortened the conversation at one place, in one go: first results were pruned, then spans compacted.

    Attributes:
        seq: Of its first event.
        time: When that was recorded, epoch milliseconds.
        prunes: The results that were replaced.
        compactions: The compactions.
    """

    seq: int
    time: int
    prunes: list[Entry] = field(default_factory=list[Entry])
    compactions: list[Compaction] = field(default_factory=list[Compaction])

    @property
    def trigger(self) -> str | None:
        """Why its first compaction began; None: something was pruned, and that was enough."""
        return self.compactions[0].trigger if self.compactions else None

    @property
    def entries(self) -> list[Entry]:
        """What it put in the place of what."""
        return [*self.prunes, *[one.message for one in self.compactions if one.message is not None]]


Ending = Literal["complete", "unanswered", "open", "waiting"]
"""How a log ends. ``complete``: every turn has ended, and no prompt waits. ``unanswered``: in a turn whose last step
has no whole answer of the model. ``open``: in a turn, behind an answer. ``waiting``: with prompts that no turn took up.
"""

Outside = Entry | Shortening | NewLife
"""What a replayed turn does not do itself."""


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
    behind: list[Outside] = field(default_factory=list[Outside])

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
        todos: The data of each ``todo/write``.
        interrupted: It alone was stopped.
        headed: Its request had a header of its own in the log.
    """

    number: int
    said: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    inside: list[Outside] = field(default_factory=list[Outside])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    results: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    todos: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    interrupted: bool = False
    headed: bool = False


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
    before: list[Outside]
    submitted: list[dict[str, Any]]
    completed: list[str]
    model: str | None = None
    header: dict[str, Any] | None = None
    steps: list[RecordedStep] = field(default_factory=list[RecordedStep])
    behind: list[Outside] = field(default_factory=list[Outside])
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
        waiting: The ids of prompts that neither began nor ended.
        tail: What came from outside behind the last turn.
        stray: The seqs of answers outside of any step: what they were asked for is in no turn.
        lost: The marks (``log/salvaged``) of what was lost before the log was saved from damage, a seed's left out.
    """

    header: LogHeader
    seed: list[bytes] = field(default_factory=list[bytes])
    surface: list[SessionEvent] = field(default_factory=list[SessionEvent])
    turns: list[RecordedTurn] = field(default_factory=list[RecordedTurn])
    summaries: list[SummaryAsked] = field(default_factory=list[SummaryAsked])
    bind: dict[str, Any] | None = None
    next_seq: int = 0
    waiting: list[str] = field(default_factory=list[str])
    tail: list[Outside] = field(default_factory=list[Outside])
    stray: list[int] = field(default_factory=list[int])
    lost: list[SessionEvent] = field(default_factory=list[SessionEvent])

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return sum(len(step.attempts) for turn in self.turns for step in turn.steps)

    @property
    def ends(self) -> Ending:
        """How it ends."""
        turn = self.turns[-1] if self.turns else None
        if turn is not None and turn.reason is None:
            last = turn.steps[-1] if turn.steps else None
            answered = last is not None and bool(last.attempts) and last.attempts[-1].answered
            return "open" if answered else "unanswered"
        return "waiting" if self.waiting else "complete"

    @property
    def ends_where(self) -> str:
        """The same in words; empty for one that is complete."""
        kind = self.ends
        if kind in ("complete", "waiting"):
            return "" if kind == "complete" else f"it ends with {len(self.waiting)} prompts that no turn took up"
        turn = self.turns[-1]
        step = f", step {turn.steps[-1].number}" if turn.steps else ""
        what = "the model's answer is not there" if kind == "unanswered" else "the turn has not ended"
        return f"it ends in turn {turn.number}{step}: {what}"


def code_of(data: dict[str, Any]) -> str | None:
    """The code of the error that an event's data has, or None."""
    error: dict[str, Any] = data.get("error") or {}
    return error.get("code")


def source_kind(message: dict[str, Any]) -> str | None:
    """The kind of a message's source."""
    source: dict[str, Any] = message.get("source") or {}
    return source.get("kind")
