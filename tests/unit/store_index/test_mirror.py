"""The way of a written document into the index: nobody waits for it, nothing is lost, failures are told."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from kimi_ray.store import open_store
from kimi_ray.store.seam import Document, SessionCopy
from kimi_ray.store.session_index import fold
from kimi_ray.store.session_index_file import IndexFile
from kimi_ray.store.session_index_marks import read_marks
from kimi_ray.store.session_index_mirror import FAILURES, LIMIT, Changes, Mirror
from kimi_ray.store.session_index_query import SessionQuery
from kimi_ray.store.session_index_reader import SessionsReader
from kimi_ray.store.session_index_rows import IndexRow, row_of
from tests.unit.store_index.index_home import EVERYTHING, opened, until


def row(session_id: str, at: int = 1, revision: int = 1) -> IndexRow:
    return row_of(Document(session_id, "w", revision, {"created_at": 1, "updated_at": at}))


class Sink:
    """Stands for the index's file."""

    def __init__(self) -> None:
        self.flushes: list[dict[str, IndexRow | None]] = []
        self.failing = 0
        self.failures: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.writing = 0
        self.mirror = Mirror(self.write, failed=self.failed, flushed=lambda: None, window_s=0.001)

    async def write(self, changes: Changes) -> None:
        self.writing += 1
        await self.gate.wait()
        if self.failing:
            self.failing -= 1
            raise sqlite3.OperationalError("database is locked")
        self.flushes.append(dict(changes))

    def failed(self, _error: BaseException, failures: int) -> None:
        self.failures.append(failures)


async def test_a_session_is_flushed_once_however_often_it_was_written() -> None:
    sink = Sink()
    for at in range(100):
        sink.mirror.add("a", row("a", at))
    sink.mirror.add("b", None)
    assert sink.mirror.size == 2 and sink.flushes == []  # not open yet
    sink.mirror.open()
    assert await sink.mirror.drain(5)
    assert sink.flushes == [{"a": row("a", 99), "b": None}]
    await sink.mirror.close()


async def test_what_is_written_during_a_flush_is_flushed_again() -> None:
    sink = Sink()
    sink.gate.clear()
    sink.mirror.open()
    sink.mirror.add("a", row("a", 1))
    draining = asyncio.create_task(sink.mirror.drain(5))
    await until(lambda: sink.writing)
    sink.mirror.add("a", row("a", 2))
    sink.gate.set()
    assert await draining
    assert [one["a"] for one in sink.flushes] == [row("a", 1), row("a", 2)]
    await sink.mirror.close()


async def test_a_failed_flush_is_tried_again() -> None:
    sink = Sink()
    sink.failing = 2
    sink.mirror.open()
    sink.mirror.add("a", row("a"))
    await until(lambda: sink.flushes)
    assert sink.failures == [1, 2] and sink.flushes == [{"a": row("a")}]
    await until(lambda: not sink.mirror.size)
    sink.failing = 1
    sink.mirror.add("a", row("a", 2))
    await until(lambda: len(sink.flushes) == 2)
    assert sink.failures == [1, 2, 1]
    await sink.mirror.close()


async def test_evicting_waits_for_a_flush_under_way() -> None:
    sink = Sink()
    sink.gate.clear()
    sink.mirror.open()
    sink.mirror.add("a", row("a"))
    await until(lambda: sink.writing)
    evicting = asyncio.create_task(sink.mirror.evict("a"))
    await until(lambda: not sink.mirror.size)
    assert not evicting.done()
    sink.gate.set()
    await evicting
    assert len(sink.flushes) == 1
    await sink.mirror.close()


async def test_too_many_are_dropped_and_that_is_told() -> None:
    sink = Sink()
    whole = [sink.mirror.add(f"s{number}", None) for number in range(LIMIT + 1)]
    assert whole == [True] * LIMIT + [False] and sink.mirror.size == 0
    await sink.mirror.close()


async def test_a_locked_index_slows_no_write_and_no_reader_is_misled(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        index = await home.ready()
        lock = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        slowest = 0.0
        for number in range(20):
            began = time.perf_counter()
            await home.write("a", at=2 + number)
            index.record(Document(f"extra-{number}", "w", 1, {"created_at": 1, "updated_at": number}))
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 0.5
        assert (await home.ids())[0] == "a" and len(await home.ids()) == 21
        await until(lambda: read_marks(str(tmp_path)).stale, 5)
        reader = SessionsReader(open_store(tmp_path))
        (only,) = (await reader.page(EVERYTHING)).items  # the extra ones have no documents
        assert (only.updated_at, reader.standing) == (21, "degraded")
        lock.execute("ROLLBACK")
        lock.close()
        await home.ready()
        await until(lambda: not read_marks(str(tmp_path)).stale, 5)


async def test_five_failures_degrade_and_the_documents_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        index = await home.ready()
        tries: list[int] = []

        def full(_self: IndexFile, changes: Changes) -> None:
            tries.append(len(changes))
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(IndexFile, "record", full)
            patch.setattr("kimi_ray.store.session_index_mirror._PAUSE_S", 0.0)
            await home.write("a", at=2)
            await until(lambda: len(tries) >= FAILURES)
            await until(lambda: index.state != "ready")
            status = await index.status()
            assert status.degraded_count == 1 and status.reason is not None and "full" in status.reason
            found = await home.service.query_sessions(EVERYTHING)
            assert [one.updated_at for one in found.items] == [2]
        await home.ready()
        assert await home.ids() == await home.scanned()


async def test_an_index_that_cannot_be_made_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").mkdir()
    (tmp_path / "index.sqlite" / "in the way").touch()
    (tmp_path / "index-writers").touch()
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        await home.write("b", at=2)
        assert await home.ids() == ["b", "a"]
        assert (await home.service.index_status()).state in ("preparing", "degraded")


async def test_a_publication_is_listed_whole_once_it_is_shown(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        await home.ready()
        service = home.service
        names = {f"f{number}": "w" for number in range(3)}
        await service.begin_publication("g", names)
        for name in names:
            value = {"created_at": 5, "updated_at": 5, "fork_group": "g"}
            await service.copy_session("g", SessionCopy(name, "w", value, ()))
            assert await home.ids() == ["a"]
        await service.publish("g")
        assert await home.ids(fork_group="g") == ["f2", "f1", "f0"]
        assert await home.ids() == await home.scanned() == ["f2", "f1", "f0", "a"]
        await service.publish("g")  # told again, by somebody who did not hear the answer
        assert await home.ids() == await home.scanned()


async def test_removal_of_a_row_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        index = await home.ready()
        await home.write("b", at=2)
        await home.service.forget_session_summary("b")
        await home.service.forget_session_summary("a")
        assert await home.ids() == []
        await home.write("a", at=3)
        assert await home.ids() == ["a"]
        index.missed()
        await home.ready()
        assert await home.ids() == ["a", "b"] == await home.scanned()


async def test_a_cursor_that_waits_in_the_mirror_resolves(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("a", at=1)
        index = await home.ready()
        lock = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        await home.write("c", at=3)
        await home.write("b", at=2)
        assert set(index.pending()) == {"b", "c"}
        assert await home.ids(after="c") == ["b", "a"]
        assert await home.ids(before="a") == ["c", "b"]
        assert await home.service.count_sessions(SessionQuery()) == 3
        await home.remove("b")
        assert await home.ids(after="b") == []
        lock.close()


def test_folding_keeps_the_later_version() -> None:
    old, new = row("a", revision=1), row("a", revision=2)
    assert fold({"a": new}, {"a": old}) == {"a": new}
    assert fold({"a": old}, {"a": new}) == {"a": new}
    assert fold({"a": old}, {"a": None}) == {"a": None}
    assert fold({"a": None}, {"a": old}) == {"a": None}
    assert fold({}, {"a": old}) == {"a": old}
