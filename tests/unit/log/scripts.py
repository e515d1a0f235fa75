"""Logs to test with: built by append, by a random script, or with turns and tools."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kimi_ray.events import LogHeader, SessionEvent, WriterRef
from kimi_ray.log import EventLog, tool_message

HEADER = LogHeader(session_id="s", agent_id="main", created_at=1, writer=WriterRef(name="k", version="t"))


def new_log(**options: Any) -> EventLog:
    return EventLog(HEADER, clock=lambda: 1000, **options)


def user(log: EventLog, text: str, **kwargs: Any) -> SessionEvent:
    body = {"id": f"m{log.next_seq}", "role": "user", "content": [{"type": "text", "text": text}], "source": {}}
    return log.append("user/message", body, surface=kwargs.pop("surface", "append"), **kwargs)


def begin(log: EventLog) -> None:
    """A turn with its first step."""
    log.append("turn/start", {"turn": log.order.next_turn, "prompts": []})
    step(log)


def step(log: EventLog) -> None:
    log.append("step/start", {"turn": log.order.open_turn, "step": log.order.next_step})


def step_end(log: EventLog) -> None:
    log.append("step/end", {"turn": log.order.open_turn, "step": log.order.open_step})


def end(log: EventLog) -> None:
    if log.order.open_step is not None:
        step_end(log)
    log.append("turn/end", {"turn": log.order.open_turn, "reason": {"kind": "completed"}})


def ask(log: EventLog, *calls: str, text: str = "") -> SessionEvent:
    """An answer that asks for tools."""
    content: list[Any] = [{"type": "text", "text": text}] if text else []
    content += [{"type": "tool-call", "id": call, "name": "t", "arguments": "{}"} for call in calls]
    message = {"id": f"a{log.next_seq}", "role": "assistant", "content": content, "source": {}}
    data = {"turn": log.order.open_turn, "step": log.order.open_step, "message": message}
    return log.append("assistant/message", data, surface="append")


def call(log: EventLog, call_id: str) -> SessionEvent:
    place = {"turn": log.order.open_turn, "step": log.order.open_step}
    return log.append("tool/call", {**place, "call_id": call_id, "name": "t", "arguments": "{}"})


def result_data(log: EventLog, call_id: str, text: str, *, step: int | None = None) -> dict[str, Any]:
    message = tool_message(f"r{call_id}", call_id, [{"type": "text", "text": text}], is_error=False)
    return {"turn": log.order.open_turn, "step": log.order.open_step if step is None else step, "message": message}


def result(log: EventLog, call_id: str, text: str = "r") -> SessionEvent:
    return log.append("tool/result", result_data(log, call_id, text), surface="append")


def cut(log: EventLog, start: int, last: int, sources: Any) -> SessionEvent:
    span = {"replace": [start, last]}
    return log.append("surface/cut", {"reason": "undo", "prompts": []}, surface=span, sources=sources)


def chunk(log: EventLog, text: str) -> SessionEvent:
    place = {"turn": log.order.open_turn, "step": log.order.open_step, "attempt": 1}
    return log.append("assistant/chunk", {**place, "chunk": {"type": "text-delta", "index": 0, "text": text}})


SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from(["user", "note", "turn", "chunk", "response", "replace", "shorten", "cut", "compaction"]),
        st.integers(0, 30),
        st.integers(0, 30),
        st.text(max_size=8),
    ),
    max_size=25,
)
"""What ``play`` plays: words with two numbers and a text."""


def play(log: EventLog, script: list[tuple[str, int, int, str]]) -> None:
    """Append what a random script says; what does not fit is left out."""
    for what, one, other, text in script:
        seqs = log.surface.seqs
        low, high = sorted((one % len(seqs), other % len(seqs))) if seqs else (0, 0)
        span = seqs[low : high + 1]
        if what == "user":
            user(log, text)
        elif what == "note":
            log.append("note/added", {"text": text})
        elif what == "turn":
            begin(log)
            calls = [f"c{log.next_seq}.{number}" for number in range(one % 3)]
            ask(log, *calls, text=text)
            for name in calls:
                call(log, name)
                result(log, name, text * other)
            end(log)
        elif what == "chunk":
            begin(log)
            for _ in range(one % 4):
                chunk(log, text)
            end(log)
        elif what == "response":
            begin(log)
            place = {"turn": log.order.open_turn, "step": log.order.open_step, "attempt": 1}
            log.append("llm/response", {**place, "usage": {"input": one, "output": other}, "timing": {}})
            end(log)
        elif what == "replace" and seqs:
            user(log, text, surface={"replace": [span[0], span[-1]]}, sources=span)
        elif what == "shorten":
            results = [node for node in log.surface if node.type == "tool/result"]
            if results:
                node = results[one % len(results)]
                begin(log)
                data = dict(node.data)
                data["message"] = tool_message(
                    node.data["message"]["id"],
                    node.data["message"]["source"]["call_id"],
                    [{"type": "text", "text": text}],
                    is_error=False,
                )
                log.append("tool/result", data, surface={"replace": [node.seq, node.seq]}, sources=[node.seq])
                end(log)
        elif what == "cut" and seqs and log.surface.is_balanced(low, high + 1):
            cut(log, span[0], span[-1], span)
        elif what == "compaction":
            turn = {} if log.order.open_turn is None else {"turn": log.order.open_turn}
            log.append("compaction/start", {"compaction_id": f"k{log.next_seq}", **turn})
            if one % 2:
                log.append("compaction/end", {"compaction_id": log.order.open_compaction})
            else:
                log.append("log/end-seed", {})
