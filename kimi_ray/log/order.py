"""Order invariants: what may follow what in a log (DSH 14, counting from 0).

``Order.check`` runs before the commit point and may veto; ``Order.apply`` follows the committed event. The state is
small and folded from the log, so a reopened log goes on under the same rules.
"""

from __future__ import annotations

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent

_IN_STEP = frozenset({"assistant/chunk", "assistant/message", "tool/call", "tool/result", "llm/retry", "llm/response"})

_CHECKED = _IN_STEP | {
    "turn/start",
    "turn/end",
    "step/start",
    "step/end",
    "surface/cut",
    "request/header",
    "todo/write",
    "compaction/start",
    "compaction/summary",
    "compaction/end",
}

FOLLOWED = frozenset(
    {
        "turn/start",
        "turn/end",
        "step/start",
        "step/end",
        "assistant/message",
        "tool/call",
        "tool/result",
        "compaction/start",
        "compaction/end",
        "log/end-seed",
        "runtime/activated",
    }
)
"""The types that ``Order.apply`` looks at."""


class Order:
    """Where a log stands: its open turn and step, and the calls of that step.

    Attributes:
        next_turn: The number of the next turn.
        open_turn: The open turn's number, or None between turns.
        open_step: The open step's number, or None.
        pending_calls: Tool calls of the open step without a result: call id to the seq of its ``tool/call``, or None
            while it has not been started.
        open_compaction: Id of the compaction that holds the surface, or None. Its start is a lock only for the writer
            that wrote it: an end of a seed or another activation behind it makes it stale.
    """

    __slots__ = ("next_step", "next_turn", "open_compaction", "open_step", "open_turn", "pending_calls")

    def __init__(self) -> None:
        self.next_turn = 0
        self.next_step = 0
        self.open_turn: int | None = None
        self.open_step: int | None = None
        self.pending_calls: dict[str, int | None] = {}
        self.open_compaction: str | None = None

    def check(self, event: SessionEvent) -> None:
        """Refuse an event out of order.

        Raises:
            LogError: ``log.out_of_order``.
        """
        kind, data = event.type, event.data
        if kind not in _CHECKED:
            return
        if kind in _IN_STEP:
            if kind == "tool/result" and event.replaced is not None:
                if self.open_turn is None:
                    raise _bad(event, "a tool/result is replaced only inside a turn")
                return
            if data["turn"] != self.open_turn or data["step"] != self.open_step or self.open_step is None:
                raise _bad(
                    event, f"turn {data['turn']} step {data['step']} is not open ({self.open_turn}.{self.open_step} is)"
                )
            if kind == "assistant/message":
                tool_call_ids(event)  # so that following the committed event cannot fail
            if kind == "tool/call" and data["call_id"] not in self.pending_calls:
                raise _bad(event, f"no message of this step asked for call {data['call_id']}")
            if kind == "tool/result" and data["message"]["source"]["call_id"] not in self.pending_calls:
                raise _bad(event, f"call {data['message']['source']['call_id']} is not waiting for a result")
        elif kind == "step/start":
            if data["turn"] != self.open_turn or self.open_step is not None or data["step"] != self.next_step:
                raise _bad(event, f"step {data['step']} cannot start in turn {self.open_turn}")
        elif kind == "step/end":
            if data["turn"] != self.open_turn or data["step"] != self.open_step:
                raise _bad(event, f"step {data['step']} is not open")
        elif kind == "turn/start":
            if self.open_turn is not None or data["turn"] != self.next_turn:
                raise _bad(event, f"turn {data['turn']} cannot start: next is {self.next_turn}, open {self.open_turn}")
        elif kind == "turn/end":
            if data["turn"] != self.open_turn or self.open_step is not None:
                raise _bad(event, f"turn {data['turn']} cannot end: open is {self.open_turn}.{self.open_step}")
        elif kind == "surface/cut" and self.open_turn is not None:
            raise _bad(event, "the surface is cut only between turns")
        elif kind in ("request/header", "todo/write") and self.open_turn is None:
            raise _bad(event, f"{kind} belongs inside a turn")
        elif kind == "compaction/start":
            if self.open_compaction is not None:
                raise _bad(event, f"compaction {self.open_compaction} has not ended")
            if data.get("turn") != self.open_turn:
                raise _bad(event, f"it is of turn {data.get('turn')}, open is {self.open_turn}")
        elif kind in ("compaction/summary", "compaction/end") and data["compaction_id"] != self.open_compaction:
            raise _bad(event, f"compaction {data['compaction_id']} is not open")

    def apply(self, event: SessionEvent) -> None:
        """Follow a committed event."""
        kind, data = event.type, event.data
        if kind == "assistant/message":
            if event.replaced is None:
                for call_id in tool_call_ids(event):
                    self.pending_calls[call_id] = None
        elif kind == "tool/call":
            self.pending_calls[data["call_id"]] = event.seq
        elif kind == "tool/result":
            if event.replaced is None:
                self.pending_calls.pop(data["message"]["source"]["call_id"], None)
        elif kind == "step/start":
            self.open_step = data["step"]
            self.next_step = data["step"] + 1
            self.pending_calls.clear()
        elif kind == "step/end":
            self.open_step = None
            self.pending_calls.clear()
        elif kind == "turn/start":
            self.open_turn = data["turn"]
            self.next_turn = data["turn"] + 1
            self.next_step = 0
        elif kind == "turn/end":
            self.open_turn = None
            self.open_step = None
            self.pending_calls.clear()
        elif kind == "compaction/start":
            self.open_compaction = data["compaction_id"]
        elif kind in ("compaction/end", "log/end-seed", "runtime/activated"):
            self.open_compaction = None


def tool_call_ids(event: SessionEvent) -> list[str]:
    """The ids of the calls that an ``assistant/message`` asks for."""
    return [block["id"] for block in event.data["message"]["content"] if block["type"] == "tool-call"]


def _bad(event: SessionEvent, what: str) -> LogError:
    return LogError(f"event {event.seq} ({event.type}): {what}", code="log.out_of_order", details={"seq": event.seq})
