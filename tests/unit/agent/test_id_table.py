"""Ids of a whole log in little memory."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.agent.ended_prompts import EndedPrompt, EndedPrompts
from kimi_ray.agent.id_table import IdTable, _place  # pyright: ignore[reportPrivateUsage]

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(st.tuples(st.text(max_size=3), NUMBERS, NUMBERS), max_size=300))
def test_a_table_is_a_dict_that_forgets_nothing(entries: list[tuple[str, int, int]]) -> None:
    table, model = IdTable(2), dict[str, tuple[int, int]]()
    for name, first, second in entries:
        assert (name in table) == (name in model)
        table.put(name, first, second)
        model[name] = (first, second)
        assert len(table) == len(model)
    assert all(table.get(name) == numbers for name, numbers in model.items())
    assert table.get("not there") is None and "not there" not in table
    again = IdTable(2)
    for name, numbers in reversed(model.items()):
        again.put(name, *numbers)
    assert table == again
    again.put("another", 0, 0)
    assert table != again


def test_ids_whose_places_are_the_same_are_told_apart() -> None:
    from array import array

    keys = array("Q", bytes(8 * 8))
    for key in (6, 14, 22, 7):  # all at the end, and around it
        place = _place(keys, key)
        assert not keys[place]
        keys[place] = key
    assert [keys[_place(keys, key)] for key in (22, 6, 7, 14)] == [22, 6, 7, 14]
    assert not keys[_place(keys, 30)]


def test_an_id_is_a_few_bytes() -> None:
    def size(table: Any) -> int:
        return sum(sys.getsizeof(array) for array in (table._keys, *table._columns))

    known, numbered = IdTable(), IdTable(3)
    for n in range(10_000):
        known.put(f"call_{n}")
        numbered.put(f"msg_{n}", n, n, n)
    assert len(known) == 10_000 and numbered.get("msg_7777") == (7777, 7777, 7777)
    assert size(known) <= 10_000 * 32 and size(numbered) <= 10_000 * 128


def test_what_is_left_of_a_prompt() -> None:
    prompts = EndedPrompts()
    prompts.put("a", "completed", 0, hash("what it said"))
    prompts.put("b", "cancelled", None, None)
    assert prompts.get("a") == EndedPrompt("completed", 0, hash("what it said"))
    assert prompts.get("b") == EndedPrompt("cancelled", None, 0)
    assert prompts.get("c") is None and len(prompts) == 2
