"""A store of either encoding under failing disks, forks, restarts and readers; what they promise is the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store import JsonlStore, StoreOptions, Stream, open_store, open_store_for_writing
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.faults import FaultyFs, Rule
from kimi_ray.store.seam import Batch
from tests.conformance.store_contract import (
    MAIN,
    all_lines,
    batch,
    chunk_events,
    code,
    fingerprint,
    header,
    line,
    notes,
    ok,
)
from tests.unit.store.damaged_logs import ENCODINGS

LOG_NAMES = {"none": "wire.jsonl", "zstd": "wire.jsonl.zst"}


@pytest.fixture(params=ENCODINGS)
def compression(request: pytest.FixtureRequest) -> str:
    return request.param


async def started(home: Path, compression: str, fs: Any = None, *, count: int = 2, **options: Any) -> JsonlStore:
    how = StoreOptions(compression=compression, claim_timeout_s=1, **options)
    store = await open_store_for_writing(str(home), how, fs=fs)
    assert isinstance(store, JsonlStore)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    if count:
        ok(await store.append([notes(0, count)], sync=True))
    return store


def log_of(home: Path, compression: str, session: str = "s1") -> Path:
    return home / f"sessions/wd_x_0123/{session}/agents/main" / LOG_NAMES[compression]


def wanted(count: int) -> list[bytes]:
    return [line(seq, text=f"n{seq}") for seq in range(count)]


async def test_the_file_is_named_by_the_encoding_and_the_home_refuses_the_other(
    tmp_path: Path, compression: str
) -> None:
    store = await started(tmp_path, compression)
    assert await store.locate(MAIN) == str(log_of(tmp_path, compression))
    assert await store.read_raw(MAIN) == log_of(tmp_path, compression).read_bytes()
    await store.close()
    other = "zstd" if compression == "none" else "none"
    with pytest.raises(StoreError) as caught:
        await open_store_for_writing(str(tmp_path), StoreOptions(compression=other))
    assert caught.value.code == "store.settings_mismatch"
    reader = open_store(tmp_path)
    assert await all_lines(reader) == wanted(2), "a reader takes the encoding from the home"
    assert await reader.locate(MAIN) == str(log_of(tmp_path, compression))


async def test_a_partial_write_is_rolled_back_so_that_the_retry_has_no_gap(tmp_path: Path, compression: str) -> None:
    """DeepSeek Harness test 46."""
    fs = FaultyFs()
    store = await started(tmp_path, compression, fs)
    size = log_of(tmp_path, compression).stat().st_size
    fs.budget = 30
    assert code((await store.append([notes(2, 60)], sync=True))[0]) == "store.disk_full"
    assert log_of(tmp_path, compression).stat().st_size == size
    fs.budget = None
    ok(await store.append([notes(2, 60)], sync=True))
    assert await all_lines(store) == wanted(60)
    assert (await store.verify(MAIN)).problems == ()
    await store.close()


async def test_a_failed_sync_rewrites_what_was_not_durable(tmp_path: Path, compression: str) -> None:
    """DeepSeek Harness test 52: what a failed sync may have lost is written again before anything is acknowledged."""
    fs = FaultyFs()
    store = await started(tmp_path, compression, fs)
    ok(await store.append([notes(2, 4)], sync=False))
    fs.rules.append(Rule("fdatasync", errno.EIO))
    truncates = fs.calls.get("truncate", 0)
    assert ok(await store.append([notes(4, 7)], sync=True)).durable == 7
    assert fs.calls["truncate"] == truncates + 1
    assert await all_lines(store) == wanted(7)
    await store.close()
    assert (await open_store(tmp_path).verify(MAIN)).ok


async def test_killed_within_a_write_and_opened_again_twice(tmp_path: Path, compression: str) -> None:
    """Kimi Code W1: a torn tail was tolerated once, and the next append glued onto it."""
    store = await started(tmp_path, compression, count=3, durability="none")
    path = log_of(tmp_path, compression)
    size = path.stat().st_size
    rows = [line(seq, text=f"ünïcödé 🙂 text {seq}") for seq in (3, 4)]
    ok(await store.append([batch(rows, 3)], sync=True))
    await store.close()
    data = path.read_bytes()
    for cut in sorted({*range(size, len(data), 11), *range(len(data) - 5, len(data) + 1)}):
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(data[:cut])
        await opened_twice(tmp_path, compression, [*wanted(3), *rows])


async def opened_twice(home: Path, compression: str, written: list[bytes]) -> None:
    expected: list[bytes] | None = None
    for life in ("life-1", "life-2"):
        store = await open_store_for_writing(str(home), StoreOptions(compression=compression, durability="none"))
        grant = await store.open_writer(MAIN, life)
        lines = await all_lines(store)
        if expected is None:
            assert lines == written[: len(lines)]
            assert len(lines) >= 3
        else:
            assert lines == expected
        more = line(grant.next_seq, text=life)
        ok(await store.append([batch([more], grant.next_seq, epoch=grant.epoch, nonce=life)], sync=True))
        expected = [*lines, more]
        assert (await store.verify(MAIN)).problems == ()
        await store.close()


async def test_one_damaged_batch_in_the_middle_leaves_everything_else_readable(
    tmp_path: Path, compression: str
) -> None:
    """Kimi Code W7: one bad line made the whole session unloadable."""
    store = await started(tmp_path, compression, count=4)
    ends = [log_of(tmp_path, compression).stat().st_size]
    for first in (4, 8, 12):
        ok(await store.append([notes(first, first + 4)], sync=True))
        ends.append(log_of(tmp_path, compression).stat().st_size)
    await store.close()
    log = log_of(tmp_path, compression)
    data = bytearray(log.read_bytes())
    data[(ends[1] + ends[2]) // 2] ^= 1
    log.write_bytes(data)
    store = await open_store_for_writing(str(tmp_path), StoreOptions(compression=compression))
    with pytest.raises(StoreError) as caught:
        await store.open_writer(MAIN, "w2")
    assert caught.value.code == "store.corrupt"
    assert caught.value.details["offset"] >= ends[1]
    assert (await store.read_from(MAIN, 0, 8)).lines == tuple(wanted(8))
    assert (await store.read_from(MAIN, 12)).lines == tuple(wanted(16)[12:])
    survivors = [text for _, text in (await store.read_surviving(MAIN)).events]
    assert set(wanted(16)[:8] + wanted(16)[12:]) <= set(survivors)
    assert len((await store.read_surviving(MAIN)).damage) == 1
    assert [row.error for row in await store.list_logs()] == [None]
    assert log.read_bytes() == data
    await store.close()


async def test_a_fork_at_every_cut_even_of_a_torn_source(tmp_path: Path, compression: str) -> None:
    store = await started(tmp_path, compression, count=3)
    packed = pack_rows(chunk_events(9)[3:])
    rows = [row for row, _ in packed]
    ok(await store.append([Batch(MAIN, 1, "w", 3, b"".join(rows), tuple(map(len, rows)), (6,))], sync=True))
    await store.open_writer(MAIN, "w2")
    ok(await store.append([notes(9, 12, epoch=2, nonce="w2")], sync=True))
    lines = await all_lines(store)
    await store.close()
    os.truncate(log_of(tmp_path, compression), log_of(tmp_path, compression).stat().st_size - 3)
    store = await open_store_for_writing(str(tmp_path), StoreOptions(compression=compression))
    before = fingerprint(log_of(tmp_path, compression).parent)
    count = (await store.inspect(MAIN)).cut
    assert count == (12 if compression == "zstd" else 11)
    for cut in range(count + 1):
        target = Stream(f"fork{cut}", "main")
        grant = await store.fork(MAIN, cut, header(target), "f")
        assert grant.next_seq == cut
        assert grant.epoch in (2, 3)
        assert await all_lines(store, target) == lines[:cut]
        assert (await store.fork(MAIN, cut, header(target), "f")) == grant
        ok(await store.append([notes(cut, cut + 2, epoch=grant.epoch, nonce="f", stream=target)], sync=True))
        report = await store.verify(target)
        assert (report.problems, report.events) == ((), cut + 2)
        assert (await store.inspect(target)).header == header(target)
    with pytest.raises(StoreError) as caught:
        await store.fork(MAIN, count + 1, header(Stream("no", "main")), "f")
    assert (caught.value.code, caught.value.details["expected"]) == ("store.gap", count)
    assert fingerprint(log_of(tmp_path, compression).parent) == before, "a fork leaves its source alone"
    await store.close()


async def test_a_fork_of_frames_copies_them_byte_for_byte(tmp_path: Path) -> None:
    store = await started(tmp_path, "zstd", count=3)
    ok(await store.append([notes(3, 40)], sync=True))
    source = await store.read_raw(MAIN)
    target = Stream("s2", "main")
    await store.fork(MAIN, 40, {**header(target), "origin": "fork"}, "f")
    copied = await store.read_raw(target)
    body = source[source.index(b"\x28\xb5\x2f\xfd", 4) :]
    assert body in copied
    await store.close()


async def test_a_revision_changes_with_the_log_and_never_by_looking(tmp_path: Path, compression: str) -> None:
    store = await started(tmp_path / "a", compression, count=3)
    seen = [await store.revision(MAIN)]
    for first in (3, 4):
        ok(await store.append([notes(first, first + 1)], sync=True))
        seen.append(await store.revision(MAIN))
    for _ in range(2):
        await store.inspect(MAIN)
        await store.verify(MAIN)
        await store.read_from(MAIN, 0)
        await store.load(MAIN)
        assert await store.revision(MAIN) == seen[-1]
    assert [row.revision for row in await store.snapshots()] == seen[-1:]
    await store.close()
    path = log_of(tmp_path / "a", compression)
    with path.open("ab") as file:
        file.write(b"torn")
    reader = open_store(tmp_path / "a")
    seen.append(await reader.revision(MAIN))
    await reader.inspect(MAIN)
    assert await reader.revision(MAIN) == seen[-1]
    await reader.load(MAIN, is_live=False)
    seen.append(await reader.revision(MAIN))
    assert len(set(seen)) == len(seen), "each append and each repair that changes something"
    other = await started(tmp_path / "b", compression, count=3)
    assert (await other.revision(MAIN)).split(":")[0] != seen[0].split(":")[0], "the store's uuid"
    await other.close()


async def test_an_open_turn_is_found_by_a_live_process_as_by_a_stranger(tmp_path: Path, compression: str) -> None:
    store = await started(tmp_path, compression, count=0)

    def turn(seq: int, kind: str, **data: Any) -> bytes:
        return line(seq, kind, turn=0, **data)

    async def same() -> int:
        mine, theirs = await store.inspect(MAIN), await open_store(tmp_path).inspect(MAIN)
        assert (mine.header, mine.next_seq, mine.epoch, mine.closers, mine.cut) == (
            theirs.header,
            theirs.next_seq,
            theirs.epoch,
            theirs.closers,
            theirs.cut,
        )
        return len(mine.closers)

    seq = 0
    for rows, closers in (
        ([line(0, text="before")], 0),
        ([turn(1, "turn/start")], 1),
        ([turn(2, "step/start", step=0), line(3, text="within")], 2),
        ([turn(4, "step/end", step=0), turn(5, "turn/end", reason={"kind": "completed"})], 0),
        ([line(6, text='turn/start is only a text here: "type":"turn/start"')], 0),
        ([line(7, text="x"), turn(8, "turn/start")], 1),
    ):
        ok(await store.append([batch(rows, seq)], sync=True))
        seq += len(rows)
        assert await same() == closers
    target = Stream("s2", "main")
    await store.fork(MAIN, seq, header(target), "f")
    assert len((await store.inspect(target)).closers) == 1
    await store.close()
    store = await open_store_for_writing(str(tmp_path), StoreOptions(compression=compression))  # type: ignore[assignment]
    await store.open_writer(MAIN, "w2")
    assert await same() == 1
    await store.close()


async def test_a_batch_that_names_other_seqs_than_it_says_is_refused(tmp_path: Path, compression: str) -> None:
    store = await started(tmp_path, compression, count=3)
    wrong = batch([line(7)], 3)
    assert code((await store.append([wrong], sync=True))[0]) == "store.bad_batch"
    ok(await store.append([notes(3, 4)], sync=True))
    await store.close()


async def test_large_events_and_batches_come_back(tmp_path: Path, compression: str) -> None:
    store = await started(tmp_path, compression, count=1, durability="none")
    noise = os.urandom(5 << 19).hex()
    rows = [line(1, text=noise), line(2, text="x" * (6 << 20)), *(line(seq, text=noise[: 1 << 20]) for seq in (3, 4))]
    ok(await store.append([batch(rows, 1)], sync=True))
    ok(await store.append([notes(5, 6)], sync=True))
    for seq in range(1, 5):
        page = await store.read_from(MAIN, seq, 1)
        assert page.lines == (rows[seq - 1],)
    assert (await store.read_from(MAIN, 5)).lines == (line(5, text="n5"),)
    report = await store.verify(MAIN)
    assert (report.problems, report.events) == ((), 6)
    await store.close()
    again = await open_store_for_writing(str(tmp_path), StoreOptions(compression=compression, durability="none"))
    assert (await again.open_writer(MAIN, "w2")).next_seq == 6
    await again.close()


async def test_ids_cannot_leave_the_home(tmp_path: Path, compression: str) -> None:
    """DeepSeek Harness test 49."""
    store = await started(tmp_path / "home", compression)
    for bad in ("../x", "a/b", "..", "", "x" * 129, "ä"):
        with pytest.raises(KimiRayError) as caught:
            await store.open_session(bad, "n", workspace_id="wd_x_0123")
        assert caught.value.code == "store.invalid_id"
        with pytest.raises(KimiRayError) as caught:
            await store.open_writer(header(Stream("s1", bad)), "w")
        assert caught.value.code == "store.invalid_id"
    await store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
