"""Mixed faults on three raylets under load, and an independent look at the home afterwards.

Swarms, prompts and raw logs run while processes of every kind are killed or stopped, a node is lost and another
comes, the disk is full for a while, every sync takes 10 ms longer and the nodes' clocks are a minute apart. A short
scenario runs with the suite; ``KIMI_RAY_TEST_SOAK_S=600`` makes it ten minutes of all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.store import open_store
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.seam import StoreOptions, Stream
from tests.cluster.soak_models import EFFECTS
from tests.cluster.test_local_sh import Cluster, free_base_port
from tests.conformance.oracle_checker import Report, check_home

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="local.sh needs Linux"),
]

ROOT = Path(__file__).parents[2]
CLOCKS_MS = {1: 60_000, 2: -60_000}
"""How far each worker node's clock is off; a node that comes later has that of the one it replaces."""
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "zstd": {"compression": "zstd"}, "sqlite": {"backend": "sqlite"}}
"""How the logs are stored: the seed chooses, or ``KIMI_RAY_TEST_SOAK_WAY``."""
DISK_MB = 512
FULL_S, FULL_SHORT_S = 8.0, 2.0
STOPPED_S = 40.0
QUICK = ("store", "agents", "sessions", "registry")
LONG = (*QUICK, "stop agents", "stop store", "node", "full disk")


class Disturber:
    """Does harm to a cluster and its home, one thing after the other."""

    def __init__(self, cluster: Cluster, home: Path, dice: random.Random, *, may_fill: bool, full_s: float) -> None:
        self.full_s = full_s
        self.cluster = cluster
        self.home = home
        self.dice = dice
        self.may_fill = may_fill
        self.done: Counter[str] = Counter()
        self.workers = dict(CLOCKS_MS)
        self.stopped: list[asyncio.Task[None]] = []

    async def run(self, seconds: float, kinds: tuple[str, ...], pause_s: tuple[float, float]) -> None:
        """All kinds in random order, again and again, until the time is over; each at least once."""
        await self._run(seconds, kinds, pause_s)
        await asyncio.gather(*self.stopped)

    async def _run(self, seconds: float, kinds: tuple[str, ...], pause_s: tuple[float, float]) -> None:
        ends = time.monotonic() + seconds
        while not self.done or time.monotonic() < ends:
            for kind in self.dice.sample(kinds, len(kinds)):
                await asyncio.sleep(self.dice.uniform(*pause_s))
                if time.monotonic() >= ends and len(self.done) >= len(kinds) - (not self.may_fill):
                    return
                print(f"{seconds - (ends - time.monotonic()):.0f} s: {kind}", flush=True)
                await self._do(kind)

    async def _do(self, kind: str) -> None:
        if kind == "node":
            await self._lose_node()
        elif kind == "full disk":
            if not self.may_fill:
                return
            await self._fill_disk()
        else:
            role = kind.removeprefix("stop ")
            pids = await self._pids(role)
            if not pids:
                return
            pid = self.dice.choice(pids)
            if kind == role:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            else:
                self.stopped.append(asyncio.create_task(_stop_for(pid, STOPPED_S)))
        self.done[kind] += 1

    async def _pids(self, role: str) -> list[int]:
        title = {"store": "Persist", "agents": "Agent", "sessions": "Session", "registry": "Registry"}[role]
        return [pid for _, pid, name in await self._processes() if name.startswith(f"ray::{title}")]

    async def _processes(self) -> list[tuple[int, int, str]]:
        listed = (await asyncio.to_thread(self.cluster.run, "status")).stdout
        found = re.findall(r"^node (\d+)\s+pid (\d+)", listed, re.M)
        return [(int(node), int(pid), _title(int(pid))) for node, pid in found]

    async def _lose_node(self) -> None:
        node = self.dice.choice(sorted(self.workers))
        offset = self.workers.pop(node)
        for one, pid, _ in await self._processes():
            if one == node:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(self.dice.uniform(1, 5))
        self.workers[await asyncio.to_thread(add_node, self.cluster, offset)] = offset

    async def _fill_disk(self) -> None:
        filler = self.home.parent / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(b"\0" * (1 << 20)):
                pass
        await asyncio.sleep(self.full_s)
        filler.unlink()


async def _stop_for(pid: int, seconds: float) -> None:
    """A process that stands still, and goes on as if nothing had been."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def _title(pid: int) -> str:
    """What a process is now: a worker is nothing in particular before it becomes an actor."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def add_node(cluster: Cluster, offset_ms: int) -> int:
    """One more node with a clock that is off; its number."""
    cluster.environment["KIMI_RAY_CLOCK_OFFSET_MS"] = str(offset_ms)
    added = cluster.run("add")
    assert added.returncode == 0, added.stderr
    return int(added.stdout.split()[1])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """A directory for the home, on a small disk of its own where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(path)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    yield path, mounted
    if mounted:
        if (tmp_path / "failed").exists():
            shutil.copytree(path / "home", tmp_path / "home as left")
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def cluster(tmp_path: Path, disk: tuple[Path, bool]) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    (tmp_path / "notes").mkdir()
    made.environment[EFFECTS] = str(tmp_path / "notes")
    yield made
    made.run("down")


async def test_everything_at_once(cluster: Cluster, disk: tuple[Path, bool], tmp_path: Path, budget: Any) -> None:
    seconds = float(os.environ.get("KIMI_RAY_TEST_SOAK_S") or 0)
    place, may_fill = disk
    chosen = os.environ.get("KIMI_RAY_TEST_SOAK_WAY") or random.Random(f"{budget.seed}:way").choice(list(WAYS))
    way = WAYS[chosen]
    home, notes = place / "home", tmp_path / "notes"
    base = free_base_port(7 * 30)
    up = await asyncio.to_thread(cluster.run, "up", "1", "--base-port", str(base), "--num-cpus", "2")
    assert up.returncode == 0, up.stderr
    for offset in CLOCKS_MS.values():
        await asyncio.to_thread(add_node, cluster, offset)
    exports = cluster.exports()
    fails = "" if may_fill else ",fail=pwrite:ENOSPC:500:20"
    settings = {
        "home": str(home), "address": f"127.0.0.1:{base}", "notes": str(notes), "cwd": str(tmp_path),
        "seed": budget.seed, "swarms": 2 if seconds else 1, "prompters": 3 if seconds else 2,
        "items": 24 if seconds else 12,
        "config": {
            "fs_spec": f"sync_delay_ms=10{fails}", "hosts_per_node": 2, "lease_timeout_s": 60, "store_timeout_s": 90,
            "close_timeout_s": 60, **way,
        },
    }  # fmt: skip
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.cluster.soak_driver", json.dumps(settings),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env={**cluster.environment, **exports, "PYTHONPATH": str(ROOT), "KIMI_RAY_CLOCK_OFFSET_MS": "0"},
        limit=1 << 24,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None and driver.stderr is not None
    full_s = FULL_S if seconds else FULL_SHORT_S
    disturber = Disturber(cluster, home, random.Random(budget.seed), may_fill=may_fill, full_s=full_s)
    try:
        async with asyncio.timeout(180):
            line = await driver.stdout.readline()
        assert line, (await driver.stderr.read()).decode()
        if seconds:
            await disturber.run(seconds, LONG, (3, 12))
        else:
            await disturber.run(budget.seconds, (*QUICK, "full disk"), (0.5, 3))
        async with asyncio.timeout(600):
            out, err = await driver.communicate(b"end\n")
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.communicate()
    print(out.decode(), chosen, "disturbances", dict(disturber.done))
    cluster.run("down")
    (tmp_path / "failed").touch()
    problems = await _check(home, notes, way)
    assert problems == []
    assert driver.returncode == 0, err.decode()[-5000:]
    (tmp_path / "failed").unlink()


async def _check(home: Path, notes: Path, way: dict[str, Any]) -> list[str]:
    """Everything that is not as it must be."""
    told = json.loads((notes / "told.json").read_text())
    journals = [notes / "driver", notes / "raw", *notes.glob("effects-*")]
    found = check_home(home, journals, running=True)
    print("as left:", found.summary())
    await _touch_all(home, way)
    after = check_home(home, journals)
    print("opened again:", after.summary())
    problems = [*found.violations, *after.violations, *told["failures"]]
    problems += [
        f"{stream} lost events when it was opened again"
        for stream, log in found.logs.items()
        if after.logs[stream].lines[: len(log.lines)] != log.lines
    ]
    problems += _row_problems(told["swarms"]) + _prompt_problems(told["prompts"], after)
    rows = [row for swarm in told["swarms"] for row in swarm["rows"]]
    print(
        f"{len(told['swarms'])} swarms, {len(rows)} rows {dict(Counter(f'{row[3]} {row[4]}' for row in rows))}, "
        f"{sum(row[5] for row in rows)} interruptions; "
        f"{len(told['prompts'])} prompts {dict(Counter(str(one['state']) for one in told['prompts']))}; "
        f"raw {told['raw_events']} events, {told['raw_flushes']} flushes, {told['zombies']} zombies; "
        f"errors on the way {told['errors']} {told['unusual']}"
    )
    for stream, log in after.logs.items():
        types = Counter(json.loads(line)["type"] for line in log.lines)
        if types["turn/start"] != types["turn/end"] and stream[0].startswith("session_raw") is False:
            problems.append(f"{stream} has {types['turn/start']} turns and {types['turn/end']} ends")
    apart = [json.loads(log.lines[0])["time"] - log.header["created_at"] for log in after.logs.values() if log.lines]
    if not any(50_000 < abs(skew) < 1e9 for skew in apart):
        problems.append("no clock was off: nothing was shown of them")
    return problems


async def _touch_all(home: Path, way: dict[str, Any]) -> None:
    """What the next start does with every session and log that is wanted again."""
    store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=5, **way))
    try:
        logs = [Stream(*listed.stream) for listed in await open_store(home).list()]
        for session_id in dict.fromkeys(stream.session_id for stream in logs):
            await store.open_session(session_id, "touch")
        for stream in logs:
            await store.load(stream, is_live=False)
    finally:
        await store.close()


def _row_problems(swarms: list[dict[str, Any]]) -> list[str]:
    problems: list[str] = []
    for swarm in swarms:
        where = swarm["session_id"]
        if "error" in swarm:
            # The session's own log could not be written while the disk was full: told, and nothing was promised.
            if not swarm["error"]["code"].startswith("store."):
                problems.append(f"swarm of {where} ended with {swarm['error']}")
            continue
        if [row[0] for row in swarm["rows"]] != swarm["asked"]:
            problems.append(f"{where}: {len(swarm['asked'])} asked for, rows {[row[0] for row in swarm['rows']]}")
        agents = [row[1] for row in swarm["rows"] if row[1] is not None]
        if len(set(agents)) != len(agents):
            problems.append(f"{where}: two rows have one agent")
        problems += [
            f"{where}: row {row}"
            for row in swarm["rows"]
            if row[3] != "completed" and not str(row[4]).startswith("store.")
        ]
    return problems


def _prompt_problems(prompts: list[dict[str, Any]], report: Report) -> list[str]:
    problems: list[str] = []
    seen: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for one in prompts:
        if not one["accepted"]:
            continue
        stream = (one["session_id"], "main")
        if stream not in seen:
            seen[stream] = Counter()
            for line in report.logs[stream].lines if stream in report.logs else ():
                event = json.loads(line)
                if event["type"].startswith("prompt/"):
                    seen[stream][event["type"], event["data"].get("prompt_id", "")] += 1
        submitted = seen[stream]["prompt/submitted", one["prompt_id"]]
        completed = seen[stream]["prompt/completed", one["prompt_id"]]
        if submitted != 1 or completed > 1 or (one["state"] is not None and completed != 1):
            problems.append(f"{one}: {submitted} times submitted, {completed} times completed in its log")
    return problems
