"""The first difference of two JSON values: found when there is one, at a place where both can be looked up."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.events import freeze
from kimi_ray.replay.difference import ABSENT, SHOWN_CHARS, first_difference, messages_difference

_LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=3)
_KEYS = st.sampled_from(["a", "b", "c"])
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner), max_leaves=8)


def _at(value: Any, path: str) -> Any:
    for key, index in re.findall(r"([a-c])|\[(\d+)\]", path):
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError):
            return ABSENT
    return value


def _strict(value: Any) -> str:
    return repr(value)


@given(_VALUES, _VALUES)
def test_what_is_found_is_what_stands_there(one: Any, other: Any) -> None:
    found = first_difference(one, freeze({"v": other})["v"])
    if found is None:
        assert _sorted(one) == _sorted(other)
        return
    path, recorded, replayed = found
    assert _at(one, path) == recorded and _at(other, path) == replayed
    assert recorded is ABSENT or _strict(recorded) != _strict(replayed)


def _sorted(value: Any) -> Any:
    """With keys in one order, and booleans that are not numbers."""
    if isinstance(value, dict):
        return ("object", sorted((key, _sorted(item)) for key, item in value.items()))  # pyright: ignore
    if isinstance(value, list):
        return ("array", [_sorted(item) for item in value])  # pyright: ignore
    return (type(value).__name__, value)


@pytest.mark.parametrize(
    ("ignored", "field"),
    [
        ((), "a.b[0].c"),
        (("a.b[0].c",), "a.b[1]"),
        (("a.b[0]", "a.b[1]"), "d"),
        (("a",), "d"),
        (("a.b[",), "a.b[0].c"),
        (("a", "d"), None),
    ],
)
def test_fields_that_may_differ(ignored: tuple[str, ...], field: str | None) -> None:
    one = {"a": {"b": [{"c": 1}, 2]}, "d": True}
    other = {"a": {"b": [{"c": 2}, 3]}, "d": 1}
    found = first_difference(one, other, ignored=ignored)
    assert (None if found is None else found[0]) == field


def test_of_long_texts_the_part_is_shown_where_they_part() -> None:
    long = "x" * 5000
    found = first_difference({"t": f"{long}one{long}"}, {"t": f"{long}two{long}"})
    assert found is not None
    _, recorded, replayed = found
    assert "one" in recorded and "two" in replayed and max(len(recorded), len(replayed)) < SHOWN_CHARS + 20


def test_ids_and_sources_are_not_told_to_a_model() -> None:
    one = {"id": "a", "role": "user", "content": [{"type": "text", "text": "x"}], "source": {"kind": "user"}}
    other = {**one, "id": "b", "source": {"kind": "task"}}
    assert messages_difference([one], [other]) is None
    assert messages_difference([one], []) == ("messages[0]", {"role": "user", "content": one["content"]}, ABSENT)
    assert messages_difference([one, one], [one, {**one, "role": "assistant"}], 1) is not None
    assert messages_difference([one, one], [one], 2) is None
