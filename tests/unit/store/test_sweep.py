"""Mark and sweep: what anybody refers to stays, the rest goes after the grace, and no race takes a blob away."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store import Store, StoreOptions, Stream, open_store, open_store_for_writing
from kimi_ray.store.blobs import TOUCH_LASTS_S, Blobs, digest_of
from kimi_ray.store.directories import Directories
from kimi_ray.store.faults import FaultyFs, Rule
from kimi_ray.store.fs import RealFs
from kimi_ray.store.jsonl_reader import JsonlReader
from kimi_ray.store.layout import Layout
from kimi_ray.store.sweep import MIN_GRACE_S, check_grace, digests_in, mark_files
from kimi_ray.store.writer_settings import WriterSettings
from tests.unit.store.rescue_homes import (
    DIGEST,
    SESSION,
    blob_file,
    filled_home,
    flip,
    header_of,
    log_file,
    turn_events,
    write_log,
)
from tests.unit.store.test_faults import DyingFs
from tests.unit.store.test_salvage import BACKENDS

DAY = 86_400.0


def age(home: Path, seconds: float) -> None:
    """Make all blobs that much older."""
    for path in (home / "blobs").rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


async def opened(home: Path, **options: Any) -> Store:
    return await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=1, **options))


def blobs_of(home: Path, fs: Any = None) -> Blobs:
    files = fs or RealFs()
    layout = Layout(files, str(home))
    return Blobs(files, layout, Directories(files, str(home), durable=True), durable=True)


@pytest.mark.parametrize(("backend", "compression"), BACKENDS)
async def test_what_a_log_names_stays_and_the_rest_goes_after_the_grace(
    tmp_path: Path, backend: str, compression: str
) -> None:
    options = {"backend": backend, "compression": compression}
    await filled_home(tmp_path, **options)
    store = await opened(tmp_path, **options)
    other = digest_of(b"nobody's")
    await store.put_blobs({other: b"nobody's"})
    report = await store.sweep_blobs()
    assert (report.kept, report.young, report.deleted) == (1, 1, 0)
    age(tmp_path, DAY + 60)
    dry = await store.sweep_blobs(dry_run=True)
    assert (dry.kept, dry.deleted, dry.deleted_bytes) == (1, 1, len(b"nobody's"))
    assert blob_file(tmp_path, other).exists()
    report = await store.sweep_blobs()
    assert (report.kept, report.deleted, report.logs) == (1, 1, 2)
    assert not blob_file(tmp_path, other).exists()
    assert await store.read_blob(DIGEST)
    await store.open_session(SESSION, "n2")
    await store.remove(SESSION)
    assert (await store.sweep_blobs()).deleted == 1, "a removed session's blobs go too"
    assert not blob_file(tmp_path).exists()
    await store.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_damaged_logs_tails_redo_files_and_reservations_still_name_their_blobs(
    tmp_path: Path, compression: str
) -> None:
    await filled_home(tmp_path, agents=("main",), compression=compression)
    (log,) = log_file(tmp_path).parent.glob("wire.jsonl*")
    data = log.read_bytes()
    names = ("wire.tail-1-77", "wire.redo", "wire.jsonl.tmp-01ABC")
    for name in names:
        log.with_name(name).write_bytes(b"\x00garbage" + data[: len(data) * 3 // 4])
        log.unlink(missing_ok=True)
        found: set[str] = set()
        blocked: list[dict[str, object]] = []
        mark_files(RealFs(), str(tmp_path), found, blocked)
        assert (found, blocked) == ({DIGEST}, []), name
        log.with_name(name).unlink()
    log.write_bytes(data)
    if compression == "none":
        flip(log, b'"request/header"', at=3)
    age(tmp_path, 2 * DAY)
    store = await opened(tmp_path, compression=compression)
    report = await store.sweep_blobs()
    assert (report.kept, report.deleted) == (1, 0)
    assert bool(report.problems) == (compression == "none")
    await store.close()
    log.unlink()
    reserved = tmp_path / "reserved"
    reserved.mkdir(exist_ok=True)
    (reserved / "s.main").write_text(f'{{"header":"{DIGEST}"}}')
    found = set()
    mark_files(RealFs(), str(tmp_path), found, [])
    assert found == {DIGEST}


def test_a_digest_over_the_edge_of_two_reads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.store.sweep._CHUNK", 200)
    (tmp_path / "sessions").mkdir()
    text = b"x" * 150 + b" ".join(digest_of(bytes([n])).encode() for n in range(40))
    (tmp_path / "sessions/file").write_bytes(text)
    found: set[str] = set()
    mark_files(RealFs(), str(tmp_path), found, [])
    assert found == set(digests_in(text))
    assert len(found) == 40


async def test_where_something_cannot_be_read_nothing_is_deleted(tmp_path: Path) -> None:
    await filled_home(tmp_path, agents=("main",))
    fs = FaultyFs()
    store = await open_store_for_writing(str(tmp_path), StoreOptions(), fs=fs)
    await store.put_blobs({digest_of(b"x"): b"x"})
    age(tmp_path, 2 * DAY)
    fs.rules.append(Rule("pread", errno.EIO, count=0, path="wire.jsonl"))
    report = await store.sweep_blobs()
    assert (report.deleted, report.held_back) == (0, 2)
    assert {str(problem["code"]) for problem in report.problems} == {"store.io_failed"}
    fs.rules.clear()
    assert (await store.sweep_blobs()).deleted == 1
    await store.close()


async def test_a_session_that_is_removed_meanwhile_holds_the_sweep_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blobs may live on in a fork that is just being made of it, and is in no listing yet."""
    await filled_home(tmp_path, agents=("main",))
    age(tmp_path, 2 * DAY)
    store = await opened(tmp_path)
    loop = asyncio.get_running_loop()
    listed = JsonlReader.all_logs

    async def remove() -> None:
        await store.open_session(SESSION, "n2")
        await store.remove(SESSION)

    def list_then_remove(reader: JsonlReader) -> Any:
        rows = listed(reader)
        if rows:
            asyncio.run_coroutine_threadsafe(remove(), loop).result(10)
        return rows

    monkeypatch.setattr(JsonlReader, "all_logs", list_then_remove)
    report = await store.sweep_blobs()
    assert (report.deleted, report.held_back) == (0, 1)
    monkeypatch.setattr(JsonlReader, "all_logs", listed)
    assert (await store.sweep_blobs()).deleted == 1
    await store.close()


async def test_a_fork_whose_source_goes_keeps_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled_home(tmp_path, agents=("main",))
    age(tmp_path, 2 * DAY)
    store = await opened(tmp_path)
    loop = asyncio.get_running_loop()
    listed = JsonlReader.all_logs
    made = False

    async def fork() -> None:
        await store.open_session("session_fork", "n", workspace_id="wd_x_0123")
        await store.fork(Stream(SESSION, "main"), 10, header_of(session="session_fork"), "f")
        await store.open_session(SESSION, "n2")
        await store.remove(SESSION)

    def list_then_fork(reader: JsonlReader) -> Any:
        nonlocal made
        rows = listed(reader)
        if not made:
            made = True
            asyncio.run_coroutine_threadsafe(fork(), loop).result(10)
        return rows

    monkeypatch.setattr(JsonlReader, "all_logs", list_then_fork)
    report = await store.sweep_blobs()
    assert report.deleted == 0
    assert await store.read_blob(DIGEST)
    await store.close()


def test_asking_makes_young_durably_and_is_remembered_for_a_while_only(tmp_path: Path) -> None:
    fs = FaultyFs()
    (tmp_path / "blobs").mkdir()
    writer = blobs_of(tmp_path)
    digest = digest_of(b"content")
    writer.put(digest, b"content")
    age(tmp_path, 2 * DAY)
    now = [time.time()]
    layout = Layout(fs, str(tmp_path))
    asking = Blobs(fs, layout, Directories(fs, str(tmp_path), durable=True), durable=True, clock=lambda: now[0])
    assert asking.has(digest)
    assert fs.calls["utime"] == fs.calls["fsync"] == 1, "young, and that on the disk, before the answer"
    assert blob_file(tmp_path, digest).stat().st_mtime > time.time() - 60
    assert asking.has(digest)
    asking.put(digest, b"content")
    assert fs.calls["utime"] == 1
    now[0] += TOUCH_LASTS_S
    assert asking.has(digest)
    assert fs.calls["utime"] == 2
    now[0] += TOUCH_LASTS_S
    blob_file(tmp_path, digest).unlink()
    assert not asking.has(digest), "not from memory"
    asking.put(digest, b"content")
    assert asking.read(digest) == b"content"


def test_a_process_remembers_so_many_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.store.blobs.TOUCHES", 2)
    blobs, contents = blobs_of(tmp_path), [b"%d" % n for n in range(5)]
    for content in contents:
        blobs.put(digest_of(content), content)
    assert len(blobs._touched) == 2  # pyright: ignore[reportPrivateUsage]
    age(tmp_path, 2 * DAY)
    assert all(blobs.has(digest_of(content)) for content in reversed(contents))
    ages = [time.time() - blob_file(tmp_path, digest_of(content)).stat().st_mtime for content in contents]
    assert [age < DAY for age in ages] == [True, True, True, False, False], "what is not remembered is touched again"
    assert len(blobs._touched) == 2  # pyright: ignore[reportPrivateUsage]


class Paused(RealFs):
    """Stops before the first call of one kind on a blob until it may go on."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.reached, self.go_on = threading.Event(), threading.Event()

    def _pause(self, operation: str) -> None:
        if operation == self.operation and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(10)

    def unlink(self, path: str) -> None:
        self._pause("unlink")
        super().unlink(path)

    def utime(self, path: str) -> None:
        self._pause("utime")
        super().utime(path)

    def rename(self, source: str, target: str) -> None:
        self._pause("rename")
        super().rename(source, target)


@pytest.mark.parametrize("who", ["sweep", "has", "put"])
def test_sweep_against_a_touch_at_the_worst_moment(tmp_path: Path, who: str) -> None:
    """One of the two stands right before its deed; whatever the other does, who was told yes finds the blob."""
    (tmp_path / "blobs").mkdir()
    digest = digest_of(b"content")
    blobs_of(tmp_path).put(digest, b"content")
    age(tmp_path, 2 * DAY)
    if who == "put":
        blob_file(tmp_path, digest).rename(tmp_path / "kept")
    slow = Paused({"sweep": "unlink", "has": "utime", "put": "rename"}[who])
    answers: list[bool] = []

    def sweeping(fs: Any) -> None:
        blobs_of(tmp_path, fs).sweep(set(), time.time() - DAY, False)

    def touching(fs: Any) -> None:
        blobs = blobs_of(tmp_path, fs)
        if who == "put":
            blobs.put(digest, b"content")
            answers.append(True)
        else:
            answers.append(blobs.has(digest))

    first, second = (sweeping, touching) if who == "sweep" else (touching, sweeping)
    one = threading.Thread(target=first, args=(slow,))
    one.start()
    assert slow.reached.wait(10)
    if who == "put":
        (tmp_path / "kept").rename(blob_file(tmp_path, digest))
    two = threading.Thread(target=second, args=(RealFs(),))
    two.start()
    two.join(0.1)
    slow.go_on.set()
    one.join(10)
    two.join(10)
    assert answers == [blob_file(tmp_path, digest).exists()]
    if who != "sweep":
        assert answers == [True]


async def test_two_sweeps_at_once_and_beside_a_live_writer(tmp_path: Path) -> None:
    await filled_home(tmp_path, agents=("main",))
    stores = [await opened(tmp_path) for _ in range(3)]
    old = {digest_of(bytes([n])): bytes([n]) for n in range(60)}
    await stores[0].put_blobs(old)
    await stores[0].close()
    age(tmp_path, 2 * DAY)
    writer = await opened(tmp_path)
    await writer.open_session("session_live", "n", workspace_id="wd_x_0123")
    wanted = list(old)[::3]

    async def write() -> None:
        for number, digest in enumerate(wanted):
            if not await writer.has_blob(digest):
                await writer.put_blobs({digest: old[digest]})
            header = header_of(f"agent-{number + 1}", session="session_live")
            await write_log(writer, turn_events(1, blob=digest), header)

    _, *reports = await asyncio.gather(write(), *(store.sweep_blobs() for store in stores[1:]))
    assert [report.problems for report in reports] == [(), ()]
    for digest in wanted:
        assert await writer.read_blob(digest) == old[digest]
    await asyncio.gather(*(store.sweep_blobs() for store in stores[1:]))
    assert {digest for digest in old if blob_file(tmp_path, digest).exists()} == set(wanted)
    for store in (*stores[1:], writer):
        await store.close()


async def test_a_death_in_the_middle_leaves_nothing_that_matters(tmp_path: Path) -> None:
    for calls in range(0, 24, 2):
        home = tmp_path / f"h{calls}"
        await filled_home(home, agents=("main",), durability="none")
        blobs = blobs_of(home)
        gone = [digest_of(bytes([n])) for n in range(4)]
        for number, digest in enumerate(gone):
            blobs.put(digest, bytes([number]))
        (blob_file(home).parent / f"{'0' * 64}.tmp-01ABC").write_bytes(b"half")
        age(home, 2 * DAY)
        fs = DyingFs(calls)
        try:
            store = await open_store_for_writing(str(home), StoreOptions(), fs=fs)
            await store.sweep_blobs()
        except KimiRayError:
            assert fs.dead
        fs.kill()
        again = await opened(home)
        await again.sweep_blobs()
        assert await again.read_blob(DIGEST)
        left = [path.name for path in (home / "blobs").rglob("*") if path.is_file()]
        assert left == [DIGEST[7:]]
        await again.close()


def test_the_grace_is_longer_than_any_memory_of_a_blob() -> None:
    assert 2 * float(WriterSettings().known_blob_ttl_s) <= MIN_GRACE_S
    assert TOUCH_LASTS_S < MIN_GRACE_S
    check_grace(0, 0)
    check_grace(MIN_GRACE_S, 9)
    with pytest.raises(StoreError) as caught:
        check_grace(MIN_GRACE_S - 1, 1)
    assert caught.value.code == "store.grace_too_short"


async def test_reading_takes_no_lock_and_writes_nothing(tmp_path: Path) -> None:
    await filled_home(tmp_path, agents=("main",))
    (tmp_path / "blobs.lock").unlink()
    age(tmp_path, 2 * DAY)
    before = blob_file(tmp_path).stat().st_mtime_ns
    assert await open_store(tmp_path).read_blob(DIGEST)
    assert not (tmp_path / "blobs.lock").exists()
    assert blob_file(tmp_path).stat().st_mtime_ns == before
