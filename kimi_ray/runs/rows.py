"""The rows of a run: one per key in ``results.jsonl``, one per attempt in ``attempts.jsonl``. Format version 1.

The keys and their order are a contract with whoever reads these files. Every key is always there; None means "not
known" or "does not apply".
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json

from kimi_ray.errors import RunError
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.outcomes import RowError, RowStatus
from kimi_ray.settings import Settings, Usage

ROW_VERSION = 1


class Timing(Settings):
    """Where a rollout's time went, milliseconds of the monotonic clock. The parts need not add up to ``wall_ms``."""

    queued_ms: int = 0
    """From the start of the run (or of the retry) to the first turn."""
    limiter_ms: int = 0
    """Waiting for a free connection of the model."""
    model_ms: int = 0
    tools_ms: int = 0
    store_ms: int = 0
    """Waiting for durability."""
    retry_wait_ms: int = 0
    """Waiting between attempts of a model request."""
    wall_ms: int = 0


class RowModel(Settings):
    """The model asked for, and what the server said it is."""

    name: str | None = None
    served: str | None = None
    fingerprint: str | None = None


class _Row(Settings):
    # A newer release may add keys; this one must still read its rows.
    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)

    def to_line(self) -> bytes:
        """The row as a line of its file, final ``\\n`` included."""
        return self.model_dump_json().encode() + b"\n"


_RowT = TypeVar("_RowT", bound=_Row)


class AttemptSummary(Settings):
    """An attempt as its result row lists it; the whole of it is in ``attempts.jsonl``."""

    attempt: int = Field(ge=1)
    seed: int
    status: RowStatus
    stop: str
    error: RowError | None = None
    session_id: str | None = None
    agent_id: str | None = None
    last_seq: int | None = None
    usage: Usage = Usage()
    cost_usd: float | None = None
    wall_ms: int = 0


class AttemptRow(_Row):
    """One attempt of a rollout, however it ended."""

    v: Literal[1] = ROW_VERSION
    run_id: str
    item_id: str
    index: int = Field(ge=0)
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=1)
    """Counted from 1, over all runs and resumes of this key."""
    seed: int
    session_id: str | None = None
    agent_id: str | None = None
    last_seq: int | None = None
    """The last durable event of the attempt's log."""
    status: RowStatus
    stop: str
    """The kind of the turn's end, ``limit:<name>``, or why it was never started."""
    error: RowError | None = None
    text: str | None = None
    output: Any = None
    scores: dict[str, Any] = Field(default_factory=dict)
    usage: Usage = Usage()
    cost_usd: float | None = None
    price_date: str | None = None
    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    interruptions: int = 0
    timing: Timing = Timing()
    model: RowModel = RowModel()
    node_id: str | None = None

    @property
    def key(self) -> RolloutKey:
        """The rollout's identity."""
        return RolloutKey(self.item_id, self.repeat)

    def summary(self) -> AttemptSummary:
        """The attempt as its result row lists it."""
        return AttemptSummary(
            attempt=self.attempt,
            seed=self.seed,
            status=self.status,
            stop=self.stop,
            error=self.error,
            session_id=self.session_id,
            agent_id=self.agent_id,
            last_seq=self.last_seq,
            usage=self.usage,
            cost_usd=self.cost_usd,
            wall_ms=self.timing.wall_ms,
        )


class ResultRow(_Row):
    """What became of one rollout: the last attempt's facts, and a list of all attempts.

    ``usage``, ``cost_usd``, ``timing`` and the counts are the last attempt's, the one whose log the row points at;
    earlier attempts have theirs in ``attempts``. A ``SwarmReport`` sums over all of them.
    """

    v: Literal[1] = ROW_VERSION
    run_id: str
    item_id: str
    index: int = Field(ge=0)
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=0)
    """The number of the last attempt, counted from 1; 0 when none was started."""
    seed: int | None = None
    session_id: str | None = None
    agent_id: str | None = None
    last_seq: int | None = None
    status: RowStatus
    stop: str
    error: RowError | None = None
    item: Any
    """All columns of the item, or its bare string."""
    text: str | None = None
    output: Any = None
    scores: dict[str, Any] = Field(default_factory=dict)
    usage: Usage = Usage()
    cost_usd: float | None = None
    price_date: str | None = None
    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    interruptions: int = 0
    timing: Timing = Timing()
    attempts: tuple[AttemptSummary, ...] = ()
    model: RowModel = RowModel()
    node_id: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> RolloutKey:
        """The rollout's identity."""
        return RolloutKey(self.item_id, self.repeat)

    @property
    def total_usage(self) -> Usage:
        """Tokens of all attempts."""
        total = Usage()
        for attempt in self.attempts:
            total = total.plus(attempt.usage)
        return total if self.attempts else self.usage

    @property
    def total_cost_usd(self) -> float | None:
        """Cost of all attempts; None when no attempt has a known price."""
        known = [attempt.cost_usd for attempt in self.attempts if attempt.cost_usd is not None]
        return sum(known) if known else self.cost_usd

    @classmethod
    def of_attempts(
        cls,
        attempts: tuple[AttemptRow, ...],
        *,
        item: Any,
        tags: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> ResultRow:
        """The row of a rollout whose attempts are these, in order; the last one decides."""
        last = attempts[-1]
        facts = {name: getattr(last, name) for name in AttemptRow.model_fields}
        return cls(
            **facts,
            item=item,
            attempts=tuple(attempt.summary() for attempt in attempts),
            tags=tags or {},
            metadata=metadata or {},
        )

    @classmethod
    def not_started(
        cls,
        *,
        run_id: str,
        key: RolloutKey,
        index: int,
        item: Any,
        stop: str,
        attempts: tuple[AttemptRow, ...] = (),
        tags: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> ResultRow:
        """The row of a key that was never started; ``stop`` says why: ``cancelled``, ``limit:<name>``, ``fail_on``."""
        return cls(
            run_id=run_id,
            item_id=key.item_id,
            index=index,
            repeat=key.repeat,
            attempt=attempts[-1].attempt if attempts else 0,
            status="not_started",
            stop=stop,
            item=item,
            attempts=tuple(attempt.summary() for attempt in attempts),
            tags=tags or {},
            metadata=metadata or {},
        )


def result_from_line(line: bytes) -> ResultRow:
    """Read a line of ``results.jsonl``.

    Raises:
        RunError: ``run.bad_row``; ``run.version_unsupported`` for a row of another version.
    """
    return _parsed(ResultRow, line)


def attempt_from_line(line: bytes) -> AttemptRow:
    """Read a line of ``attempts.jsonl``. Raises as ``result_from_line`` does."""
    return _parsed(AttemptRow, line)


def _parsed(kind: type[_RowT], line: bytes) -> _RowT:
    try:
        value: Any = from_json(line)
    except ValueError as error:
        raise RunError(f"a row is not JSON: {error}", code="run.bad_row") from None
    version: Any = value.get("v") if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  checked below by the model
    if version != ROW_VERSION:
        raise RunError(
            f"a row has version {version!r}, this program reads {ROW_VERSION}",
            code="run.version_unsupported",
            hint="use the release that wrote it",
            details={"version": version},
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunError(f"a row's {where} is wrong: {first['msg']}", code="run.bad_row") from None
