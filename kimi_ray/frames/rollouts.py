"""The frame ``rows``: of runs what ``results.jsonl`` says, of other logs what they say by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from kimi_ray.agent.fold import FOLLOWED, AgentFold
from kimi_ray.errors import KimiRayError, RunError
from kimi_ray.events import SessionEvent
from kimi_ray.frames.batches import Batches, Row
from kimi_ray.frames.log_facts import as_json, check_counts
from kimi_ray.frames.reading import Event, Handler
from kimi_ray.frames.sources import FoundLog
from kimi_ray.runs.outcomes import error_of, reason_of_function, status_of, stop_of
from kimi_ray.runs.rows import ResultRow, result_from_line
from kimi_ray.runs.run_directory import RESULTS
from kimi_ray.settings import Usage


def add_run(directory: Path, table: Batches, fault: Callable[[KimiRayError], None]) -> None:
    """The rows of a run directory. A line that is none is told and passed over; one torn by a crash is left out.

    Args:
        directory: The run's.
        table: Takes the rows.
        fault: Told of lines that are no rows; it may raise.
    """
    for number, line in enumerate(_whole_lines(directory / RESULTS, fault), start=1):
        try:
            row = result_from_line(line)
        except RunError as error:
            fault(error.with_details(file=str(directory / RESULTS), line=number))
            continue
        table.add(_of_result(row), len(row.text or ""))


def _whole_lines(path: Path, fault: Callable[[KimiRayError], None]) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]
    except FileNotFoundError:
        return
    except OSError as error:
        fault(
            RunError(
                f"{path} cannot be read: {error.strerror}",
                code="run.unreadable",
                hint="make it readable",
                details={"file": str(path)},
            )
        )


def _of_result(row: ResultRow) -> Row:
    error, timing, usage = row.error, row.timing, row.usage
    return (
        row.run_id,
        row.item_id,
        row.index,
        row.repeat,
        row.attempt,
        len(row.attempts),
        row.seed,
        row.session_id,
        row.agent_id,
        row.last_seq,
        row.status,
        row.stop,
        None if error is None else error.code,
        None if error is None else error.error_class,
        None if error is None else error.message,
        None if error is None else error.model_dump_json(),
        as_json(row.item),
        row.text,
        as_json(row.output),
        as_json(row.scores),
        *_usage(usage),
        row.cost_usd,
        row.total_usage.total,
        row.total_cost_usd,
        row.price_date,
        row.turns,
        row.steps,
        row.tool_calls,
        row.interruptions,
        timing.queued_ms,
        timing.limiter_ms,
        timing.model_ms,
        timing.tools_ms,
        timing.store_ms,
        timing.retry_wait_ms,
        timing.wall_ms,
        row.model.name,
        row.model.served,
        row.model.fingerprint,
        row.node_id,
        None,
        as_json(row.tags),
        as_json(row.metadata),
        "results",
    )


def _usage(usage: Usage) -> tuple[Any, ...]:
    return (
        usage.input,
        usage.cached,
        usage.cache_write,
        usage.output,
        usage.reasoning,
        bool(usage.estimated),
    )


class _LogRow(NamedTuple):
    """What a log says of its agent, with what is needed to count attempts."""

    key: tuple[Any, ...]
    attempt: int
    tokens: int
    row: list[Any]


class LogRows:
    """Makes rows of logs that no run directory tells of: of several attempts at an item the last counts."""

    def __init__(self, table: Batches) -> None:
        self._table = table
        self._known: dict[tuple[Any, ...], list[_LogRow]] = {}

    def fold(self, log: FoundLog) -> RowFold:
        """What follows a log; its row comes with ``finish``."""
        return RowFold(log, self._take)

    def _take(self, row: _LogRow) -> None:
        self._known.setdefault(row.key, []).append(row)

    def finish(self) -> None:
        """All logs were read."""
        for attempts in self._known.values():
            last = max(attempts, key=lambda one: one.attempt)
            last.row[_ATTEMPTS] = len(attempts)
            last.row[_TOTAL_TOKENS] = sum(one.tokens for one in attempts)
            self._table.add(last.row, len(last.row[_TEXT] or ""))


class _Shown:
    """An event as ``AgentFold`` looks at it, filled anew each time: a ``SessionEvent`` costs more than its fold."""

    __slots__ = ("data", "replaced", "seq", "time", "type")

    def show(self, event: Event) -> SessionEvent:
        """The event; until the next call."""
        self.seq = event["seq"]
        self.time = event["time"]
        self.type = event["type"]
        self.data = event["data"]
        surface = event.get("surface")
        self.replaced = None if surface is None or surface == "append" else tuple(surface["replace"])
        return cast("SessionEvent", self)


class RowFold:
    """Follows one log to its row."""

    def __init__(self, log: FoundLog, take: Callable[[_LogRow], None]) -> None:
        self._log = log
        self._take = take
        self._fold = AgentFold(keep_turns=1, seed_bind=log.header.get("bind"))
        self._shown = _Shown()
        self._reason: dict[str, Any] | None = None
        self._turn_open = False
        self._responses = 0
        self._of_messages = Usage()
        self._node: str | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """See ``Fold``."""
        return dict.fromkeys(FOLLOWED, self._follow)

    def _follow(self, event: Event) -> None:
        kind, data = event["type"], event["data"]
        check_counts(data.get("usage"))
        self._fold.apply(self._shown.show(event))
        if kind == "turn/start":
            self._turn_open = True
        elif kind == "turn/end":
            self._turn_open, self._reason = False, data["reason"]
        elif kind == "llm/response":
            self._responses += 1
        elif kind == "assistant/message" and "usage" in data and event.get("surface") == "append":
            usage: dict[str, Any] = data["usage"] or {}
            known = {name: usage[name] for name in Usage.model_fields if name in usage}
            self._of_messages = self._of_messages.plus(Usage.model_construct(**known))
        elif kind == "log/end-seed":
            self._responses, self._of_messages = 0, Usage()
        elif kind == "runtime/activated":
            self._node = data.get("node")
        elif kind == "prompt/completed":
            record = self._fold.prompts.get(data["prompt_id"])
            if record is not None and record.is_rollout:
                self._reason = reason_of_function(data)

    def finish(self, last_seq: int) -> None:
        """See ``Fold``."""
        fold, header, stream = self._fold, self._log.header, self._log.stream
        totals = fold.totals()
        usage = totals.usage if self._responses else self._of_messages  # a log that has no llm/response
        waiting = any(record.state in ("pending", "running") for record in fold.prompts.values())
        stop = "open" if self._reason is None or self._turn_open or waiting else stop_of(self._reason)
        status = "open" if stop == "open" else status_of(stop)
        error = None if stop == "open" or self._reason is None else error_of(stop, self._reason.get("error"))
        newest = next(reversed(fold.turns.values()), None)
        outputs = [record.output for record in fold.prompts.values() if record.output is not None]
        attempt = header.get("attempt")
        key = (header.get("run_id"), header.get("item_id"), header.get("repeat"))
        is_rollout = None not in key
        sampling: dict[str, Any] = (fold.bind or {}).get("sampling") or {}
        row: list[Any] = [
            *key[:2],
            None,
            key[2],
            attempt,
            1,
            sampling.get("seed"),
            *stream,
            last_seq,
            status,
            stop,
            None if error is None else error.code,
            None if error is None else error.error_class,
            None if error is None else error.message,
            None if error is None else error.model_dump_json(),
            None,
            newest.text if newest is not None else None,
            as_json(outputs[-1]) if outputs else None,
            as_json(fold.scores),
            *_usage(usage),
            None,
            usage.total,
            None,
            None,
            totals.turns,
            totals.steps,
            totals.tool_calls,
            totals.interruptions,
            totals.queued_ms,
            totals.limiter_ms,
            totals.model_ms,
            totals.tools_ms,
            totals.store_ms,
            totals.retry_wait_ms,
            totals.wall_ms,
            fold.model_name,
            fold.served_model,
            fold.fingerprint,
            self._node,
            header.get("profile"),
            None,
            None,
            "log",
        ]
        self._take(_LogRow((*key, stream if not is_rollout else None), int(attempt or 1), usage.total, row))


_ATTEMPTS, _TEXT, _TOTAL_TOKENS = 5, 17, 27
"""Places in a row; a test holds them against the columns."""
