"""The independent checker finds nothing in a sound home, and every broken promise in one that was tampered with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kimi_ray.hosts.store_host import StoreHost
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import StoreOptions
from kimi_ray.store.writer_settings import WriterSettings
from tests.actors.store_load import StoreLoad
from tests.conformance.oracle_checker import Journal, check_home

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zstd": {"compression": "zstd"},
    "sqlite": {"backend": "sqlite"},
}
SETTINGS = WriterSettings(write_window_ms=5, sync_interval_ms=20)


class _Peer:
    """The store of this process, called as an actor is."""

    name = "store"

    def __init__(self, service: PersistenceService) -> None:
        self.host = StoreHost.__new__(StoreHost)
        self.host._service = service

    async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        return await getattr(self.host, method)(*args)


async def _fill(place: Path, way: dict[str, Any]) -> None:
    place.mkdir()
    service = PersistenceService(str(place / "home"), StoreOptions(durability="os", **way))
    journal = Journal(place / "journal")
    load = StoreLoad(
        _Peer(service), journal, random.Random(1), sessions=2, agents=2, reopen_chance=0.1, pause_s=0.001,
        settings=SETTINGS,
    )  # fmt: skip
    await load.start()
    await load.flushed_after(60)
    # One blob for sure, whatever the dice gave.
    log = load.streams[0]
    assert log.writer is not None
    log.append_with_blob(log.writer)
    await load.stop()
    grant = await service.open_session("session_load0", "again")
    await service.write_document("session_load0", {"title": "t"}, grant.grant, "again", 0)
    await service.close()
    journal.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A home of each way, written once; with the journal beside it."""
    made: dict[str, Path] = {}

    def make(way: str) -> Path:
        if way not in made:
            made[way] = tmp_path_factory.mktemp(way) / "sound"
            asyncio.run(_fill(made[way], WAYS[way]))
        return made[way]

    return make


@pytest.fixture
def place(sound: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy that a test may spoil."""
    return lambda way: Path(shutil.copytree(sound(way), tmp_path / way))


def problems(place: Path, **how: Any) -> list[str]:
    return check_home(place / "home", [place / "journal"], **how).violations


@pytest.mark.parametrize("way", WAYS)
def test_a_sound_home_has_no_violation(sound: Callable[[str], Path], way: str) -> None:
    report = check_home(sound(way) / "home", [sound(way) / "journal"])
    assert report.violations == []
    assert report.events == report.acknowledged > 200 and len(report.logs) == 4 and report.torn == 0
    assert report.grants > 4 and report.documents == 1
    assert any(b'"text-delta"' in line for log in report.logs.values() for line in log.lines)


def log_of(place: Path) -> Path:
    return max(place.glob("home/sessions/*/*/agents/*/wire.jsonl*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("way", ["plain", "zstd"])
def test_every_flipped_bit_of_what_was_acknowledged_is_seen(place: Callable[[str], Path], way: str) -> None:
    here = place(way)
    path = log_of(here)
    sound = path.read_bytes()
    dice = random.Random(7)
    for at in dice.sample(range(len(sound)), 40):
        spoiled = bytearray(sound)
        spoiled[at] ^= 1 << dice.randrange(8)
        path.write_bytes(spoiled)
        with contextlib.suppress(ValueError):  # a header that is no JSON any more
            report = check_home(here / "home", [here / "journal"])
            # The last batch holds the row that closed the log, and nothing that was acknowledged.
            seen = report.violations or (report.torn and at > len(sound) - 500)
            # A frame's header has bits that mean nothing, or only how much memory its reader may need.
            assert seen or (way == "zstd" and _unpacked(bytes(spoiled)) == _unpacked(sound)), at


def _unpacked(data: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as frames:
        return frames.read()


@pytest.mark.parametrize("way", ["plain", "zstd"])
def test_a_cut_log_is_seen(place: Callable[[str], Path], way: str) -> None:
    here = place(way)
    path = log_of(here)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    found = problems(here)
    assert any("were acknowledged" in problem for problem in found)


def test_an_old_batch_at_the_end_is_seen(place: Callable[[str], Path]) -> None:
    here = place("plain")
    path = log_of(here)
    data = path.read_bytes()
    second = data.index(b'{"batch":1,')
    path.write_bytes(data + data[second : data.index(b'{"batch":2,')])
    assert any("stands where" in problem for problem in problems(here))


def test_a_whole_batch_after_damage_is_seen(place: Callable[[str], Path]) -> None:
    here = place("plain")
    path = log_of(here)
    data = bytearray(path.read_bytes())
    data[data.index(b'{"batch":2,') + 30] ^= 1
    path.write_bytes(data)
    assert any("after damage" in problem for problem in problems(here))


@pytest.mark.parametrize("way", WAYS)
def test_an_event_that_no_writer_appended_is_seen(place: Callable[[str], Path], way: str) -> None:
    here = place(way)
    journal = here / "journal"
    records = journal.read_bytes().splitlines(keepends=True)
    at = next(n for n, record in enumerate(records) if record.startswith(b'["append"'))
    journal.write_bytes(b"".join(records[:at] + records[at + 1 :]))
    assert any("was never appended" in problem for problem in problems(here))
    journal.write_bytes(b"".join(records).replace(json.loads(records[at])[4][0][1].encode(), b"0" * 24))
    assert any("is not what was appended" in problem for problem in problems(here))


@pytest.mark.parametrize("way", WAYS)
def test_a_flush_of_what_a_later_writer_wrote_over_is_seen(place: Callable[[str], Path], way: str) -> None:
    here = place(way)
    journal = here / "journal"
    report = check_home(here / "home")
    stream, log = next((stream, log) for stream, log in report.logs.items() if len(log.grants) > 1)
    first, second = log.grants[:2]
    with open(journal, "ab") as file:
        file.write(json.dumps(["flush", *stream, first.epoch, second.seq + 1]).encode() + b"\n")
    assert any("began below" in problem for problem in problems(here))


@pytest.mark.parametrize("change", ["data", "missing", "head", "epoch", "nonce"])
def test_a_changed_database_is_seen(place: Callable[[str], Path], change: str) -> None:
    here = place("sqlite")
    [path] = here.glob("home/shards/*.db")
    database = sqlite3.connect(path)
    database.execute(
        {
            "data": "UPDATE rows SET data = cast(replace(data, 'load', 'lord') AS BLOB) WHERE id % 100 = 7",
            "missing": "DELETE FROM rows WHERE id = (SELECT max(id) FROM rows)",
            "head": "UPDATE heads SET next_seq = next_seq + 1",
            "epoch": "UPDATE grants SET epoch = epoch + 10 WHERE seq = 0",
            "nonce": "UPDATE grants SET nonce = 'same'",
        }[change]
    )
    database.commit()
    database.close()
    assert problems(here)


def test_files_that_are_not_what_they_should_be_are_seen(place: Callable[[str], Path]) -> None:
    here = place("plain")
    home = here / "home"
    directory = log_of(here).parent
    (directory / "wire.redo").write_bytes(b"{}")
    (directory / "wire.jsonl.tmp-01X").write_bytes(b"")
    assert [problem.split(":")[0] for problem in problems(here)] == ["left over"] * 2
    assert problems(here, running=True) == []
    lines = [line for log in check_home(home).logs.values() for line in log.lines]
    digest = next(found[1] for line in lines if (found := re.search(rb'"\$blob":"sha256:([0-9a-f]{64})"', line)))
    [blob] = home.glob(f"blobs/*/{digest.decode()}")
    blob.write_bytes(b"something else")
    document = next(home.glob("sessions/*/*/state.json"))
    document.write_bytes(b"{")
    (home / "owners").mkdir(exist_ok=True)
    (home / "owners" / "session_load1").write_bytes(b"[]")
    found = "\n".join(problems(here, running=True))
    assert "does not have the content of its name" in found
    assert re.search(r"state\.json is not JSON", found) and "is no object" in found
    blob.unlink()
    assert any("referred to and missing" in problem for problem in problems(here, running=True))


def test_effects_and_told_events_must_be_in_the_log(place: Callable[[str], Path]) -> None:
    here = place("plain")
    stream = ("session_load0", "agent-0")
    journal = Journal(here / "journal")
    journal.did(stream, "call_1")
    journal.did(stream, "call_1")
    journal.told(stream, 10_000)
    journal.told(("session_gone", "main"), 1)
    journal.close()
    found = "\n".join(problems(here))
    assert "in the world and not in the log" in found and "had its effect 2 times" in found
    assert "10000 events were acknowledged" in found and "1 acknowledged events and no log" in found
