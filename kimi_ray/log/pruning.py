"""Pruning: the head and the tail of a long tool result, by code point (DSH 9.9). Pure and deterministic.

What goes is the middle of all text of a result together; a marker stands once where it was. Blocks that are no text
stay where they are and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MARKER = "\n\n[the middle of this result was pruned]\n\n"
"""What stands for the removed text."""


@dataclass(frozen=True, slots=True)
class PruneRule:
    """How much of a long result stays, in code points of its text.

    Raises:
        ValueError: head, marker and tail together would be longer than the threshold: a result could grow.
    """

    threshold: int = 8_192
    """A result of so many characters, or fewer, stays as it is."""
    head: int = 4_096
    tail: int = 1_024

    def __post_init__(self) -> None:
        if min(self.head, self.tail) < 0 or self.head + len(MARKER) + self.tail > self.threshold:
            raise ValueError(
                f"head ({self.head}), marker ({len(MARKER)}) and tail ({self.tail}) do not fit into"
                f" {self.threshold} characters"
            )


def text_length(content: Sequence[dict[str, Any]]) -> int:
    """The characters of all text blocks of a result whose blobs are in place."""
    return sum(len(block["text"]) for block in content if block["type"] == "text")


def pruned(content: Sequence[dict[str, Any]], rule: PruneRule) -> list[dict[str, Any]] | None:
    """The content without the middle of its text, or None when it is short enough.

    Args:
        content: The blocks of one tool result, every blob in place.
        rule: What stays.
    """
    total = text_length(content)
    if total <= rule.threshold:
        return None
    first, behind = rule.head, total - rule.tail
    kept: list[dict[str, Any]] = []
    at, is_marked = 0, False
    for block in content:
        if block["type"] != "text":
            kept.append(block)
            continue
        text = block["text"]
        begin, at = at, at + len(text)
        before, after = text[: max(0, first - begin)], text[max(0, behind - begin) :]
        if text and not is_marked and begin < behind and at > first:
            before, is_marked = before + MARKER, True
        if before or after:
            kept.append({**block, "text": before + after})
    return kept
