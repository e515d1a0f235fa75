"""The frames as Arrow tables, all of them from one pass over the logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.frames.batches import Batches, Problem, Sink, pyarrow
from kimi_ray.frames.calls import ModelCallsFold, ToolCallsFold
from kimi_ray.frames.conversation import MessagesFold
from kimi_ray.frames.log_facts import LogFacts
from kimi_ray.frames.reading import Fold, LogFault, read_log
from kimi_ray.frames.rollouts import LogRows, add_run
from kimi_ray.frames.schemas import FRAMES, columns
from kimi_ray.frames.sources import Finder, FoundLog, Source, Sources
from kimi_ray.frames.steps import StepsFold

Table: TypeAlias = Any
"""A ``pyarrow.Table``; the library has no types."""
OnDamage = Literal["raise", "skip"]

_PROBLEMS: Final = b"kimi_ray.problems"
_PROBLEMS_KEPT: Final = 1000
_FOLDS: Final[dict[str, Callable[[LogFacts, Batches], Fold]]] = {
    "steps": StepsFold,
    "model_calls": ModelCallsFold,
    "tool_calls": ToolCallsFold,
    "messages": MessagesFold,
}


def rows(sources: Sources, *, home: Source | None = None, on_damage: OnDamage = "raise") -> Table:
    """One row for each rollout of a run, or for each agent of a session. See docs/frames.md for the columns.

    Args:
        sources: A run directory, a run id (``run_...``), a session id, ``SESSION/AGENT``, or the zip of
            ``sessions export``; or several. What is named twice comes once.
        home: Where the logs are; None takes the home that a run was written with, and else the configured one.
        on_damage: ``raise`` stops at the first thing that cannot be read; ``skip`` goes on without it, and
            ``problems(table)`` tells what that was.

    Returns:
        A ``pyarrow.Table``.

    Raises:
        ConfigError: ``frames.bad_source``; SessionError: ``session.not_found``; RunError, StoreError, LogError: for
            what cannot be read.
    """
    return tables(sources, ("rows",), home=home, on_damage=on_damage)["rows"]


def steps(
    sources: Sources, *, home: Source | None = None, on_damage: OnDamage = "raise", copied: bool = False
) -> Table:
    """One row for each step: a model request with the tools that it asks for.

    Args:
        sources: See ``rows``.
        home: See ``rows``.
        on_damage: See ``rows``.
        copied: Of forks also what the log that they began as had before; else every event counts once.

    Raises:
        KimiRayError: See ``rows``.
    """
    return tables(sources, ("steps",), home=home, on_damage=on_damage, copied=copied)["steps"]


def model_calls(
    sources: Sources, *, home: Source | None = None, on_damage: OnDamage = "raise", copied: bool = False
) -> Table:
    """One row for each attempt at the model, failed ones too. Arguments and errors as for ``steps``."""
    return tables(sources, ("model_calls",), home=home, on_damage=on_damage, copied=copied)["model_calls"]


def tool_calls(
    sources: Sources, *, home: Source | None = None, on_damage: OnDamage = "raise", copied: bool = False
) -> Table:
    """One row for each call of a tool that a model asked for. Arguments and errors as for ``steps``."""
    return tables(sources, ("tool_calls",), home=home, on_damage=on_damage, copied=copied)["tool_calls"]


def messages(
    sources: Sources, *, home: Source | None = None, on_damage: OnDamage = "raise", copied: bool = False
) -> Table:
    """One row for each message, those too that the model sees no more. Arguments and errors as for ``steps``."""
    return tables(sources, ("messages",), home=home, on_damage=on_damage, copied=copied)["messages"]


def tables(
    sources: Sources,
    names: Iterable[str] = FRAMES,
    *,
    home: Source | None = None,
    on_damage: OnDamage = "raise",
    copied: bool = False,
) -> dict[str, Table]:
    """Several frames from one pass over the logs. Arguments and errors as for ``steps``; ``names`` says which.

    Raises:
        ConfigError: ``frames.unknown``.
    """
    wanted = tuple(dict.fromkeys((names,) if isinstance(names, str) else names))
    batches: dict[str, list[Any]] = {}
    schemas: dict[str, Any] = {}

    def sink(name: str, schema: Any) -> Callable[[Any], None]:
        batches[name], schemas[name] = [], schema
        return batches[name].append

    reading = read_frames(sources, wanted, sink, home=home, on_damage=on_damage, copied=copied)
    pa = pyarrow()
    told = json.dumps(reading.problems, ensure_ascii=False, default=str).encode("utf-8", "replace")
    made: dict[str, Table] = {}
    for name in wanted:
        table = pa.Table.from_batches(batches[name], schemas[name])
        made[name] = table.replace_schema_metadata({**(schemas[name].metadata or {}), _PROBLEMS: told})
    return made


def problems(table: Table) -> list[Problem]:
    """What could not be read when the table was made with ``on_damage="skip"``, each ``{code, message, details}``."""
    metadata: dict[bytes, bytes] = table.schema.metadata or {}
    told = metadata.get(_PROBLEMS)
    return [] if told is None else json.loads(told)


class Reading:
    """What a pass over the sources came to."""

    def __init__(self, on_damage: OnDamage) -> None:
        if on_damage not in ("raise", "skip"):
            raise ConfigError(f"on_damage is {on_damage!r}", code="request.invalid", hint='use "raise" or "skip"')
        self.problems: list[Problem] = []
        """The first thousand things that could not be read."""
        self.logs = 0
        self.events = 0
        self.counts: dict[str, int] = {}
        """Rows by frame."""
        self.damaged = False
        self._raises = on_damage == "raise"

    def fault(self, error: KimiRayError) -> None:
        """Something cannot be read."""
        if self._raises:
            raise error
        data = error.to_data()
        self.problem({"code": data["code"], "message": data["message"], "details": data.get("details") or {}})

    def problem(self, problem: Problem) -> None:
        """As ``fault``, told as data."""
        if self._raises:
            raise KimiRayError(problem["message"], code=problem["code"], details=problem["details"])
        self.damaged = True
        if len(self.problems) < _PROBLEMS_KEPT:
            self.problems.append(problem)


def read_frames(
    sources: Sources,
    names: Sequence[str],
    sink: Sink,
    *,
    home: Source | None,
    on_damage: OnDamage,
    copied: bool,
) -> Reading:
    """One pass: record batches go to the sinks of their frames as they are made.

    Args:
        sources: See ``rows``.
        names: The frames.
        sink: Gives the taker of a frame's batches.
        home: See ``rows``.
        on_damage: See ``rows``.
        copied: See ``steps``.
    """
    for name in names:
        columns(name)
    reading = Reading(on_damage)
    finder = Finder(home)
    try:
        of_logs = [name for name in names if name != "rows"]
        found = finder.find(sources, logs=bool(of_logs))
        made = {name: Batches(name, sink, reading.problem) for name in names}
        for error in found.faults:
            reading.fault(error)
        log_rows = LogRows(made["rows"]) if "rows" in made else None
        if log_rows is not None:
            for directory in found.runs:
                add_run(directory, made["rows"], reading.fault)
        for log in found.logs:
            rows_of_logs = log_rows if found.tells_row(log) else None
            _read(log, made, of_logs, rows_of_logs, reading, copied=copied)
        if log_rows is not None:
            log_rows.finish()
    finally:
        finder.close()
    for name, table in made.items():
        table.flush()
        reading.counts[name] = table.count
    return reading


def _read(
    log: FoundLog,
    made: dict[str, Batches],
    of_logs: list[str],
    log_rows: LogRows | None,
    reading: Reading,
    *,
    copied: bool,
) -> None:
    def named(error: KimiRayError) -> None:
        reading.fault(error.with_details(session_id=log.stream.session_id, agent_id=log.stream.agent_id))

    def fault(found: LogFault) -> None:
        named(found.error.with_details(ends_here=True) if found.ends else found.error)

    facts = LogFacts(log, copied=copied, lost=named)
    folds: list[Fold] = [_FOLDS[name](facts, made[name]) for name in of_logs]
    if log_rows is not None:
        folds.append(log_rows.fold(facts))
    if folds:
        reading.events += read_log(log.place.lines(log.stream), folds, fault)
        reading.logs += 1
