"""How an agent that begins with another's history finds it closed (K 4.9): nothing in it is waited for."""

from __future__ import annotations

from typing import Any

from kimi_ray.log.messages import tool_message
from kimi_ray.log.order import Order

STILL_RUNNING = (
    "This tool call was still running when this history was handed over. Its result is not part of this context: do "
    "not assume that it succeeded or failed, and do not wait for it."
)


def inherited_closers(order: Order, *, next_seq: int, at: int) -> list[dict[str, Any]]:
    """What closes the open turn of an inherited history: ``{"type", "data", "surface"?, "sources"?}`` in order.

    Every open call of the open step gets a result that is no error and says that the outcome is not known here;
    answered calls stay as they are. Then ``step/end`` and ``turn/end``. A history without an open turn needs nothing.

    Args:
        order: The folded order state at the end of the history.
        next_seq: The seq that the first of these events will have.
        at: Epoch milliseconds of the handing over.
    """
    turn, step = order.open_turn, order.open_step
    if turn is None:
        return []
    out: list[dict[str, Any]] = []
    for call_id, call_seq in order.pending_calls.items():
        message_id = f"inherited-tool-result-{call_id}-{next_seq + len(out)}"
        content = [{"type": "text", "text": STILL_RUNNING}]
        event: dict[str, Any] = {
            "type": "tool/result",
            "data": {
                "turn": turn,
                "step": step,
                "message": tool_message(message_id, call_id, content, is_error=False),
                "recovered_at": at,
            },
            "surface": "append",
        }
        if call_seq is not None:
            event["sources"] = [call_seq]
        out.append(event)
    if step is not None:
        out.append({"type": "step/end", "data": {"turn": turn, "step": step, "recovered_at": at}})
    out.append({"type": "turn/end", "data": {"turn": turn, "reason": {"kind": "interrupted", "recovered_at": at}}})
    return out
