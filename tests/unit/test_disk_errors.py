"""A disk that fails under a running agent: it is told by name, and goes on without loss when the disk does."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, SessionError, StoreError
from kimi_ray.events import parse_event, parse_header
from kimi_ray.log import EventLog
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile
from kimi_ray.store import StoreOptions, Stream, open_store, open_store_for_writing
from kimi_ray.store.checkup import check_session
from tests.conformance.store_contract import MAIN, all_lines, header, notes, ok
from tests.unit.runtime_fixtures import Stage, running

FAULTS = {
    "a full disk": ("enospc_after=0", "store.disk_full", "ENOSPC"),
    "a quota": ("fail=write:EDQUOT:0:0", "store.disk_full", "EDQUOT"),
    "failing writes": ("fail=pwrite:EIO:0:0", "store.io_failed", "EIO"),
    "failing syncs": ("fail=fdatasync:EIO:0:0,fail=fsync:EIO:0:0", "store.poisoned", "EIO"),
    "no rights": ("fail=write:EACCES:0:0", "store.permission_denied", "EACCES"),
    "a read-only mount": ("fail=write:EROFS:0:0", "store.permission_denied", "EROFS"),
}
COMPRESSIONS = ("none", "zstd")


class Disk:
    """What is wrong with the disk of a running store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fail(self, spec: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(spec)
        new.replace(self._path)

    def mend(self) -> None:
        self._path.unlink()


@asynccontextmanager
async def agent(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Session, Stage, Disk]]:
    control = tmp_path / "control"
    spec = f"control={control}"
    config = {"durability": "disk", "fs_spec": spec, "store_timeout_s": 20.0, **settings}
    async with running(tmp_path, **config) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        assert (await (await session.main.submit("first")).result(20)).state == "completed"
        yield session, stage, Disk(control)


async def whole(home: Path, session_id: str) -> EventLog:
    """The log as it is stored: it verifies and restores, and no event is there twice."""
    store = open_store(home)
    stream = Stream(session_id, "main")
    report = await store.verify(stream)
    assert report.ok, report
    lines = await all_lines(store, stream)
    ids = [data["prompt_id"] for line in lines if (data := parse_event(line).data) and b'"prompt/submitted"' in line]
    assert len(set(ids)) == len(ids)
    header = parse_header((await store.inspect(stream)).header)
    return EventLog.restore(header, [parse_event(line, at=at) for at, line in enumerate(lines)])


def causes(error: KimiRayError | dict[str, Any]) -> list[dict[str, Any]]:
    """An error and what it says was its cause, as data."""
    data = error.to_data() if isinstance(error, KimiRayError) else error
    inner = (data.get("details") or {}).get("cause")
    return [data, *(causes(inner) if inner else [])]


def check_told(error: KimiRayError | dict[str, Any], code: str, number: str, home: Path) -> None:
    found = next(one for one in causes(error) if one["code"] == code)
    details = found["details"]
    assert details["errno"] == number
    assert details["path"].startswith(str(home))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_turn_that_meets_a_failing_disk_says_so_and_nothing_is_lost(
    tmp_path: Path, fault: str, compression: str
) -> None:
    spec, code, number = FAULTS[fault]
    home = tmp_path / "home"
    async with agent(tmp_path, compression=compression) as (session, stage, disk):
        stage.gate.clear()
        prompt = await session.main.submit("second")
        await stage.until_running(1)
        disk.fail(spec)
        stage.gate.set()
        result = await prompt.result(20)
        if fault == "a full disk":
            assert result.state == "completed", "the end of the turn went to the reserve"
        else:
            assert result.state == "failed"
            assert result.error is not None
            check_told(result.error, code, number, home)
        with pytest.raises(KimiRayError) as caught:
            await session.main.submit("while it fails")
        check_told(caught.value, code, number, home)
        disk.mend()
        assert (await (await session.main.submit("third")).result(20)).state == "completed"
        await session.close()
        log = await whole(home, session.id)
    said = [message["content"][0]["text"] for message in log.messages() if message["role"] == "user"]
    assert said == ["first", "second", "while it fails", "third"]
    assert log.order.open_turn is None


async def test_a_text_that_has_no_room_is_told_at_once_and_goes_first_when_there_is(tmp_path: Path) -> None:
    """The system prompt is a file of its own, and larger than what the reserve is for."""
    control = tmp_path / "control"
    config = {"durability": "disk", "fs_spec": f"control={control}", "store_timeout_s": 60.0}
    profile = Profile(name="wordy", system_prompt="Be brief. " * 10_000)
    async with running(tmp_path, **config) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=profile)
        disk = Disk(control)
        disk.fail("fail=write:ENOSPC:0:0:/blobs/")
        async with asyncio.timeout(20):
            try:
                result = await (await session.main.submit("first")).result(20)
                refused: dict[str, Any] | None = result.error
            except KimiRayError as error:
                refused = error.to_data()
        assert refused is not None
        check_told(refused, "store.disk_full", "ENOSPC", tmp_path / "home")
        disk.mend()
        assert (await (await session.main.submit("second")).result(20)).state == "completed"
        await session.close()
        await whole(tmp_path / "home", session.id)
    check = await check_session(open_store(tmp_path / "home"), session.id)
    assert check.ok
    assert check.blobs >= 1


async def test_short_writes_and_slow_syncs_are_only_slow(tmp_path: Path) -> None:
    async with agent(tmp_path) as (session, _, disk):
        disk.fail("short_write=7,sync_delay_ms=20")
        assert (await (await session.main.submit("second")).result(20)).state == "completed"
        await session.close()
        await whole(tmp_path / "home", session.id)


async def test_a_fault_that_passes_by_itself_within_a_flush_is_not_even_noticed(tmp_path: Path) -> None:
    async with agent(tmp_path) as (session, _, disk):
        disk.fail("fail=fdatasync:EIO:0:1")
        assert (await (await session.main.submit("second")).result(20)).state == "completed"
        disk.fail("fail=pwrite:EIO:0:1:wire")
        assert (await (await session.main.submit("third")).result(20)).state == "completed"
        await session.close()
        log = await whole(tmp_path / "home", session.id)
        assert len(log.messages()) == 6


async def test_an_agent_that_waits_for_no_disk_goes_on_to_its_bound(tmp_path: Path) -> None:
    settings = {"checkpoint": "none", "log_bytes": 60_000, "store_timeout_s": 1.0}
    async with agent(tmp_path, **settings) as (session, stage, disk):
        disk.fail("fail=pwrite:ENOSPC:0:0")
        answered = len(stage.requests)
        text = "x" * 2_000
        refused: dict[str, Any] | None = None
        for number in range(60):
            try:
                prompt = await session.main.submit(f"{number} {text}")
                result = await prompt.result(20)
                refused = result.error
            except KimiRayError as error:
                refused = error.to_data()
            if refused is not None and len(stage.requests) == answered:
                break
            answered = len(stage.requests)
        assert refused is not None, "it went on past its bound"
        check_told(refused, "store.disk_full", "ENOSPC", tmp_path / "home")
        disk.mend()
        assert (await (await session.main.submit("after")).result(20)).state == "completed"
        await session.close()
        await whole(tmp_path / "home", session.id)


async def test_a_directory_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with agent(tmp_path) as (session, _, _disk):
        (place,) = home.glob(f"sessions/*/{session.id}")
        away = tmp_path / "away"
        place.rename(away)
        with pytest.raises(KimiRayError) as caught:
            await session.main.submit("second")
        check_told(caught.value, "store.poisoned", "ENOENT", home)
        away.rename(place)
        assert (await (await session.main.submit("third")).result(20)).state == "completed"
        await session.close()
        log = await whole(home, session.id)
        assert [message["content"][0]["text"] for message in log.messages()][-2:] == ["third", "did third"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """``tmp_path/home`` as a tmpfs of 16 MiB."""
    home = tmp_path / "home"
    home.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", home], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield home
    subprocess.run(["umount", "-l", home], check=True)


async def test_a_real_disk_that_fills(tmp_path: Path, mount: Path) -> None:
    async with agent(tmp_path) as (session, stage, _):
        stage.gate.clear()
        prompt = await session.main.submit("second")
        await stage.until_running(1)
        hog = mount / "hog"
        with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 4096)
        stage.gate.set()
        assert (await prompt.result(20)).state == "completed", "the end of the turn is small, and has its reserve"
        reserve = mount / "reserve"
        told: KimiRayError | None = None
        for number in range(100):  # the last page of a file may have room for some events
            try:
                await (await session.main.submit(f"{number} " + "x" * 5_000)).result(20)
            except KimiRayError as error:
                told = error
                break
        assert told is not None
        check_told(told, "store.disk_full", "ENOSPC", mount)
        left = reserve.stat().st_size
        assert left > 0
        await asyncio.to_thread(hog.unlink)
        assert (await (await session.main.submit("third")).result(20)).state == "completed"
        await session.close()
        log = await whole(mount, session.id)
        assert log.order.open_turn is None


async def test_a_real_disk_that_is_read_only_for_a_while(mount: Path) -> None:
    """The kernel remounts only what nobody has open for writing: the store begins its work on such a disk."""
    home = mount / "home"
    await (await open_store_for_writing(str(home), StoreOptions())).close()
    store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=1))

    async def remount(how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(mount)]
        await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)

    await remount("ro")
    try:
        with pytest.raises(StoreError) as caught:
            await store.open_session("s1", "n", workspace_id="wd_x_0123")
        check_told(caught.value, "store.permission_denied", "EROFS", home)
        assert await open_store(home).list() == [], "reading goes on"
    finally:
        await remount("rw")
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 3)], sync=True))
    await store.close()
    assert (await open_store(home).verify(MAIN)).ok


async def test_a_close_that_cannot_make_a_log_durable_names_it_and_can_be_done_again(tmp_path: Path) -> None:
    async with agent(tmp_path, store_timeout_s=1.0) as (session, stage, disk):
        stage.gate.clear()
        await session.main.submit("second")
        await stage.until_running(1)
        disk.fail(FAULTS["failing writes"][0])
        for _ in range(2):
            with pytest.raises(SessionError) as caught:
                await session.close()
            assert caught.value.code == "session.close_failed"
            assert caught.value.details["streams"] == [f"{session.id}/main"]
            check_told(caught.value.details["first"], "store.io_failed", "EIO", tmp_path)
        disk.mend()
        await session.close()
    await whole(tmp_path / "home", session.id)
    lines = await all_lines(open_store(tmp_path / "home"), Stream(session.id, "main"))
    assert [event.type for line in lines if (event := parse_event(line)).type == "turn/end"] == ["turn/end"] * 2


async def test_a_runtime_that_is_closed_on_a_failing_disk_lets_the_session_go(tmp_path: Path) -> None:
    with pytest.raises(KimiRayError) as caught:
        async with agent(tmp_path, store_timeout_s=1.0) as (session, stage, disk):
            stage.gate.clear()
            await session.main.submit("second")
            await stage.until_running(1)
            disk.fail(FAULTS["failing writes"][0])
    assert caught.value.code == "session.close_failed"
    disk.mend()
    async with running(tmp_path) as (runtime, _, model):
        again = await runtime.workspace(tmp_path / "work").resume(session.id, model=model)
        assert (await (await again.main.submit("third")).result(20)).state == "completed"
