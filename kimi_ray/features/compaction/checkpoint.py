"""The one message that stands for what was compacted: what the user said, word for word, and the summary. Pure.

Its first block tells the model what it is. Then come ``kept`` blocks of the user's own messages (its source says how
many, so that the next compaction takes them over, with the mark where some were left out), the todo list, and last the
summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kimi_ray.events import SessionEvent
from kimi_ray.log.estimate import CHARS_PER_TOKEN, FRAME_TOKENS, content_tokens
from kimi_ray.log.messages import Message

SOURCE = "compaction"

PREAMBLE = (
    "What was said before this point was replaced by this message, automatically. It is established background: go on "
    "from it, do not answer it, do not repeat it."
)
USERS_WORDS = " First come the user's own messages, oldest first and word for word, then a summary of everything."
ELIDED = "[Some of the user's messages are left out here.]"
_MARKS = {"pending": "[ ]", "in_progress": "[~]", "done": "[x]"}
_HEAD_SHARE = 10


def checkpoint_message(
    *,
    message_id: str,
    compaction_id: str,
    summary: Sequence[dict[str, Any]],
    kept: Sequence[dict[str, Any]],
    todos: Sequence[dict[str, Any]] | None,
    answers: int,
) -> Message:
    """The message.

    Args:
        message_id: Its id.
        compaction_id: Of the compaction.
        summary: Text blocks.
        kept: The user's own words (``users_words``, ``within``).
        todos: The todo list, which is not in any message.
        answers: How many answers of the model are gone with it, of earlier compactions too.
    """
    content: list[dict[str, Any]] = [{"type": "text", "text": PREAMBLE + (USERS_WORDS if kept else "")}, *kept]
    if todos:
        lines = "\n".join(f"{_MARKS.get(todo['status'], '[ ]')} {todo['title']}" for todo in todos)
        content.append({"type": "text", "text": f"## Todo list\n{lines}"})
    text = "\n\n".join(str(block["text"]).strip() for block in summary)
    content.append({"type": "text", "text": f"<compacted-summary>\n{text}\n</compacted-summary>"})
    source: dict[str, Any] = {"kind": SOURCE, "compaction_id": compaction_id}
    if kept:
        source["kept"] = len(kept)
    if answers:
        source["answers"] = answers
    return {"id": message_id, "role": "user", "content": content, "source": source}


def is_checkpoint(node: SessionEvent) -> bool:
    """Whether a node of the surface stands for what was compacted."""
    if node.type != "user/message" or node.replaced is None:
        return False
    source: dict[str, Any] = node.data.get("source") or {}
    return source.get("kind") == SOURCE


def users_words(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The blocks of the user's own messages, those that an earlier checkpoint has kept first, its mark among them."""
    blocks: list[dict[str, Any]] = []
    for message in messages:
        source: dict[str, Any] = message.get("source") or {}
        if source.get("kind") == SOURCE:
            blocks.extend(message["content"][1 : 1 + source.get("kept", 0)])
        elif source.get("kind") == "user" and not source.get("blocked"):
            blocks.extend(message["content"])
    return blocks


def answers_in(messages: Iterable[Message]) -> int:
    """The answers of the model among messages, with those that earlier checkpoints stand for."""
    count = 0
    for message in messages:
        source: dict[str, Any] = message.get("source") or {}
        count += 1 if message["role"] == "assistant" else source.get("answers", 0)
    return count


def within(blocks: Sequence[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    """The blocks within a budget of tokens: over it a tenth of it from the beginning, the rest from the end.

    Texts are cut by code point; a mark stands where something was left out, now or by a compaction before. A mark is
    never cut, and none stands beside another.
    """
    if sum(map(_tokens, blocks)) <= budget:
        return list(blocks)
    mark = {"type": "text", "text": ELIDED}
    left = budget - _tokens(mark)
    head_budget = left // _HEAD_SHARE
    if head_budget <= 0:
        return []
    head, rest = _first(blocks, head_budget)
    while head and _is_mark(head[-1]):
        head.pop()
    while rest and _is_mark(rest[0]):
        rest = rest[1:]
    tail = _last(rest, left - sum(map(_tokens, head)))
    while tail and _is_mark(tail[0]):
        del tail[0]
    return [*head, mark, *tail]


def _is_mark(block: dict[str, Any]) -> bool:
    return block.get("text") == ELIDED


def _first(blocks: Sequence[dict[str, Any]], budget: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What fits of the beginning, and the rest."""
    taken: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        price = _tokens(block)
        if price > budget:
            chars = 0 if block["type"] != "text" or _is_mark(block) else _chars(budget)
            if chars <= 0:
                return taken, list(blocks[at:])
            taken.append({**block, "text": block["text"][:chars]})
            return taken, [{**block, "text": block["text"][chars:]}, *blocks[at + 1 :]]
        taken.append(block)
        budget -= price
    return taken, []


def _last(blocks: Sequence[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    for block in reversed(blocks):
        price = _tokens(block)
        if price > budget:
            chars = 0 if block["type"] != "text" or _is_mark(block) else _chars(budget)
            if chars > 0:
                taken.append({**block, "text": block["text"][-chars:]})
            break
        taken.append(block)
        budget -= price
    taken.reverse()
    return taken


def _chars(budget: int) -> int:
    """The characters of one block that has so many tokens."""
    return (budget - FRAME_TOKENS) * CHARS_PER_TOKEN


def _tokens(block: dict[str, Any]) -> int:
    return content_tokens([block])
