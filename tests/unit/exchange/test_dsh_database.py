"""SQLite stores: packed and compressed columns, damage by row, and a source that nobody touches."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.exchange.dsh import read_source
from kimi_ray.exchange.dsh.database import decode_seqs
from tests.unit.exchange.conftest import FIXTURES, only, verdict
from tests.unit.exchange.dsh_writer import UUID, Database, Log, crashed, frame, header, packed, text, varints

EVENTS = crashed()
EXPECTED = (len(EVENTS), len(EVENTS) + 4)


def made(tmp_path: Path, *statements: str, events: list[Any] = EVENTS, **head: Any) -> Path:
    base = Database(tmp_path / "sessions.sqlite")
    base.session(header(**head), events)
    for statement in statements:
        base.connection.execute(statement)
    base.close()
    return base.path


def test_a_crashed_session(tmp_path: Path, untouched: Callable[[Path], Any]) -> None:
    path = made(tmp_path)
    before = untouched(tmp_path)
    reading = only(path)
    assert verdict(reading) == EXPECTED and reading.stored == EVENTS
    assert reading.header == header() and untouched(tmp_path) == before


def test_columns_that_are_null_are_absent_in_the_header(tmp_path: Path) -> None:
    base = Database(tmp_path / "db.sqlite")
    head = {"version": 0, "id": "child", "createdAt": 5, "parentSession": "s0", "seedLength": 3, "agentPreset": "x"}
    base.session(head, [])
    base.close()
    reading = only(base.path)
    assert reading.header == head and verdict(reading) == (0, 0)


def test_a_write_ahead_log_is_read_and_left_alone(tmp_path: Path, untouched: Callable[[Path], Any]) -> None:
    base = Database(tmp_path / "sessions.sqlite", wal=True)
    base.session(header(), EVENTS)
    assert (tmp_path / "sessions.sqlite-wal").stat().st_size > 0
    before = untouched(tmp_path)
    (reading,) = read_source(str(tmp_path))
    assert verdict(reading) == EXPECTED
    assert untouched(tmp_path) == before
    base.close()


def test_a_database_without_its_write_ahead_log_is_older(tmp_path: Path) -> None:
    source = FIXTURES / "sqlite-crash-kill-after-flush" / "sessions.sqlite"
    copy = tmp_path / "sessions.sqlite"
    copy.write_bytes(source.read_bytes())
    with_log = next(read_source(str(source)))
    assert verdict(with_log) == (57, 61)
    assert [verdict(reading) for reading in read_source(str(copy))] != [(57, 61)]


def test_rows_are_packed_and_compressed(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    seqs = log.chunks(*(f"word {n} " for n in range(2000)))
    log.assistant({"type": "text", "text": "x" * 9000}, sources=[*seqs[5:], *seqs[:5]])
    log.end_step()
    log.end()
    base = Database(tmp_path / "db.sqlite")
    rows = packed(log.events)
    rows[2:3] = [_part(rows[2], 0, 1000), _part(rows[2], 1000, 2000)]
    base.session(header(), [])
    for row in rows:
        base.row("s1", row)
    kinds = {type(row[0]) for row in base.connection.execute("SELECT data FROM events")}
    base.close()
    assert kinds == {str, bytes}
    assert only(base.path).stored == log.events


def _part(row: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    data = row["data"]
    gaps = data["dt"]
    return {
        **row,
        "seq0": row["seq0"] + start,
        "time0": row["time0"] + sum(gaps[:start]),
        "data": {**data, "dt": gaps[start : end - 1], "texts": data["texts"][start:end]},
    }


ENDED = next(event["seq"] for event in EVENTS if event["type"] == "turn/end")
BREAK = [
    "UPDATE events SET data = '{not json' WHERE seq = {seq}",
    "UPDATE events SET data = x'00' WHERE seq = {seq}",
    "UPDATE events SET type = 'other', ignorable = 0 WHERE seq = {seq}",
    "UPDATE events SET surface_op = '{' WHERE seq = {seq}",
    "UPDATE events SET source_event_seqs = x'8100' WHERE seq = {seq}",
    "DELETE FROM events WHERE seq = {seq}",
]


@pytest.mark.parametrize("statement", BREAK)
def test_a_row_broken_before_the_last_turn_end_refuses(tmp_path: Path, statement: str) -> None:
    reading = only(made(tmp_path, statement.replace("{seq}", "1")))
    assert reading.error is not None and reading.error.kind == "corrupt"
    named = 2 if statement.startswith("DELETE") else 1
    assert reading.error.message == f"corrupt session log: invalid committed physical row at seq {named}"
    assert reading.error.at["seq"] == named and reading.header == header()


@pytest.mark.parametrize("statement", BREAK)
def test_a_row_broken_after_it_begins_a_tail_that_goes(tmp_path: Path, statement: str) -> None:
    seq = ENDED + 4
    reading = only(made(tmp_path, statement.replace("{seq}", str(seq))))
    assert reading.error is None and len(reading.stored or []) == seq
    assert reading.set_aside == {"rows": len(EVENTS) - seq - statement.startswith("DELETE")}


@pytest.mark.parametrize(
    "change",
    [
        {"texts": ["a", "b"], "dt": [0]},
        {"dt": [0]},
        {"more": 1},
        {"texts": ["a"] * 1025, "dt": [0] * 1024},
        {"texts": ["a" * 400_000] * 3, "dt": [0, 0]},
    ],
)
def test_a_malformed_packed_row(tmp_path: Path, change: dict[str, Any]) -> None:
    base = Database(tmp_path / "db.sqlite")
    base.session(header(), [])
    data = {"turn": 1, "step": 1, "index": 0, "dt": [0, 0], "texts": ["a", "b", "c"]} | change
    base.row("s1", {"type": "text-chunks", "seq0": 0, "time0": 1, "data": data})
    base.close()
    assert verdict(only(base.path)) == (0, 0)


def test_a_packed_row_that_expands_beyond_its_bound(tmp_path: Path) -> None:
    base = Database(tmp_path / "db.sqlite")
    base.session(header(), [])
    data = text({"turn": 1, "step": 1, "index": 0, "dt": [0, 0], "texts": ["a" * 900_000, "b" * 900_000, "c"]})
    base.connection.execute(
        "INSERT INTO events VALUES ('s1', 0, 'text-chunks', 1, ?, NULL, NULL, 0)", (frame(data.encode()),)
    )
    base.close()
    assert verdict(only(base.path)) == (0, 0)


def test_sources_are_canonical_varints() -> None:
    for seqs in ([], [0], [3, 4, 5], [500, 2, 2**53 - 1, 0], list(range(200))):
        assert decode_seqs(varints(seqs)) == seqs
    assert varints([3, 4]) == b"\x03\x02"
    for bad in (b"\x80", b"\x80\x00", b"\x83\x00", b"\x01\x05", b"\xff" * 9, b"\xff\xff\xff\xff\xff\xff\xff\xff\x01"):
        with pytest.raises(ValueError, match="source_event_seqs"):
            decode_seqs(bad)


@given(st.lists(st.integers(0, 2**53 - 1), max_size=30))
def test_varints_come_back(seqs: list[int]) -> None:
    assert decode_seqs(varints(seqs)) == seqs


def test_an_empty_list_of_sources_is_not_an_absent_one(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    log.assistant({"type": "text", "text": "a"}, sources=[])
    log.assistant({"type": "text", "text": "b"})
    reading = only(made(tmp_path, events=log.events))
    assert (reading.stored or [])[2]["sourceEventSeqs"] == []
    assert "sourceEventSeqs" not in (reading.stored or [])[3]


@pytest.mark.parametrize(
    ("pragma", "kind", "words"),
    [
        ("PRAGMA user_version = 18", "unsupported", "schema version 18"),
        ("PRAGMA user_version = 0", "unsupported", "schema version 0"),
        ("PRAGMA application_id = 7", "unsupported", "application id 7"),
        ("DROP TABLE events", "corrupt", "required schema objects"),
    ],
)
def test_a_database_of_another_kind(tmp_path: Path, pragma: str, kind: str, words: str) -> None:
    reading = only(made(tmp_path, pragma))
    assert reading.id is None and reading.error is not None
    assert reading.error.kind == kind and words in reading.error.message
    assert reading.to_data()["header"] is None


def test_a_damaged_file(tmp_path: Path) -> None:
    path = made(tmp_path)
    data = bytearray(path.read_bytes())
    data[2000:] = b"\xaa" * (len(data) - 2000)
    path.write_bytes(data)
    assert [reading.error.kind for reading in read_source(str(path)) if reading.error] == ["corrupt"]
    path.write_bytes(bytes(data[:700]))
    assert only(path).error is not None


def test_one_bad_session_does_not_hide_the_others(tmp_path: Path) -> None:
    base = Database(tmp_path / "db.sqlite")
    base.session(header("good"), EVENTS)
    base.session(header("new", version=1), EVENTS)
    base.session(header("lost", cwd="not/absolute"), [])
    base.session(header("old", version=-1), [])
    base.close()
    found = {reading.id: verdict(reading) for reading in read_source(str(base.path))}
    assert found == {"good": EXPECTED, "new": "unsupported", "lost": "corrupt", "old": "unsupported"}
    new = next(reading for reading in read_source(str(base.path)) if reading.id == "new")
    assert new.header is not None and new.header["version"] == 1
    assert new.error is not None and new.error.message.endswith("upgrade the harness to open it")


def test_unknown_types(tmp_path: Path) -> None:
    log = Log()
    log.add("x/new", {}, ignorable=True)
    assert verdict(only(made(tmp_path, events=log.events))) == (1, 1)
    log.add("x/new", {})
    (tmp_path / "sessions.sqlite").unlink()
    reading = only(made(tmp_path, events=log.events))
    assert verdict(reading) == "unsupported" and "(raw log" not in str(reading.error)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = made(tmp_path, "UPDATE sessions SET cwd = CAST(x'2fff' AS TEXT)")
    assert verdict(only(path)) == EXPECTED


def test_a_rollback_journal_is_honoured(tmp_path: Path) -> None:
    """A writer killed inside of a transaction leaves a hot journal: what it had begun is not there."""
    path = made(tmp_path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("PRAGMA cache_spill = 1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE events SET data = zeroblob(5000)")
    connection.execute("INSERT INTO sessions VALUES ('x',0,1,NULL,NULL,NULL,NULL,?,1,NULL,NULL)", (UUID,))
    assert (tmp_path / "sessions.sqlite-journal").exists()
    crashed_copy = tmp_path / "copy"
    crashed_copy.mkdir()
    for name in ("sessions.sqlite", "sessions.sqlite-journal"):
        (crashed_copy / name).write_bytes((tmp_path / name).read_bytes())
    connection.close()
    assert verdict(only(crashed_copy / "sessions.sqlite")) == EXPECTED
