"""The reserve: on a full disk the ends of turns, grants and sessions are written, ordinary events wait."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.events import make_event
from kimi_ray.store import Store, StoreOptions, open_store, open_store_for_writing
from kimi_ray.store.blobs import digest_of
from kimi_ray.store.faults import FaultyFs
from kimi_ray.store.reserve import RESERVE_BYTES, Reserve, ends_a_turn, reserve_of
from kimi_ray.store.wire import pack_call, unpack_call
from tests.conformance.store_contract import MAIN, all_lines, batch, code, header, line, notes, ok

SIZE = 256 << 10
OPTIONS = StoreOptions(claim_timeout_s=1, extra={"reserve_bytes": SIZE})


class Time:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def started(home: Path, fs: FaultyFs, *, count: int = 2, compression: str = "none") -> Store:
    store = await open_store_for_writing(str(home), replace(OPTIONS, compression=compression), fs=fs)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    if count:
        ok(await store.append([notes(0, count)], sync=True))
        ok(await store.append([notes(count, count + 1)], sync=True))
    return store


def lasting(first: int, end: int) -> list[bytes]:
    return [line(seq, text=f"n{seq}") for seq in range(first, end)]


def test_it_is_really_allocated_and_grows_back_when_there_is_space(tmp_path: Path) -> None:
    fs, now = FaultyFs(), Time()
    reserve = Reserve(fs, str(tmp_path), size=SIZE, clock=now)
    reserve.keep()
    path = tmp_path / "reserve"
    assert path.stat().st_size == SIZE
    assert path.stat().st_blocks * 512 >= SIZE
    assert path.stat().st_mode & 0o777 == 0o600
    assert reserve.give(100)
    assert SIZE - (128 << 10) <= path.stat().st_size < SIZE
    fs.budget = SIZE
    now.now += 5
    reserve.keep()
    assert path.stat().st_size < SIZE, "the last space of a disk is not for the reserve"
    fs.budget = 2 * SIZE
    reserve.keep()
    assert path.stat().st_size < SIZE, "it is not looked after at each write"
    now.now += 5
    reserve.keep()
    assert path.stat().st_size == SIZE


def test_it_is_used_up_and_then_the_disk_is_full(tmp_path: Path) -> None:
    fs = FaultyFs()
    reserve = Reserve(fs, str(tmp_path), size=SIZE)
    reserve.keep()
    fs.budget = 0
    written: list[int] = []

    def write() -> None:
        if fs.budget is not None and fs.budget < 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fs.budget = (fs.budget or 0) - 50_000
        written.append(50_000)

    with pytest.raises(OSError, match="No space"):
        for _ in range(1000):
            reserve.spend(50_000, write)
    assert SIZE - 100_000 <= sum(written) <= SIZE
    assert (tmp_path / "reserve").stat().st_size == 0
    assert not reserve.give(1)


def test_other_errors_do_not_touch_it(tmp_path: Path) -> None:
    reserve = Reserve(FaultyFs(), str(tmp_path), size=SIZE)
    reserve.keep()

    def fails() -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        reserve.spend(1, fails)
    assert (tmp_path / "reserve").stat().st_size == SIZE
    assert not Reserve(FaultyFs(), str(tmp_path / "nothing"), size=SIZE).give(1)


def test_who_keeps_one(tmp_path: Path) -> None:
    for durability, size in (("disk", RESERVE_BYTES), ("os", RESERVE_BYTES), ("none", 0)):
        home = tmp_path / durability
        home.mkdir()
        reserve_of(FaultyFs(), str(home), StoreOptions(durability=durability)).keep()  # type: ignore[arg-type]
        assert (home / "reserve").exists() == (size > 0)


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_on_a_full_disk_a_turn_ends_and_its_log_is_closed(tmp_path: Path, compression: str) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs, compression=compression)
    reserve = tmp_path / "reserve"
    assert reserve.stat().st_size == SIZE, "made with the first batch that was appended"
    fs.budget = 0
    for one in (notes(3, 5), notes(3, 9)):
        assert code((await store.append([one], sync=True))[0]) == "store.disk_full"
    assert reserve.stat().st_size == SIZE, "ordinary events do not get it"
    with pytest.raises(StoreError) as caught:
        await store.put_blobs({digest_of(b"x" * 100_000): b"x" * 100_000})
    assert caught.value.code == "store.disk_full"
    closing = replace(notes(3, 5), closing=True)
    assert ok(await store.append([closing], sync=True)).durable == 5
    assert reserve.stat().st_size < SIZE
    assert await store.write_document("s1", {"title": "t"}, grant=1, nonce="n", revision=0) == 1
    await store.close_writer(MAIN, 1, "w")
    report = await open_store(tmp_path).verify(MAIN)
    assert (report.ok, report.closed, report.events) == (True, True, 5)
    grant = await store.open_writer(MAIN, "w2")
    more = notes(5, 3000, epoch=grant.epoch, nonce="w2")
    assert code((await store.append([more], sync=True))[0]) == "store.disk_full"
    fs.budget = None
    ok(await store.append([more], sync=True))
    assert await all_lines(store) == lasting(0, 3000)
    await store.close()
    assert reserve.stat().st_size < SIZE, "looked after once a second at most"
    again = await open_store_for_writing(str(tmp_path), replace(OPTIONS, compression=compression))
    await again.open_session("s1", "n", workspace_id="wd_x_0123")
    grant = await again.open_writer(MAIN, "w3")
    ok(await again.append([notes(3000, 3001, epoch=grant.epoch, nonce="w3")], sync=True))
    await again.close()
    assert reserve.stat().st_size == SIZE


async def test_a_log_that_is_new_may_be_born_of_the_reserve(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs)
    fs.budget = 0
    other = header(MAIN._replace(agent_id="agent-1"))
    fs.budget = 300  # a reservation is no event
    await store.open_writer(other, "x")
    fs.budget = 0
    first = notes(0, 2, stream=MAIN._replace(agent_id="agent-1"), nonce="x")
    assert code((await store.append([first], sync=True))[0]) == "store.disk_full"
    ok(await store.append([replace(first, closing=True)], sync=True))
    await store.close()


async def test_a_turn_that_a_crash_left_open_is_closed_on_a_full_disk(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await started(tmp_path, fs, count=0)
    start = line(0, kind="turn/start", turn=0, prompts=[])
    ok(await store.append([batch([start], 0)], sync=True))
    ok(await store.append([notes(1, 2)], sync=True))
    await store.close()
    full = FaultyFs()
    again = await open_store_for_writing(str(tmp_path), OPTIONS, fs=full)
    full.budget = 400  # for the claim: files that are replaced give their space back
    view = await again.load(MAIN, is_live=False)
    assert [closer["type"] for closer in view.closers] == ["turn/end"]
    assert (await open_store(tmp_path).inspect(MAIN)).closers == ()
    await again.close()


def test_the_mark_travels_with_its_batch() -> None:
    batches = [notes(0, 2), replace(notes(2, 4), closing=True)]
    assert [one.closing for one in unpack_call(pack_call(batches))] == [False, True]


def test_which_batches_end_something() -> None:
    def event(kind: str, seq: int):  # type: ignore[no-untyped-def]
        return make_event(seq, 1, kind, {})

    assert not ends_a_turn([event("step/end", 0), event("assistant/chunk", 1)])
    assert ends_a_turn([event("assistant/chunk", 0), event("turn/end", 1), event("prompt/completed", 2)])
    assert not ends_a_turn([])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    import subprocess

    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_on_a_real_full_disk(small_disk: Path) -> None:
    home = small_disk / "home"
    store = await open_store_for_writing(str(home), OPTIONS)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 1)], sync=True))
    ok(await store.append([notes(1, 2)], sync=True))
    assert (home / "reserve").stat().st_size == SIZE
    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    seq, refused = 2, None
    while refused is None:
        result = (await store.append([notes(seq, seq + 40)], sync=True))[0]
        refused = result.error
        seq += 40 if refused is None else 0
    assert refused["code"] == "store.disk_full"
    assert refused["details"]["errno"] == "ENOSPC"
    ok(await store.append([replace(notes(seq, seq + 3), closing=True)], sync=True))
    await store.close_writer(MAIN, 1, "w")
    await store.write_document("s1", {"title": "t"}, grant=1, nonce="n", revision=0)
    await store.close()
    report = await open_store(home).verify(MAIN)
    assert (report.ok, report.closed, report.events) == (True, True, seq + 3)
    hog.unlink()
    again = await open_store_for_writing(str(home), OPTIONS)
    await again.open_session("s1", "n", workspace_id="wd_x_0123")
    grant = await again.open_writer(MAIN, "w2")
    ok(await again.append([notes(seq + 3, seq + 9, epoch=grant.epoch, nonce="w2")], sync=True))
    assert await all_lines(again) == lasting(0, seq + 9)
    await again.close()
    assert (home / "reserve").stat().st_size == SIZE
