"""Which part of a surface an undo takes away: the last prompts and all that came of them (K 7.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from kimi_ray.events import SessionEvent

Unavailable = Literal["empty", "compaction_boundary", "insufficient"]

BEFORE_A_PROMPT = frozenset({"hook_result", "gate"})
"""Sources of messages that stand before a prompt and are there because of it."""


@dataclass(frozen=True, slots=True)
class UndoSpan:
    """The nodes to cut, always up to the end of the surface."""

    seqs: tuple[int, ...]
    prompts: tuple[str, ...]
    """The prompts among them, oldest first."""


def undo_span(surface: Sequence[SessionEvent], count: int) -> UndoSpan | Unavailable:
    """The span of the last ``count`` prompts of the user, or why there is none.

    What the runtime said (notices, reminders) does not count; nothing behind a summary can be reached.

    Args:
        surface: The nodes.
        count: How many prompts, at least 1.
    """
    prompts: list[str] = []
    at = len(surface)
    while at > 0 and len(prompts) < count:
        at -= 1
        node = surface[at]
        if node.type != "user/message":
            continue
        if node.replaced is not None:
            return "compaction_boundary"
        if _source(node) == "user":
            prompts.append(str(node.data["id"]))
    if len(prompts) < count:
        return "insufficient" if prompts else "empty"
    while at > 0 and surface[at - 1].type == "user/message" and _source(surface[at - 1]) in BEFORE_A_PROMPT:
        at -= 1
    return UndoSpan(tuple(node.seq for node in surface[at:]), tuple(reversed(prompts)))


def _source(node: SessionEvent) -> object:
    source = node.data.get("source")
    return cast("dict[str, Any]", source).get("kind") if isinstance(source, dict) else None
