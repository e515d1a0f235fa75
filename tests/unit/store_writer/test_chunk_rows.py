"""Packed chunk rows: what is packed, what stays, and that every byte comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import StoreError
from kimi_ray.events import SessionEvent, make_event, parse_event
from kimi_ray.store.chunk_rows import MAX_MEMBERS, MAX_ROW_BYTES, is_packed, pack_rows, unpack_row


def chunk(kind: str, text: str, *, index: int = 0, turn: int = 0, step: int = 0, attempt: int = 1, **more: Any) -> Any:
    key = "arguments" if kind == "tool-call-delta" else "text"
    body = {"type": kind, "index": index, **more, key: text}
    return {"turn": turn, "step": step, "attempt": attempt, "chunk": body}


def events_of(datas: list[Any], times: list[int] | None = None, first: int = 0) -> list[SessionEvent]:
    return [
        make_event(first + n, times[n] if times else 100 + n, "assistant/chunk", data) for n, data in enumerate(datas)
    ]


def check(events: list[SessionEvent]) -> list[tuple[bytes, int]]:
    rows = pack_rows(events)
    lines: list[bytes] = []
    for row, count in rows:
        assert row.endswith(b"\n") and row.count(b"\n") == 1
        assert is_packed(row) == (count > 1)
        unpacked = unpack_row(row)
        assert len(unpacked) == count
        lines += unpacked
    assert lines == [event.line for event in events]
    return rows


def test_a_run_becomes_one_row_of_the_documented_shape() -> None:
    events = events_of([chunk("text-delta", t, turn=2, step=1, index=3) for t in "abc"], times=[500, 510, 505], first=7)
    [(row, count)] = check(events)
    assert count == 3
    assert json.loads(row) == {
        "type": "text-chunks",
        "seq0": 7,
        "time0": 500,
        "data": {"turn": 2, "step": 1, "attempt": 1, "index": 3, "dt": [10, -5], "texts": ["a", "b", "c"]},
    }


def test_tool_call_fragments_with_and_without_id_are_two_runs() -> None:
    named = [chunk("tool-call-delta", "{", id="c1", name="read")] * 3
    bare = [chunk("tool-call-delta", '"')] * 4
    rows = check(events_of(named + bare))
    assert [count for _, count in rows] == [3, 4]
    first, second = (json.loads(row)["data"] for row, _ in rows)
    assert (first["id"], first["name"], first["args"]) == ("c1", "read", ["{"] * 3)
    assert "id" not in second and "name" not in second


@pytest.mark.parametrize(
    "datas",
    [
        [chunk("text-delta", "a")] * 2,
        [chunk("text-delta", "a"), chunk("reasoning-delta", "b"), chunk("text-delta", "c")],
        [chunk("text-delta", "a", index=n) for n in range(3)],
        [chunk("text-delta", "a", turn=n) for n in range(3)],
        [chunk("text-delta", "a", step=n) for n in range(3)],
        [chunk("text-delta", "a", attempt=n + 1) for n in range(3)],
        [chunk("text-delta", "a", extra=1)] * 3,
        [chunk("block-start", "a")] * 3,
        [{**chunk("text-delta", "a"), "more": 1}] * 3,
        [dict(reversed(chunk("text-delta", "a").items()))] * 3,
        [{"turn": True, "step": 0, "attempt": 1, "chunk": {"type": "text-delta", "index": 0, "text": "a"}}] * 3,
        [{"turn": 0, "step": 0, "attempt": 1, "chunk": {"type": "text-delta", "index": 0, "text": 5}}] * 3,
        [{"turn": 0, "step": 0, "attempt": 1, "chunk": {"type": "text-delta", "index": 0.0, "text": "a"}}] * 3,
        [{"turn": 0, "step": 0, "attempt": 1, "chunk": {"text": "a", "type": "text-delta", "index": 0}}] * 3,
        [{"turn": 0, "step": 0, "attempt": 1, "chunk": ["text-delta"]}] * 3,
        [{"turn": 0, "step": 0, "attempt": 1, "chunk": {"type": ["text-delta"], "index": 0, "text": "a"}}] * 3,
        [{}] * 3,
        [chunk("tool-call-delta", "a", id=None)] * 3,
        [chunk("tool-call-delta", "a", name="n", id="i")] * 3,
        [chunk("text-delta", "a", id="i")] * 3,
    ],
)
def test_what_is_not_exactly_a_run_stays_verbatim(datas: list[Any]) -> None:
    assert all(count == 1 for _, count in check(events_of(datas)))


def test_a_huge_gap_breaks_a_run_and_a_negative_one_does_not() -> None:
    datas = [chunk("text-delta", "a")] * 6
    rows = check(events_of(datas, times=[0, 1, 2, 2**60, 2**60 - 5, 2**60 + 1]))
    assert [count for _, count in rows] == [3, 3]


def test_rows_are_bounded_in_members_and_bytes() -> None:
    rows = check(events_of([chunk("text-delta", "a")] * (MAX_MEMBERS * 2 + 2)))
    assert [count for _, count in rows] == [MAX_MEMBERS, MAX_MEMBERS, 1, 1]
    rows = check(events_of([chunk("text-delta", "é" * 100_000)] * 12))
    assert all(len(row) <= MAX_ROW_BYTES for row, _ in rows)
    assert len(rows) < 12
    big = [chunk("text-delta", "z" * MAX_ROW_BYTES)] * 3
    assert [count for _, count in check(events_of(big))] == [1, 1, 1]


def test_a_foreign_spelling_of_the_text_is_not_packed() -> None:
    lines = [e.line for e in events_of([chunk("text-delta", "A")] * 4)]
    foreign = [line.replace(b'"text":"A"', rb'"text":"\u0041"') for line in lines]
    rows = check([parse_event(line) for line in foreign])
    assert all(count == 1 for _, count in rows)
    assert b"".join(row for row, _ in rows) == b"".join(line + b"\n" for line in foreign)


def test_a_hole_in_the_seqs_ends_a_run() -> None:
    before, after = events_of([chunk("text-delta", "a")] * 3), events_of([chunk("text-delta", "a")] * 3, first=9)
    assert [count for _, count in check(before + after)] == [3, 3]


def test_other_events_and_their_envelopes_pass_through() -> None:
    odd = make_event(3, 5, "assistant/chunk", chunk("text-delta", "a"), None, None, True)
    events = [*events_of([chunk("text-delta", "a")] * 3), odd, make_event(4, 6, "turn/start", {"turn": 0})]
    assert [count for _, count in check(events)] == [3, 1, 1]


GOOD = (
    b'{"type":"text-chunks","seq0":0,"time0":1,"data":'
    b'{"turn":0,"step":0,"attempt":1,"index":0,"dt":[1,1],"texts":["a","b","c"]}}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dt":[1,1]', b'"dt":[1]'),
        (b'"dt":[1,1]', b'"dt":[1,1.5]'),
        (b'"dt":[1,1]', b'"dt":[1,true]'),
        (b'"dt":[1,1]', b'"dt":{}'),
        (b'"seq0":0', b'"seq0":-1'),
        (b'"seq0":0', b'"seq0":0.5'),
        (b'"seq0":0', b'"seq0":"0"'),
        (b'"time0":1', b'"time0":null'),
        (b'"turn":0', b'"turn":false'),
        (b'"texts":["a","b","c"]', b'"texts":["a","b",3]'),
        (b'"texts":["a","b","c"]', b'"texts":"abc"'),
        (b'"dt":[1,1],"texts":["a","b","c"]', b'"dt":[1],"texts":["a","b"]'),
        (b'"texts"', b'"args"'),
        (b'"attempt":1,', b""),
        (b'"attempt":1', b'"attempt":1,"attempt":1'),
        (b'"dt"', b'"id":"x","dt"'),
        (b"}}", b'},"more":1}'),
        (b"}}", b"}"),
        (b"}}", b"}} "),
        (b'"a"', rb'"\u0061"'),
        (b'"a"', rb'"\ud800"'),
        (b'"a"', b'"\xff"'),
        (b'"text-chunks"', b'"text-chunks2"'),
    ],
)
def test_a_malformed_packed_row_is_corrupt(old: bytes, new: bytes) -> None:
    assert len(unpack_row(GOOD)) == 3
    row = GOOD.replace(old, new)
    if not is_packed(row):
        assert unpack_row(row) == [row]
        return
    with pytest.raises(StoreError) as caught:
        unpack_row(row)
    assert caught.value.code == "store.corrupt"


KINDS = st.sampled_from(["text-delta", "reasoning-delta", "tool-call-delta", "usage"])
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


@st.composite
def batches(draw: st.DrawFn) -> list[SessionEvent]:
    events: list[SessionEvent] = []
    seq = draw(st.integers(0, 10**9))
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(KINDS)
        call = draw(st.sampled_from([{}, {"id": "c\u00e9"}, {"id": "c", "name": 'n"'}, {"name": "n"}]))
        more = call if kind == "tool-call-delta" else {}
        place = {"index": draw(st.integers(0, 1)), "turn": draw(st.integers(0, 1))}
        for _ in range(draw(st.integers(1, 6))):
            time = draw(st.one_of(st.integers(0, 50), st.integers(-(2**62), 2**62)))
            made = draw(st.integers(0, 19))
            data: Any = chunk(kind, draw(TEXT), **place, **more)
            if made == 0:
                data = {"turn": 0}
            events.append(make_event(seq, time, "tool/call" if made == 1 else "assistant/chunk", data))
            seq += 1
    return events


@given(batches())
def test_packing_then_unpacking_gives_every_batch_back_byte_for_byte(events: list[SessionEvent]) -> None:
    check(events)


@given(st.lists(TEXT, min_size=3, max_size=40), st.sampled_from(["text-delta", "reasoning-delta", "tool-call-delta"]))
def test_a_plain_run_is_always_packed(texts: list[str], kind: str) -> None:
    assert len(check(events_of([chunk(kind, text) for text in texts]))) == 1


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_any_changed_byte_is_corrupt_or_another_exact_row(at: int, byte: int) -> None:
    row = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    if b"\n" in row:
        return
    try:
        lines = unpack_row(row)
    except StoreError as error:
        assert error.code == "store.corrupt"
        return
    if is_packed(row):
        [(again, count)] = pack_rows([parse_event(line) for line in lines])
        assert (again, count) == (row + b"\n", 3)
