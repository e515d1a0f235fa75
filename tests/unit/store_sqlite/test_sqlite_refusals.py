"""Databases that are not opened, each refused by its name; and files that are made safely."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store import RealFs, StoreOptions, Stream, open_store_for_writing
from kimi_ray.store.identity import require_identity
from kimi_ray.store.open import open_store
from kimi_ray.store.sqlite import sqlite_reader
from kimi_ray.store.sqlite.leftovers import ROWS_AT_ONCE
from tests.conformance.store_contract import MAIN, all_lines, code, fingerprint, header, notes, ok
from tests.unit.store_sqlite.sqlite_home import SqliteHome, damage


@pytest.fixture
def home(tmp_path: Path) -> SqliteHome:
    return SqliteHome(tmp_path / "home", syncs=False)


async def start(store: Any, stream: Stream = MAIN, count: int = 3) -> None:
    await store.open_session(stream.session_id, "n", workspace_id="wd_x_0123")
    await store.open_writer(header(stream), "w")
    if count:
        ok(await store.append([notes(0, count, stream=stream)], sync=True))


async def refused(work: Any) -> KimiRayError:
    with pytest.raises(KimiRayError) as caught:
        await work
    return caught.value


def _overwrite(path: Path) -> None:
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)


def _other_program(path: Path) -> None:
    damage(path, "PRAGMA application_id = 7")


def _newer(path: Path) -> None:
    damage(path, "PRAGMA user_version = 9")


def _more_tables(path: Path) -> None:
    damage(path, "CREATE TABLE more (x)")


def _other_store(path: Path) -> None:
    damage(path, "UPDATE store SET home_id = 'another'")


def _cut(path: Path) -> None:
    os.truncate(path, 3 * 4096 + 100)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_overwrite, "store.foreign_database"),
        (_other_program, "store.foreign_database"),
        (_newer, "store.format_unsupported"),
        (_more_tables, "store.corrupt"),
        (_other_store, "store.wrong_home"),
        (_cut, "store.corrupt"),
    ],
)
async def test_a_database_that_is_not_ours_is_refused_by_its_name(
    home: SqliteHome, change: Callable[[Path], None], expected: str
) -> None:
    store = await home.open()
    await start(store)
    await store.close()
    change(home.database())
    before = fingerprint(home.path / "shards")
    again = await home.open()
    for work in (again.read_from(MAIN, 0), again.open_writer(MAIN, "w2"), again.inspect(MAIN)):
        error = await refused(work)
        assert error.code == expected
        assert str(home.database()) in error.message
    assert code((await again.append([notes(3, 4)], sync=True))[0]) == expected
    await again.close()
    assert fingerprint(home.path / "shards") == before, "nothing was written into it"


async def test_a_log_without_its_database_is_refused_and_kept(home: SqliteHome) -> None:
    """A new database beside it would take the log for its own: SQLite looks at nothing but its name."""
    store = await home.open()
    await start(store)
    await home.kill(store)
    log = Path(f"{home.database()}-wal")
    whole = log.read_bytes()
    assert whole
    home.database().unlink()
    reader = open_store(home.path)
    again = await home.open()
    for work in (
        reader.list_documents(),
        reader.list(),
        again.read_from(MAIN, 0),
        again.open_writer(MAIN, "w2"),
        again.open_writer(header(Stream("s9", "main")), "w3"),
    ):
        error = await refused(work)
        assert error.code == "store.corrupt" and str(log) in error.message
    await again.close()
    assert log.read_bytes() == whole and not home.database().exists()


async def test_a_damaged_shard_leaves_the_others_in_use(tmp_path: Path) -> None:
    home = SqliteHome(tmp_path / "home", syncs=False, shards=2)
    store = await home.open()
    streams = [Stream(f"s{n}", "main") for n in range(8)]
    for stream in streams:
        await start(store, stream)
    await store.close()
    _overwrite(home.database(0))
    again = await home.open()
    codes = []
    for stream in streams:
        try:
            assert len(await all_lines(again, stream)) == 3
            codes.append("")
        except KimiRayError as error:
            codes.append(error.code)
    assert set(codes) == {"", "store.foreign_database"}
    await again.close()


async def test_files_are_private_and_links_are_not_followed(home: SqliteHome, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = await home.open()
        await start(store)
        files = list((home.path / "shards").iterdir())
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE((home.path / "shards").stat().st_mode) == 0o700
        await store.close()
    finally:
        os.umask(old)
    home.database().chmod(0o620)
    again = await home.open()
    error = await refused(again.open_writer(MAIN, "w2"))
    assert (error.code, "0620" in error.message) == ("store.unsafe_file", True)
    assert len(await all_lines(again)) == 3, "reading it does no harm"
    home.database().chmod(0o600)
    home.database().rename(tmp_path / "elsewhere.db")
    home.database().symlink_to(tmp_path / "elsewhere.db")
    assert (await refused(again.open_writer(MAIN, "w2"))).code == "store.unsafe_file"
    await again.close()


async def test_two_creators_make_one_database(home: SqliteHome) -> None:
    stores = [await home.open() for _ in range(4)]
    streams = [Stream(f"s{n}", "main") for n in range(4)]
    await asyncio.gather(*(start(store, stream) for store, stream in zip(stores, streams, strict=True)))
    assert {row.stream for row in await stores[0].list_logs()} == set(streams)
    for store in stores:
        await store.close()
    assert [file.name for file in (home.path / "shards").iterdir()] == ["0.db"]


async def test_what_a_dead_creator_left_is_removed(home: SqliteHome) -> None:
    store = await home.open()
    await start(store)
    await store.close()
    for name in ("0.making-01DEAD", "0.making-01DEAD-wal"):
        (home.path / "shards" / name).write_bytes(b"half")
    again = await home.open()
    await again.open_writer(MAIN, "w2")
    await again.close()
    assert [file.name for file in (home.path / "shards").iterdir()] == ["0.db"]


async def test_a_network_home_is_refused_even_if_its_locks_work(tmp_path: Path) -> None:
    class Network(RealFs):
        def fs_type(self, path: str) -> str:
            return "nfs4"

    for backend, expected in (("jsonl", None), ("sqlite", "store.unsupported_filesystem")):
        options = StoreOptions(backend=backend, network_home=True)
        opening = open_store_for_writing(str(tmp_path / backend), options, fs=Network())
        if expected is None:
            await (await opening).close()
        else:
            assert (await refused(opening)).code == expected


async def test_an_old_library_is_refused_before_anything_is_made(home: SqliteHome, monkeypatch: Any) -> None:
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 26, 0))
    error = await refused(home.open())
    assert error.code == "store.backend_unavailable"
    assert not home.path.exists()


async def test_an_id_that_differs_in_case_is_not_found_and_not_made(home: SqliteHome) -> None:
    store = await home.open()
    await start(store, Stream("Same", "main"))
    twin = Stream("same", "main")
    for work in (store.read_from(twin, 0), store.inspect(twin), store.open_writer(twin, "w"), store.revision(twin)):
        assert (await refused(work)).code == "store.not_found"
    assert code((await store.append([notes(0, 1, stream=twin)], sync=True))[0]) == "store.not_found"
    assert (await refused(store.open_session("same", "n", workspace_id="wd_x_0123"))).code == "store.invalid_id"
    assert (await refused(store.open_writer(header(twin), "w"))).code == "store.invalid_id"
    await store.close()


# -- leftovers --------------------------------------------------------------------------------------------------------


async def test_a_fork_of_a_dead_process_is_gone_at_the_next_start(home: SqliteHome) -> None:
    store = await home.open()
    await start(store)
    await store.close()
    damage(home.database(), "INSERT INTO streams VALUES (7, 's1', 'copy', 'i', 0, x'7b7d', 0)")
    from kimi_ray.store.sqlite.catalogue import write_head
    from kimi_ray.store.sqlite.schema import Head

    with _connection(home) as connection:
        write_head(connection, Head(7, 0, 0, "", True, False, "01DEADWRITER", 0))
        rows = [((7 << 40) + seq, 1, 0, b"row") for seq in range(2 * ROWS_AT_ONCE + 5)]
        connection.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", rows)
    again = await home.open()
    assert [row.stream for row in await again.list_logs()] == [MAIN]
    await again.close()
    with _connection(home) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("heads", "rows", "streams")
        ]
    assert counts == [1, 3, 1]


async def test_a_fork_of_a_living_process_stays(home: SqliteHome) -> None:
    store = await home.open()
    await start(store)
    from kimi_ray.store.sqlite.catalogue import write_head
    from kimi_ray.store.sqlite.schema import Head

    with _connection(home) as connection:
        write_head(connection, Head(7, 0, 0, "", True, False, store._owners.writer, 0))
    again = await home.open()
    await start(again, Stream("s2", "main"))
    with _connection(home) as connection:
        assert connection.execute("SELECT count(*) FROM heads").fetchone()[0] == 3
    await again.close()
    await store.close()


async def test_a_removal_that_was_cut_short_is_finished_at_the_next_start(home: SqliteHome, monkeypatch: Any) -> None:
    store = await home.open()
    await start(store)
    await store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
    store._shards[0].transactions.run = _only_first(store._shards[0].transactions.run)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await store.remove("s1")
    assert (await refused(store.read_from(MAIN, 0))).code == "store.deleted"
    await home.kill(store)
    again = await home.open()
    with _connection(home) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("heads", "rows", "grants")
        ]
        assert counts == [0, 0, 0]
    assert (await refused(again.read_from(MAIN, 0))).code == "store.deleted"
    assert await again.list_documents() == []
    await again.close()


async def test_a_damaged_session_can_be_removed(home: SqliteHome) -> None:
    store = await home.open()
    await start(store)
    await store.close()
    damage(home.database(), "UPDATE heads SET next_seq = 2")
    damage(home.database(), "UPDATE sessions SET workspace_id = 'elsewhere'")
    again = await home.open()
    assert (await refused(again.inspect(MAIN))).code == "store.corrupt"
    await again.remove("s1")
    assert (await refused(again.inspect(MAIN))).code == "store.deleted"
    await again.close()


async def test_a_grant_that_nobody_came_back_for_is_forgotten_after_a_day(home: SqliteHome) -> None:
    store = await home.open()
    await start(store, count=0)
    await start(store, Stream("s1", "late"), count=0)
    await home.kill(store)
    damage(home.database(), "UPDATE streams SET created_at = 1 WHERE agent_id = 'main'")
    again = await home.open()
    ok(await again.append([notes(0, 1, stream=Stream("s1", "late"))], sync=True))
    assert code((await again.append([notes(0, 1)], sync=True))[0]) == "store.not_found"
    await again.close()


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["closed", "killed", "beside a writer"])
async def test_a_reader_writes_no_byte(home: SqliteHome, state: str) -> None:
    store = await home.open()
    await start(store, count=40)
    await store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
    if state == "closed":
        await store.close()
    elif state == "killed":
        await home.kill(store)
    before = {
        name: print_
        for name, print_ in fingerprint(home.path).items()
        if "-shm" not in name or state != "beside a writer"
    }
    reader = sqlite_reader(RealFs(), str(home.path), require_identity(RealFs(), str(home.path)))
    assert reader.inspect(MAIN).cut == 40
    assert len(reader.read_from(MAIN, 0, 100, 1 << 20).lines) == 40
    assert len(reader.list_logs(None)) == len(reader.list_documents()) == len(reader.snapshots("s1")) == 1
    assert reader.verify(MAIN).ok
    assert len(reader.read_surviving(MAIN, 0, 100).events) == 40
    assert reader.locate(MAIN) is None
    with pytest.raises(StoreError) as caught:
        reader.read_raw(MAIN)
    assert caught.value.code == "store.no_raw_artifact"
    reader.close()
    after = {name: print_ for name, print_ in fingerprint(home.path).items() if name in before}
    assert after == before
    if state != "beside a writer":
        assert fingerprint(home.path).keys() == before.keys()
    else:
        ok(await store.append([notes(40, 41)], sync=True))
        await store.close()


async def test_a_killed_home_without_its_index_is_read_whole(home: SqliteHome) -> None:
    store = await home.open()
    await start(store, count=40)
    await home.kill(store)
    Path(f"{home.database()}-shm").unlink()
    before = home.database().read_bytes(), Path(f"{home.database()}-wal").read_bytes()
    reader = sqlite_reader(RealFs(), str(home.path), require_identity(RealFs(), str(home.path)))
    assert reader.inspect(MAIN).cut == 40
    reader.close()
    assert (home.database().read_bytes(), Path(f"{home.database()}-wal").read_bytes()) == before


async def test_revisions_change_with_every_write_and_are_of_one_store(home: SqliteHome, tmp_path: Path) -> None:
    store = await home.open()
    await start(store)
    other_home = SqliteHome(tmp_path / "other", syncs=False)
    other = await other_home.open()
    await start(other)
    seen = [await store.revision(MAIN), await other.revision(MAIN)]
    ok(await store.append([notes(3, 4)], sync=False))
    seen.append(await store.revision(MAIN))
    await store.open_writer(MAIN, "w2")
    seen.append(await store.revision(MAIN))
    assert len(set(seen)) == 4
    assert [row.revision for row in await store.snapshots()] == [seen[-1]]
    await other.close()
    await store.close()


def _connection(home: SqliteHome) -> Any:
    import contextlib
    import sqlite3

    @contextlib.contextmanager
    def opened() -> Any:
        connection = sqlite3.connect(home.database())
        try:
            yield connection
            connection.commit()
        finally:
            connection.close()

    return opened()


def _only_first(run: Any) -> Any:
    calls = 0

    async def once(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("the process dies here")
        return await run(*args, **how)

    return once
