"""``loss``: what a killed process loses, and what a power cut after it could, measured by doing it.

A child process is host and store in one: it appends an event each millisecond to a real log, or runs an agent that
calls a tool. It is killed with SIGKILL at a random moment, then its home is read:

* *killed*: what the kernel had is kept, as after the death of a process;
* *power cut*: every file is first cut to the size that it had at its last sync, the worst that a disk may leave.

What is counted are events appended, or for agents effects of a tool and their ``tool/call``. ``lost`` of them are not
in the log; ``lost_ms`` is the age of the oldest such at the moment of the kill, which ``write_window_ms`` and
``sync_interval_ms`` bound; ``promised_lost`` are those among them that had been promised (by a flush, by a checkpoint,
by the end of a turn), which must be nought wherever a mode makes a promise.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kimi_ray.bench.loss_child import SYNCED_NAME, Tally
from kimi_ray.bench.processes import Meter
from kimi_ray.bench.report import BenchReport
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError
from kimi_ray.settings import Checkpoint, Durability
from kimi_ray.store import open_store

START_BOUND_S = 60.0
LONGEST_RUN_S = 2.2
"""Kills fall anywhere between the first event and this: inside the first window, and after several syncs."""

Work = Literal["background", "flushes", "agent"]


@dataclass(frozen=True)
class Case:
    """How the child runs. ``checkpoint`` counts for agents only."""

    work: Work
    durability: Durability
    checkpoint: Checkpoint = "request"

    @property
    def name(self) -> str:
        """Its key in the report."""
        return f"{self.durability} {self.checkpoint if self.work == 'agent' else self.work}"


CASES = (
    Case("background", "disk"),
    Case("flushes", "disk"),
    Case("background", "os"),
    Case("flushes", "os"),
    Case("agent", "disk", "request"),
    Case("agent", "disk", "turn"),
    Case("agent", "disk", "none"),
)


@dataclass
class Loss:
    """The worst of some kills; times in milliseconds."""

    kills: int = 0
    lost: int = 0
    lost_ms: float = 0.0
    promised_lost: int = 0
    power_lost: int = 0
    power_lost_ms: float = 0.0
    power_promised_lost: int = 0


async def bench_loss(
    *, kills: int = 10, seed: int | None = None, cases: Sequence[Case] = CASES, directory: str | None = None
) -> BenchReport:
    """The worst loss of some kills for each case.

    ``value`` is the longest loss of a killed process in any case, its floor the window that bounds it.

    Args:
        kills: Of each case.
        seed: Of the moments; None draws one, which the report tells.
        cases: Which.
        directory: On whose disk the homes are; None is the temporary directory's.
    """
    seed = random.randrange(1 << 32) if seed is None else seed
    dice = random.Random(seed)
    window_ms = float(RuntimeConfig.model_fields["write_window_ms"].default)
    losses: dict[str, Loss] = {}
    began = time.perf_counter()
    with Meter() as meter:
        for case in cases:
            loss = losses[case.name] = Loss()
            for _ in range(kills):
                await _kill_one(case, dice.uniform(0.0, LONGEST_RUN_S), loss, directory)
    worst = max(losses[case.name].lost_ms for case in cases)
    return BenchReport(
        bench="loss",
        value=worst,
        unit="ms",
        floor=window_ms,
        ratio=worst / window_ms,
        wall_s=time.perf_counter() - began,
        cpu_s=meter.cpu_s,
        peak_pss_mb=meter.peak_pss_mb,
        figures={
            "kills": kills,
            "seed": seed,
            "write_window_ms": window_ms,
            "sync_interval_ms": RuntimeConfig.model_fields["sync_interval_ms"].default,
            "cases": {name: _told(loss) for name, loss in losses.items()},
        },
    )


def _told(loss: Loss) -> dict[str, Any]:
    return {key: round(value, 1) for key, value in vars(loss).items()}


async def _kill_one(case: Case, after_s: float, loss: Loss, directory: str | None) -> None:
    home = tempfile.mkdtemp(prefix="kimi-ray-bench-", dir=directory)
    try:
        tally = Tally.create(f"{home}/tally")
        arguments = (home, case.work, case.durability, case.checkpoint)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"from kimi_ray.bench.loss_child import main; main(*{arguments!r})",
            start_new_session=True,  # Ctrl-C is the bench's, which then ends it
        )
        try:
            await _has_begun(process, tally)
            await asyncio.sleep(after_s)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            await process.wait()
        loss.kills += 1
        stored = await _stored(home, case.work)
        loss.lost = max(loss.lost, tally.done - stored)
        loss.lost_ms = max(loss.lost_ms, tally.age_ms(stored, killed_at))
        loss.promised_lost += max(0, tally.promised - stored)
        await asyncio.to_thread(_cut_power, home)
        stored = await _stored(home, case.work)
        loss.power_lost = max(loss.power_lost, tally.done - stored)
        loss.power_lost_ms = max(loss.power_lost_ms, tally.age_ms(stored, killed_at))
        loss.power_promised_lost += max(0, tally.promised - stored)
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _has_begun(process: asyncio.subprocess.Process, tally: Tally) -> None:
    deadline = time.monotonic() + START_BOUND_S
    while tally.done == 0:
        if process.returncode is not None or time.monotonic() > deadline:
            raise KimiRayError("the process to be killed did not begin", code="bench.incomplete")
        await asyncio.sleep(0.01)


async def _stored(home: str, work: Work) -> int:
    """How many events the one log has, or of an agent's how many ``tool/call``; 0 when there is no log."""
    store = open_store(home)
    count = 0
    for listed in await store.list():
        seq = 0
        while listed.error is None and (lines := (await store.read_from(listed.stream, seq, 5000)).lines):
            seq += len(lines)
            count += len(lines) if work != "agent" else sum(b'"type":"tool/call"' in line for line in lines)
    return count


def _cut_power(home: str) -> None:
    """Cut every log to what its last sync covered; a file that no sync covered is empty."""
    synced: dict[int, int] = {}
    notes = f"{home}/{SYNCED_NAME}"
    if os.path.exists(notes):
        with open(notes, "rb") as file:
            for line in file.read().rpartition(b"\n")[0].splitlines():
                inode, size = line.split()
                synced[int(inode)] = int(size)
    for place, _, names in os.walk(f"{home}/sessions"):
        for name in names:
            path = os.path.join(place, name)
            found = os.stat(path)
            if name.startswith("wire."):
                os.truncate(path, min(found.st_size, synced.get(found.st_ino, 0)))
