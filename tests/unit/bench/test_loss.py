"""The bench that kills: what was promised is there after a kill and a power cut; the tally outlives its writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_ray.bench.loss import CASES, Case, _cut_power, bench_loss
from kimi_ray.bench.loss_child import SYNCED_NAME, NotingFs, Tally


@pytest.mark.parametrize(
    "case", [Case("flushes", "disk"), Case("agent", "disk", "request")], ids=lambda case: case.name
)
async def test_nothing_promised_is_lost(case: Case, tmp_path: Path) -> None:
    report = (await bench_loss(kills=1, cases=[case], directory=str(tmp_path))).to_data()
    found = report["cases"][case.name]
    assert (found["kills"], found["promised_lost"], found["power_promised_lost"]) == (1, 0, 0)
    assert found["lost"] <= found["power_lost"]
    assert list(tmp_path.iterdir()) == []


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_tally_is_seen_at_once_by_whoever_maps_it(tmp_path: Path) -> None:
    made = Tally.create(str(tmp_path / "tally"))
    other = Tally.open(str(tmp_path / "tally"))
    other.note()
    other.note()
    other.promise(1)
    assert (made.done, made.promised) == (2, 1)
    assert made.age_ms(2, 1e12) == 0.0
    assert made.age_ms(0, 1e12) > made.age_ms(1, 1e12) - 1 > 0


def test_a_power_cut_keeps_what_the_last_sync_covered_and_no_more(tmp_path: Path) -> None:
    place = tmp_path / "sessions" / "w" / "s" / "agents" / "main"
    place.mkdir(parents=True)
    fs = NotingFs(str(tmp_path / SYNCED_NAME))
    synced, never = str(place / "wire.jsonl"), str(place / "wire.redo")
    for path in (synced, never):
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"12345")
        if path == synced:
            fs.fdatasync(fd)
            os.write(fd, b"678")
        os.close(fd)
    _cut_power(str(tmp_path))
    assert (Path(synced).read_bytes(), Path(never).read_bytes()) == (b"12345", b"")
