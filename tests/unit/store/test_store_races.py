"""The named races, on every backend; and those that need a power cut, on the simulated machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.store import StoreOptions, Stream
from kimi_ray.store.fs import FILE_MODE, RealFs
from kimi_ray.store.jsonl import JsonlStore
from tests.conformance.simulated_home import SimulatedHome
from tests.conformance.store_contract import MAIN, Home, all_lines, code, header, line, notes, ok
from tests.conformance.store_races import StoreRaces, opened
from tests.unit.store.test_jsonl_contract import JsonlHome
from tests.unit.store_sqlite.sqlite_home import SqliteHome


class ZstdHome(JsonlHome):
    def options(self, **options: Any) -> StoreOptions:
        return super().options(**{"compression": "zstd", **options})


@pytest.mark.parametrize("kind", [JsonlHome, ZstdHome, SqliteHome], ids=["jsonl", "zstd", "sqlite"], scope="class")
class TestEveryBackend(StoreRaces):
    @pytest.fixture
    def home(self, kind: type[Home], tmp_path: Path) -> Home:
        return kind(tmp_path / "home", syncs=False)  # type: ignore[call-arg]


@pytest.fixture(params=["none", "zstd"])
def machine(request: pytest.FixtureRequest) -> Iterator[SimulatedHome]:
    machine = SimulatedHome(request.param)
    yield machine
    machine.close()


@pytest.mark.parametrize("seed", range(8))
def test_killed_before_its_sync_then_sent_again_then_a_power_cut(machine: SimulatedHome, seed: int) -> None:
    """What the dead store wrote is page cache only; the answer to the resend must not rest on it."""

    async def before() -> None:
        store = await machine.open()
        await opened(store, count=3)
        ok(await store.append([notes(3, 20)], sync=False))
        await machine.kill(store)
        again = await machine.open()
        assert ok(await again.append([notes(2, 20)], sync=True)).durable == 20

    async def after() -> None:
        store = await machine.open()
        assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(20)]
        assert (await store.verify(MAIN)).ok

    machine.run(before())
    machine.power_cut(seed)
    machine.run(after())


@pytest.mark.parametrize("seed", range(8))
def test_a_child_is_lost_in_a_power_cut_after_its_report_and_then_forked_there(
    machine: SimulatedHome, seed: int
) -> None:
    child, copy = Stream("s1", "agent-1"), Stream("s1", "agent-2")

    async def before() -> None:
        store = await machine.open()
        await opened(store)
        await opened(store, child, "c", count=9)
        ok(await store.append([notes(0, 2)], sync=True))
        ok(await store.append([notes(9, 30, stream=child, nonce="c")], sync=False))

    async def after() -> None:
        store = await machine.open()
        await store.open_session("s1", "n2")
        grant = await store.fork(child, 9, header(copy), "f")
        assert (grant.next_seq, grant.epoch) == (9, 2)
        assert await all_lines(store, copy) == [line(seq, text=f"n{seq}") for seq in range(9)]

    machine.run(before())
    machine.power_cut(seed)
    machine.run(after())


@pytest.mark.parametrize("seed", range(8))
def test_a_grant_outlives_a_power_cut_and_fences_the_earlier_writer(machine: SimulatedHome, seed: int) -> None:
    async def before() -> None:
        store = await machine.open()
        await opened(store, count=3)
        ok(await store.append([notes(3, 12)], sync=False))
        assert (await store.open_writer(MAIN, "w2")).next_seq == 12

    async def after() -> None:
        store = await machine.open()
        for nonce, epoch, expected in (("w", 1, "store.fenced"), ("w2", 2, None)):
            result = (await store.append([notes(12, 15, epoch=epoch, nonce=nonce)], sync=True))[0]
            assert (None if result.error is None else result.error["code"]) == expected
        assert len(await all_lines(store)) == 15

    machine.run(before())
    machine.power_cut(seed)
    machine.run(after())


def test_a_sync_that_fails_in_an_unforeseen_way_is_an_answer(
    machine: SimulatedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for a thread that broke, and the next sync is tried anew."""

    async def life() -> None:
        store = await machine.open()
        await opened(store, count=3)
        with monkeypatch.context() as patch:
            patch.setattr(machine.files(store), "fdatasync", lambda fd: {}["no errno"])
            (answer,) = await store.append([notes(3, 5)], sync=True)
            assert code(answer) == "store.io_failed"
        assert ok(await store.append([notes(3, 6)], sync=True)).durable == 6
        await store.close()

    machine.run(life())


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_no_older_grant_of_an_unwritten_log_comes_back_with_a_power_cut(compression: str) -> None:
    """Reservations are not synced, so after a power cut the one on the disk may be the fenced writer's."""

    async def grants(machine: SimulatedHome) -> None:
        store = await machine.open()
        await store.open_session(MAIN.session_id, "n", workspace_id="wd_x_0123")
        assert [(await store.open_writer(header(), nonce)).epoch for nonce in ("old", "new")] == [1, 2]

    async def zombie(machine: SimulatedHome) -> str:
        store = await machine.open()
        await store.open_session(MAIN.session_id, "n", workspace_id="wd_x_0123")
        (answer,) = await store.append([notes(0, 3, nonce="old")], sync=True)
        await store.close()
        return code(answer)

    for seed in range(100):
        with contextlib.closing(SimulatedHome(compression)) as machine:
            machine.run(grants(machine))
            machine.power_cut(seed)
            assert machine.run(zombie(machine)) == "store.not_found", seed


class _Removing(RealFs):
    """Carries out the removal of a session just before a file of it is opened, as a thread beside it would."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.before: str | None = None

    def open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        if self.before is not None and self.before in path and flags & (os.O_RDWR | os.O_WRONLY):
            self.before = None
            (self._home / "tombstones").mkdir(exist_ok=True)
            (self._home / "tombstones" / "s1").touch()
            shutil.rmtree(self._home / "sessions" / "wd_x_0123" / "s1")
        return super().open(path, flags, mode)


@pytest.mark.parametrize("restarted", [False, True], ids=["its first batch", "loaded for it"])
async def test_an_append_whose_file_goes_with_its_session_meanwhile(tmp_path: Path, restarted: bool) -> None:
    """Between the look at the tombstone and the open of the file: no failing disk."""
    options, fs = StoreOptions(durability="os"), _Removing(tmp_path)
    store = await JsonlStore.open(str(tmp_path), options, fs=fs)
    await opened(store, count=2)
    child = Stream("s1", "agent-1")
    if restarted:
        await store.close()
        store = await JsonlStore.open(str(tmp_path), options, fs=fs)
        late = notes(2, 4)
        fs.before = "agents/main/wire.jsonl"
    else:
        await store.open_writer(header(child), "c")
        late = notes(0, 2, stream=child, nonce="c")
        fs.before = "agents/agent-1/"
    (answer,) = await store.append([late], sync=True)
    assert fs.before is None, "the session is gone"
    assert code(answer) == "store.deleted"
    await store.close()
