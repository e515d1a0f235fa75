"""Plain logs: every cut, tails of all kinds, and where damage begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.exchange.conftest import only, verdict, verdict_of
from tests.unit.exchange.dsh_writer import Log, asks, crashed, header, header_line, line, packed, plain, put
from tests.unit.exchange.oracle import plain_verdict

EVENTS = crashed()
WHOLE = plain(header(), EVENTS)
CLOSERS = 4


def read(tmp_path: Path, data: bytes) -> Any:
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    return verdict(only(path))


def test_a_crashed_log(tmp_path: Path) -> None:
    reading = only(put(tmp_path, header(), WHOLE))
    assert verdict(reading) == (len(EVENTS), len(EVENTS) + CLOSERS)
    assert reading.stored == EVENTS and reading.id == "s1" and reading.header == header()
    assert [closer["type"] for closer in reading.closers or []] == [
        "tool/result",
        "tool/result",
        "step/end",
        "turn/end",
    ]
    unknown, not_started, *_ = reading.closers or []
    started = next(event["seq"] for event in EVENTS if event["data"].get("callId") == "call-2")
    assert unknown["sourceEventSeqs"] == [started] and "sourceEventSeqs" not in not_started
    assert unknown["data"]["message"]["id"] == f"interrupted-tool-result-call-2-{len(EVENTS)}"
    assert {closer["time"] for closer in reading.closers or []} == {EVENTS[-1]["time"]}


def test_every_cut() -> None:
    lines = WHOLE.split(b"\n")
    # Long lines far from the end are cut at some places only; all that matters there is which line it is.
    for end in [*range(0, len(WHOLE) - 900, 5), *range(len(WHOLE) - 900, len(WHOLE)), *_ends(lines)]:
        data = WHOLE[:end]
        expected = plain_verdict(data)
        found = verdict_of(data)
        assert (found if found == "corrupt" else found[0]) == expected, end


def _ends(lines: list[bytes]) -> list[int]:
    ends = [len(b"\n".join(lines[: number + 1])) for number in range(len(lines) - 1)]
    return [end + around for end in ends for around in (-1, 0, 1)]


def test_every_bit_flip_reads_or_refuses() -> None:
    lines = WHOLE.split(b"\n")
    small = b"\n".join([lines[0], *lines[-6:]])
    for at in range(len(small)):
        data = bytearray(small)
        data[at] ^= 1 << at % 8
        found = verdict_of(bytes(data))
        assert found in ("corrupt", "unsupported") or found[0] <= 6


@pytest.mark.parametrize("tail", [b"\0" * 64, b'{"type":"todo', b"garbage", b"{}", b"x" * 5000])
def test_a_tail_without_a_newline_goes(tmp_path: Path, tail: bytes) -> None:
    assert read(tmp_path, WHOLE + tail) == (len(EVENTS), len(EVENTS) + CLOSERS)


@pytest.mark.parametrize("tail", [b"garbage line\n", b"\0" * 64 + b"\n", b"\n", b"{}\n", b"5\n", b"[1]\n", b'"x"\n'])
def test_a_bad_line_at_the_end_goes(tmp_path: Path, tail: bytes) -> None:
    assert read(tmp_path, WHOLE + tail) == (len(EVENTS), len(EVENTS) + CLOSERS)


def test_null_in_place_of_an_event(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE + b"null\n") == "corrupt"


def test_a_bad_line_hides_what_follows_it(tmp_path: Path) -> None:
    more = {"type": "todo/write", "seq": len(EVENTS), "time": 1, "data": {"todos": []}}
    assert read(tmp_path, WHOLE + b"garbage\n" + line(more)) == (len(EVENTS), len(EVENTS) + CLOSERS)


@pytest.mark.parametrize("removed", range(len(packed(EVENTS))))
def test_a_line_removed(tmp_path: Path, removed: int) -> None:
    rows = packed(EVENTS)
    ended = next(at for at, row in enumerate(rows) if row["type"] == "turn/end")
    data = header_line(header()) + b"".join(line(row) for at, row in enumerate(rows) if at != removed)
    found = read(tmp_path, data)
    assert (found if found == "corrupt" else found[0]) == plain_verdict(data)
    assert (found == "corrupt") == (removed < ended)


def test_where_the_gap_is(tmp_path: Path) -> None:
    rows = packed(EVENTS)
    data = header_line(header()) + b"".join(line(row) for at, row in enumerate(rows) if at != 2)
    reading = only(put(tmp_path, header(), data))
    assert reading.error is not None and reading.error.kind == "corrupt"
    assert reading.error.message == "corrupt session log: seq gap in committed region at line 3 (expected 2, got 3)"
    at = reading.error.at
    assert (at["line"], at["seq"]) == (4, 2)
    assert data[at["byte"] :].startswith(line(rows[3])) and data[: at["byte"]].count(b"\n") == 3


def test_two_writers(tmp_path: Path) -> None:
    """The same seqs appended twice: what the original cannot open any more."""
    log = Log()
    log.start()
    log.start_step()
    log.end_step()
    log.end()
    data = plain(header(), log.events) + b"".join(line(event) for event in log.events[2:])
    reading = only(put(tmp_path, header(), data))
    assert reading.error is not None
    assert reading.error.message == "corrupt session log: seq gap in committed region at line 5 (expected 4, got 2)"


def test_an_unreadable_line_before_a_turn_end(tmp_path: Path) -> None:
    rows = [line(row) for row in packed(EVENTS)]
    rows[1] = b'{"type":\n'
    reading = only(put(tmp_path, header(), header_line(header()) + b"".join(rows)))
    assert reading.error is not None
    assert reading.error.message == "corrupt session log: unparsable committed event at line 2"


def test_a_packed_row_with_a_gap_goes_whole(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    log.chunks("a", "b", "c")
    rows = packed(log.events)
    rows[-1]["seq0"] += 1
    data = header_line(header()) + b"".join(map(line, rows))
    assert read(tmp_path, data)[0] == 2
    assert read(tmp_path, data + line({"type": "turn/end", "seq": 5, "time": 1, "data": {}})) == "corrupt"


@pytest.mark.parametrize(
    "change",
    [
        {"seq0": -1},
        {"seq0": 2**53},
        {"time0": 1.5},
        {"time0": "1"},
        {"extra": 1},
        {"data": None},
        {"data": []},
    ],
)
def test_a_malformed_packed_row_is_an_unreadable_line(tmp_path: Path, change: dict[str, Any]) -> None:
    rows = _streamed()
    rows[-1] |= change
    _check_malformed(tmp_path, rows)


@pytest.mark.parametrize(
    "change",
    [
        {"dt": [1]},
        {"dt": [1, 2.5]},
        {"dt": [1, 2**53]},
        {"texts": []},
        {"texts": ["a", "b", 3]},
        {"texts": "abc"},
        {"turn": "1"},
        {"index": None},
        {"more": 1},
        {"id": "x"},
    ],
)
def test_a_packed_row_with_malformed_data(tmp_path: Path, change: dict[str, Any]) -> None:
    rows = _streamed()
    rows[-1]["data"] |= change
    _check_malformed(tmp_path, rows)


def _streamed() -> list[dict[str, Any]]:
    log = Log()
    log.start()
    log.start_step()
    log.chunks("a", "b", "c")
    return packed(log.events)


def _check_malformed(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    data = header_line(header()) + b"".join(map(line, rows))
    assert read(tmp_path, data)[0] == 2
    end = {"type": "turn/end", "seq": 5, "time": 1, "data": {}}
    reading = _only(tmp_path, data + line(end))
    assert reading.error.message == "corrupt session log: unparsable committed event at line 3"


def _only(tmp_path: Path, data: bytes) -> Any:
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    return only(path)


def test_packed_rows_come_back_as_they_were(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    log.chunks("one", "two", "thr\ud83d", "\ude80ee")
    log.chunks("think", "ing", " hard", kind="reasoning-delta")
    log.chunks('{"c', 'om"', ":1}", kind="tool-call-delta", id="c1", name="bash")
    log.chunks("{", "}", " ", kind="tool-call-delta", id="c2")
    log.chunks("x", "y")
    log.events[7]["time"] -= 1000  # clocks go back
    assert len(packed(log.events)) == 8
    reading = only(put(tmp_path, header(), plain(header(), log.events)))
    assert reading.stored == log.events


def test_crlf(tmp_path: Path) -> None:
    data = WHOLE.replace(b"\n", b"\r\n")
    assert read(tmp_path, data) == (len(EVENTS), len(EVENTS) + CLOSERS)


def test_no_closers_for_what_is_closed(tmp_path: Path) -> None:
    """Calls of closed steps and earlier turns are not answered again."""
    log = Log()
    log.start()
    log.start_step()
    log.assistant(*asks("c1"))
    log.end_step()
    log.end()
    assert read(tmp_path, plain(header(), log.events)) == (5, 5)
    log.start()
    assert read(tmp_path, plain(header(), log.events)) == (6, 7)
    log.start_step()
    log.chunks("half an ans")
    reading = _only(tmp_path, plain(header(), log.events))
    assert [closer["type"] for closer in reading.closers] == ["step/end", "turn/end"]
    again = _only(tmp_path, plain(header(), reading.events))
    assert again.closers == [] and again.stored == reading.events


def test_closers_keep_the_order_in_which_the_calls_were_asked_for(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    log.assistant(*asks("z", "a", "m"))
    log.call("a")
    log.call("unasked")
    reading = _only(tmp_path, plain(header(), log.events))
    sources = [closer["data"]["message"]["source"]["callId"] for closer in reading.closers[:3]]
    assert sources == ["z", "a", "m"]
    codes = [closer["data"]["error"]["code"] for closer in reading.closers[:3]]
    assert codes == ["TOOL_NOT_STARTED", "TOOL_OUTCOME_UNKNOWN", "TOOL_NOT_STARTED"]
    assert [closer["seq"] for closer in reading.closers] == list(range(5, 10))
