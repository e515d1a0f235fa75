"""The benches of the log: tiny ones run through, tell the contract's keys, and notice what is not stored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimi_ray.bench.append import bench_append
from kimi_ray.bench.event_streams import EVENTS_A_TURN, WINDOW_TURNS, append_small, append_turn
from kimi_ray.bench.fork import bench_fork
from kimi_ray.bench.index import bench_index
from kimi_ray.bench.resume import bench_resume
from kimi_ray.cli.app import app
from kimi_ray.errors import KimiRayError
from kimi_ray.events import LogHeader, SessionEvent, WriterRef
from kimi_ray.log import EventLog
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import Page, Stream

CONTRACT = ["bench", "value", "unit", "floor", "ratio", "wall_s", "cpu_s", "peak_pss_mb"]


def new_log() -> EventLog:
    return EventLog(
        LogHeader(session_id="s", agent_id="main", created_at=0, writer=WriterRef(name="test", version="0"))
    )


async def test_index_finds_the_newest(tmp_path: Path) -> None:
    report = (await bench_index(sessions=200, directory=str(tmp_path))).to_data()
    assert list(report)[:8] == CONTRACT
    assert (report["bench"], report["unit"], report["sessions"]) == ("index", "ms", 200)
    assert report["value"] > 0 and report["floor"] > 0 and report["beside_ms"] > 0
    assert list(tmp_path.iterdir()) == []


async def test_append_reports_what_it_stored(tmp_path: Path) -> None:
    report = (
        await bench_append(
            sessions=2, events=30, flush_every=10, repeats=2, address="in-process", directory=str(tmp_path)
        )
    ).to_data()
    assert list(report)[:8] == CONTRACT
    assert (report["bench"], report["unit"]) == ("append", "events/s")
    assert report["value"] > 0 and report["ratio"] > 0
    # Three flushes of two logs; the first of each makes its file, which is no sync of an append.
    assert report["syncs"] == 4
    assert 3 <= report["actor_calls"] <= 6
    assert report["bytes_per_event"] > report["line_bytes"] > 80
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_a_delay_of_each_sync_slows_both_sides(backend: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sessions": 2, "events": 20, "flush_every": 10, "repeats": 1, "address": "in-process"}
    report = (await bench_append(**options, backend=backend, sync_delay_ms=20, directory=str(tmp_path))).to_data()
    assert report["wall_s"] >= 0.04
    assert 40 / report["floor"] >= 0.08


async def test_append_fails_when_an_acknowledged_event_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ReadStore.read_from

    async def short(self: ReadStore, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        page = await read(self, stream, seq, limit, max_bytes)
        return dataclasses.replace(page, lines=page.lines[:-1])

    monkeypatch.setattr(ReadStore, "read_from", short)
    with pytest.raises(KimiRayError) as caught:
        await bench_append(
            sessions=1, events=10, flush_every=5, repeats=1, address="in-process", directory=str(tmp_path)
        )
    assert caught.value.code == "bench.incomplete"


async def test_resume_measures_each_part(tmp_path: Path) -> None:
    report = (await bench_resume(events=300, backend="sqlite", directory=str(tmp_path))).to_data()
    assert list(report)[:8] == CONTRACT
    assert report["events"] >= 300
    assert report["tail_ms"] > 0 and report["inspect_ms"] > 0 and report["read_s"] > 0
    assert report["resumed_s"] <= report["value"]
    assert report["read_before_mb"] <= report["read_peak_mb"] < 150
    assert report["resume_before_mb"] <= report["resume_peak_mb"] < 250
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_fork_compares_the_copy_with_its_source(backend: Any, tmp_path: Path) -> None:
    report = (await bench_fork(events=200, repeats=2, backend=backend, directory=str(tmp_path))).to_data()
    assert list(report)[:8] == CONTRACT
    assert report["events"] >= 200
    assert report["grew_mb"] < 50


def test_the_command_prints_one_document() -> None:
    words = "bench append --json --sessions 1 --events 4 --flush-every 2 --repeats 1 --address in-process".split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout))[:8] == CONTRACT


def test_small_events_are_about_as_long_as_those_of_the_design() -> None:
    log, lines = new_log(), list[bytes]()
    log.observe(lambda event: lines.append(event.line))
    append_small(log, 1000)
    assert 100 <= sum(map(len, lines)) / 1000 <= 116


def test_turns_are_turns_and_leave_the_window_of_the_model() -> None:
    log, events = new_log(), list[SessionEvent]()
    log.observe(events.append)
    for turn in range(2 * WINDOW_TURNS):
        append_turn(log)
        assert log.next_seq == (turn + 1) * EVENTS_A_TURN
    assert len(log.surface) == WINDOW_TURNS * 4
    assert [len(log.messages()), events[-1].type] == [WINDOW_TURNS * 4, "prompt/completed"]
