"""What a whole program leaves behind: nothing on stdout, and no process, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, json, os, sys
from kimi_ray.actors import connect
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import registry_name, store_name
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.store.seam import Stream

home, how = sys.argv[1:]

async def main():
    config = RuntimeConfig(home=home, hosts_per_node=1, object_store_memory=100 << 20)
    connection = await connect(config)
    (host,) = await connection.registry.call("place_agents", [PlaceAgent(Stream("s", "main"))], timeout_s=90)
    names = [host, store_name(connection.home_id, 0), registry_name(connection.home_id)]
    pids = [(await connection.cluster.peer(n).call("ping", timeout_s=30, group="control"))["pid"] for n in names]
    if how == "noise":
        os.kill(pids[0], 9)
        await connection.registry.call("report_lost", host, timeout_s=30)
        await connection.registry.call("place_agents", [PlaceAgent(Stream("s", "main"))], timeout_s=90)
    with open(home + "/told.json.part", "w") as file:
        json.dump({"pids": pids, "log": connection.log_path}, file)
    os.rename(home + "/told.json.part", home + "/told.json")
    if how == "wait":
        await asyncio.sleep(120)

asyncio.run(main())
"""


def start(home: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(home), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
    )


def told(home: Path, process: subprocess.Popen[bytes]) -> dict:
    ends = time.monotonic() + 90
    while not (home / "told.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.1)
    return json.loads((home / "told.json").read_text())


def family(pid: int) -> set[int]:
    """All processes below ``pid``, however deep."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(entry.joinpath("stat").read_text().rsplit(") ", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def living(pids: set[int]) -> set[int]:
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return {pid for pid in pids if lives(pid)}


def name_of(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()!r}"
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid} gone"


def assert_all_gone(pids: set[int], within_s: float) -> None:
    ends = time.monotonic() + within_s
    while living(pids):
        assert time.monotonic() < ends, [name_of(pid) for pid in living(pids)]
        time.sleep(0.1)


@pytest.mark.long
def test_a_program_that_just_ends_was_silent_and_leaves_nothing(tmp_path: Path):
    process = start(tmp_path, "noise")
    facts = told(tmp_path, process)
    pids = set(facts["pids"]) | family(process.pid)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err.decode()
    assert (out, err) == (b"", b"")
    assert facts["log"] == str(tmp_path / "logs" / "driver-ray.log")
    assert "Ray" in Path(facts["log"]).read_text()
    assert_all_gone(pids, 10)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_killed_driver_leaves_no_process(tmp_path: Path, number: int, status: int):
    process = start(tmp_path, "wait")
    facts = told(tmp_path, process)
    pids = set(facts["pids"]) | family(process.pid)
    assert len(living(pids)) >= 5
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err.decode()
    assert (out, err) == (b"", b"")
    assert_all_gone(pids, 10)
