"""A driver killed in the middle of its run, and what the next command finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import open_store
from kimi_ray.runs.run_directory import read_rows
from tests.actors.fault_models import COMMAND, wait_for
from tests.actors.faults import assert_nothing_lost, counts, read_session
from tests.actors.test_processes import ROOT, assert_all_gone, family

ITEMS = 36


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Any]:
    """Start a ``kimi-ray`` command in a program of its own; killed at the end if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "kimi_ray.cli", *map(str, arguments)],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.long
async def test_a_killed_driver_leaves_logs_that_open_and_a_run_that_goes_on(command, tmp_path: Path) -> None:
    home, out, items = tmp_path / "home", tmp_path / "run", tmp_path / "items.txt"
    pid_file, work = tmp_path / "sleeper.pid", tmp_path / "work"
    work.mkdir()
    prompts = [f"sleeper {pid_file}", *(f"thing {n}" for n in range(ITEMS - 1))]
    items.write_text("".join(f"{prompt}\n" for prompt in prompts))
    process = command(
        "swarm", "{{item}}", "--items", items, "--model", COMMAND, "--profile", "bare", "--tools", "Bash",
        "--workdir", f"copy:{work}", "--max-concurrency", "6", "--out", out, "--home", home, "--seed", "7",
    )  # fmt: skip

    def rows() -> list[Any]:
        assert process.poll() is None, process.communicate()
        return read_rows(out) if (out / "results.jsonl").exists() else []

    wait_for(lambda: len(rows()) >= 10, 60)
    sleeper = int(wait_for(lambda: pid_file.exists() and pid_file.read_text().strip()))
    pids = {process.pid} | family(process.pid)
    assert len(pids) > 5 and sleeper in pids
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert_all_gone(pids, 10)
    print("all gone after", time.monotonic() - began)

    before = read_rows(out)
    assert 10 <= len(before) < ITEMS
    (session_id,) = {row.session_id for row in before}
    assert session_id is not None
    logs = await read_session(home, session_id)
    assert_nothing_lost(before, logs)
    store = open_store(home)
    for agent_id, events in logs.items():
        stream = next(log.stream for log in await store.list(session_id) if log.stream.agent_id == agent_id)
        view = await store.load(stream, is_live=False)
        assert view.next_seq >= len(events)
    repaired = await read_session(home, session_id)
    for events in repaired.values():
        assert counts(events)["turn/start"] == counts(events)["turn/end"]

    began = time.monotonic()
    again = command("swarm", "--resume", out, "--json")
    told, err = again.communicate(timeout=90)
    print("resume", time.monotonic() - began)
    assert again.returncode == 0, err
    report = json.loads(told)
    assert report["ok"] and report["kept"] == len(before)
    after = read_rows(out)
    assert len(after) == ITEMS == len({(row.item_id, row.repeat) for row in after})
    kept = [row for row in after if row.session_id == session_id]
    assert {row.key: row for row in kept} == {row.key: row for row in before}
    new = {row.agent_id for row in after if row.session_id != session_id}
    assert len(new) == ITEMS - len(before)
    second = await read_session(home, report["session_id"])
    assert set(second) == new | {"main"}
    assert_nothing_lost([row for row in after if row.session_id != session_id], second)
