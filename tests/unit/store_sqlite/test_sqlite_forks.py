"""Forks in many transactions: visible whole or not at all, also when something happens in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.store import Stream
from kimi_ray.store.sqlite import SqliteStore
from kimi_ray.store.sqlite.leftovers import ROWS_AT_ONCE
from tests.conformance.store_contract import MAIN, all_lines, header, line, notes, ok
from tests.unit.store_sqlite.sqlite_home import SqliteHome, damage

COUNT = 2 * ROWS_AT_ONCE + 77
COPY = Stream("s1", "copy")
ELSEWHERE = Stream("s7", "main")


@pytest.fixture
def home(tmp_path: Path) -> SqliteHome:
    return SqliteHome(tmp_path / "home", syncs=False, shards=2)


@pytest.fixture
async def store(home: SqliteHome) -> AsyncIterator[SqliteStore]:
    store = await home.open(durability="none")
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, COUNT)], sync=False))
    yield store
    await store.close()


def counted(path: Path) -> tuple[int, int]:
    """Logs and rows in a database."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        heads = connection.execute("SELECT count(*) FROM heads").fetchone()[0]
        return heads, connection.execute("SELECT count(*) FROM rows").fetchone()[0]


@pytest.mark.parametrize("target", [COPY, ELSEWHERE])
@pytest.mark.parametrize("cut", [0, ROWS_AT_ONCE, COUNT - 1, COUNT])
async def test_a_long_log_is_copied_while_others_write(
    store: SqliteStore, home: SqliteHome, target: Stream, cut: int
) -> None:
    """Into the same database and into another one."""
    from kimi_ray.store.sharding import shard_of

    assert {shard_of("s1", 2), shard_of("s7", 2)} == {0, 1}
    await store.open_session(target.session_id, "n", workspace_id="wd_x_0123")
    forking = asyncio.create_task(store.fork(MAIN, cut, header(target), "f"))
    written = COUNT
    while not forking.done():
        ok(await store.append([notes(written, written + 3)], sync=False))
        written += 3
        assert {row.stream for row in await store.list_logs()} <= {MAIN, target}
    grant = await forking
    assert (grant.epoch, grant.next_seq) == (2, cut)
    again = await store.fork(MAIN, cut, header(target), "f")
    assert (again.epoch, again.next_seq) == (2, cut)
    with pytest.raises(KimiRayError) as caught:
        await store.fork(MAIN, cut, header(target), "other")
    assert caught.value.code == "store.exists"
    assert await all_lines(store, target) == [line(seq, text=f"n{seq}") for seq in range(cut)]
    ok(await store.append([notes(cut, cut + 2, epoch=2, nonce="f", stream=target)], sync=True))
    for stream in (MAIN, target):
        assert (await store.verify(stream)).ok


async def test_a_fork_of_a_damaged_log_leaves_nothing(store: SqliteStore, home: SqliteHome) -> None:
    from kimi_ray.store.sharding import shard_of

    path = home.database(shard_of("s1", 2))
    damage(path, "UPDATE rows SET data = x'00' WHERE id & 0xffffffffff = ?", ROWS_AT_ONCE + 9)
    with pytest.raises(KimiRayError) as caught:
        await store.fork(MAIN, COUNT, header(COPY), "f")
    assert caught.value.code == "store.corrupt"
    assert caught.value.details["seq"] == ROWS_AT_ONCE + 9
    assert [row.stream for row in await store.list_logs()] == [MAIN]
    assert counted(path) == (1, COUNT)
    assert (await store.fork(MAIN, 5, header(COPY), "f")).next_seq == 5, "the name is free"


async def test_a_fork_that_nobody_waits_for_any_more_leaves_nothing(store: SqliteStore, home: SqliteHome) -> None:
    from kimi_ray.store.sharding import shard_of

    path = home.database(shard_of("s1", 2))
    commits = store._shards[shard_of("s1", 2)].transactions
    before = commits.commits
    forking = asyncio.create_task(store.fork(MAIN, COUNT, header(COPY), "f"))
    async with asyncio.timeout(20):
        while commits.commits < before + 2:
            await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert [row.stream for row in await store.list_logs()] == [MAIN]
    assert counted(path) == (1, COUNT)


async def test_two_forks_under_one_name_are_one(store: SqliteStore) -> None:
    answers: list[Any] = await asyncio.gather(
        *(store.fork(MAIN, 40, header(COPY), nonce) for nonce in ("f", "f", "g")), return_exceptions=True
    )
    told = [getattr(answer, "code", None) or answer.epoch for answer in answers]
    assert told in ([2, 2, "store.exists"], ["store.exists", "store.exists", 2])  # whoever came first
    again = await asyncio.gather(
        *(store.fork(MAIN, 40, header(COPY), nonce) for nonce in ("f", "f", "g")), return_exceptions=True
    )
    assert [getattr(answer, "code", None) or answer.epoch for answer in again] == told


async def test_a_removal_of_a_long_log_lets_others_write(store: SqliteStore, home: SqliteHome) -> None:
    from kimi_ray.store.sharding import shard_of

    name = next(f"s{n}" for n in range(2, 99) if shard_of(f"s{n}", 2) == shard_of("s1", 2))
    other = Stream(name, "main")
    await store.open_session(name, "n", workspace_id="wd_x_0123")
    await store.open_writer(header(other), "w")
    removing = asyncio.create_task(store.remove("s1"))
    written = 0
    while not removing.done() or written < 6:
        ok(await store.append([notes(written, written + 3, stream=other)], sync=False))
        written += 3
    await removing
    assert counted(home.database(shard_of("s1", 2))) == (1, written)
