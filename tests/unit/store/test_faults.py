"""Full disks, failed writes and syncs, deaths in the middle: nothing acknowledged is lost, failures have codes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ConfigError, KimiRayError, StoreError
from kimi_ray.store import RealFs, Store, StoreOptions, Stream, open_store, open_store_for_writing
from kimi_ray.store.faults import FaultyFs, Rule, fs_from_spec
from tests.conformance.store_contract import MAIN, all_lines, code, fingerprint, header, line, notes, ok
from tests.unit.store.killable_fs import KillableFs


async def started(home: Path, fs: Any, *, count: int = 2, **options: Any) -> Store:
    store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=1, **options), fs=fs)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    if count:
        ok(await store.append([notes(0, count)], sync=True))
    return store


def wanted(count: int) -> list[bytes]:
    return [line(seq, text=f"n{seq}") for seq in range(count)]


async def test_a_full_disk_refuses_by_name_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs)
    fs.budget = 100
    log = tmp_path / "sessions/wd_x_0123/s1/agents/main/wire.jsonl"
    size = log.stat().st_size
    result = (await store.append([notes(2, 60)], sync=True))[0]
    assert log.stat().st_size == size, "what was half written is cut off again"
    assert code(result) == "store.disk_full"
    assert result.error is not None
    assert result.error["retryable"] is True
    assert result.error["details"]["path"].endswith("wire.jsonl")
    assert await all_lines(store) == wanted(2)
    report = await store.verify(MAIN)  # type: ignore[attr-defined]
    assert (report.ok, report.torn_bytes) == (True, 0)
    fs.budget = None
    ok(await store.append([notes(2, 60)], sync=True))
    assert await all_lines(store) == wanted(60)
    await store.close()


async def test_a_full_disk_at_creation_leaves_no_log_and_no_temporary_file(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs, count=0)
    fs.budget = 50
    assert code((await store.append([notes(0, 9)], sync=True))[0]) == "store.disk_full"
    assert await store.list_logs() == []
    assert [file for file in tmp_path.rglob("*") if ".tmp-" in file.name] == []
    with pytest.raises(StoreError) as caught:
        await store.write_document("s1", {"text": "x" * 100}, grant=1, nonce="n", revision=0)
    assert caught.value.code == "store.disk_full"
    assert await store.read_document("s1") is None
    fs.budget = None
    ok(await store.append([notes(0, 9)], sync=True))
    await store.close()


async def test_short_writes_are_finished(tmp_path: Path) -> None:
    store = await started(tmp_path, FaultyFs(short_write=7), count=20)
    assert await all_lines(store) == wanted(20)
    await store.close()


async def test_a_failed_sync_is_followed_by_writing_again(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs)
    ok(await store.append([notes(2, 4)], sync=False))
    fs.rules.append(Rule("fdatasync", errno.EIO))
    writes, truncates = fs.calls["pwrite"], fs.calls.get("truncate", 0)
    assert ok(await store.append([notes(4, 7)], sync=True)).durable == 7
    assert fs.calls["pwrite"] == writes + 2, "the batch, and everything since the last good sync again"
    assert fs.calls["truncate"] == truncates + 1
    assert await all_lines(store) == wanted(7)
    ok(await store.append([notes(7, 9)], sync=True))
    await store.close()
    assert (await open_store(tmp_path).verify(MAIN)).ok


async def test_a_stream_that_cannot_be_written_again_is_poisoned_and_only_it(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs)
    other = Stream("s1", "agent-1")
    await store.open_writer(header(other), "w")
    ok(await store.append([notes(0, 1, stream=other)], sync=True))
    fs.rules += [
        Rule("fdatasync", errno.EIO, path="agents/main"),
        Rule("fsync", errno.EIO, count=0, path="agents/main"),
    ]
    result = (await store.append([notes(2, 5)], sync=True))[0]
    assert code(result) == "store.poisoned"
    assert result.error is not None
    assert (result.error["details"]["errno"], result.error["retryable"]) == ("EIO", True)
    assert code((await store.append([notes(2, 5)], sync=True))[0]) == "store.poisoned", "one good sync proves nothing"
    with pytest.raises(StoreError) as caught:
        await store.open_writer(MAIN, "w2")
    assert caught.value.code == "store.poisoned"
    ok(await store.append([notes(1, 2, stream=other)], sync=True))
    fs.rules.clear()
    writes = fs.calls["pwrite"]
    assert ok(await store.append([notes(2, 6)], sync=True)).durable == 6
    assert fs.calls["pwrite"] == writes + 2, "what was never acknowledged is written once more, then the new event"
    assert await all_lines(store) == wanted(6)
    assert (await store.open_writer(MAIN, "w2")).epoch == 2
    ok(await store.append([notes(2, 3, stream=other)], sync=True))
    await store.close()


@pytest.mark.parametrize(
    ("operation", "number", "expected"),
    [("pwrite", errno.EIO, "store.io_failed"), ("open", errno.EACCES, "store.permission_denied")],
)
async def test_file_errors_have_codes_and_paths(tmp_path: Path, operation: str, number: int, expected: str) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs, count=0)
    fs.rules.append(Rule(operation, number, path="wire.jsonl"))
    result = (await store.append([notes(0, 1)], sync=True))[0]
    assert code(result) == expected
    assert result.error is not None
    assert "wire.jsonl" in result.error["details"]["path"]
    ok(await store.append([notes(0, 1)], sync=True))
    await store.close()


async def test_a_truncation_that_fails_is_made_up_for_before_the_next_write(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs)
    fs.budget = 60
    fs.rules.append(Rule("truncate", errno.EIO))
    assert code((await store.append([notes(2, 50)], sync=True))[0]) == "store.disk_full"
    assert await all_lines(store) == wanted(2)
    fs.budget = None
    ok(await store.append([notes(2, 4)], sync=True))
    await store.close()
    report = await open_store(tmp_path).verify(MAIN)
    assert (report.ok, report.events, report.torn_bytes) == (True, 4, 0)


async def test_a_batch_written_during_a_sync_waits_for_the_next_one(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs)
    fs.sync_delay_s = 0.05
    first = asyncio.create_task(store.append([notes(2, 4)], sync=True))
    await asyncio.sleep(0.02)  # into the sync; the promise below holds wherever this lands
    assert ok(await store.append([notes(4, 6)], sync=True)).durable == 6
    assert ok(await first).durable >= 4
    await store.close()


async def test_what_nobody_waits_for_is_synced_after_the_interval(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs, extra={"sync_interval_ms": 10})
    assert ok(await store.append([notes(2, 3)], sync=False)).durable == 2
    async with asyncio.timeout(10):
        while ok(await store.append([notes(0, 2)], sync=False)).durable != 3:
            await asyncio.sleep(0.005)
    await store.close()


async def test_a_dead_process_loses_nothing_synced_wherever_it_dies(tmp_path: Path) -> None:
    """Kill at every file call of a small life, recover, check, and go on."""

    async def live(home: Path, fs: KillableFs) -> int:
        durable = 0
        try:
            store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=0.5), fs=fs)
            await store.open_session("s1", "n", workspace_id="wd_x_0123")
            durable = 0
            grant = await store.open_writer(header(), "w")
            for first in (0, 3):
                durable = ok_or_zero(await store.append([notes(first, first + 3)], sync=True), durable)
            await store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
            await store.close_writer(MAIN, grant.epoch, "w")
            again = await store.open_writer(MAIN, "w2")
            durable = ok_or_zero(await store.append([notes(6, 8, epoch=again.epoch, nonce="w2")], sync=True), durable)
        except KimiRayError as error:
            assert fs.dead, error
        fs.kill()
        return durable

    counter = DyingFs(10**9)
    assert await live(tmp_path / "whole", counter) == 8
    for calls in range(counter.made):
        home = tmp_path / f"h{calls}"
        durable = await live(home, DyingFs(calls))
        store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=0.5))
        await store.open_session("s1", "n9", workspace_id="wd_x_0123")
        known = bool(await store.list_logs())
        grant = await store.open_writer(MAIN if known else header(), "w9")
        assert grant.next_seq >= durable
        ok(await store.append([notes(grant.next_seq, 9, epoch=grant.epoch, nonce="w9")], sync=True))
        assert await all_lines(store) == wanted(9)
        report = await store.verify(MAIN)
        assert report.ok, (calls, report)
        await store.close()
        assert [
            file.name for file in (home / "sessions").rglob("*") if ".tmp-" in file.name or "redo" in file.name
        ] == []


def ok_or_zero(results: list[Any], before: int) -> int:
    if results[0].error is not None:
        raise StoreError("died", code="store.io_failed")
    return results[0].durable


class DyingFs(KillableFs):
    """Dies by itself after so many changing calls."""

    CHANGING = frozenset(
        ("create", "pwrite", "truncate", "fsync", "fdatasync", "sync_dir", "rename", "link", "unlink", "mkdir", "rmdir")
    )

    def __init__(self, calls: int) -> None:
        super().__init__(syncs=False)
        self.left = calls
        self.made = 0

    def _check(self, operation: str, path: str) -> None:
        if operation in self.CHANGING:
            self.made += 1
            self.left -= 1
            if self.left < 0:
                self.dead = True
        super()._check(operation, path)


async def torn_home(path: Path, cut: int) -> int:
    store = await started(path, KillableFs(syncs=False), count=3)
    ok(await store.append([notes(3, 6)], sync=True))
    await store.close()
    log = path / "sessions/wd_x_0123/s1/agents/main/wire.jsonl"
    size = log.stat().st_size
    os.truncate(log, size - cut)
    return size - cut


async def test_a_torn_tail_is_set_aside_once_and_no_byte_is_destroyed(tmp_path: Path) -> None:
    await torn_home(tmp_path, 30)
    agent = tmp_path / "sessions/wd_x_0123/s1/agents/main"
    before = (agent / "wire.jsonl").read_bytes()
    view = await open_store(tmp_path).inspect(MAIN)
    assert (view.cut, view.next_seq) == (5, 5)
    assert view.torn_bytes > 0
    assert await all_lines(open_store(tmp_path)) == wanted(5)
    assert fingerprint(agent).keys() == {str(agent / "wire.jsonl")}, "looking repairs nothing"
    store = await open_store_for_writing(str(tmp_path), StoreOptions())
    assert ok(await store.append([notes(5, 7)], sync=True)).durable == 7, "same grant: a repair is not a grant"
    assert await all_lines(store) == wanted(7)
    aside = [file for file in agent.iterdir() if file.name.startswith("wire.tail-1-")]
    assert len(aside) == 1
    offset = int(aside[0].name.rsplit("-", 1)[1])
    assert before == (agent / "wire.jsonl").read_bytes()[:offset] + aside[0].read_bytes()
    await store.close()


async def test_a_repair_may_die_anywhere_and_is_finished_by_the_next(tmp_path: Path) -> None:
    for calls in range(40):
        home = tmp_path / f"h{calls}"
        await torn_home(home, 30)
        fs = DyingFs(calls)
        finished = True
        try:
            store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=0.5), fs=fs)
            finished = (await store.append([notes(5, 6)], sync=True))[0].error is None
        except KimiRayError:
            finished = False
        fs.kill()
        expected = 6 if finished else 5
        seen = await all_lines(open_store(home))
        assert seen[:5] == wanted(5), "readers see the log as it will be"
        after = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=0.5))
        assert ok(await after.append([notes(5, 8)], sync=True)).durable == 8
        assert await all_lines(after) == wanted(8)
        await after.close()
        agent = home / "sessions/wd_x_0123/s1/agents/main"
        assert not (agent / "wire.redo").exists()
        assert [file.name for file in agent.iterdir() if ".tmp-" in file.name] == []
        if finished:
            assert expected == 6
            return
    pytest.fail("the repair never finished")


async def test_a_corrupt_log_says_where_and_its_other_rows_stay_readable(tmp_path: Path) -> None:
    store = await started(tmp_path, None, count=4)
    for first in (4, 8):
        ok(await store.append([notes(first, first + 4)], sync=True))
    await store.close()
    log = tmp_path / "sessions/wd_x_0123/s1/agents/main/wire.jsonl"
    data = bytearray(log.read_bytes())
    at = data.index(b'"n5"')
    data[at + 1] ^= 4
    log.write_bytes(data)
    store = await open_store_for_writing(str(tmp_path), StoreOptions())
    start = data.rindex(b"\n", 0, at) + 1
    for attempt in (store.inspect(MAIN), store.load(MAIN, is_live=False), store.open_writer(MAIN, "w2")):
        with pytest.raises(StoreError) as caught:
            await attempt
        assert caught.value.code == "store.corrupt"
        assert caught.value.details == {"file": str(log), "offset": start, "seq": 5}
    assert code((await store.append([notes(12, 13)], sync=True))[0]) == "store.corrupt"
    page = await store.read_from(MAIN, 0)
    assert page.lines == tuple(wanted(5)), "up to the damage"
    with pytest.raises(StoreError):
        await store.read_from(MAIN, 5)
    assert (await store.read_from(MAIN, 6)).lines == tuple(wanted(12)[6:]), "only the damaged row is lost"
    report = await store.verify(MAIN)
    assert not report.ok
    assert report.problems[0]["details"]["offset"] == start
    assert [row.error for row in await store.list_logs()] == [None]
    assert log.read_bytes() == data
    await store.close()


async def test_one_broken_log_does_not_hide_the_others(tmp_path: Path) -> None:
    store = await started(tmp_path, None, count=1)
    for agent in ("agent-1", "agent-2", "agent-3"):
        stream = Stream("s1", agent)
        await store.open_writer(header(stream), "w")
        ok(await store.append([notes(0, 1, stream=stream)], sync=True))
    base = tmp_path / "sessions/wd_x_0123/s1/agents"
    (base / "agent-1/wire.jsonl").write_bytes(b"not a header\n")
    (base / "agent-2/wire.jsonl").write_bytes(b"")
    (base / "agent-3/wire.jsonl").write_bytes(b'{"type":"log","version":7}\n')
    rows = {row.stream.agent_id: row for row in await store.list_logs(session_id="s1")}
    assert rows["main"].header is not None
    found = {name: row.error["code"] for name, row in rows.items() if row.error is not None}
    assert found == {"agent-1": "store.corrupt", "agent-2": "store.not_found", "agent-3": "log.version_unsupported"}
    await store.close()


async def test_a_headerless_file_was_never_created_and_gives_way_without_being_destroyed(tmp_path: Path) -> None:
    directory = tmp_path / "sessions/wd_x_0123/s1/agents/main"
    directory.mkdir(parents=True)
    (directory / "wire.jsonl").write_bytes(b"\0" * 512)
    store = await started(tmp_path, None, count=3)
    assert await all_lines(store) == wanted(3)
    assert (directory / "wire.tail-0-0").read_bytes() == b"\0" * 512
    await store.close()


async def test_durability_os_makes_no_sync(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await open_store_for_writing(str(tmp_path), StoreOptions(durability="os"), fs=fs)
    synced = dict(fs.calls)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    assert ok(await store.append([notes(0, 3)], sync=True)).durable == 3
    await store.write_document("s1", {}, grant=1, nonce="n", revision=0)
    await store.close()
    for operation in ("fsync", "fdatasync", "sync_dir"):
        assert fs.calls.get(operation, 0) == synced.get(operation, 0), operation
    assert b'"mode":"os"' in (tmp_path / "sessions/wd_x_0123/s1/agents/main/wire.jsonl").read_bytes()


async def test_first_touch_syncs_what_was_found_before_any_promise(tmp_path: Path) -> None:
    store = await started(tmp_path, None, count=3)
    await store.close()
    fs = FaultyFs()
    again = await open_store_for_writing(str(tmp_path), StoreOptions(), fs=fs)
    fs.rules.append(Rule("fsync", errno.EIO, path="wire.jsonl"))
    result = (await again.append([notes(0, 3)], sync=True))[0]
    assert code(result) == "store.io_failed", "an equal overlap is an acknowledgement too"
    assert ok(await again.append([notes(0, 3)], sync=True)).durable == 3
    await again.close()


def test_fs_from_spec() -> None:
    fs = fs_from_spec("enospc_after=1000,fail=fdatasync:EIO:10:1:wire,short_write=9,sync_delay_ms=2")
    assert isinstance(fs, FaultyFs)
    assert (fs.budget, fs.short_write, fs.sync_delay_s) == (1000, 9, 0.002)
    assert fs.rules == [Rule("fdatasync", errno.EIO, 10, 1, "wire")]
    assert isinstance(fs_from_spec(" "), RealFs)
    for bad in ("nonsense", "fail=open", "fail=open:EWHAT", "enospc_after=many"):
        with pytest.raises(ConfigError) as caught:
            fs_from_spec(bad)
        assert caught.value.code == "config.invalid"
