"""After a failed sync the kernel may call pages clean that never reached the disk.

The simulated disk does just that: a failed sync forgets which pages were dirty.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.store import StoreOptions, open_store, open_store_for_writing
from kimi_ray.store.faults import FaultyFs, Rule
from kimi_ray.store.seam import Store
from kimi_ray.store.window import Window
from tests.conformance.simulated_home import SimulatedHome
from tests.conformance.store_contract import MAIN, all_lines, code, header, line, notes, ok


def wanted(count: int) -> list[bytes]:
    return [line(seq, text=f"n{seq}") for seq in range(count)]


async def begun(home: SimulatedHome) -> Store:
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=True))
    return store


def break_syncs(home: SimulatedHome, store: Store, good: int) -> None:
    """From now on syncs of the log fail, but the first ``good`` of those that write it again."""
    fails = [Rule("fdatasync", errno.EIO, count=0), Rule("fsync", errno.EIO, good, count=0)]
    for rule in fails:
        rule.path = "wire.jsonl"
    home.files(store).rules.extend(fails)


async def mended(home: SimulatedHome, good: int) -> None:
    """The disk works again."""
    store = await begun(home)
    break_syncs(home, store, good)
    for _ in range(2):
        assert code((await store.append([notes(3, 60)], sync=True))[0]) == "store.poisoned"
    assert await all_lines(store) == wanted(3), "what is not on the disk is not shown either"
    home.files(store).rules.clear()
    assert ok(await store.append([notes(3, 61)], sync=True)).durable == 61


async def replaced(home: SimulatedHome, good: int) -> None:
    """Another process takes over, and the writer sends again what was not acknowledged."""
    store = await begun(home)
    break_syncs(home, store, good)
    assert code((await store.append([notes(3, 60)], sync=True))[0]) == "store.poisoned"
    await home.kill(store)
    again = await home.open()
    await again.open_session("s1", "n")
    assert ok(await again.append([notes(3, 61)], sync=True)).durable == 61


async def found(home: SimulatedHome) -> list[bytes]:
    return await all_lines(await home.open())


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("life", [mended, replaced])
def test_what_is_acknowledged_after_a_failed_sync_survives_a_power_cut(
    life: Callable[[SimulatedHome, int], Coroutine[Any, Any, None]], good: int, compression: str
) -> None:
    for seed in range(6):
        home = SimulatedHome(compression)
        try:
            home.run(life(home, good))
            home.power_cut(seed)
            assert home.run(found(home)) == wanted(61), seed
        finally:
            home.close()


async def test_a_file_that_is_not_the_one_that_was_written_is_left_alone(tmp_path: Path) -> None:
    """A directory that comes back with an older copy of the log."""
    store = await open_store_for_writing(str(tmp_path), StoreOptions(claim_timeout_s=1))
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=True))
    (log,) = tmp_path.rglob("wire.jsonl")
    old = log.read_bytes()
    ok(await store.append([notes(3, 30)], sync=True))
    log.rename(tmp_path / "away")
    log.write_bytes(old)
    result = (await store.append([notes(30, 31)], sync=True))[0]
    assert code(result) == "store.poisoned"
    assert log.read_bytes() == old, "not filled up with zeros"
    (tmp_path / "away").rename(log)
    assert ok(await store.append([notes(30, 31)], sync=True)).durable == 31
    await store.close()
    assert await all_lines(open_store(tmp_path)) == wanted(31)


@pytest.mark.parametrize("there", [b"", b"abc", b"x" * 5000])
def test_a_file_that_is_cut_while_it_is_read_ends_the_read(there: bytes) -> None:
    window = Window(lambda offset, size: there[offset : offset + size], 9000)
    assert window.line_at(0) is None


async def test_a_poisoned_log_is_inspected_and_read_as_far_as_it_is_durable(tmp_path: Path) -> None:
    fs = FaultyFs()
    store = await open_store_for_writing(str(tmp_path), StoreOptions(claim_timeout_s=1), fs=fs)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=True))
    fs.rules += [Rule("fdatasync", errno.EIO), Rule("fsync", errno.EIO, count=0, path="wire.jsonl")]
    assert code((await store.append([notes(3, 9)], sync=True))[0]) == "store.poisoned"
    view = await store.inspect(MAIN)
    assert (view.next_seq, view.epoch) == (3, 1)
    assert await all_lines(store) == wanted(3)
    assert (await store.verify(MAIN)).ok
    fs.rules.clear()
    ok(await store.append([notes(3, 9)], sync=True))
    assert await all_lines(store) == wanted(9)
    await store.close()
