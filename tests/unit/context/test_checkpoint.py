"""The message that stands for the rest: the user's own words within a budget, the summary behind them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.features.compaction.checkpoint import (
    ELIDED,
    PREAMBLE,
    answers_in,
    checkpoint_message,
    users_words,
    within,
)
from kimi_ray.log.estimate import content_tokens


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*blocks: dict[str, Any], **source: Any) -> dict[str, Any]:
    return {"id": "u", "role": "user", "content": list(blocks), "source": {"kind": "user", **source}}


def tokens(blocks: list[dict[str, Any]]) -> int:
    return sum(content_tokens([block]) for block in blocks)


def made(**options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "message_id": "m",
        "compaction_id": "k",
        "summary": [text(" one "), text("two\n")],
        "kept": [],
        "todos": None,
        "answers": 0,
    }
    return checkpoint_message(**(given | options))


def test_without_words_of_the_user_it_is_the_sentence_and_the_summary() -> None:
    message = made()
    assert message["source"] == {"kind": "compaction", "compaction_id": "k"}
    assert message["content"] == [text(PREAMBLE), text("<compacted-summary>\none\n\ntwo\n</compacted-summary>")]


def test_only_the_users_own_messages_are_kept_and_those_of_an_earlier_checkpoint() -> None:
    image = {"type": "image", "url": "u"}
    earlier = made(kept=[text("first"), image], todos=[{"title": "t", "status": "done"}], answers=3)
    messages = [
        earlier,
        user(text("second")),
        user(text("no"), blocked=True),
        {"id": "n", "role": "user", "content": [text("a notice")], "source": {"kind": "task"}},
        {"id": "a", "role": "assistant", "content": [text("an answer")], "source": {"kind": "model"}},
        {"id": "t", "role": "user", "content": [], "source": {"kind": "tool", "call_id": "c"}},
        user(text("third"), image),
    ]
    assert users_words(messages) == [text("first"), image, text("second"), text("third"), image]
    assert answers_in(messages) == 4


def test_above_the_budget_a_tenth_stays_of_the_beginning_and_the_rest_of_the_end() -> None:
    blocks = [text(f"{number:03} " + "x" * 36) for number in range(100)]
    found = within(blocks, 500)
    at = found.index(text(ELIDED))
    assert tokens(found) <= 500 < tokens(blocks)
    assert found[0] == blocks[0] and found[-1] == blocks[-1]
    assert tokens(found[:at]) <= 50 and tokens(found[at + 1 :]) > 380
    assert within(blocks, 0) == [] and within(blocks, tokens(blocks)) == blocks


def test_one_long_message_keeps_its_beginning_and_its_end() -> None:
    whole = "".join(chr(0x4E00 + number) for number in range(10_000))
    head, mark, tail = (block["text"] for block in within([text(whole)], 1_000))
    assert mark == ELIDED and whole.startswith(head) and whole.endswith(tail)
    assert len(tail) > 8 * len(head) > 0


@pytest.mark.parametrize("budget", range(60, 400, 3))
def test_the_mark_of_an_earlier_compaction_stays_whole_and_is_nobodys_words(budget: int) -> None:
    kept = within([text(f"{number:03} " + "x" * 36) for number in range(100)], budget)
    for _ in range(6):
        earlier = made(kept=kept)
        budget += 21  # another model, whose window is larger
        kept = within(users_words([earlier, user(text("more " * 30))]), budget)
        said = [block["text"] for block in kept]
        assert tokens(kept) <= budget
        assert [word for word in said if "left out" in word or word.startswith("[")] == [ELIDED] * said.count(ELIDED)
        assert not any(ELIDED.endswith(word) for word in said if word != ELIDED)
        assert all(said[at : at + 2] != [ELIDED, ELIDED] for at in range(len(said)))
        assert not said or said.count(ELIDED) >= 1


@given(st.lists(st.text(max_size=300).map(text), max_size=8), st.integers(0, 400))
def test_whatever_the_words_they_are_within_the_budget_and_in_their_order(
    blocks: list[dict[str, Any]], budget: int
) -> None:
    found = within(blocks, budget)
    assert tokens(found) <= max(budget, 0)
    again = within(found, budget)
    assert again == found
    at = 0
    whole = "".join(block["text"] for block in blocks)
    for block in found:
        if block["text"] != ELIDED or block in blocks:
            at = whole.find(block["text"], at)
            assert at >= 0
