"""How many tokens a request or an answer has, when no server counted: four characters a token, rounded up."""

from __future__ import annotations

from typing import Any, cast

from pydantic_core import to_json

from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.settings import Usage

CHARS_PER_TOKEN = 4
_IMAGE_CHARS = 4_000
"""An image counts as a thousand tokens, whatever its size."""


def tokens_of(chars: int) -> int:
    """The estimate for a text of so many characters."""
    return -(-chars // CHARS_PER_TOKEN)


_LONG = 64
"""A conversation of so many messages is remembered, so that its next request costs what is new in it."""

_CONVERSATIONS = 256


class Estimator:
    """Estimates usage. Remembers the last tool list, whose JSON is the dearest part of a request to measure, and what
    was counted of long conversations."""

    __slots__ = ("_counted", "_tools", "_tools_chars")

    def __init__(self) -> None:
        self._tools: tuple[ToolSpec, ...] = ()
        self._tools_chars = 0
        self._counted: dict[tuple[str, str], tuple[list[dict[str, Any]], int]] = {}

    def input_chars(self, request: ChatRequest) -> int:
        """The characters of the system prompt, the tools and all messages."""
        if request.tools is not self._tools:
            self._tools_chars = len(to_json([tool.to_data() for tool in request.tools])) if request.tools else 0
            self._tools = request.tools
        chars = self._tools_chars + (len(request.system) if request.system else 0)
        return chars + self._messages_chars(request)

    def _messages_chars(self, request: ChatRequest) -> int:
        messages = request.messages
        if len(messages) < _LONG:
            return sum(_content_chars(message["content"]) for message in messages)
        agent = (request.session_id, request.agent_id)
        before, chars = self._counted.pop(agent, ([], 0))
        # The messages are shared from request to request: this compares identities, at a speed that does not matter.
        if messages[: len(before)] != before:
            before, chars = [], 0
        chars += sum(_content_chars(message["content"]) for message in messages[len(before) :])
        if len(self._counted) >= _CONVERSATIONS:
            del self._counted[next(iter(self._counted))]
        self._counted[agent] = (messages, chars)
        return chars

    def usage(self, request: ChatRequest, *, text_chars: int, reasoning_chars: int = 0) -> Usage:
        """The usage of a request and its answer.

        Args:
            request: What was asked.
            text_chars: Characters of text, names and arguments in the answer.
            reasoning_chars: Characters of reasoning in the answer.
        """
        return Usage.model_construct(
            input=tokens_of(self.input_chars(request)),
            cached=0,
            cache_write=0,
            output=tokens_of(text_chars + reasoning_chars),
            reasoning=tokens_of(reasoning_chars),
            estimated=True,
        )


def _content_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    chars = 0
    for block in cast("list[dict[str, Any]]", content):
        kind = block["type"]
        if kind in ("text", "reasoning"):
            chars += len(block["text"])
        elif kind == "tool-call":
            chars += len(block["name"]) + len(block["arguments"])
        elif kind == "tool-result":
            chars += _content_chars(block["content"])
        else:
            chars += _IMAGE_CHARS
    return chars
