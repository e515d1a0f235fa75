"""How many tokens a piece of a conversation has, when no server counted: the one rule of this program.

Four characters a token, rounded up, and four tokens for the frame of each block and of each message.
"""

from __future__ import annotations

from typing import Any, cast

from kimi_ray.events import encode

CHARS_PER_TOKEN = 4
FRAME_TOKENS = 4
"""What the frame of a block or of a message costs."""
_IMAGE_TOKENS = 1_000
"""An image, whatever its size."""


def tokens_of(chars: int) -> int:
    """The estimate for a text of so many characters."""
    return -(-chars // CHARS_PER_TOKEN)


def content_tokens(content: Any) -> int:
    """The estimate for a message's content: a text, or blocks of any kind."""
    if isinstance(content, str):
        return tokens_of(len(content)) + FRAME_TOKENS
    total = 0
    for block in cast("list[dict[str, Any]]", content):
        kind = block["type"]
        if kind in ("text", "reasoning"):
            # A text that is kept in a blob says its length in bytes.
            total += tokens_of(len(block["text"]) if "text" in block else block["bytes"])
        elif kind == "tool-call":
            arguments = block["arguments"]
            total += tokens_of(len(block["name"]))
            total += tokens_of(len(arguments) if isinstance(arguments, str) else arguments["bytes"])
        elif kind == "tool-result":
            total += content_tokens(block["content"])
        elif kind == "image":
            total += _IMAGE_TOKENS
        else:
            total += tokens_of(len(encode(block)))
        total += FRAME_TOKENS
    return total


def message_tokens(message: dict[str, Any]) -> int:
    """The estimate for a message."""
    return content_tokens(message["content"]) + FRAME_TOKENS
