"""Estimated usage of a request and its answer, when no server counted: by the rule of ``kimi_ray.log.estimate``."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.log.estimate import CHARS_PER_TOKEN, FRAME_TOKENS, message_tokens, tokens_of
from kimi_ray.settings import Usage

__all__ = ["CHARS_PER_TOKEN", "Estimator"]

_LONG = 64
"""A conversation of so many messages is remembered, so that its next request costs what is new in it."""

_CONVERSATIONS = 256


class Estimator:
    """Estimates usage. Remembers the last tool list, whose JSON is the dearest part of a request to measure, and what
    was counted of long conversations."""

    __slots__ = ("_counted", "_tools", "_tools_tokens")

    def __init__(self) -> None:
        self._tools: tuple[ToolSpec, ...] = ()
        self._tools_tokens = 0
        self._counted: dict[tuple[str, str], tuple[list[dict[str, Any]], int]] = {}

    def input_tokens(self, request: ChatRequest) -> int:
        """The tokens of the system prompt, the tools and all messages."""
        if request.tools is not self._tools:
            self._tools_tokens = 0
            if request.tools:
                self._tools_tokens = tokens_of(len(to_json([tool.to_data() for tool in request.tools]))) + FRAME_TOKENS
            self._tools = request.tools
        system = tokens_of(len(request.system)) + FRAME_TOKENS if request.system else 0
        return self._tools_tokens + system + self._messages_tokens(request)

    def _messages_tokens(self, request: ChatRequest) -> int:
        messages = request.messages
        if len(messages) < _LONG:
            return sum(map(message_tokens, messages))
        agent = (request.session_id, request.agent_id)
        before, tokens = self._counted.pop(agent, ([], 0))
        # The messages are shared from request to request: this compares identities, at a speed that does not matter.
        if messages[: len(before)] != before:
            before, tokens = [], 0
        tokens += sum(map(message_tokens, messages[len(before) :]))
        if len(self._counted) >= _CONVERSATIONS:
            del self._counted[next(iter(self._counted))]
        self._counted[agent] = (messages, tokens)
        return tokens

    def usage(self, request: ChatRequest, *, text_chars: int, reasoning_chars: int = 0) -> Usage:
        """The usage of a request and its answer.

        Args:
            request: What was asked.
            text_chars: Characters of text, names and arguments in the answer.
            reasoning_chars: Characters of reasoning in the answer.
        """
        return Usage.model_construct(
            input=self.input_tokens(request),
            cached=0,
            cache_write=0,
            output=tokens_of(text_chars + reasoning_chars),
            reasoning=tokens_of(reasoning_chars),
            estimated=True,
        )
