"""Readers beside a writer that commits and empties its log all the time: each sees one state, never an older one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
from pathlib import Path

from kimi_ray.errors import KimiRayError
from kimi_ray.store import RealFs
from kimi_ray.store.identity import require_identity
from kimi_ray.store.sqlite import SqliteReader, sqlite_reader
from kimi_ray.store.sqlite.beside import Onlooker
from kimi_ray.store.sqlite.database_file import DatabaseFile
from tests.conformance.store_contract import MAIN, header, line, notes, ok
from tests.unit.store_sqlite.sqlite_home import SqliteHome, damage

_WRITER = """
import asyncio, sys
from kimi_ray.store import StoreOptions, open_store_for_writing
from tests.conformance.store_contract import MAIN, header, notes, ok

async def main():
    store = await open_store_for_writing(sys.argv[1], StoreOptions(backend="sqlite"))
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    print("ready", flush=True)
    writer = store._shards[0].transactions
    for number in range(120):
        ok(await store.append([notes(20 * number, 20 * number + 20)], sync=number % 3 == 0))
        if number % 5 == 0:
            await asyncio.get_running_loop().run_in_executor(writer._thread, writer._truncate)
    await store.close()

asyncio.run(main())
"""


def look(reader: SqliteReader, before: int) -> int:
    """How long the log is: no shorter than it was, and its end is right."""
    try:
        seen = reader.inspect(MAIN).cut
    except KimiRayError as error:
        assert (error.code, before) == ("store.not_found", 0), error
        return 0
    assert seen >= before
    first = max(0, seen - 30)
    page = reader.read_from(MAIN, first, 30, 1 << 20)
    assert list(page.lines) == [line(seq, text=f"n{seq}") for seq in range(first, first + len(page.lines))]
    assert page.next_seq >= seen
    return seen


async def test_a_writer_in_another_process(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WRITER, str(tmp_path),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
    reader = sqlite_reader(RealFs(), str(tmp_path), require_identity(RealFs(), str(tmp_path)))
    ended = asyncio.ensure_future(process.wait())
    seen = looks = 0
    async with asyncio.timeout(60):
        while not ended.done():
            seen = await asyncio.to_thread(look, reader, seen)
            looks += 1
    assert await ended == 0
    assert look(reader, seen) == 2400
    assert looks > 3
    reader.close()


async def test_a_writer_in_this_process_that_opens_while_it_is_read(tmp_path: Path) -> None:
    """A reader maps the index read-only for the length of a read, which must not turn the writer away."""
    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 20)], sync=True))
    await home.kill(store)
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        reader = sqlite_reader(RealFs(), str(home.path), require_identity(RealFs(), str(home.path)))
        seen = 0
        try:
            while not stop.is_set():
                seen = look(reader, seen)
        except BaseException as error:
            failures.append(error)
        finally:
            reader.close()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    try:
        for number in range(4):
            again = await home.open()
            grant = await again.open_writer(MAIN, f"w{number}")
            first = grant.next_seq
            ok(await again.append([notes(first, first + 9, epoch=grant.epoch, nonce=f"w{number}")], sync=True))
            await again.close()
    finally:
        stop.set()
        for thread in readers:
            await asyncio.to_thread(thread.join, 20)
    assert not failures


async def test_a_cold_database_that_a_writer_comes_to_in_the_middle_of_a_read_is_read_again(tmp_path: Path) -> None:
    """It is read without locks: what was seen counts only if nobody wrote meanwhile."""
    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=True))
    await store.close()
    identity = require_identity(RealFs(), str(home.path))
    onlooker = Onlooker(DatabaseFile(str(home.path), identity, 0))
    seen: list[int] = []

    def count(connection: sqlite3.Connection | None) -> int:
        assert connection is not None
        seen.append(connection.execute("SELECT count(*) FROM rows").fetchone()[0])
        if len(seen) == 1:
            damage(home.database(), "DELETE FROM rows WHERE id = (SELECT max(id) FROM rows)")
        return seen[-1]

    assert onlooker.read(count) == 2
    assert seen == [3, 2]
    onlooker.close()
