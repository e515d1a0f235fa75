"""The JSON rule: what may be stored, what is refused by name, and that nothing changes on the way."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kimi_ray.errors import LogError
from kimi_ray.events import FrozenDict, FrozenList, decode, encode, freeze, thaw

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda x: x + 0.0)
    | st.text(st.characters(codec="utf-8"))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=4)
    ),
    max_leaves=25,
)


class Sub(str):
    __slots__ = ()


class Kind(enum.IntEnum):
    one = 1


class Model(BaseModel):
    x: int = 1


class Number(float):
    __slots__ = ()


class Table(dict[str, int]):
    pass


def nested(depth: int, leaf: Any = None) -> Any:
    value = leaf
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


REFUSED = [
    (math.nan, "nan"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (-0.0, "-0.0"),
    (2**63, "int outside"),
    (-(2**63) - 1, "int outside"),
    (b"bytes", "bytes"),
    ((1, 2), "tuple"),
    ({1}, "set"),
    (Sub("s"), "Sub"),
    (Kind.one, "Kind"),
    (Number(1), "Number"),
    (Table(a=1), "Table"),
    (Decimal(1), "Decimal"),
    (Model(), "Model"),
    (1j, "complex"),
    (object(), "object"),
    ("a\ud800b", "surrogate"),
    ("\udfff", "surrogate"),
]


@pytest.mark.parametrize(("value", "what"), REFUSED)
@pytest.mark.parametrize("place", ["", "a", "a.b[1].c", "list[0]"])
def test_what_is_not_json_is_refused_by_name_and_place(value: Any, what: str, place: str) -> None:
    built: Any = {
        "": value,
        "a": {"a": value},
        "a.b[1].c": {"a": {"b": [0, {"c": value}]}},
        "list[0]": {"list": [value]},
    }
    with pytest.raises(LogError) as caught:
        freeze(built[place])
    assert caught.value.code == "log.not_json"
    assert what in caught.value.details["found"]
    assert caught.value.details["at"] == place


@pytest.mark.parametrize("key", [1, None, True, 1.5, b"k", Sub("k"), ("k",), "k\ud800"])
def test_a_key_is_a_plain_string_of_unicode(key: Any) -> None:
    with pytest.raises(LogError) as caught:
        freeze({"outer": [{key: 1}]})
    assert caught.value.code == "log.not_json"


def test_numpy_scalars_are_refused() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.int64(1), numpy.float64(1.0), numpy.bool_(True), numpy.str_("s"), numpy.array([1])):
        with pytest.raises(LogError, match=r"numpy|type"):
            freeze({"x": value})


def test_nesting_ends_at_64() -> None:
    assert thaw(freeze(nested(64))) == nested(64)
    assert freeze(nested(63, [])) == nested(63, [])
    for deep in (nested(65), nested(64, {}), nested(64, []), nested(10_000)):
        with pytest.raises(LogError, match="nesting above 64"):
            freeze(deep)


def test_cycles_are_refused_and_sharing_is_not() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(LogError, match="a cycle at"):
        freeze({"x": cycle})
    table: dict[str, Any] = {}
    table["self"] = table
    with pytest.raises(LogError, match="a cycle"):
        freeze(table)
    shared = {"deep": [1, [2]]}
    assert freeze([shared, shared, [shared, {"x": shared}]]) == [shared, shared, [shared, {"x": shared}]]


def test_a_list_that_doubles_itself_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.events.json_rule.MAX_VALUES", 10_000)
    bomb: Any = [1, 1]
    for _ in range(50):
        bomb = [bomb, bomb]
    with pytest.raises(LogError, match="more than 10000 values") as caught:
        freeze(bomb)
    assert caught.value.code == "log.not_json"
    assert len(freeze([0] * 10_000)) == 10_000


def test_frozen_data_shares_nothing_with_its_source() -> None:
    source: Any = {"list": [1, {"x": [2]}], "empty": [], "none": {}}
    frozen = freeze(source)
    source["list"][1]["x"].append(3)
    source["empty"].append(1)
    source["none"]["k"] = 1
    source["more"] = 1
    assert frozen == {"list": [1, {"x": [2]}], "empty": [], "none": {}}


def test_frozen_data_cannot_be_changed_by_any_method() -> None:
    frozen = freeze({"d": {"k": 1}, "l": [2, 1]})
    table, items = frozen["d"], frozen["l"]
    assert type(table) is FrozenDict and type(items) is FrozenList
    attempts: list[Any] = [
        lambda: table.__setitem__("k", 2),
        lambda: table.__delitem__("k"),
        lambda: table.__ior__({"z": 1}),
        table.clear,
        lambda: table.pop("k"),
        table.popitem,
        lambda: table.setdefault("z", 1),
        lambda: table.update(z=1),
        lambda: items.__setitem__(0, 5),
        lambda: items.__setitem__(slice(0, 1), [5]),
        lambda: items.__delitem__(0),
        lambda: items.__iadd__([1]),
        lambda: items.__imul__(2),
        lambda: items.append(1),
        items.clear,
        lambda: items.extend([1]),
        lambda: items.insert(0, 1),
        items.pop,
        lambda: items.remove(1),
        items.reverse,
        items.sort,
        lambda: setattr(table, "x", 1),
        lambda: setattr(items, "x", 1),
    ]
    for attempt in attempts:
        with pytest.raises((TypeError, AttributeError)):
            attempt()
    assert frozen == {"d": {"k": 1}, "l": [2, 1]}


@given(VALUES)
def test_every_value_survives_freezing_encoding_and_reading(value: Any) -> None:
    frozen = freeze(value)
    line = encode(value)
    assert encode(frozen) == line and b"\n" not in line
    back = decode(line)
    assert encode(back) == line
    assert thaw(back) == value == json.loads(line)
    assert thaw(frozen) == value
    assert freeze(frozen) == frozen


@given(VALUES)
def test_what_is_read_is_as_frozen_as_what_is_appended(value: Any) -> None:
    def kinds(frozen: Any) -> Any:
        if isinstance(frozen, dict):
            return type(frozen), [(key, kinds(item)) for key, item in frozen.items()]
        if isinstance(frozen, list):
            return type(frozen), [kinds(item) for item in frozen]
        return type(frozen), frozen

    assert kinds(decode(encode(value))) == kinds(freeze(value))


@given(VALUES)
def test_frozen_data_can_be_pickled_and_copied(value: Any) -> None:
    frozen = freeze(value)
    for other in (pickle.loads(pickle.dumps(frozen)), copy.deepcopy(frozen), copy.copy(frozen)):
        assert other == frozen and type(other) is type(frozen)
    assert type(thaw(frozen)) in (dict, list, str, int, float, bool, type(None))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b" ",
        b"{",
        b"{} {}",
        b'{"a":1,}',
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"-0.0",
        b"[[-0.0]]",
        b'{"a":[1,{"b":-0.0}]}',
        b'{"a":{"b":1e999}}',
        b"9223372036854775808",
        b"[-9223372036854775809]",
        b"1" * 5000,
        b'"\x01"',
        b'"\xff"',
        rb'"\ud800"',
        b"\xef\xbb\xbf{}",
        b"{}\x00",
        b"'a'",
        b"{a:1}",
        b"[" * 65 + b"]" * 65,
        b"[" * 100_000,
        b"{}".decode().encode("utf-16"),
    ],
)
def test_what_is_not_our_json_is_refused_on_reading(line: bytes) -> None:
    with pytest.raises(LogError) as caught:
        decode(line)
    assert caught.value.code == "log.not_json"


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"b":2,"a":3}',
        b'[{"x":{"k":[],"k":[]}}]',
        rb'{"a":1,"\u0061":2}',
        b'{"":1,"":2}',
    ],
)
def test_a_key_that_stands_twice_is_refused(line: bytes) -> None:
    with pytest.raises(LogError, match="stands twice"):
        decode(line)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b' {"a" : [1, 2.50]} ', {"a": [1, 2.5]}),
        (rb'"\u0041\/"', "A/"),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (b"1E2", 100.0),
        (b'{"b":1,"a":2}', {"b": 1, "a": 2}),
    ],
)
def test_another_spelling_of_the_same_json_is_read(line: bytes, value: Any) -> None:
    assert decode(line) == value


@given(st.binary(max_size=40))
def test_any_bytes_give_a_value_or_a_named_error(line: bytes) -> None:
    try:
        value = decode(line)
    except LogError as error:
        assert error.code == "log.not_json"
    else:
        assert decode(encode(value)) == value


@given(VALUES, st.data())
def test_one_changed_byte_never_raises_anything_else(value: Any, data: st.DataObject) -> None:
    line = bytearray(encode(value))
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(line))
    except LogError as error:
        assert error.code == "log.not_json"
