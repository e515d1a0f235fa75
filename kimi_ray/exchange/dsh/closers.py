"""The events with which the harness closes a turn that a crash left open. Pure; given twice, it adds nothing."""

from __future__ import annotations

from typing import Any, Final, cast

from kimi_ray.exchange.dsh.errors import InvalidSession
from kimi_ray.exchange.dsh.model import Event, JsonObject

_OUTCOME_UNKNOWN: Final = (
    "The tool call was interrupted after it was recorded, but no result was durably recorded. Its outcome is unknown. "
    "Decide whether to retry from the tool semantics: retry only if the operation is read-only or idempotent; if it "
    "may have side effects, first verify external state or ask the user. Do not retry blindly."
)
_NOT_STARTED: Final = (
    "The tool call was interrupted before the Harness recorded it as started. Retry it if it is still needed."
)


def interrupted_turn_closers(events: list[Event]) -> list[Event]:
    """A result for every unanswered call of the open step, then ``step/end``, then ``turn/end``.

    Args:
        events: The whole log, in the present shape.

    Returns:
        Events with the next seqs and the last event's time; none when no turn is open.

    Raises:
        InvalidSession: an event's data is not what its type demands.
    """
    turn: Any = None
    step: Any = None
    pending: dict[Any, tuple[Any, int | None]] = {}
    for event in events:
        kind, data = event.get("type"), event.get("data")
        if kind in ("turn/start", "turn/end"):
            turn, step = (_field(event, "turn") if kind == "turn/start" else None), None
            pending.clear()
        elif kind in ("step/start", "step/end"):
            step = _field(event, "step") if kind == "step/start" else None
            if kind == "step/end":
                pending.clear()
        elif kind == "assistant/message":
            for block in cast("JsonObject", data)["message"]["content"]:
                if block is None:
                    raise InvalidSession(f"a content block of event {event['seq']} is null", event["seq"])
                if isinstance(block, dict) and cast("JsonObject", block).get("type") == "tool-call":
                    call = cast("JsonObject", block)
                    pending[_key(call.get("id"))] = (_field(event, "step"), None)
        elif kind == "tool/call":
            call_id = _key(_field(event, "callId"))
            if call_id in pending:
                pending[call_id] = (pending[call_id][0], event["seq"])
        elif kind == "tool/result":
            pending.pop(cast("JsonObject", data)["message"]["source"]["callId"], None)
    if turn is None or not events:
        return []
    return _closing(events[-1], turn, step, pending)


def _closing(last: Event, turn: Any, open_step: Any, pending: dict[Any, tuple[Any, int | None]]) -> list[Event]:
    closers: list[Event] = []

    def close(kind: str, data: JsonObject, **surface: Any) -> None:
        seq = last["seq"] + 1 + len(closers)
        closers.append({"type": kind, "seq": seq, "time": last.get("time"), "data": data, **surface})

    for call_id, (step, call_seq) in pending.items():
        started = call_seq is not None
        text = _OUTCOME_UNKNOWN if started else _NOT_STARTED
        message = {
            "id": f"interrupted-tool-result-{call_id}-{last['seq'] + 1 + len(closers)}",
            "role": "user",
            "source": {"kind": "tool", "callId": call_id},
            "content": [
                {
                    "type": "tool-result",
                    "toolCallId": call_id,
                    "isError": True,
                    "content": [{"type": "text", "text": text}],
                }
            ],
        }
        error = (
            {"name": "ToolOutcomeUnknownError", "code": "TOOL_OUTCOME_UNKNOWN"}
            if started
            else {"name": "ToolNotStartedError", "code": "TOOL_NOT_STARTED"}
        )
        cited = {"sourceEventSeqs": [call_seq]} if started else {}
        data = {"turn": turn, "step": step, "message": message, "error": error}
        close("tool/result", data, surfaceOp="append", **cited)
    if open_step is not None:
        close("step/end", {"turn": turn, "step": open_step})
    close("turn/end", {"turn": turn, "reason": {"kind": "interrupted"}})
    return closers


def _field(event: Event, name: str) -> Any:
    data = event.get("data")
    if data is None:
        raise InvalidSession(f"the data of event {event['seq']} ({event['type']}) is null", event["seq"])
    return cast("JsonObject", data).get(name) if isinstance(data, dict) else None


def _key(value: Any) -> Any:
    """A call id as a key: those of the harness are strings, others are told apart by their text."""
    return value if isinstance(value, str | int | float | None) else str(value)
