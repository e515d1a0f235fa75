"""The simulated machine keeps its own promises: a test that passes on it has been through a real loss."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable

import pytest

from kimi_ray.store.faults import Rule
from kimi_ray.store.fs import pwrite_all, read_file, replace_file, write_file
from tests.conformance.simulated_fs import SECTOR, Disk, SimulatedFs
from tests.conformance.simulated_loop import simulated_loop

SEEDS = range(150)


def after_cuts(prepare: Callable[[SimulatedFs], None], look: Callable[[SimulatedFs], object]) -> set[object]:
    """What is seen after a power cut, over all seeds."""
    found: set[object] = set()
    for seed in SEEDS:
        disk = Disk()
        prepare(SimulatedFs(disk))
        disk.crash(seed)
        found.add(look(SimulatedFs(disk)))
    return found


def content(path: str) -> Callable[[SimulatedFs], bytes | None]:
    def look(fs: SimulatedFs) -> bytes | None:
        try:
            return read_file(fs, path)
        except FileNotFoundError:
            return None

    return look


def test_a_dead_process_loses_nothing_and_frees_its_locks() -> None:
    disk = Disk()
    fs = SimulatedFs(disk)
    fd = fs.open("/a", os.O_RDWR | os.O_CREAT)
    fs.pwrite(fd, b"written", 0)
    fs.flock(fd, fcntl.LOCK_EX)
    other = SimulatedFs(disk)
    mine = other.open("/a", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        other.flock(mine, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fs.kill()
    disk.crash(None)
    other.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert other.pread(mine, 99, 0) == b"written"
    assert disk.boot_id == "boot-0"
    for attempt in (lambda: fs.stat("/a"), lambda: fs.pread(fd, 1, 0), lambda: fs.mkdir("/b"), lambda: fs.listdir("/")):
        with pytest.raises(OSError, match=r"dead|open"):
            attempt()


def test_a_power_cut_keeps_what_was_synced_and_each_later_sector_as_it_likes() -> None:
    old, new = b"o" * (3 * SECTOR), b"n" * (3 * SECTOR)

    def prepare(fs: SimulatedFs) -> None:
        write_file(fs, "/a", old, sync=True)
        fs.sync_dir("/")
        fd = fs.open("/a", os.O_RDWR)
        fs.pwrite(fd, new, 0)

    found = after_cuts(prepare, content("/a"))
    contents = [data for data in found if isinstance(data, bytes)]
    sectors = {tuple(data[n * SECTOR : (n + 1) * SECTOR] for n in range(3)) for data in contents}
    assert {part for parts in sectors for part in parts} == {old[:SECTOR], new[:SECTOR]}, "a sector is whole"
    assert len(sectors) == 8, "in every combination"


def test_an_appended_sector_may_be_lost_become_zeros_or_garbage_and_the_size_survive_without_it() -> None:
    def prepare(fs: SimulatedFs) -> None:
        write_file(fs, "/a", b"o" * SECTOR, sync=True)
        fs.sync_dir("/")
        fd = fs.open("/a", os.O_RDWR)
        fs.pwrite(fd, b"n" * (2 * SECTOR), SECTOR)

    found = {data for data in after_cuts(prepare, content("/a")) if isinstance(data, bytes)}
    assert all(data.startswith(b"o" * SECTOR) for data in found)
    assert {len(data) for data in found} == {SECTOR, 3 * SECTOR}
    tails = {data[SECTOR:] for data in found}
    assert {b"", bytes(2 * SECTOR), b"n" * (2 * SECTOR), bytes(SECTOR) + b"n" * SECTOR} <= tails
    assert any(set(tail[:SECTOR]) - {0, ord("n")} for tail in tails), "garbage"


def test_an_unsynced_truncation_is_kept_or_lost() -> None:
    def prepare(fs: SimulatedFs) -> None:
        write_file(fs, "/a", b"o" * 600, sync=True)
        fs.sync_dir("/")
        fs.truncate(fs.open("/a", os.O_RDWR), 10)

    assert after_cuts(prepare, content("/a")) == {b"o" * 600, b"o" * 10}


def test_each_change_of_a_directory_is_kept_or_lost_by_itself() -> None:
    def prepare(fs: SimulatedFs) -> None:
        for name in "abc":
            write_file(fs, f"/{name}", b"", sync=True)

    found = after_cuts(prepare, lambda fs: tuple(sorted(fs.listdir("/"))))
    assert len(found) == 8
    assert after_cuts(lambda fs: (prepare(fs), fs.sync_dir("/"))[0], lambda fs: len(fs.listdir("/"))) == {3}


def test_a_rename_is_one_change_and_does_not_sync_what_it_names() -> None:
    def replaced(sync: bool) -> Callable[[SimulatedFs], None]:
        def prepare(fs: SimulatedFs) -> None:
            write_file(fs, "/a", b"old", sync=True)
            fs.sync_dir("/")
            replace_file(fs, "/a", b"new", sync=sync, unique="1")

        return prepare

    assert after_cuts(replaced(True), content("/a")) == {b"old", b"new"}
    assert after_cuts(replaced(False), content("/a")) > {b"old", b"new", b""}, "a name without its content"


def test_a_failed_sync_loses_the_pages_and_the_next_one_says_nothing() -> None:
    disk = Disk()
    fs = SimulatedFs(disk)
    write_file(fs, "/a", b"synced", sync=True)
    fs.sync_dir("/")
    fs.rules.append(Rule("fdatasync", errno.EIO))
    fd = fs.open("/a", os.O_RDWR)
    fs.pwrite(fd, b" and lost", 6)
    with pytest.raises(OSError, match="Input/output"):
        fs.fdatasync(fd)
    fs.fdatasync(fd)
    assert read_file(fs, "/a") == b"synced and lost", "the cache still shows it"
    for seed in SEEDS:
        copy = disk.clone()
        copy.crash(seed)
        assert read_file(SimulatedFs(copy), "/a") == b"synced"
    fs.pwrite(fd, b" and kept", 6)
    fs.fdatasync(fd)
    disk.crash(1)
    assert read_file(SimulatedFs(disk), "/a") == b"synced and kept", "written again"


def test_short_writes_a_full_disk_and_a_read_only_one() -> None:
    disk = Disk()
    fs = SimulatedFs(disk)
    fd = fs.open("/a", os.O_RDWR | os.O_CREAT)
    fs.short_write = 3
    assert fs.pwrite(fd, b"abcdef", 0) == 3
    pwrite_all(fs, fd, b"abcdef", 0)
    fs.short_write = None
    disk.capacity = 10
    assert fs.free_space("/") == 4
    assert fs.pwrite(fd, b"xyz", 0) == 3, "in place costs nothing"
    assert fs.pwrite(fd, b"0123456789", 6) == 4
    with pytest.raises(OSError, match="No space"):
        fs.pwrite(fd, b"x", 10)
    disk.read_only = True
    for attempt in (
        lambda: fs.pwrite(fd, b"x", 0),
        lambda: fs.mkdir("/d"),
        lambda: fs.open("/a", os.O_RDWR),
        lambda: fs.unlink("/a"),
    ):
        with pytest.raises(OSError, match="Read-only"):
            attempt()
    assert read_file(fs, "/a") == b"xyzdef0123"


def test_rules_fail_any_call() -> None:
    fs = SimulatedFs(Disk())
    write_file(fs, "/a", b"x", sync=True)
    for operation, attempt in {
        "open": lambda: fs.open("/a", os.O_RDONLY),
        "pread": lambda: read_file(fs, "/a"),
        "stat": lambda: fs.stat("/a"),
        "rename": lambda: fs.rename("/a", "/b"),
        "link": lambda: fs.link("/a", "/b"),
        "sync_dir": lambda: fs.sync_dir("/"),
        "listdir": lambda: fs.listdir("/"),
    }.items():
        fs.rules = [Rule(operation, errno.EIO)]
        with pytest.raises(OSError, match="Input/output"):
            attempt()
    assert fs.listdir("/") == ["a"]


def test_a_directory_vanishes_under_an_open_file() -> None:
    disk = Disk()
    fs = SimulatedFs(disk)
    fs.mkdir("/d")
    fd = fs.open("/d/a", os.O_RDWR | os.O_CREAT)
    disk.vanish("/d")
    fs.pwrite(fd, b"x", 0)
    for attempt in (lambda: fs.open("/d/a", os.O_RDONLY), lambda: fs.mkdir("/d/e"), lambda: fs.sync_dir("/d")):
        with pytest.raises(FileNotFoundError):
            attempt()


def test_a_process_dies_before_its_last_call_and_in_the_middle_of_a_write() -> None:
    disk = Disk()
    fs = SimulatedFs(disk, calls=1)
    fd = fs.open("/a", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="dead"):
        fs.pwrite(fd, b"0123456789", 0)
    assert fs.dead
    assert read_file(SimulatedFs(disk), "/a") == b"01234"


def test_the_same_seed_gives_the_same_disk_and_a_clone_shares_nothing() -> None:
    disk = Disk()
    fs = SimulatedFs(disk)
    fs.mkdir("/d")
    for name in "abc":
        write_file(fs, f"/d/{name}", os.urandom(2000), sync=False)
    fs.link("/d/a", "/d/twin")
    for seed in range(20):
        one, two = disk.clone(), disk.clone()
        one.crash(seed)
        two.crash(seed)
        assert one.fingerprint() == two.fingerprint()
    copy = disk.clone()
    other = SimulatedFs(copy)
    other.pwrite(other.open("/d/a", os.O_RDWR), b"changed", 0)
    assert read_file(other, "/d/twin").startswith(b"changed"), "still one file"
    assert not read_file(fs, "/d/a").startswith(b"changed")


def test_boots_and_times_are_the_machine_s_own() -> None:
    disk = Disk()
    fs = SimulatedFs(disk)
    write_file(fs, "/a", b"x", sync=True)
    before = fs.stat("/a")
    read_file(fs, "/a")
    assert fs.stat("/a") == before
    fs.pwrite(fs.open("/a", os.O_RDWR), b"y", 0)
    assert fs.stat("/a").st_mtime_ns > before.st_mtime_ns
    disk.crash(1)
    assert disk.boot_id == "boot-1"


def test_simulated_time_passes_without_waiting_and_a_wait_without_a_bound_is_an_error() -> None:
    with simulated_loop() as loop:
        started = loop.time()
        loop.run(asyncio.sleep(3600))
        assert loop.time() - started == pytest.approx(3600)
        with pytest.raises(RuntimeError, match="without a bound"):
            loop.run(asyncio.wait_for(asyncio.Event().wait(), None))
