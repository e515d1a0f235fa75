"""What the benches of the log append: a stream of small events, and turns as agents write them."""

from __future__ import annotations

from typing import Any

from kimi_ray.log import EventLog

EVENTS_A_TURN = 50
CHUNKS_A_STEP = 17
WINDOW_TURNS = 100
"""Turns that stay in the model's context; then one message takes their place, as after a compaction."""

_WORDS = "the log is read back and every event stands where it was put down by its one writer".split()
_USAGE = {"input": 4200, "output": 96}


def append_small(log: EventLog, count: int) -> None:
    """Append ``count`` small events that no fold looks at: about 113 bytes a line."""
    for number in range(log.next_seq, log.next_seq + count):
        log.append("hook/invoked", {"event": "PostToolUse", "command": f"check {number}"})


def append_turn(log: EventLog) -> None:
    """Append one whole turn, ``EVENTS_A_TURN`` events: two streamed answers with a tool call between them.

    Every ``WINDOW_TURNS`` turns the user's message takes the place of all messages before it.
    """
    turn = log.order.next_turn
    prompt = f"prompt_{turn}"
    content = [{"type": "text", "text": f"Look at part {turn} and say what it does."}]
    log.append("prompt/submitted", {"prompt_id": prompt, "content": content})
    log.append("turn/start", {"turn": turn, "prompts": [prompt]})
    log.append("prompt/started", {"prompt_id": prompt, "turn": turn})
    log.append("step/start", {"turn": turn, "step": 0})
    _append_question(log, {"id": prompt, "role": "user", "content": content, "source": {"kind": "user"}}, turn)
    call = {"type": "tool-call", "id": f"call_{turn}", "name": "Read", "arguments": f'{{"path":"src/part_{turn}.py"}}'}
    _append_answer(log, turn, 0, call)
    _append_tool_run(log, turn, call)
    log.append("step/end", {"turn": turn, "step": 0, "model_ms": 900, "tools_ms": 3, "store_ms": 1})
    log.append("step/start", {"turn": turn, "step": 1})
    _append_answer(log, turn, 1, None)
    log.append("step/end", {"turn": turn, "step": 1, "model_ms": 800, "tools_ms": 0, "store_ms": 1})
    log.append("turn/end", {"turn": turn, "reason": {"kind": "completed"}, "steps": 2})
    log.append("prompt/completed", {"prompt_id": prompt, "state": "completed", "turn": turn})


def _append_question(log: EventLog, message: dict[str, Any], turn: int) -> None:
    nodes = log.surface.seqs if turn and turn % WINDOW_TURNS == 0 else ()
    if nodes:
        log.append("user/message", message, surface={"replace": [nodes[0], nodes[-1]]}, sources=nodes)
    else:
        log.append("user/message", message, surface="append")


def _append_tool_run(log: EventLog, turn: int, call: dict[str, Any]) -> None:
    place = {"turn": turn, "step": 0}
    asked = log.append("tool/call", {**place, "call_id": call["id"], "name": "Read", "arguments": call["arguments"]})
    text = "\n".join(f"{line:5d}  value_{line} = compute({line})" for line in range(12))
    content = [{"type": "text", "text": text}]
    message = {
        "id": f"result_{turn}",
        "role": "user",
        "source": {"kind": "tool", "call_id": call["id"]},
        "content": [{"type": "tool-result", "tool_call_id": call["id"], "content": content, "is_error": False}],
    }
    log.append("tool/result", {**place, "message": message, "run_ms": 3}, surface="append", sources=[asked.seq])


def _append_answer(log: EventLog, turn: int, step: int, call: dict[str, Any] | None) -> None:
    place = {"turn": turn, "step": step}
    texts = [f"{_WORDS[(turn + n) % len(_WORDS)]} " for n in range(CHUNKS_A_STEP)]
    for text in texts:
        log.append(
            "assistant/chunk", {**place, "attempt": 1, "chunk": {"type": "text-delta", "index": 0, "text": text}}
        )
    timing = {"queued_ms": 0, "ttft_ms": 210, "total_ms": 900}
    log.append("llm/response", {**place, "attempt": 1, "usage": _USAGE, "timing": timing})
    content: list[dict[str, Any]] = [{"type": "text", "text": "".join(texts)}]
    message = {
        "id": f"answer_{turn}_{step}",
        "role": "assistant",
        "content": content if call is None else [*content, call],
        "source": {"kind": "model", "provider": "scripted", "model": "bench"},
    }
    log.append("assistant/message", {**place, "message": message, "usage": _USAGE, "attempt": 1}, surface="append")
