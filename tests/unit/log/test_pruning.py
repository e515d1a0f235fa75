"""Pruning: head and tail by code point, over all text of a result, the same every time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.log.pruning import MARKER, PruneRule, pruned, text_length

RULE = PruneRule(threshold=100, head=20, tail=10)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def joined(content: list[dict[str, Any]]) -> str:
    return "".join(block["text"] for block in content if block["type"] == "text")


def test_a_result_at_the_threshold_stays_and_one_above_is_head_marker_tail() -> None:
    assert pruned([text("x" * 100)], RULE) is None
    assert pruned([], RULE) is None
    whole = "".join(chr(0x100 + n) for n in range(101))
    assert pruned([text(whole)], RULE) == [text(whole[:20] + MARKER + whole[-10:])]


def test_a_character_is_a_code_point_whatever_its_bytes() -> None:
    found = pruned([text("\U0001f600" * 150)], RULE)
    assert found is not None and found[0]["text"] == "\U0001f600" * 20 + MARKER + "\U0001f600" * 10


def test_the_marker_stands_once_and_blocks_without_text_left_go() -> None:
    image = {"type": "image", "url": "u"}
    content = [text("a" * 15), image, text("b" * 50), text("c" * 40), image, text("d" * 4)]
    assert pruned(content, RULE) == [
        text("a" * 15),
        image,
        text("b" * 5 + MARKER),
        text("c" * 6),
        image,
        text("d" * 4),
    ]


def test_other_blocks_cost_nothing_and_other_keys_of_a_block_stay() -> None:
    assert pruned([{"type": "image", "data": "x" * 10_000}], RULE) is None
    [block] = pruned([{**text("x" * 200), "cache": True}], RULE) or [{}]
    assert block["cache"] is True


@pytest.mark.parametrize(("threshold", "head", "tail"), [(10, 5, 5), (100, 100, 0), (100, -1, 0), (30, 0, 0)])
def test_a_rule_by_which_a_result_could_grow_is_none(threshold: int, head: int, tail: int) -> None:
    with pytest.raises(ValueError):
        PruneRule(threshold, head, tail)


BLOCKS = st.lists(st.one_of(st.text(max_size=90).map(text), st.just({"type": "image", "url": "u"})), max_size=6)


@given(BLOCKS, st.integers(0, 30), st.integers(0, 20))
def test_what_is_pruned_is_smaller_and_is_head_and_tail_of_the_whole(
    content: list[dict[str, Any]], head: int, tail: int
) -> None:
    rule = PruneRule(100, head, tail)
    before = joined(content)
    found = pruned(content, rule)
    assert (found is None) == (len(before) <= 100)
    if found is None:
        return
    assert joined(found) == before[:head] + MARKER + before[len(before) - tail :]
    assert text_length(found) <= rule.threshold and text_length(found) < text_length(content)
    assert [b for b in found if b["type"] == "image"] == [b for b in content if b["type"] == "image"]
    assert all(block["text"] for block in found if block["type"] == "text")
    assert pruned(content, rule) == found and pruned(found, rule) is None
