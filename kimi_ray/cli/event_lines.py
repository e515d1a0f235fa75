"""One line about an event, for people. Everything in it is made safe for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from pydantic_core import to_json

from kimi_ray.cli.printing import clock_time, counted, one_line, safe
from kimi_ray.events import SessionEvent

_TYPE_COLUMNS = 18
_HEAD_COLUMNS = 60
_REFUSED = frozenset({"tool.denied", "tool.unknown", "tool.bad_arguments", "tool.not_started"})
"""The codes of results of calls that nothing ran for."""
_OTHER_SHAPE = (KeyError, TypeError, AttributeError, IndexError)
"""What a payload of another version, or a large one kept as a blob, runs into: it is then shown as it is."""


def event_line(event: SessionEvent, width: int | None = 160) -> str:
    """``seq  time  type  what``, on one line of at most ``width`` columns; None does not cut."""
    at = clock_time(event.time, "%H:%M:%S.%f")
    start = f"{event.seq:>6}  {at[:12]}  {event.type:<{_TYPE_COLUMNS}}  "
    about = _about(event, whole=width is None)
    return start + one_line(about, None if width is None else max(20, width - len(start)))


def event_text(event: SessionEvent) -> str:
    """The line, and below it, indented, the whole text of a message or a tool result, or where code of yours failed."""
    text = _full_text(event)
    if not text.strip():
        return event_line(event, None)
    shown = "\n".join(f"        {line}" for line in safe(text).splitlines())
    return f"{event_line(event, _HEAD_COLUMNS if event.replaced is None else 2 * _HEAD_COLUMNS)}\n{shown}"


def blocks_text(content: Any) -> str:
    """The text of a message's content: text blocks, calls by name, results, other media by kind."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return _blob(content)
    return "\n".join(part for block in cast("Sequence[Any]", content) if (part := _block(block)))


def _block(block: Any) -> str:
    if not isinstance(block, dict):
        return str(block)
    data = cast("dict[str, Any]", block)
    kind = data.get("type")
    if kind == "text":
        return str(data.get("text", ""))
    if kind == "tool-call":
        return f"{data.get('name')}({data.get('arguments')})"
    if kind == "tool-result":
        return blocks_text(data.get("content"))
    if kind in ("reasoning", "thinking"):
        return f"({kind}) {data.get('text', '')}"
    return f"[{kind}]"


def _blob(value: Any) -> str:
    if isinstance(value, dict) and "$blob" in value:
        data = cast("dict[str, Any]", value)
        return f"[{data.get('bytes')} bytes in {data['$blob']}]"
    return str(cast("object", value))


def _full_text(event: SessionEvent) -> str:
    data = event.data
    try:
        if event.type in ("user/message", "prompt/submitted"):
            return blocks_text(data["content"])
        if event.type in ("assistant/message", "tool/result"):
            return blocks_text(data["message"]["content"])
        if event.type == "compaction/summary":
            return f"stands for {_events(data)}\n{blocks_text(data['summary'])}"
        if event.type in ("prompt/completed", "turn/end"):
            ended: Any = data
            error: Any = ended.get("error") or ended.get("reason", {}).get("error") or {}
            return str(error.get("details", {}).get("traceback") or "")
    except _OTHER_SHAPE:
        return ""
    return ""


def _about(event: SessionEvent, *, whole: bool) -> str:
    describe = _DESCRIBE.get(event.type)
    try:
        about = describe(event.data) if describe is not None else _pairs(event.data, whole=whole)
    except _OTHER_SHAPE:
        about = _pairs(event.data, whole=whole)
    if event.replaced is None:
        return about
    what = "takes out" if event.type == "surface/cut" else "in place of"
    return f"({what} {_span(*event.replaced)}) {about}"


def _pairs(data: Any, *, whole: bool = False) -> str:
    return " ".join(f"{key}={_as_json(value) if whole else _short(value)}" for key, value in data.items())


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


def _short(value: Any) -> str:
    """Of a list how many it has: it may be long."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in list(table.items())[:4]) + "}"
    if isinstance(value, list | tuple):
        return f"({counted(len(value), 'item')})"  # pyright: ignore[reportUnknownArgumentType]
    return str(value)


def _span(start: int, end: int) -> str:
    """A span of the conversation by its first and last event, in its order: behind a replacement not the log's."""
    if start == end:
        return f"event {start}"
    return f"events {start} to {end}" + (" in the conversation's order" if start > end else "")


def _events(data: Any) -> str:
    seqs = data["shadowed_seqs"]
    named = ", ".join(str(seq) for seq in seqs)
    return f"{counted(len(seqs), 'event')} of {data['shadowed_tokens']} tokens by estimate, seq {named}"


def _due(data: Any) -> str:
    """How large the next request was, and from where on that is too large."""
    tokens, threshold = data.get("tokens"), data.get("threshold")
    parts = [
        "" if tokens is None else f"at {tokens} tokens",
        "" if threshold is None else f"(threshold {threshold})",
    ]
    return " ".join(part for part in parts if part)


def _compaction(data: Any) -> str:
    found = data.get("shadowed_range")
    parts = [
        str(data.get("trigger") or ""),
        "" if found is None else f"of {_span(found['start'], found['end'])}",
        _due(data),
        f"asked for: {blocks_text(data['instruction'])}" if data.get("instruction") else "",
    ]
    return " ".join(part for part in parts if part)


def _undo(data: Any) -> str:
    prompts = data["prompts"]
    return f"{data['reason']} of {counted(len(prompts), 'prompt')}: {', '.join(prompts)}"


def _reason(reason: Any) -> str:
    kind = str(reason["kind"])
    if kind == "limit":
        return f"limit {reason.get('name')} of {reason.get('value')} ({reason.get('used')} used)"
    error = reason.get("error")
    if not error and reason.get("cause"):
        return f"{kind} ({reason['cause']})"
    return f"{kind}: {_error(error)}" if error else kind


def _place(workdir: Any) -> str:
    path = workdir.get("prepared") or workdir.get("path")
    return f", in {path}" if path else ""


def _tools(tools: Any) -> str:
    """How many; nothing is known of those that are kept as a blob."""
    return "" if isinstance(tools, dict) else f", {counted(len(tools or ()), 'tool')}"


def _error(error: Any) -> str:
    return f"{error.get('code')} {error.get('message')}"


def _tokens(usage: Any) -> str:
    if not usage:
        return "no usage"
    told = f"{usage.get('input', 0) + usage.get('cached', 0)} in, {usage.get('output', 0)} out"
    return f"about {told}" if usage.get("estimated") else told


def _response(data: Any) -> str:
    if data.get("error"):
        return f"attempt {data['attempt']} failed: {_error(data['error'])}"
    timing = data["timing"]
    took = timing.get("total_ms", timing.get("model_ms"))
    return (
        f"{data.get('served_model') or 'model'}: {_tokens(data.get('usage'))}"
        + (f", {took} ms" if took is not None else "")
        + f", {data.get('finish_reason') or 'no finish reason'}"
    )


def _result(data: Any) -> str:
    blocks = data["message"]["content"]
    failed = any(block.get("is_error") for block in blocks)
    code = data.get("exit_code")
    error: Any = data.get("error") or {}
    how = "refused: " if error.get("code") in _REFUSED else "failed: "
    return (how if failed else "") + (f"exit {code}: " if code else "") + blocks_text(blocks)


def _hook(data: Any) -> str:
    """How it ended comes before its command, which may be long."""
    code = data.get("exit_code")
    parts = [
        str(data["event"]),
        "blocked" if data["blocked"] else "did not block",
        "" if code is None else f"exit {code}",
        f"failed: {data['error']}" if data.get("error") else "",
        f"said: {data['message']}" if data.get("message") else "",
    ]
    about = {key: data[key] for key in ("about", "duration_ms", "invoked", "command") if data.get(key) is not None}
    return f"{', '.join(part for part in parts if part)}; {_pairs(about)}"


_DESCRIBE: dict[str, Callable[[Any], str]] = {
    "log/forked": lambda d: (
        f"begins as {d['source']['session_id']}/{d['source']['agent_id']}"
        + (f" at {d['at']}" if d.get("at") is not None else "")
        + f" was, {d['source']['seq']} events"
    ),
    "log/end-seed": lambda _: "what follows is its own",
    "turn/start": lambda d: f"turn {d['turn']}" + (" (continued)" if d.get("continuation") else ""),
    "turn/end": lambda d: f"turn {d['turn']} {_reason(d['reason'])}",
    "step/start": lambda d: f"step {d['turn']}.{d['step']}",
    "step/end": lambda d: (
        f"step {d['turn']}.{d['step']}{' (interrupted)' if d.get('interrupted') else ''}: "
        f"model {d.get('model_ms', 0)} ms, tools {d.get('tools_ms', 0)} ms, "
        f"store {d.get('store_ms', 0)} ms"
    ),
    "user/message": lambda d: blocks_text(d["content"]),
    "prompt/submitted": lambda d: blocks_text(d["content"]),
    "assistant/message": lambda d: blocks_text(d["message"]["content"]),
    "tool/call": lambda d: (
        (f"refused, {d['refused']}: " if d.get("refused") else "") + f"{d['name']}({d['arguments']})"
    ),
    "tool/result": _result,
    "assistant/chunk": lambda d: str(d["chunk"].get("text") or d["chunk"].get("delta") or _pairs(d["chunk"])),
    "prompt/completed": lambda d: f"{d['state']}" + (f": {_error(d['error'])}" if d.get("error") else ""),
    "llm/retry": lambda d: (
        f"attempt {d['attempt']} of {d['max_attempts']} failed, next in {d['delay_ms']} ms: {_error(d['error'])}"
    ),
    "llm/response": _response,
    "request/header": lambda d: f"{d['reason']}: model {d['header'].get('model')}" + _tools(d["header"].get("tools")),
    "profile/bind": lambda d: (
        f"profile {d['profile'].get('name')}, model {d.get('model')}{_place(d.get('workdir') or {})}"
    ),
    "compaction/start": _compaction,
    "compaction/summary": lambda d: f"stands for {_events(d)}: {blocks_text(d['summary'])}",
    "compaction/prune": lambda d: " ".join(
        part for part in (f"a long result is shortened: {_events(d)}", _due(d)) if part
    ),
    "compaction/end": lambda d: f"failed: {_error(d['error'])}" if d.get("error") else "done",
    "surface/cut": _undo,
    "subagent/failed": lambda d: f"{d['agent_id']}: {_error(d['error'])}",
    "hook/result": _hook,
    "swarm/end": lambda d: f"{d['run_id']}: " + ", ".join(f"{n} {s}" for s, n in d["counts"].items()),
}
