"""Logical repair: the events that close a turn which a crash left open (DSH 7.1). Pure and deterministic.

It never removes anything. For each unanswered call of the open step a ``tool/result`` that tells the model what is
known; then ``step/end``; then ``turn/end`` with reason ``interrupted``. Applied to a log that needs nothing it gives
nothing, so it can run twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kimi_ray.events import SessionEvent
from kimi_ray.log.messages import tool_message
from kimi_ray.log.order import Order

OUTCOME_UNKNOWN = (
    "The process stopped while this tool call was running: whether it took effect is unknown. Run it again only if it "
    "is read-only or safe to repeat; otherwise look at the state of things first."
)
NOT_STARTED = "The process stopped before this tool call was started. Call it again if it is still needed."


def closing_events(order: Order, *, next_seq: int, recovered_at: int) -> list[dict[str, Any]]:
    """What ``append`` needs to close an open turn: ``{"type", "data", "surface"?, "sources"?}`` in order.

    Args:
        order: The folded order state at the end of the log.
        next_seq: The seq that the first closing event will have.
        recovered_at: Epoch milliseconds of the recovery, kept in each event.
    """
    turn, step = order.open_turn, order.open_step
    if turn is None:
        return []
    out: list[dict[str, Any]] = []
    for call_id, call_seq in order.pending_calls.items():
        started = call_seq is not None
        text = OUTCOME_UNKNOWN if started else NOT_STARTED
        message_id = f"interrupted-tool-result-{call_id}-{next_seq + len(out)}"
        event: dict[str, Any] = {
            "type": "tool/result",
            "data": {
                "turn": turn,
                "step": step,
                "message": tool_message(message_id, call_id, [{"type": "text", "text": text}], is_error=True),
                "error": {"code": "tool.outcome_unknown" if started else "tool.not_started"},
                "recovered_at": recovered_at,
            },
            "surface": "append",
        }
        if started:
            event["sources"] = [call_seq]
        out.append(event)
    if step is not None:
        out.append({"type": "step/end", "data": {"turn": turn, "step": step, "recovered_at": recovered_at}})
    reason = {"kind": "interrupted", "recovered_at": recovered_at}
    out.append({"type": "turn/end", "data": {"turn": turn, "reason": reason}})
    return out


def interrupted_turn_closers(
    events: Iterable[SessionEvent] | Iterable[dict[str, Any]], *, recovered_at: int | None = None
) -> list[dict[str, Any]]:
    """The closing events of a whole log as envelopes, seq and time set.

    Args:
        events: The log from its first event, as events or as envelope dicts.
        recovered_at: Epoch milliseconds; None takes the last event's time.
    """
    from kimi_ray.events import event_from_data

    order = Order()
    last: SessionEvent | None = None
    for item in events:
        last = item if isinstance(item, SessionEvent) else event_from_data(item)
        order.apply(last)
    if last is None:
        return []
    when = last.time if recovered_at is None else recovered_at
    found = closing_events(order, next_seq=last.seq + 1, recovered_at=when)
    return [{"seq": last.seq + 1 + index, "time": when, **event} for index, event in enumerate(found)]
