"""Many stored lines at once: the same events and the same refusals as one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import LogError
from kimi_ray.events import CORE, SessionEvent, encode, make_event, parse_event, read_stored, type_key
from kimi_ray.events import stored as module

KNOWN = {type_key(entry.name): entry.name for entry in CORE}
PASSED = frozenset({type_key("assistant/chunk"), type_key("note/added")})

TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False).map(lambda x: x + 0.0)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["turn/start", "user/message", "assistant/chunk", "note/added", "llm/response", "new/thing"]),
        st.dictionaries(TEXT, VALUES, max_size=2),
        st.sampled_from([None, "append", "replace"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def lines_of(events: Any) -> list[bytes]:
    lines: list[bytes] = []
    for seq, (kind, data, surface, ignorable) in enumerate(events, 3):
        how: Any = {"replace": [0, 1]} if surface == "replace" else surface
        sources = (1, 0) if surface == "replace" else None
        lines.append(make_event(seq, 1700000000000, kind, data, how, sources, ignorable).line)
    return lines


def parts(event: SessionEvent) -> Any:
    return (event.seq, event.time, event.type, event.data, event.surface, event.sources, event.ignorable, event.line)


@given(EVENTS)
@settings(max_examples=40, deadline=None)
def test_the_events_are_those_of_reading_line_by_line(events: Any) -> None:
    lines = lines_of(events)
    each = map(parse_event, lines)
    looked_at = [event for event in each if type_key(event.type) not in PASSED or event.surface is not None]
    wanted = [parts(event) for event in looked_at]
    assert [parts(event) for event in read_stored(lines, 3, KNOWN, PASSED)] == wanted


@given(EVENTS, st.data())
@settings(max_examples=80, deadline=None)
def test_a_changed_byte_is_judged_as_it_is_line_by_line(events: Any, data: st.DataObject) -> None:
    lines = lines_of(events)
    at = data.draw(st.integers(0, len(lines) - 1))
    line = bytearray(lines[at])
    place = data.draw(st.integers(0, len(line) - 1))
    line[place] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'{}[]":,0')))
    lines[at] = bytes(line)

    def outcome(read: Any) -> Any:
        try:
            return [parts(event) for event in read()]
        except LogError as error:
            return (error.code, error.message)

    one_by_one = outcome(lambda: [parse_event(line, at=seq) for seq, line in enumerate(lines, 3)])
    assert outcome(lambda: read_stored(lines, 3, KNOWN, frozenset())) == one_by_one


def test_what_is_passed_over_must_stand_in_its_place() -> None:
    line = make_event(5, 1, "note/added", {"text": "x"}).line
    assert list(read_stored([line], 5, KNOWN, PASSED)) == []
    with pytest.raises(LogError, match="where 6 belongs"):
        list(read_stored([line], 6, KNOWN, PASSED))


def test_a_text_that_looks_like_a_type_is_not_one() -> None:
    sly = '","type":"note/added","data":{'
    line = make_event(0, 1, "user/message", {"id": sly, "x": {"type": "note/added"}}, "append").line
    (event,) = read_stored([line], 0, KNOWN, PASSED)
    assert event.type == "user/message" and event.data["id"] == sly
    other = b'{"x":1,"time":1,"type":"note/added","data":{}}'
    with pytest.raises(LogError):
        list(read_stored([other], 0, KNOWN, PASSED))


def test_long_numbers_minus_zero_and_depth_are_looked_at_closely() -> None:
    good = [2**63 - 1, -(2**63), 0.5, "-0.0", "9" * 30, [[[]]] * 40]
    lines = [make_event(seq, 1, "turn/start", {"turn": value}).line for seq, value in enumerate(good)]
    assert [event.data["turn"] for event in read_stored(lines, 0, KNOWN, PASSED)] == good
    for bad in (b"9223372036854775808", b"-9223372036854775809", b"-0.0", b"1e999", b"[" * 70 + b"]" * 70):
        line = b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":%s}}' % bad
        with pytest.raises(LogError) as refused:
            list(read_stored([line], 0, KNOWN, PASSED))
        assert refused.value.code == "log.not_json"


def test_lines_that_only_make_sense_together_are_refused() -> None:
    whole = make_event(0, 1, "turn/start", {"turn": 0}).line + b"," + make_event(1, 1, "turn/start", {"turn": 0}).line
    half = len(whole) // 2
    for lines in ([whole[:half], whole[half:]], [whole], [b"", whole]):
        with pytest.raises(LogError):
            list(read_stored(lines, 0, KNOWN, PASSED))


def test_slices_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [make_event(seq, 1, "turn/start" if seq % 3 else "note/added", {"turn": seq}).line for seq in range(50)]
    monkeypatch.setattr(module, "_SLICE", 4)
    assert [event.seq for event in read_stored(lines, 0, KNOWN, PASSED)] == [seq for seq in range(50) if seq % 3]


def test_foreign_spelling_is_read_and_kept() -> None:
    line = b'{ "time": 1, "seq": 0, "type": "turn/start", "data": {"turn": 0.50} }'
    (event,) = read_stored([line], 0, KNOWN, PASSED)
    assert event.line == line and event.data == {"turn": 0.5} and encode(event.to_data()) != line
