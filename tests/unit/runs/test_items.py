"""Items have an identity that does not depend on their place, and bad ones are named where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import RunError
from kimi_ray.runs import Filter, items_hash, keys_of, prepare_items
from kimi_ray.settings import Item, Sampling


def refused(code: str, items: Any, **how: Any) -> RunError:
    with pytest.raises(RunError) as error:
        prepare_items(items, **how)
    assert error.value.code == code
    return error.value


def test_default_ids_are_hashes_of_the_data_and_repeats_are_told_apart() -> None:
    made = prepare_items(["a", "b", "a", "a", {"x": 1, "y": 2}, {"y": 2, "x": 1}])
    ids = [one.id for one in made]
    # The first 12 hex digits of the SHA-256 of '"a"', a fact anyone can recompute.
    assert ids[0] == "ac8d8342bbb2"
    assert ids[2:4] == ["ac8d8342bbb2~2", "ac8d8342bbb2~3"]
    assert ids[5] == f"{ids[4]}~2"
    assert [one.index for one in made] == [0, 1, 2, 3, 4, 5]


def test_an_id_does_not_depend_on_filter_limit_or_shuffle() -> None:
    data = [{"n": n % 5, "kind": "odd" if n % 2 else "even"} for n in range(20)]
    whole = {one.id: one.item.data for one in prepare_items(data)}
    for how in ({"filters": [Filter.parse("kind=odd")]}, {"shuffle": 3, "limit": 7}, {"limit": 4}):
        some = prepare_items(data, **how)  # type: ignore[arg-type]
        assert [one.index for one in some] == list(range(len(some)))
        for one in some:
            assert whole[one.id] == one.item.data


def test_a_shuffle_is_the_same_twice_and_another_with_another_seed() -> None:
    data = [f"text {n}" for n in range(50)]
    first, again, other = (prepare_items(data, shuffle=seed) for seed in (1, 1, 2))
    assert first == again
    assert [one.id for one in first] != [one.id for one in other]
    assert {one.id for one in first} == {one.id for one in other} == {one.id for one in prepare_items(data)}
    assert prepare_items(data, shuffle=1, limit=5) == first[:5]


def test_a_limit_does_not_take_more_than_it_needs() -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"item {taken}"

    assert len(prepare_items(endless(), limit=3)) == 3
    assert taken == 3


def test_explicit_ids_and_the_id_column() -> None:
    made = prepare_items([{"name": "a/b ü#1", "n": 1}, Item(id="own", data={"n": 2})], id_column="name")
    assert [one.id for one in made] == ["a/b ü#1", "own"]
    assert prepare_items([{"n": 17}], id_column="n")[0].id == "17"


def test_equal_explicit_ids_name_both_places() -> None:
    error = refused(
        "items.duplicate_id", [{"k": "x"}, {"k": "y"}, {"k": "x"}], id_column="k", sources=["l1", "l2", "l3"]
    )
    assert error.details == {"id": "x", "first": "l1", "second": "l3"}


def test_an_explicit_id_cannot_take_a_default_one() -> None:
    refused("items.duplicate_id", ["a", Item(id="ac8d8342bbb2", data="z")])
    refused("items.duplicate_id", [Item(id="ac8d8342bbb2~2", data="z"), "a", "a"])


def test_a_missing_id_column_names_those_there_are() -> None:
    error = refused("items.unknown_column", [{"a": 1, "b": 2}], id_column="id", sources=["f.csv line 2"])
    assert "f.csv line 2" in error.message
    assert "a, b" in str(error)


@pytest.mark.parametrize(
    "bad_id",
    ["", "x" * 257, "a\nb", "a\0", "tab\t", "\u202e", "\ud800"],
)
def test_ids_are_bounded_and_printable(bad_id: str) -> None:
    refused("items.bad_item", [Item(id=bad_id, data="x")])


@pytest.mark.parametrize("value", [None, True, 1.5, ["a"], {}])
def test_an_id_column_holds_strings_or_integers(value: Any) -> None:
    refused("items.bad_item", [{"id": value}], id_column="id")


@pytest.mark.parametrize(
    "bad",
    [3, None, ["a"], {"x": float("nan")}, {"x": object()}, {1: "x"}, {"x": "\ud800"}, {"x": (1,)}, b"x", {"x": 2**70}],
)
def test_what_is_not_an_item_is_named_by_its_place(bad: Any) -> None:
    assert "item 2" in refused("items.bad_item", ["fine", bad]).message


@pytest.mark.parametrize("one", ["a single string", {"a": 1}, b"x"])
def test_one_thing_is_not_a_collection(one: Any) -> None:
    assert "list" in (refused("items.bad_item", one).hint or "")


def test_no_items() -> None:
    refused("items.empty", [])
    error = refused("items.empty", ["a", "b"], filters=[Filter.parse("item=c")])
    assert "item=c" in error.message
    assert error.details["items"] == 2
    refused("items.bad_limit", ["a"], limit=0)


def test_items_are_copied_not_shared() -> None:
    data = {"x": ["y"]}
    made = prepare_items([data])
    data["x"].append("z")
    assert made[0].item.data == {"x": ["y"]}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("lang=en", [0, 2]),
        ("lang!=en", [1]),
        ("lang~^e", [0, 2]),
        ("n=1", [0]),
        ("n~[23]", [1, 2]),
        ("ok=true", [0]),
        ("ok=null", [2]),
        ("text=a=b!~c", [1]),
        ("text=", [2]),
    ],
)
def test_filters(condition: str, expected: list[int]) -> None:
    data = [
        {"lang": "en", "n": 1, "ok": True, "text": "t"},
        {"lang": "de", "n": 2, "ok": False, "text": "a=b!~c"},
        {"lang": "en", "n": 3, "ok": None, "text": ""},
    ]
    made = prepare_items(data, filters=[Filter.parse(condition)])
    assert [data.index(one.item.data) for one in made] == expected


@pytest.mark.parametrize("text", ["", "column", "=x", "~x", "a~(", "!=x"])
def test_filters_that_are_none(text: str) -> None:
    with pytest.raises(RunError) as error:
        Filter.parse(text)
    assert error.value.code == "items.bad_filter"


def test_a_filter_on_an_unknown_column() -> None:
    assert "lang=en" in refused("items.unknown_column", [{"a": 1}], filters=[Filter.parse("lang=en")]).message


def test_keys_are_item_by_item_with_repeats_within() -> None:
    made = prepare_items(["a", "b"])
    assert [(key.item_id, key.repeat) for key in keys_of(made, 2)] == [
        (made[0].id, 0),
        (made[0].id, 1),
        (made[1].id, 0),
        (made[1].id, 1),
    ]
    with pytest.raises(RunError) as error:
        keys_of(made, 0)
    assert error.value.code == "swarm.bad_repeats"


def test_the_hash_sees_every_change() -> None:
    base = prepare_items([{"a": 1}, {"b": 2}])
    assert items_hash(base) == items_hash(prepare_items([{"a": 1}, {"b": 2}]))
    for other in (
        [{"a": 1}],
        [{"b": 2}, {"a": 1}],
        [{"a": 1}, {"b": 3}],
        [{"a": 1}, Item(data={"b": 2}, prompt="p")],
        [{"a": 1}, Item(data={"b": 2}, sampling=Sampling(seed=1))],
        [{"a": 1}, Item(id="x", data={"b": 2})],
    ):
        assert items_hash(prepare_items(other)) != items_hash(base)  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.text(max_size=3) | st.dictionaries(st.text(max_size=3), JSON, max_size=3), min_size=1, max_size=30))
def test_ids_are_unique_and_the_same_twice(data: list[Any]) -> None:
    first, again = prepare_items(data), prepare_items(data)
    assert [one.id for one in first] == [one.id for one in again]
    assert len({one.id for one in first}) == len(data)
    assert [one.item.data for one in first] == data
