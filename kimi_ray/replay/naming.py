"""In words, what stands at a field of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from kimi_ray.log import Message

_ARGUMENT_CHARS: Final = 120
_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")
_TOOL: Final = re.compile(r"tools\[(\d+)\]")
_BLOCK: Final = re.compile(r"messages\[\d+\]\.content\[(\d+)\]")


def named_field(field: str, recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> str:
    """Which tool a field of a request's header is about; empty for other fields."""
    found = _TOOL.match(field)
    if found is None:
        return ""
    names = [_name_at(header.get("tools"), int(found[1])) for header in (recorded, replayed)]
    known = list(dict.fromkeys(name for name in names if name))
    return f"the tool {known[0]}" if len(known) == 1 else ""


def named_message(field: str, recorded: Sequence[Message], replayed: Sequence[Message]) -> str:
    """Whose message, or the result of which call, a field of a request is about; empty when none is known."""
    found = _MESSAGE.match(field)
    if found is None:
        return ""
    index = int(found[1])
    side = recorded if index < len(recorded) else replayed
    if index >= len(side):
        return ""
    message = side[index]
    if message["role"] == "assistant":
        block = _BLOCK.match(field)
        asked: Any = message["content"][int(block[1])] if block and int(block[1]) < len(message["content"]) else {}
        return f"a call of the model: {_call(asked)}" if asked.get("type") == "tool-call" else "an answer of the model"
    results = [block for block in message["content"] if block["type"] == "tool-result"]
    if not results:
        return _whose(message)
    call_id = str(results[0].get("tool_call_id"))
    for before in reversed(side[:index]):
        for block in before["content"]:
            if block["type"] == "tool-call" and block.get("id") == call_id:
                return f"the result of {_call(block)}, {call_id}"
    return f"the result of {call_id}"


def _call(block: Mapping[str, Any]) -> str:
    arguments = " ".join(str(block.get("arguments") or "").split())
    cut = arguments if len(arguments) <= _ARGUMENT_CHARS else f"{arguments[:_ARGUMENT_CHARS]} ..."
    return f"{block.get('name')}({cut})"


def _whose(message: Message) -> str:
    source: dict[str, Any] = message.get("source") or {}
    kind = source.get("kind")
    if kind == "compaction":
        return "the message that stands for what was compacted"
    return "a prompt" if kind in ("user", None) else f"a message of: {kind}"


def _name_at(tools: Any, index: int) -> str | None:
    listed = cast("list[Any]", tools) if isinstance(tools, list) else []
    return str(listed[index].get("name")) if index < len(listed) else None
