"""The states of the index: built, kept, lost, damaged, left behind by the dead; and never a wrong answer meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.session import new_document
from kimi_ray.store import open_store, open_store_for_writing
from kimi_ray.store.seam import Document, StoreOptions
from kimi_ray.store.session_index import IndexPace, SessionIndex
from kimi_ray.store.session_index_marks import MARKS_NAME, SEAL_NAME, WriterMark, distrust, read_marks, remove_marks
from kimi_ray.store.session_index_query import SessionQuery
from kimi_ray.store.session_index_reader import SessionsReader
from tests.unit.store_index.index_home import EVERYTHING, QUICK, Home, opened, state_file, until


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_built_by_the_first_document_and_kept(tmp_path: Path, backend: str) -> None:
    async with opened(tmp_path, backend=backend) as home:
        status = await home.service.index_status()
        assert (status.state, status.generation, status.sessions) == ("uninitialized", 0, None)
        for number in range(3):
            await home.write(f"s{number}", at=number)
            assert await home.ids() == [f"s{one}" for one in range(number, -1, -1)]
        await home.ready()
        await home.write("s0", at=10)
        await home.remove("s1")
        assert await home.ids() == ["s0", "s2"]
        await home.ready()
        assert await home.ids() == ["s0", "s2"] == await home.scanned()
        status = await home.service.index_status()
        assert (status.state, status.generation, status.sessions, status.pending) == ("ready", 1, 2, 0)
    reader = SessionsReader(open_store(tmp_path))
    assert [one.id for one in (await reader.page(EVERYTHING)).items] == ["s0", "s2"]
    assert reader.standing == "ready"


async def test_warm_reads_touch_no_documents_and_a_restart_uses_the_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        await home.ready()
    async with opened(tmp_path) as home:
        store = await home.service.store()
        index = await home.index()

        async def refuse() -> list[Document]:
            raise AssertionError("the documents were read")

        monkeypatch.setattr(index, "_documents", refuse)
        assert (await index.prepare()).generation == 1
        shutil.rmtree(tmp_path / "sessions")
        assert await home.ids() == ["a"]
        assert await home.service.count_sessions(EVERYTHING) == 1
        found = await home.service.get_session_summary("a")
        assert found is not None and found.updated_at == 1
        assert store.identity.home_id


async def test_reads_join_one_scan_and_a_settled_one_is_not_used_again(tmp_path: Path) -> None:
    scans: list[asyncio.Event] = []
    listed = [Document("a", "w", 1, {"created_at": 1, "updated_at": 1})]

    async def documents() -> list[Document]:
        gate = asyncio.Event()
        scans.append(gate)
        found = list(listed)
        await gate.wait()
        return found

    index = SessionIndex(str(tmp_path / "nowhere"), "h", documents, pace=IndexPace(again_s=3600))  # no file can be made
    reads = [asyncio.create_task(index.query(EVERYTHING)) for _ in range(5)]
    await until(lambda: scans)
    index.record(Document("b", "w", 1, {"created_at": 2, "updated_at": 2}))  # written while the scan is under way
    late = asyncio.create_task(index.query(EVERYTHING))
    await asyncio.sleep(0)
    scans[0].set()
    for read in [*reads, late]:
        assert [one.id for one in (await read).items] == ["b", "a"]
    assert len(scans) == 1
    again = asyncio.create_task(index.query(EVERYTHING))
    await until(lambda: len(scans) == 2)
    scans[1].set()
    await again
    await until(lambda: index.state == "degraded")
    await index.close()


@pytest.mark.parametrize("what", ["deleted", "replaced", "garbage", "another schema", "another home", "a damaged row"])
async def test_a_file_that_is_lost_or_damaged_is_made_anew(tmp_path: Path, what: str) -> None:
    path = tmp_path / "index.sqlite"
    async with opened(tmp_path) as home:
        for number in range(4):
            await home.write(f"s{number}", at=number)
        index = await home.ready()
        expected = await home.scanned()
        if what == "deleted":
            for end in ("", "-wal", "-shm"):
                Path(f"{path}{end}").unlink(missing_ok=True)
        elif what == "replaced":
            other = tmp_path / "other"
            sqlite3.connect(other).close()
            os.replace(other, path)
        elif what == "garbage":
            path.unlink()
            path.write_bytes(b"not a database" * 1000)
        else:
            statement = {
                "another schema": "UPDATE facts SET value = 99 WHERE name = 'schema'",
                "another home": "UPDATE facts SET value = 'x' WHERE name = 'home_id'",
                "a damaged row": "UPDATE sessions SET summary = '{' WHERE id = 's2'",
            }[what]
            connection = sqlite3.connect(path)
            with connection:
                connection.execute(statement)
            connection.close()
            if what != "a damaged row":
                await home.service.close()
                async with opened(tmp_path) as again:
                    assert await again.ids() == expected
                    await again.ready()
                    assert await again.ids() == expected
                return
        assert await home.ids() == expected
        assert index.state in ("degraded", "preparing")
        await home.write("late", at=99)
        assert await home.ids() == ["late", *expected]
        await home.ready()
        assert await home.ids() == ["late", *expected] == await home.scanned()
        status = await index.status()
        assert status.degraded_count == 1 and status.sessions == 5


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("what", ["an older one", "without its log"])
async def test_an_index_that_lacks_what_was_written_is_not_believed(tmp_path: Path, what: str, noticed: bool) -> None:
    path = tmp_path / "index.sqlite"
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        await home.ready()
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        shutil.copy(path, tmp_path / "older")
        await home.write("b", at=2)
        index = await home.ready()
        if what == "an older one":
            os.replace(tmp_path / "older", path)
        Path(f"{path}-wal").unlink()
        Path(f"{path}-shm").unlink(missing_ok=True)
        if noticed:
            assert await home.ids() == ["b", "a"]
            assert index.state in ("degraded", "preparing")
            await home.ready()
            assert await home.ids() == ["b", "a"]
    reader = SessionsReader(open_store(tmp_path))
    assert [one.id for one in (await reader.page(EVERYTHING)).items] == ["b", "a"]
    async with opened(tmp_path) as home:
        await home.ready()
        assert await home.ids() == ["b", "a"]


async def test_edits_and_deletions_from_outside_are_found(tmp_path: Path) -> None:
    async with opened(tmp_path, IndexPace(reconcile_s=0.05, again_s=0.02, window_s=0.001)) as home:
        for number in range(3):
            await home.write(f"s{number}", at=number)
        index = await home.ready()
        file = state_file(tmp_path, "s0")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"title": "by hand", "updated_at": 50}))
        shutil.rmtree(state_file(tmp_path, "s1").parent)
        state_file(tmp_path, "s2").write_text("{")

        async def corrected() -> bool:
            page = await home.service.query_sessions(EVERYTHING)
            rows = {one.id: one for one in page.items}
            return set(rows) == {"s0", "s2"} and rows["s0"].title == "by hand" and rows["s2"].error is not None

        async with asyncio.timeout(10):
            while not await corrected():
                assert index.state == "ready"
                await asyncio.sleep(0.005)
        assert (await index.status()).generation == 1


async def test_readers_keep_the_old_rows_while_the_documents_are_compared(tmp_path: Path) -> None:
    async with opened(tmp_path, IndexPace(reconcile_s=0.02, again_s=0.02, window_s=0.001)) as home:
        for number in range(50):
            await home.write(f"s{number:02}", at=number)
        index = await home.ready()
        expected = await home.scanned()

        async def read() -> None:
            for _ in range(40):
                assert await home.ids() == expected

        await asyncio.gather(*(read() for _ in range(4)))
        assert (await index.status()).degraded_count == 0


async def test_a_row_that_was_written_during_the_comparison_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as home:
        for name in ("changed", "removed"):
            await home.write(name, at=1)
        index = await home.ready()
        read = index._documents  # pyright: ignore[reportPrivateUsage]
        old = await read()

        async def slow() -> list[Document]:
            await home.write("changed", at=7)
            await home.write("new", at=8)
            await home.service.remove("removed")
            await until(lambda: not index.pending())
            return old

        distrust(str(tmp_path))
        assert await home.ids() == ["removed", "changed"]  # not from the index any more
        monkeypatch.setattr(index, "_documents", slow)
        await home.ready()
        page = await home.service.query_sessions(EVERYTHING)
        assert [(one.id, one.updated_at) for one in page.items] == [("new", 8), ("changed", 7)]


async def test_who_died_is_not_believed(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        await home.ready()
        reader = SessionsReader(open_store(tmp_path))
        assert len((await reader.page(EVERYTHING)).items) == 1 and reader.standing == "ready"
        distrust(str(tmp_path))
        assert len((await reader.page(EVERYTHING)).items) == 1 and reader.standing == "degraded"
        await home.ids()
        assert (await home.service.index_status()).degraded_count == 1
        await home.ready()
        assert read_marks(str(tmp_path)).trusted
        fresh = SessionsReader(open_store(tmp_path))
        await fresh.page(EVERYTHING)
        assert fresh.standing == "ready"
    assert read_marks(str(tmp_path)).living == () and not list((tmp_path / MARKS_NAME).iterdir())


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_a_writer_that_knows_of_no_index_is_noticed(tmp_path: Path, backend: str) -> None:
    async with opened(tmp_path, backend=backend) as home:
        await home.write("a", at=1)
        await home.ready()
    before = SessionsReader(open_store(tmp_path))
    assert [one.id for one in (await before.page(EVERYTHING)).items] == ["a"] and before.standing == "ready"
    async with opened(tmp_path, backend=backend) as home:  # who only reads takes nothing from it
        assert await home.ids() == ["a"]
    assert read_marks(str(tmp_path)).believed
    old = await open_store_for_writing(str(tmp_path), StoreOptions(backend=backend, durability="os"))  # as 0.1 did
    claim = await old.open_session("b", "n", workspace_id="w")
    value = new_document("b", workspace_id="w", cwd="/x", now=2)
    await old.write_document("b", value, grant=claim.grant, nonce="n", revision=claim.revision)
    for _ in range(2):
        reader = SessionsReader(open_store(tmp_path))
        assert [one.id for one in (await reader.page(EVERYTHING)).items] == ["b", "a"]
        assert reader.standing == "degraded"
        await old.close()
    async with opened(tmp_path, backend=backend) as home:
        assert await home.ids() == ["b", "a"]
        await home.ready()
    after = SessionsReader(open_store(tmp_path))
    assert [one.id for one in (await after.page(EVERYTHING)).items] == ["b", "a"] and after.standing == "ready"
    (tmp_path / SEAL_NAME).unlink()
    assert not read_marks(str(tmp_path)).believed


async def test_a_mark_that_was_removed_is_put_down_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        shutil.rmtree(tmp_path / MARKS_NAME)
        await home.write("a", at=2)
        assert len(read_marks(str(tmp_path)).living) == 1
        shutil.rmtree(tmp_path / MARKS_NAME)
    assert read_marks(str(tmp_path)).believed


async def test_an_id_that_no_file_can_hold_is_no_damage(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        await home.ready()
        assert await home.service.get_session_summary("\ud800") is None
        assert await home.ids(after="\ud800") == []
        status = await home.service.index_status()
        assert (status.state, status.degraded_count) == ("ready", 0)


def test_a_mark_that_is_just_put_down_is_not_removed(tmp_path: Path) -> None:
    mark = WriterMark(str(tmp_path), durable=True)
    mark.put()
    remove_marks(str(tmp_path), (mark.name,))
    assert read_marks(str(tmp_path)).living == (mark.name,)
    assert read_marks(str(tmp_path), mark.name).living == ()
    mark.drop()
    assert read_marks(str(tmp_path)).dead == (mark.name,)
    remove_marks(str(tmp_path), (mark.name,))
    assert read_marks(str(tmp_path)).dead == ()


async def test_documents_that_cannot_be_read_are_told_once_the_index_cannot_help(tmp_path: Path) -> None:
    async def documents() -> list[Document]:
        raise StoreError("gone", code="store.io_failed")

    index = SessionIndex(str(tmp_path), "h", documents, pace=QUICK)
    with pytest.raises(StoreError):
        await index.query(SessionQuery())
    status = await index.prepare()
    assert status.state == "degraded" and status.reason is not None and "store.io_failed" in status.reason
    await index.close()


async def test_what_is_written_after_the_close_is_not_hidden(tmp_path: Path) -> None:
    home = Home(tmp_path)
    await home.write("a", at=1)
    index = await home.ready()
    await index.close()
    index.record(Document("b", "w", 1, {"created_at": 2, "updated_at": 2}))
    assert not read_marks(str(tmp_path)).trusted
    await home.service.close()
