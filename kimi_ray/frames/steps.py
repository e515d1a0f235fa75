"""The frame ``steps``: one row for each model request with the tools that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_ray.frames.batches import Batches
from kimi_ray.frames.log_facts import LogFacts, ModelNames, check_counts
from kimi_ray.frames.reading import Event, Handler


class _Open:
    """A step that has begun."""

    __slots__ = (
        "cache_write",
        "cached",
        "data",
        "errors",
        "estimated",
        "finish",
        "input",
        "message_seq",
        "output",
        "reasoning",
        "requests",
        "retries",
        "seq",
        "time",
        "tool_calls",
    )

    def __init__(self, event: Event) -> None:
        self.seq: int = event["seq"]
        self.time: int = event["time"]
        self.data: dict[str, Any] = event["data"]
        self.requests = self.retries = self.tool_calls = self.errors = 0
        self.input = self.cached = self.cache_write = self.output = self.reasoning = 0
        self.estimated: bool | None = None
        self.finish: str | None = None
        self.message_seq: int | None = None

    def use(self, usage: dict[str, Any]) -> None:
        check_counts(usage)
        get = usage.get
        self.input += get("input", 0)
        self.cached += get("cached", 0)
        self.cache_write += get("cache_write", 0)
        self.output += get("output", 0)
        self.reasoning += get("reasoning", 0)
        self.estimated = bool(self.estimated) or bool(get("estimated"))


class StepsFold:
    """Follows the steps of one log."""

    def __init__(self, facts: LogFacts, table: Batches) -> None:
        self._facts = facts
        self._table = table
        self._names = ModelNames(facts)
        self._open: _Open | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """See ``Fold``."""
        return {
            **self._names.handlers(),
            "turn/start": self._turn_start,
            "turn/end": self._turn_end,
            "step/start": self._start,
            "step/end": self._end,
            "llm/response": self._response,
            "llm/retry": self._retry,
            "assistant/message": self._message,
            "tool/result": self._result,
        }

    def finish(self, last_seq: int) -> None:
        """See ``Fold``."""
        self._close(None, "open")

    def _turn_start(self, event: Event) -> None:
        self._close(None, "open")
        self._names.turn_start(event)

    def _turn_end(self, event: Event) -> None:
        self._close(None, "open")
        self._names.turn_end(event)

    def _start(self, event: Event) -> None:
        self._close(None, "open")
        self._open = _Open(event)

    def _end(self, event: Event) -> None:
        data = event["data"]
        recovered = data.get("recovered_at") is not None
        self._close(event, "recovered" if recovered else "interrupted" if data.get("interrupted") else "ended")

    def _response(self, event: Event) -> None:
        step = self._open
        if step is not None:
            data = event["data"]
            step.requests += 1
            step.finish = data.get("finish_reason")
            usage = data.get("usage")
            if usage:
                step.use(usage)

    def _retry(self, _event: Event) -> None:
        if self._open is not None:
            self._open.retries += 1

    def _message(self, event: Event) -> None:
        step = self._open
        if step is None or event.get("surface") != "append":
            return
        data = event["data"]
        step.message_seq = event["seq"]
        step.tool_calls += sum(block["type"] == "tool-call" for block in data["message"]["content"])
        if not step.requests:  # a log that has no llm/response
            step.requests = 1
            usage = data.get("usage")
            if usage:
                step.use(usage)

    def _result(self, event: Event) -> None:
        if self._open is not None and event.get("surface") == "append":
            self._open.errors += bool(event["data"]["message"]["content"][0].get("is_error"))

    def _close(self, event: Event | None, state: str) -> None:
        step, self._open = self._open, None
        if step is None:
            return
        place = self._facts.place(step.seq)
        if place is None:
            return
        end: dict[str, Any] = {} if event is None else event["data"]
        known = step.estimated is not None
        self._table.add(
            (
                *place,
                step.data["turn"],
                step.data["step"],
                step.seq,
                None if event is None else event["seq"],
                step.time,
                None if event is None else event["time"],
                state,
                self._names.name,
                step.finish,
                step.requests,
                step.retries,
                step.message_seq,
                step.tool_calls,
                step.errors,
                end.get("model_ms"),
                end.get("tools_ms"),
                end.get("store_ms"),
                step.input if known else None,
                step.cached if known else None,
                step.cache_write if known else None,
                step.output if known else None,
                step.reasoning if known else None,
                step.estimated,
                self._cost(step) if known else None,
            )
        )

    def _cost(self, step: _Open) -> float | None:
        used = {"input": step.input, "cached": step.cached, "cache_write": step.cache_write, "output": step.output}
        return self._facts.prices.cost(used, self._names.name, self._names.requested)
