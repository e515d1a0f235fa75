"""The frame ``rows``: of runs what ``results.jsonl`` says, of other logs what they say by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from kimi_ray.agent.fold import FOLLOWED, AgentFold
from kimi_ray.errors import KimiRayError, RunError
from kimi_ray.events import SessionEvent
from kimi_ray.frames.batches import Batches, Row
from kimi_ray.frames.log_facts import LogFacts, ModelNames, as_json, check_counts
from kimi_ray.frames.prices import Prices
from kimi_ray.frames.reading import Event, Handler
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
        None,
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
    cost: float | None
    row: list[Any]


class LogRows:
    """Makes rows of logs that no run directory tells of: of several attempts at an item the last counts."""

    def __init__(self, table: Batches) -> None:
        self._table = table
        self._known: dict[tuple[Any, ...], list[_LogRow]] = {}

    def fold(self, facts: LogFacts) -> RowFold:
        """What follows a log; its row comes with ``finish``."""
        return RowFold(facts, self._take)

    def _take(self, row: _LogRow) -> None:
        self._known.setdefault(row.key, []).append(row)

    def finish(self) -> None:
        """All logs were read."""
        for attempts in self._known.values():
            last = max(attempts, key=lambda one: one.attempt)
            last.row[_ATTEMPTS] = len(attempts)
            last.row[_TOTAL_TOKENS] = sum(one.tokens for one in attempts)
            costs = [one.cost for one in attempts if one.cost is not None]
            last.row[_TOTAL_COST] = sum(costs) if len(costs) == len(attempts) else None
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


_COUNTS = ("input", "cached", "cache_write", "output", "reasoning")


class _Used:
    """Tokens by model: an agent may have spoken to several."""

    def __init__(self) -> None:
        self._by_model: dict[tuple[str | None, str | None], list[int]] = {}
        self._estimated = False

    def add(self, usage: dict[str, Any] | None, model: tuple[str | None, str | None]) -> None:
        """What a request took."""
        if not usage:
            return
        counts = self._by_model.get(model)
        if counts is None:
            counts = self._by_model[model] = [0] * len(_COUNTS)
        for place, name in enumerate(_COUNTS):
            counts[place] += usage.get(name, 0)
        self._estimated = self._estimated or bool(usage.get("estimated"))

    def sum(self) -> Usage:
        """Of all models."""
        whole = map(sum, zip(*self._by_model.values(), strict=True))
        return Usage.model_construct(**dict(zip(_COUNTS, whole, strict=False)), estimated=self._estimated or None)

    def cost(self, prices: Prices, model: tuple[str | None, str | None]) -> float | None:
        """US dollars; None when one of the models has no known price; ``model`` is the agent's own."""
        parts = self._by_model or {model: [0] * len(_COUNTS)}
        costs = [prices.cost(dict(zip(_COUNTS, counts, strict=True)), *whose) for whose, counts in parts.items()]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None


class RowFold:
    """Follows one log to its row."""

    def __init__(self, facts: LogFacts, take: Callable[[_LogRow], None]) -> None:
        self._facts = facts
        self._take = take
        self._fold = AgentFold(keep_turns=1, seed_bind=facts.header.get("bind"))
        self._names = ModelNames(facts)
        self._follow_names = self._names.handlers()
        self._summing: str | None = None
        self._of_responses = _Used()
        self._shown = _Shown()
        self._reason: dict[str, Any] | None = None
        self._turn_open = False
        self._responses = 0
        self._of_messages = _Used()
        self._node: str | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """See ``Fold``."""
        return dict.fromkeys(FOLLOWED | {"compaction/request"}, self._follow)

    def _follow(self, event: Event) -> None:
        kind, data = event["type"], event["data"]
        check_counts(data.get("usage"))
        self._fold.apply(self._shown.show(event))
        follow_name = self._follow_names.get(kind)
        if follow_name is not None:
            follow_name(event)
        if kind == "turn/start":
            self._turn_open = True
        elif kind == "turn/end":
            self._turn_open, self._reason = False, data["reason"]
        elif kind == "llm/response":
            self._responses += 1
            self._of_responses.add(data.get("usage"), (self._names.name, self._names.requested))
        elif kind == "compaction/request":
            self._summing = data.get("model")
        elif kind == "compaction/response":
            self._responses += 1
            self._of_responses.add(data.get("usage"), (self._names.latest or self._names.name, self._summing))
        elif kind == "assistant/message" and "usage" in data and event.get("surface") == "append":
            self._of_messages.add(data["usage"], (self._names.name, self._names.requested))
        elif kind == "log/end-seed":
            self._responses, self._of_messages, self._of_responses = 0, _Used(), _Used()
        elif kind == "runtime/activated":
            self._node = data.get("node")
        elif kind == "prompt/completed":
            record = self._fold.prompts.get(data["prompt_id"])
            if record is not None and record.is_rollout:
                self._reason = reason_of_function(data)

    def finish(self, last_seq: int) -> None:
        """See ``Fold``."""
        fold, header, stream = self._fold, self._facts.header, self._facts.stream
        totals = fold.totals()
        used = self._of_responses if self._responses else self._of_messages  # a log that has no llm/response
        usage = totals.usage if self._responses else self._of_messages.sum()
        model = (self._names.name, self._names.requested)
        cost = used.cost(self._facts.prices, model)
        waiting = any(record.state in ("pending", "running") for record in fold.prompts.values())
        stop = "open" if self._reason is None or self._turn_open or waiting else stop_of(self._reason)
        status = "open" if stop == "open" else status_of(stop)
        error = None if stop == "open" or self._reason is None else error_of(stop, self._reason.get("error"))
        newest = next(reversed(fold.turns.values()), None)
        outputs = [record.output for record in fold.prompts.values() if record.output is not None]
        attempt = header.get("attempt")
        key = (header.get("run_id"), header.get("item_id"), header.get("repeat"))
        is_rollout = None not in key
        bind: dict[str, Any] = fold.bind or {}
        sampling: dict[str, Any] = bind.get("sampling") or {}
        profile: dict[str, Any] = bind.get("profile") or {}
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
            cost,
            usage.total,
            cost,
            None if cost is None else self._facts.prices.date(*model),
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
            header.get("profile") or profile.get("name"),
            None,
            None,
            "log",
            as_json(header.get("labels") or None),
        ]
        self._take(_LogRow((*key, stream if not is_rollout else None), int(attempt or 1), usage.total, cost, row))


_ATTEMPTS, _TEXT, _TOTAL_TOKENS, _TOTAL_COST = 5, 17, 27, 28
"""Places in a row; a test holds them against the columns."""
