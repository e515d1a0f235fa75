"""Flipped bits in a database and in its log: never a wrong or a missing event without an error."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.store.checkup import check_session
from kimi_ray.store.open import open_store
from tests.unit.store_sqlite.damage_oracle import STREAMS, Written, write_home
from tests.unit.store_sqlite.sqlite_home import SqliteHome, damage


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flips(written: Written, path: Path, dice: random.Random, count: int) -> None:
    bits = path.stat().st_size * 8
    for _ in range(count):
        bit = dice.randrange(bits)
        before = path.stat()
        flip(path, bit)
        written.check(f"bit {bit % 8} of byte {bit // 8} of {path.name}")
        flip(path, bit)
        assert path.stat().st_size == before.st_size
    assert not written.check("nothing is left of it")


@pytest.mark.parametrize("in_log", [False, True])
async def test_some_flipped_bits(tmp_path: Path, in_log: bool) -> None:
    written = await write_home(SqliteHome(tmp_path / "home"), in_log=in_log)
    path = Path(f"{written.home.database()}{'-wal' if in_log else ''}")
    flips(written, path, random.Random(17), 50)


@pytest.mark.parametrize("byte", range(100))
async def test_every_byte_of_a_databases_head(tmp_path: Path, byte: int) -> None:
    """SQLite tells some of these as damage, some as another program's file, and a few as errors like any other."""
    written = await write_home(SqliteHome(tmp_path / "home"), in_log=False)
    for bit in range(8):
        flip(written.home.database(), 8 * byte + bit)
        written.check(f"bit {bit} of byte {byte}")
        flip(written.home.database(), 8 * byte + bit)


@pytest.mark.parametrize("table", ["store", "sessions", "streams", "heads", "grants", "rows"])
async def test_every_pointer_to_a_row_of_a_table(tmp_path: Path, table: str) -> None:
    """A page's pointers lead to its rows: a flipped one gives a row out of its order, and a list must still end."""
    written = await write_home(SqliteHome(tmp_path / "home"), in_log=False)
    connection = sqlite3.connect(written.home.database())
    (root,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
    connection.close()
    start = (root - 1) * 4096
    page = written.home.database().read_bytes()[start : start + 4096]
    head = 8 if page[0] == 13 else 12  # a leaf, or a page above leaves
    cells = int.from_bytes(page[3:5], "big")
    assert cells
    for bit in range(8 * head + 16 * min(cells, 3)):
        flip(written.home.database(), 8 * start + bit)
        written.check(f"bit {bit} of the head of {table}")
        flip(written.home.database(), 8 * start + bit)


@pytest.mark.parametrize(
    "change",
    [
        "heads SET next_seq = next_seq - 1 WHERE stream = 1",
        "heads SET epoch = 7 WHERE stream = 1",
        "heads SET nonce = 'x' WHERE stream = 1",
        "heads SET closed = 1 WHERE stream = 1",
        "heads SET published = 0 WHERE stream = 1",
        "heads SET copied_by = 'x' WHERE stream = 1",
        "heads SET revision = 9 WHERE stream = 1",
        "heads SET stream = 99 WHERE stream = 1",
        "streams SET header = x'7b7d' WHERE id = 1",
        "streams SET incarnation = 'x' WHERE id = 1",
        "grants SET seq = 3 WHERE stream = 1",
        "grants SET nonce = 'x' WHERE stream = 1",
        "grants SET closed_seq = 4 WHERE stream = 1",
        "rows SET data = CAST(data || x'00' AS BLOB) WHERE id = 1 << 40",
        "rows SET events = 2 WHERE id = 1 << 40",
        "rows SET id = id + 1000 WHERE id = (1 << 40) + 59",
        "rows SET id = (2 << 40) + 200 WHERE id = (1 << 40) + 59",
    ],
)
async def test_every_column_of_a_log_is_guarded(tmp_path: Path, change: str) -> None:
    """A value that changed by itself is told with its table and row, by reading or by ``verify``."""
    written = await write_home(SqliteHome(tmp_path / "home", syncs=False), in_log=False)
    damage(written.home.database(), f"UPDATE {change}")
    reader = written.reader()
    report = None
    try:
        found = list(reader.read_from(STREAMS[0], 0, 500, 1 << 20).lines)
        report = reader.verify(STREAMS[0])
        problems = [dict(problem) for problem in report.problems]
        assert found == written.lines[STREAMS[0]][: len(found)]
        assert len(found) == 60 or not change.startswith(("heads", "streams"))
    except KimiRayError as error:
        problems = [error.to_data()]
    assert {problem["code"] for problem in problems} <= {"store.corrupt", "log.bad_epoch"}
    assert any({"file", "table", "rowid", "seq"} <= problem["details"].keys() for problem in problems)
    assert written.check(change) or change.startswith("grants")
    reader.close()


@pytest.mark.parametrize(
    "change", ["workspace_id = 'x'", "revision = 9", "removed = 1", "document = x'7b7d'", "document = NULL"]
)
async def test_every_column_of_a_session_is_guarded(tmp_path: Path, change: str) -> None:
    written = await write_home(SqliteHome(tmp_path / "home", syncs=False), in_log=False)
    damage(written.home.database(), f"UPDATE sessions SET {change} WHERE session_id = 's1'")
    reader = written.reader()
    with pytest.raises(KimiRayError) as caught:
        reader.read_document("s1")
    assert (caught.value.code, caught.value.details["table"]) == ("store.corrupt", "sessions")
    listed = [row for row in reader.list_documents() if row.revision == -1]
    assert [row.value["error"]["code"] for row in listed] == ["store.corrupt"]
    reader.close()


async def test_a_document_that_its_index_lost_is_damage_and_not_missing(tmp_path: Path) -> None:
    written = await write_home(SqliteHome(tmp_path / "home", syncs=False), in_log=False)
    connection = sqlite3.connect(written.home.database())
    (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name LIKE 'sqlite_autoindex_sessions%'")
    connection.close()
    data = bytearray(written.home.database().read_bytes())
    start = (page[0] - 1) * 4096
    at = data.index(b"s1", start, start + 4096)
    data[at + 1] ^= 4
    written.home.database().write_bytes(data)
    reader = open_store(written.home.path)
    with pytest.raises(KimiRayError) as caught:
        await reader.read_document("s1")
    assert (caught.value.code, caught.value.details["table"]) == ("store.corrupt", "sessions")
    check = await check_session(reader, "s1")
    assert not check.ok and check.document == "damaged"
    assert "store.corrupt" in [problem["code"] for problem in check.problems]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("in_log", [False, True])
async def test_five_thousand_flipped_bits(tmp_path: Path, in_log: bool, budget) -> None:
    written = await write_home(SqliteHome(tmp_path / "home"), in_log=in_log)
    path = Path(f"{written.home.database()}{'-wal' if in_log else ''}")
    done = 0
    for dice in budget.rounds():
        flips(written, path, dice, 100)
        done += 100
        if done >= 2500:
            break
    print(done, "flips:", dict(written.said))
