"""Commands as users start them, each with a local Ray of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_ray.ids import new_ulid
from kimi_ray.runs import read_rows

ROOT = Path(__file__).parents[2]
MARK = "KIMI_RAY_TEST_MARK"


def slow_model() -> str:
    return "scripted:tests.unit.cli.test_swarm:slow"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No git, no ripgrep, no settings; a mark by which every process of a command is found."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "bash", "env", "cat", "ls"):
        found = next((path for top in ("/bin", "/usr/bin") if (path := Path(top, name)).exists()), None)
        if found is not None:
            (tools / name).symlink_to(found)
    return {
        "PATH": f"{Path(sys.executable).parent}:{tools}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "KIMI_RAY_HOME": str(tmp_path / "a home"),
        MARK: new_ulid(),
    }


def marked(environment: dict[str, str]) -> list[str]:
    """The processes that a command started and that still live."""
    needle = f"{MARK}={environment[MARK]}".encode()
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if needle in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:
            continue
    return found


def all_gone(environment: dict[str, str]) -> None:
    ends = time.monotonic() + 20
    while left := marked(environment):
        assert time.monotonic() < ends, left
        time.sleep(0.1)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kimi_ray.cli", *arguments]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_demo_twice(tmp_path: Path, environment: dict[str, str]) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    for _ in range(2):
        done = subprocess.run(
            command("demo", "--json"),
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["totals"]["completed"] == document["rollouts"] == 24
        rows = read_rows(document["run_dir"])
        assert all(row.tool_calls == 1 and row.item["file"] in (row.text or "") for row in rows)
        told = done.stderr.splitlines()
        assert told[0].startswith("24 agents review")
        assert told[1] == "starting a local Ray, which takes some seconds"
        assert all(line.startswith("[") for line in told[2:]), done.stderr  # no word from Ray itself
        all_gone(environment)
    assert list(place.iterdir()) == []


@pytest.mark.timeout(120)
def test_ctrl_c_in_a_terminal_and_resume(tmp_path: Path, environment: dict[str, str]) -> None:
    """A terminal sends the signal to the whole group, Ray's processes too; running rollouts still go to their end."""
    (tmp_path / "items.txt").write_text("".join(f"short {number}\n" for number in range(60)))
    arguments = ("swarm", "{{item}}", "--items", "items.txt", "--profile", "bare", "--max-concurrency", "2")
    process = subprocess.Popen(
        command(*arguments, "--model", slow_model(), "--out", "run", "--json"),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        results = tmp_path / "run" / "results.jsonl"
        ends = time.monotonic() + 60
        while not results.exists() or results.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < ends, "no row came"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    totals = json.loads(out)["totals"]
    assert totals["completed"] >= 2
    assert totals["not_started"] == 60 - totals["completed"], totals
    all_gone(environment)
    again = subprocess.run(
        command("swarm", "--resume", "run", "--in-process", "--max-concurrency", "60", "--json"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["kept"] == totals["completed"]
    rows = read_rows(tmp_path / "run")
    assert len({row.key for row in rows}) == len(rows) == 60
