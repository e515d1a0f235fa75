"""The envelope: key order, canonical bytes, and every way to be wrong."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent, event_from_data, make_event, parse_event

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
DATA = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers(-5, 5) | TEXT | st.lists(TEXT, max_size=2), max_size=3
)


@st.composite
def events(draw: st.DrawFn) -> SessionEvent:
    seq = draw(st.integers(0, 2**40))
    surface = draw(st.none() | st.just("append") | st.tuples(st.integers(0, 9), st.integers(0, 9)))
    sources = draw(st.none() | st.lists(st.integers(0, max(seq - 1, 0)), unique=True, max_size=3))
    return make_event(
        seq,
        draw(st.integers(-(2**50), 2**50)),
        draw(st.sampled_from(["turn/start", "a/b", "é/ü", "a/b/c"])),
        draw(DATA),
        {"replace": list(surface)} if isinstance(surface, tuple) else surface,
        None if sources is None or seq == 0 else tuple(sources),
        draw(st.booleans()),
    )


@given(events())
def test_an_event_and_its_line_are_the_same_thing(event: SessionEvent) -> None:
    back = parse_event(event.line, at=event.seq)
    for name in ("seq", "time", "type", "data", "surface", "sources", "ignorable", "line", "replaced"):
        assert getattr(back, name) == getattr(event, name)
    assert back == event and hash(back) == hash(event)
    assert event_from_data(json.loads(event.line)).line == event.line
    assert parse_event(event.line + b"\n") == event
    for other in (pickle.loads(pickle.dumps(event)), copy.deepcopy(event)):
        assert other == event and other.data == event.data and other.surface == event.surface
    assert list(json.loads(event.line)) == list(event.to_data())


def test_the_keys_stand_in_their_order_and_absent_ones_are_absent() -> None:
    plain = make_event(0, 7, "turn/start", {"turn": 0})
    assert plain.line == b'{"seq":0,"time":7,"type":"turn/start","data":{"turn":0}}'
    full = make_event(5, 7, "surface/cut", {"z": 1, "a": None}, {"replace": [1, 3]}, (1, 2), True)
    assert full.line == (
        b'{"seq":5,"time":7,"type":"surface/cut","data":{"z":1,"a":null},"surface":{"replace":[1,3]},'
        b'"sources":[1,2],"ignorable":true}'
    )
    assert full.replaced == (1, 3) and plain.replaced is None


def test_an_event_keeps_nothing_that_its_maker_can_change() -> None:
    data: Any = {"list": [1]}
    surface: Any = {"replace": [0, 1]}
    sources: Any = [0, 1]
    event = make_event(2, 7, "user/message", data, surface, sources)
    line = event.line
    data["list"].append(2)
    surface["replace"][0] = 9
    surface["more"] = 1
    sources.append(7)
    assert event.line == line and event.data == {"list": [1]}
    assert event.replaced == (0, 1) and event.surface == {"replace": [0, 1]} and event.sources == (0, 1)
    for change in (
        lambda: setattr(event, "seq", 9),
        lambda: delattr(event, "seq"),
        lambda: event.data.update(x=1),
        lambda: event.surface.update(x=1),  # type: ignore[union-attr]
        lambda: setattr(event, "other", 9),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()


@pytest.mark.parametrize("data", [None, [], "x", 1, [["a", 1]], b"{}"])
def test_data_is_an_object(data: Any) -> None:
    with pytest.raises(LogError) as caught:
        make_event(0, 0, "turn/start", data)
    assert caught.value.code == "log.not_json"


@pytest.mark.parametrize(
    ("surface", "sources"),
    [
        ("prepend", None),
        ({"replace": [1]}, None),
        ({"replace": [1, -1]}, None),
        ({"replace": [1, True]}, None),
        ({"replace": (1, 2)}, None),
        ({"replace": [1, 2], "x": 1}, None),
        ({}, None),
        ("append", (3,)),
        ("append", (4,)),
        ("append", (-1,)),
        ("append", (0, 0)),
        ("append", (True,)),
    ],
)
def test_a_surface_or_source_of_another_shape_is_refused_when_made(surface: Any, sources: Any) -> None:
    with pytest.raises(LogError) as caught:
        make_event(3, 0, "user/message", {}, surface, sources)
    assert caught.value.code == "log.bad_envelope"


GOOD: dict[str, Any] = {"seq": 3, "time": 1, "type": "a/b", "data": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"seq": -1},
        {"seq": 3.0},
        {"seq": True},
        {"seq": "3"},
        {"seq": None},
        {"time": 1.5},
        {"time": None},
        {"time": False},
        {"type": "ab"},
        {"type": "/"},
        {"type": "a/"},
        {"type": "/b"},
        {"type": None},
        {"type": ["a/b"]},
        {"data": []},
        {"data": None},
        {"surface": None},
        {"surface": "replace"},
        {"surface": {"replace": [0]}},
        {"surface": {"replace": [0, 1.0]}},
        {"surface": {"replace": [0, 1], "more": 1}},
        {"surface": ["append"]},
        {"sources": None},
        {"sources": {}},
        {"sources": [3]},
        {"sources": [0, 0]},
        {"sources": [-1]},
        {"sources": ["0"]},
        {"ignorable": False},
        {"ignorable": 1},
        {"ignorable": None},
        {"more": 1},
        {"": 1},
    ],
)
def test_a_wrong_envelope_is_refused_by_name(change: dict[str, Any]) -> None:
    line = json.dumps({**GOOD, **change}, separators=(",", ":")).encode()
    with pytest.raises(LogError) as caught:
        parse_event(line)
    assert caught.value.code == "log.bad_envelope"


@pytest.mark.parametrize("key", list(GOOD))
def test_a_missing_key_is_refused(key: str) -> None:
    with pytest.raises(LogError, match=r"log\.bad_envelope"):
        event_from_data({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_line_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(LogError, match=r"log\.bad_envelope"):
        parse_event(json.dumps(value).encode())


def test_the_seq_must_be_the_expected_one() -> None:
    line = make_event(3, 1, "a/b", {}).line
    assert parse_event(line, at=3).seq == 3
    with pytest.raises(LogError, match="seq is 3 where 4 belongs"):
        parse_event(line, at=4)


def test_an_event_is_one_line() -> None:
    with pytest.raises(LogError, match="one line"):
        parse_event(b'{"seq":3,\n"time":1,"type":"a/b","data":{}}')


def test_a_foreign_spelling_keeps_its_bytes() -> None:
    line = rb'{"time":1, "seq":3, "type":"a\/b","data":{"x":"\u0041"}}'
    event = parse_event(line)
    assert event.line == line and event.type == "a/b" and event.data == {"x": "A"}
