"""Ends of processes and of disks: what was acknowledged is there, and what is there is whole."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.store import RealFs, Stream
from kimi_ray.store.identity import require_identity
from kimi_ray.store.sqlite import sqlite_reader
from kimi_ray.store.sqlite.wal_check import damaged_at
from tests.conformance.store_contract import MAIN, all_lines, code, header, line, notes, ok
from tests.unit.store_sqlite.damage_oracle import write_home
from tests.unit.store_sqlite.sqlite_home import SqliteHome

FRAME = 4096 + 24
ROOT = str(Path(__file__).parents[3])


def lines_in(home: Path, stream: Stream) -> list[bytes]:
    reader = sqlite_reader(RealFs(), str(home), require_identity(RealFs(), str(home)))
    lines: list[bytes] = []
    try:
        while page := reader.read_from(stream, len(lines), 500, 1 << 20).lines:
            lines.extend(page)
    except KimiRayError as error:
        assert error.code == "store.not_found"
    finally:
        reader.close()
    return lines


# -- the log of the database cut off -----------------------------------------------------------------------------------


async def test_a_log_cut_anywhere_leaves_a_prefix_of_every_log(tmp_path: Path) -> None:
    """As a power cut does: whole commits, nothing wrong, nothing twice; and writing goes on."""
    written = await write_home(SqliteHome(tmp_path / "home", syncs=False), in_log=True)
    wal = Path(f"{written.home.database()}-wal")
    whole = wal.read_bytes()
    frames = (len(whole) - 32) // FRAME
    assert frames > 10
    dice = random.Random(5)
    cuts = [32 + number * FRAME for number in range(frames + 1)] + [dice.randrange(len(whole)) for _ in range(20)]
    before: dict[Stream, int] = {}
    for size in sorted(cuts):
        Path(f"{written.home.database()}-shm").unlink(missing_ok=True)
        wal.write_bytes(whole[:size])
        assert damaged_at(str(wal)) is None if size >= 32 else True
        for stream, expected in written.lines.items():
            found = lines_in(written.home.path, stream)
            assert found == expected[: len(found)], size
            assert len(found) >= before.get(stream, 0), "a longer log holds no less"
            before[stream] = len(found)
    assert before == {stream: len(expected) for stream, expected in written.lines.items()}
    wal.write_bytes(whole[: 32 + (frames // 2) * FRAME + 7])
    Path(f"{written.home.database()}-shm").unlink(missing_ok=True)
    store = await written.home.open()
    stored = await all_lines(store)
    grant = await store.open_writer(MAIN, "w9")
    ok(await store.append([notes(len(stored), len(stored) + 5, epoch=grant.epoch, nonce="w9")], sync=True))
    assert (await store.verify(MAIN)).ok
    await store.close()


def test_what_a_failed_transaction_left_in_the_log_is_no_damage(tmp_path: Path) -> None:
    """SQLite writes pages of a transaction that outgrows its memory, and forgets them when it is rolled back or the
    disk is full; later commits are written over the first of them, and the rest stays behind the end.
    """
    file = tmp_path / "x.db"
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA page_size = 4096")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA cache_size = 10")
    connection.execute("CREATE TABLE t (a)")
    connection.execute("INSERT INTO t VALUES ('first')")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO t VALUES (?)", [(os.urandom(3000),)] * 60)
    connection.execute("ROLLBACK")
    wal = Path(f"{file}-wal")
    left = (wal.stat().st_size - 32) // FRAME
    assert left > 20, "the test needs pages that were written and forgotten"
    assert damaged_at(str(wal)) is None
    number = 0
    while (wal.stat().st_size - 32) // FRAME == left and number < 4 * left:
        number += 1
        connection.execute("INSERT INTO t VALUES (?)", (f"{number}",))
        assert damaged_at(str(wal)) is None, number
        if number % 16 == 4:
            whole = wal.read_bytes()
            broken = bytearray(whole)
            broken[32 + 2 * FRAME + 500] ^= 4  # in what was committed
            (tmp_path / "broken").write_bytes(broken)
            assert damaged_at(str(tmp_path / "broken")) == 32 + 2 * FRAME
    assert number > 3
    connection.close()


async def test_a_damaged_log_is_refused_while_the_machine_runs_and_is_its_end_after_a_restart(tmp_path: Path) -> None:
    written = await write_home(SqliteHome(tmp_path / "home", syncs=False), in_log=True)
    wal = Path(f"{written.home.database()}-wal")
    data = bytearray(wal.read_bytes())
    data[32 + 3 * FRAME + 500] ^= 4
    wal.write_bytes(data)
    store = await written.home.open()
    for work in (store.read_from(MAIN, 0), store.open_writer(MAIN, "w9")):
        with pytest.raises(KimiRayError) as caught:
            await work
        assert caught.value.code == "store.corrupt"
        assert caught.value.details["file"] == str(wal)
        assert caught.value.details["offset"] == 32 + 3 * FRAME
    os.utime(wal, (1, 1))
    for stream, expected in written.lines.items():
        found = lines_in(written.home.path, stream)
        assert found == expected[: len(found)]
    await store.open_writer(MAIN, "w9")
    await store.close()


# -- killed processes --------------------------------------------------------------------------------------------------

_WRITER = """
import asyncio, sys
from kimi_ray.store import StoreOptions, Stream, open_store_for_writing
from tests.conformance.store_contract import header, notes

async def write(store, stream, mode):
    await store.open_session(stream.session_id, mode, workspace_id="wd_x_0123")
    try:
        grant = await store.open_writer(stream, mode)
    except Exception as error:
        assert error.code == "store.not_found", error
        grant = await store.open_writer(header(stream), mode)
    seq, sync = grant.next_seq, True
    while True:
        batch = notes(seq, seq + 7, epoch=grant.epoch, nonce=mode, stream=stream)
        answer = (await store.append([batch], sync=sync))[0]
        assert answer.error is None, answer.error
        seq, sync = seq + 7, not sync
        print(stream.session_id, answer.written, flush=True)

async def main():
    home, nonce, *sessions = sys.argv[1:]
    store = await open_store_for_writing(home, StoreOptions(backend="sqlite", claim_timeout_s=10))
    await asyncio.gather(*(write(store, Stream(name, "main"), nonce) for name in sessions))

asyncio.run(main())
"""


async def _writer(home: Path, nonce: str, *sessions: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WRITER, str(home), nonce, *sessions,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip


async def _follow(process: asyncio.subprocess.Process, told: dict[str, int], answers: int) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        for _ in range(answers):
            session, written = (await process.stdout.readline()).split()
            told[session.decode()] = int(written)


async def _kill(process: asyncio.subprocess.Process, told: dict[str, int]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.stdout is not None
    for answer in (await process.stdout.read()).splitlines():
        if len(answer.split()) == 2:
            session, written = answer.split()
            told[session.decode()] = max(told.get(session.decode(), 0), int(written))
    await process.wait()


async def test_two_processes_write_one_database_and_each_is_killed(tmp_path: Path) -> None:
    """What was written survives SIGKILL, of whichever process; the other goes on."""
    told: dict[str, int] = {}
    first = await _writer(tmp_path, "a", "s1", "s2")
    second = await _writer(tmp_path, "b", "s3", "s4")
    await _follow(first, told, 12)
    await _follow(second, told, 9)
    for _ in range(10):
        for session in told:
            found = lines_in(tmp_path, Stream(session, "main"))
            assert found == [line(seq, text=f"n{seq}") for seq in range(len(found))], "read beside its writer"
            assert len(found) >= told[session]
    await _kill(first, told)
    third = await _writer(tmp_path, "c", "s1", "s2")
    await _follow(second, told, 9)
    await _follow(third, told, 11)
    await asyncio.gather(_kill(second, told), _kill(third, told))
    assert set(told) == {"s1", "s2", "s3", "s4"}
    for session, written in told.items():
        found = lines_in(tmp_path, Stream(session, "main"))
        assert len(found) >= written > 0
        assert found == [line(seq, text=f"n{seq}") for seq in range(len(found))]
    home = SqliteHome(tmp_path, syncs=False)
    store = await home.open()
    for session in told:
        assert (await store.verify(Stream(session, "main"))).ok
        assert (await store.open_writer(Stream(session, "main"), "z")).epoch in (2, 3)
    await store.close()


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_kills_at_random_moments(tmp_path: Path, budget: Any) -> None:
    told: dict[str, int] = {}
    for dice in budget.rounds():
        sessions = [f"s{n}" for n in range(dice.randint(1, 6))]
        process = await _writer(tmp_path, f"w{budget.round}", *sessions)
        await _follow(process, told, dice.randint(1, 120))
        await asyncio.sleep(dice.random() * 0.02)
        await _kill(process, told)
        for session, written in told.items():
            found = lines_in(tmp_path, Stream(session, "main"))
            assert len(found) >= written
            assert found == [line(seq, text=f"n{seq}") for seq in range(len(found))]


# -- full disks --------------------------------------------------------------------------------------------------------


async def _fill(store: Any, limit: int) -> tuple[int, dict[str, Any]]:
    """Append until it fails: what was acknowledged, and why it failed."""
    seq = 0
    while seq < limit:
        answer = (await store.append([notes(seq, seq + 100)], sync=True))[0]
        if answer.error is not None:
            assert answer.durable <= seq
            return seq, answer.error
        assert answer.durable == seq + 100
        seq += 100
    raise AssertionError("it never failed")


async def test_a_database_that_may_not_grow_refuses_and_goes_on_when_it_may(tmp_path: Path) -> None:
    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    other = Stream("s1", "agent-1")
    await store.open_writer(header(other), "w")
    transactions = store._shards[0].transactions
    grow = transactions._connect

    def small() -> sqlite3.Connection:
        connection = grow()
        connection.execute("PRAGMA max_page_count = 40")
        return connection

    transactions._connect = small
    transactions._throw_away(sqlite3.OperationalError())
    stored, error = await _fill(store, 10_000)
    assert error["code"] == "store.disk_full"
    assert error["retryable"]
    assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(stored)]
    small_batch = notes(0, 1, stream=other)
    both = await store.append([small_batch], sync=True), await store.append([notes(stored, stored + 100)], sync=True)
    assert both[0][0].error is None or both[0][0].error["code"] == "store.disk_full"
    transactions._connect = grow
    transactions._throw_away(sqlite3.OperationalError())
    assert ok(await store.append([notes(stored, stored + 100)], sync=True)).durable == stored + 100
    assert (await store.verify(MAIN)).ok
    await store.close()


async def test_a_sync_with_nothing_to_write_syncs_what_was_found(tmp_path: Path) -> None:
    """Without a page to write SQLite would sync nothing, and answer at once."""
    home = SqliteHome(tmp_path / "home")
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=False))
    await home.kill(store)
    again = await home.open()
    ok(await again.append([notes(0, 0)], sync=False))
    seen: list[str] = []
    connection = again._shards[0].transactions._connection
    assert connection is not None
    connection.set_trace_callback(seen.append)
    for again_sent in (notes(0, 3), notes(3, 3)):
        seen.clear()
        assert ok(await again.append([again_sent], sync=True)).durable == 3
        assert [text for text in seen if text.startswith("UPDATE store")] and seen[-1] == "COMMIT"
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.set_trace_callback(None)
    await again.close()


async def test_written_events_become_durable_by_themselves(tmp_path: Path) -> None:
    home = SqliteHome(tmp_path / "home")
    store = await home.open(extra={"sync_interval_ms": 20})
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    answer = ok(await store.append([notes(0, 3)], sync=False))
    assert (answer.written, answer.durable) == (3, 0)
    transactions = store._shards[0].transactions
    async with asyncio.timeout(20):
        while transactions.synced < transactions.commits:
            await asyncio.sleep(0.005)
    assert ok(await store.append([notes(3, 4)], sync=False)).durable == 3
    await store.close()


class _Failing:
    """A connection whose next commit fails: after it was done, or instead of it."""

    def __init__(self, inner: sqlite3.Connection, *, done: bool) -> None:
        self._inner = inner
        self._done = done

    def execute(self, sql: str, *facts: Any) -> Any:
        if sql == "COMMIT":
            if self._done:
                self._inner.execute(sql)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self._inner.execute(sql, *facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("done", [True, False])
async def test_what_became_of_a_failed_commit_is_found_out(tmp_path: Path, done: bool) -> None:
    """Everything is there exactly once, whichever way the commit went that failed."""
    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=True))
    transactions = store._shards[0].transactions

    def fail() -> None:
        connection = transactions._connection
        assert connection is not None
        transactions._connection = _Failing(connection, done=done)  # type: ignore[assignment]

    fail()
    document, grant, *appended = await asyncio.gather(
        store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0),
        store.open_writer(header(Stream("s1", "agent-1")), "w1"),
        store.append([notes(3, 6)], sync=True),
        store.append([notes(6, 8)], sync=False),
    )
    assert (document, grant.epoch, grant.next_seq) == (1, 1, 0)
    assert [ok(answer).written for answer in appended] == [6, 8]
    assert not transactions._suspect, "all was written again before anything was acknowledged"
    fail()
    await store.close_writer(MAIN, 1, "w")
    assert (await store.open_writer(MAIN, "w2")).epoch == 2
    fail()
    copy = Stream("s1", "copy")
    assert (await store.fork(MAIN, 5, header(copy), "f")).next_seq == 5
    fail()
    await store.remove("s1")
    with pytest.raises(KimiRayError) as caught:
        await store.read_from(copy, 0)
    assert caught.value.code == "store.deleted"
    await store.close()


async def test_a_failing_database_acknowledges_nothing(tmp_path: Path) -> None:
    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    transactions = store._shards[0].transactions
    connect = transactions._connect
    transactions._connect = lambda: _Failing(connect(), done=False)  # type: ignore[assignment, return-value]
    transactions._throw_away(sqlite3.OperationalError())
    answers = await store.append([notes(0, 3)], sync=True)
    assert (code(answers[0]), answers[0].durable) == ("store.io_failed", 0)
    assert answers[0].error is not None and answers[0].error["retryable"]
    with pytest.raises(KimiRayError) as caught:
        await store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
    assert caught.value.code == "store.io_failed"
    transactions._connect = connect
    assert ok(await store.append([notes(0, 3)], sync=True)).durable == 3
    assert await store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0) == 1
    await store.close()


@pytest.fixture
async def small_disk(tmp_path: Path) -> AsyncIterator[Path]:
    """A real file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_full_disk_refuses_and_goes_on_when_there_is_space(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    home = SqliteHome(small_disk / "home")
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    stored, error = await _fill(store, 20_000)
    assert error["code"] in ("store.disk_full", "store.io_failed"), error
    assert error["retryable"]
    assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(stored)]
    ballast.unlink()
    assert ok(await store.append([notes(stored, stored + 100)], sync=True)).durable == stored + 100
    assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(stored + 100)]
    await store.close()


async def test_what_ends_a_turn_or_a_session_is_written_on_a_full_disk(small_disk: Path) -> None:
    home = SqliteHome(small_disk / "home")
    store = await home.open(extra={"reserve_bytes": 300_000})
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    stored, error = await _fill(store, 20_000)
    assert error["code"] in ("store.disk_full", "store.io_failed"), error
    last = dataclasses.replace(notes(stored, stored + 2), closing=True)
    assert ok(await store.append([last], sync=True)).durable == stored + 2
    assert await store.write_document("s1", {"state": "ended"}, grant=1, nonce="n", revision=0) == 1
    await store.close_writer(MAIN, 1, "w")
    refused = await store.append([notes(0, 100, stream=Stream("s1", "agent-1"))], sync=True)
    assert refused[0].error is not None
    assert (await store.verify(MAIN)).closed
    await store.close()
    assert lines_in(home.path, MAIN) == [line(seq, text=f"n{seq}") for seq in range(stored + 2)]


async def test_what_is_freed_for_last_words_is_not_for_a_checkpoint(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that could not be moved into the database has to be when the disk is full: that takes all it gets."""
    monkeypatch.setattr("kimi_ray.store.sqlite.transactions.CHECKPOINT_PAGES", 8)
    home = SqliteHome(small_disk / "home")
    store = await home.open(extra={"reserve_bytes": 200_000})
    for session_id in ("s1", "s2", "s3"):
        await store.open_session(session_id, "n", workspace_id="wd_x_0123")
        await store.open_writer(header(stream=Stream(session_id, "main")), "w")
    reader = sqlite3.connect(home.database())
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM rows").fetchone()
    await store.write_document("s3", {"x": "y" * 400_000}, grant=1, nonce="n", revision=0)
    stored, error = await _fill(store, 20_000)
    assert error["code"] in ("store.disk_full", "store.io_failed"), error
    reader.close()
    for said in range(3):
        last = dataclasses.replace(notes(stored + said, stored + said + 1), closing=True)
        assert ok(await store.append([last], sync=True)).durable == stored + said + 1
    assert await store.write_document("s1", {"state": "ended"}, grant=1, nonce="n", revision=0) == 1
    await store.remove("s2")
    await store.close_writer(MAIN, 1, "w")
    await store.close()
    assert lines_in(home.path, MAIN) == [line(seq, text=f"n{seq}") for seq in range(stored + 3)]


_LIMITED = """
import asyncio, json, resource, signal, sys
from kimi_ray.store import StoreOptions, open_store_for_writing
from tests.conformance.store_contract import MAIN, header, notes

async def main():
    store = await open_store_for_writing(sys.argv[1], StoreOptions(backend="sqlite"))
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
    seq, failed = 0, None
    while failed is None:
        answer = (await store.append([notes(seq, seq + 50)], sync=True))[0]
        failed = answer.error
        seq += 50 if failed is None else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = (await store.append([notes(seq, seq + 50)], sync=True))[0]
    print(json.dumps([seq, failed["code"], after.durable, after.error]), flush=True)
    await store.close()

asyncio.run(main())
"""


def test_a_write_that_fails_is_not_acknowledged_and_the_next_one_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "home")],
        capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    seq, failed, durable, error = json.loads(done.stdout)
    assert failed in ("store.disk_full", "store.io_failed")
    assert (durable, error) == (seq + 50, None)
    assert lines_in(tmp_path / "home", MAIN) == [line(at, text=f"n{at}") for at in range(seq + 50)]


async def test_a_read_only_home_is_read_and_not_written(small_disk: Path) -> None:
    home = SqliteHome(small_disk / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 30)], sync=True))
    await home.kill(store)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert len(lines_in(home.path, MAIN)) == 30
    Path(shutil.copytree(small_disk / "home", small_disk.parent / "copy"))
    assert len(lines_in(small_disk.parent / "copy", MAIN)) == 30


async def test_a_writer_that_holds_the_database_too_long_is_busy(tmp_path: Path, monkeypatch: Any) -> None:
    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    connection = store._shards[0].transactions._connection
    assert connection is not None
    blocker = sqlite3.connect(home.database(), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    connection.execute("PRAGMA busy_timeout = 50")
    monkeypatch.setattr("kimi_ray.store.sqlite.connections.BUSY_TIMEOUT_S", 0.05)
    answer = (await store.append([notes(0, 3)], sync=True))[0]
    assert code(answer) == "store.busy"
    assert answer.error is not None and answer.error["retryable"]
    blocker.execute("ROLLBACK")
    blocker.close()
    assert ok(await store.append([notes(0, 3)], sync=True)).durable == 3
    await store.close()
