"""Messages: what the surface says to the model.

``derive`` gives the message of one event; ``complete_tools`` makes sure that every tool call has exactly one result
directly behind it before a request goes out (K 7.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kimi_ray.events import SessionEvent

Message = dict[str, Any]

MISSING_RESULT = "The result of this tool call is not available in the current context."


def derive(event: SessionEvent) -> Message | None:
    """The message that a surface event shows, or None (an empty answer, a cut)."""
    kind = event.type
    if kind == "user/message":
        return event.data
    if kind == "assistant/message":
        message = event.data["message"]
        return message if message["content"] else None
    if kind == "tool/result":
        return event.data["message"]
    return None


def derive_messages(surface: Iterable[SessionEvent]) -> list[Message]:
    """The messages of a surface, in order."""
    return [message for message in map(derive, surface) if message is not None]


def message_text(message: Message) -> str:
    """The text blocks of a message, joined."""
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def complete_tools(messages: list[Message]) -> list[Message]:
    """The same messages with every tool call answered once, right behind the message that asked.

    Results are pulled up behind their call in call order; messages in between move behind them; a result without a
    call and a second result are left out; a missing result is stated as such. An id that is used again, as some servers
    do and imported logs show, is another call: a result answers the last one before it.
    """
    if not any(_calls(message) or _result_id(message) for message in messages):
        return messages
    results: dict[tuple[int, str], Message] = {}
    waiting: dict[str, int] = {}
    for place, message in enumerate(messages):
        call_id = _result_id(message)
        if call_id is not None and call_id in waiting:
            results[waiting.pop(call_id), call_id] = message
        waiting.update((block["id"], place) for block in _calls(message))
    out: list[Message] = []
    for place, message in enumerate(messages):
        if _result_id(message) is not None:
            continue
        out.append(message)
        asked = dict.fromkeys(block["id"] for block in _calls(message))
        out.extend(results.get((place, call_id)) or _missing(call_id) for call_id in asked)
    return out


def _calls(message: Message) -> list[dict[str, Any]]:
    if message["role"] != "assistant":
        return []
    return [block for block in message["content"] if block["type"] == "tool-call"]


def _result_id(message: Message) -> str | None:
    content = message["content"]
    if message["role"] == "user" and type(content) is not str and content and content[0]["type"] == "tool-result":
        return content[0]["tool_call_id"]
    return None


def _missing(call_id: str) -> Message:
    return tool_message(f"missing-{call_id}", call_id, [{"type": "text", "text": MISSING_RESULT}], is_error=True)


def tool_message(message_id: str, call_id: str, content: list[dict[str, Any]], *, is_error: bool) -> Message:
    """The message of a tool result, in log form."""
    return {
        "id": message_id,
        "role": "user",
        "source": {"kind": "tool", "call_id": call_id},
        "content": [{"type": "tool-result", "tool_call_id": call_id, "content": content, "is_error": is_error}],
    }
