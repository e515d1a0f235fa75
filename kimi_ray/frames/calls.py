"""The frames ``model_calls`` and ``tool_calls``: one row for each attempt at the model, and for each call of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_ray.frames.batches import Batches
from kimi_ray.frames.log_facts import LogFacts, ModelNames, as_json, error_of, usage_of
from kimi_ray.frames.reading import Event, Handler

_Names = tuple[str | None, str | None, str | None]
"""Of the model: its configured name, that of the request, the provider's."""


class _Request:
    """An attempt whose answer or next attempt may still come."""

    __slots__ = (
        "attempt",
        "delay_ms",
        "ended",
        "interrupted",
        "message_seq",
        "names",
        "place",
        "purpose",
        "response",
        "seq",
    )

    def __init__(self, place: tuple[Any, ...], event: Event, names: _Names, purpose: str) -> None:
        self.place = place
        self.purpose = purpose
        self.seq: int = event["seq"]
        self.ended: int = event["time"]
        self.response: dict[str, Any] = event["data"]
        self.attempt: int | None = self.response.get("attempt")
        self.names = names
        self.message_seq: int | None = None
        self.interrupted = False
        self.delay_ms: int | None = None

    def is_of(self, data: dict[str, Any]) -> bool:
        mine = self.response
        if self.purpose != "step":
            return False
        return data.get("turn") == mine.get("turn") and data.get("step") == mine.get("step")


class ModelCallsFold:
    """Follows the requests of one log."""

    def __init__(self, facts: LogFacts, table: Batches) -> None:
        self._facts = facts
        self._table = table
        self._names = ModelNames(facts)
        self._open: _Request | None = None
        self._compacting: _Names = (None, None, None)
        self._summed: str | None = None
        """The compaction whose requests made rows."""

    def handlers(self) -> Mapping[str, Handler]:
        """See ``Fold``."""
        return {
            **self._names.handlers(),
            "llm/response": self._response,
            "llm/retry": self._retry,
            "assistant/message": self._message,
            "compaction/request": self._compaction,
            "compaction/response": self._compacted,
            "compaction/summary": self._summary,
        }

    def finish(self, last_seq: int) -> None:
        """See ``Fold``."""
        self._close()

    def _begin(self, event: Event, names: _Names | None = None, purpose: str = "step") -> _Request | None:
        self._close()
        place = self._facts.place(event["seq"])
        if place is not None:
            at = self._names
            self._open = _Request(place, event, names or (at.name, at.requested, at.provider), purpose)
        return self._open

    def _response(self, event: Event) -> None:
        self._begin(event)

    def _retry(self, event: Event) -> None:
        if self._open is not None and self._open.is_of(event["data"]):
            self._open.delay_ms = event["data"]["delay_ms"]

    def _message(self, event: Event) -> None:
        if event.get("surface") != "append":
            return
        request = self._open
        if request is None or request.message_seq is not None or not request.is_of(event["data"]):
            request = self._begin(event)  # a log that has no llm/response
        if request is not None:
            request.message_seq = event["seq"]
            request.interrupted = bool(event["data"].get("interrupted"))

    def _compaction(self, event: Event) -> None:
        data = event["data"]
        self._compacting = (self._names.latest or self._names.name, data.get("model"), data.get("provider"))

    def _compacted(self, event: Event) -> None:
        self._summed = event["data"]["compaction_id"]
        self._begin(event, self._compacting, "compaction")

    def _summary(self, event: Event) -> None:
        data = event["data"]
        self._close()
        place = self._facts.place(event["seq"])
        if place is None or data["compaction_id"] == self._summed or not (data.get("usage") or data.get("model")):
            return
        model = data.get("model")
        names = (model, model, None)
        row = (*place, None, None, None, "compaction", event["seq"], None, None, event["time"], "answered", *names)
        cost = self._facts.prices.cost(data.get("usage"), model, model)
        self._table.add((*row, *(None,) * 12, *usage_of(data.get("usage")), None, None, None, cost))

    def _close(self) -> None:
        request, self._open = self._open, None
        if request is None:
            return
        data = request.response
        get = data.get
        timing: dict[str, Any] = get("timing") or {}
        error = get("error")
        total_ms = timing.get("total_ms")
        answered = not request.interrupted and (request.message_seq is not None or get("finish_reason") is not None)
        self._table.add(
            (
                *request.place,
                get("turn"),
                get("step"),
                request.attempt,
                request.purpose,
                request.seq,
                request.message_seq,
                None if total_ms is None else request.ended - total_ms,
                request.ended,
                "failed" if error else "answered" if answered else "cut",
                *request.names,
                get("served_model"),
                get("fingerprint"),
                get("response_id"),
                get("request_id"),
                get("http_status"),
                get("finish_reason"),
                get("raw_finish_reason"),
                total_ms,
                timing.get("limiter_ms"),
                timing.get("connect_ms"),
                timing.get("ttft_ms"),
                request.delay_ms,
                *usage_of(get("usage")),
                *error_of(error),
                self._facts.prices.cost(get("usage"), *request.names[:2]),
            )
        )


class _Call:
    """A call that has no result yet."""

    __slots__ = ("arguments", "asked_seq", "call_id", "call_seq", "index", "name", "place", "started", "step", "turn")

    def __init__(self, place: tuple[Any, ...], data: dict[str, Any], call_id: str) -> None:
        self.place = place
        self.call_id = call_id
        self.turn: Any = data.get("turn")
        self.step: Any = data.get("step")
        self.index: int | None = None
        self.name: str | None = None
        self.arguments: Any = None
        self.asked_seq: int | None = None
        self.call_seq: int | None = None
        self.started: int | None = None


class ToolCallsFold:
    """Follows the tool calls of one log, from the answer that asks for them to their results."""

    def __init__(self, facts: LogFacts, table: Batches) -> None:
        self._facts = facts
        self._table = table
        self._open: dict[str, _Call] = {}

    def handlers(self) -> Mapping[str, Handler]:
        """See ``Fold``."""
        return {
            "assistant/message": self._message,
            "tool/call": self._call,
            "tool/result": self._result,
            "turn/start": self._turn,
        }

    def finish(self, last_seq: int) -> None:
        """See ``Fold``."""
        self._give_up()

    def _turn(self, _event: Event) -> None:
        self._give_up()

    def _give_up(self) -> None:
        for call in self._open.values():
            self._row(call, None)
        self._open.clear()

    def _message(self, event: Event) -> None:
        data = event["data"]
        if event.get("surface") != "append":
            return
        calls = [block for block in data["message"]["content"] if block["type"] == "tool-call"]
        place = self._facts.place(event["seq"]) if calls else None
        if place is None:
            return
        for index, block in enumerate(calls):
            call = self._open[block["id"]] = _Call(place, data, block["id"])
            call.index, call.asked_seq = index, event["seq"]
            call.name, call.arguments = block["name"], block["arguments"]

    def _call(self, event: Event) -> None:
        data = event["data"]
        call_id = data["call_id"]
        call = self._open.get(call_id)
        if call is None:
            place = self._facts.place(event["seq"])
            if place is None:
                return
            call = self._open[call_id] = _Call(place, data, call_id)
            call.name, call.arguments = data["name"], data["arguments"]
        call.call_seq, call.started = event["seq"], event["time"]

    def _result(self, event: Event) -> None:
        if event.get("surface") != "append":
            return
        call_id = event["data"]["message"]["content"][0]["tool_call_id"]
        call = self._open.pop(call_id, None)
        if call is None:
            place = self._facts.place(event["seq"])
            if place is None:
                return
            call = _Call(place, event["data"], call_id)
        self._row(call, event)

    def _row(self, call: _Call, event: Event | None) -> None:
        arguments = call.arguments
        if not isinstance(arguments, str | None):
            arguments = self._facts.text(arguments) if "$blob" in arguments else as_json(arguments)
        head = (
            *call.place,
            call.turn,
            call.step,
            call.index,
            call.call_id,
            call.name,
            arguments,
            call.asked_seq,
            call.call_seq,
        )
        if event is None:
            self._table.add((*head, None, call.started, *(None,) * 3, "open", *(None,) * 5), len(arguments or ""))
            return
        data = event["data"]
        block = data["message"]["content"][0]
        failed = bool(block.get("is_error"))
        text = self._facts.texts(block["content"])
        error: dict[str, Any] = data.get("error") or {}
        full = data.get("full")
        size = full["bytes"] if full is not None else None if text is None else len(text.encode())
        status = "error" if failed else "ok"
        if call.call_seq is None and failed:
            status = "not_started"
        row = (
            *head,
            event["seq"],
            call.started,
            event["time"],
            data.get("queued_ms"),
            data.get("run_ms"),
            status,
            error.get("code"),
            data.get("exit_code"),
            text,
            size,
            data.get("recovered_at") is not None,
        )
        self._table.add(row, len(arguments or "") + len(text or ""))
