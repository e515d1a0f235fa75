"""``append``: events from the log in memory to the store's acknowledgement, on the way that an agent host takes.

What is measured is one host: this process opens the logs as a host does (claim, grant, ``EventLog``, write controller,
one sender), appends, and flushes every so many events; the store is the runtime's own, a process of its own under Ray.
So a figure holds the check, copy, encoding and fold of every event, its way through the call, the write and the sync.
A node with more CPUs has more hosts before the one store. Opening and closing the logs is not in the time; making the
files is, since a log becomes a file with its first batch.

Everything that was acknowledged is read back and counted, or the bench fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from kimi_ray.bench.event_streams import append_small
from kimi_ray.bench.floor import StoredStream, plain_writes
from kimi_ray.bench.host_logs import HostLogs, bench_runtime, disk_bytes
from kimi_ray.bench.large_log import PROFILE
from kimi_ray.bench.processes import Meter
from kimi_ray.bench.report import BenchReport
from kimi_ray.bench.workload import PLAIN_MODEL
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.agent_services import OpenedLog
from kimi_ray.runtime import Runtime
from kimi_ray.store import open_store

WARM_UP_SESSIONS = 2


class _Run:
    """One repeat: its logs, what it took, what it cost."""

    def __init__(self, logs: list[OpenedLog]) -> None:
        self.logs = logs
        self.wall_s = 0.0
        self.append_cpu_s = 0.0

    async def append(self, events: int, flush_every: int) -> None:
        async def one(opened: OpenedLog) -> None:
            for start in range(0, events, flush_every):
                began = time.thread_time()
                append_small(opened.log, min(flush_every, events - start))
                self.append_cpu_s += time.thread_time() - began
                await opened.controller.flush()

        began = time.perf_counter()
        await asyncio.gather(*map(one, self.logs))
        self.wall_s = time.perf_counter() - began


async def bench_append(
    *,
    sessions: int = 20,
    events: int = 1000,
    flush_every: int = 50,
    repeats: int = 5,
    backend: Literal["jsonl", "sqlite"] = "jsonl",
    compression: Literal["none", "zstd"] = "none",
    sync_delay_ms: float = 0.0,
    address: str | None = None,
    directory: str | None = None,
) -> BenchReport:
    """Durable events per second through one host and the store: the median of some repeats, each with new sessions.

    Args:
        sessions: How many logs, all flushed at the same time.
        events: Events of each.
        flush_every: Events of a log between two flushes.
        repeats: How often; each is followed by its floor.
        backend: How the store keeps them.
        compression: Of JSONL logs.
        sync_delay_ms: Milliseconds that every sync takes in addition, here and in the floor.
        address: Where to run; None is a local Ray, ``in-process`` has the store in this process too.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    settings: dict[str, Any] = {"backend": backend, "compression": compression}
    if sync_delay_ms:
        settings["fs_spec"] = f"sync_delay_ms={sync_delay_ms:g}"
    total = sessions * events
    async with bench_runtime(address, directory, settings) as runtime:
        await _settle(runtime)
        host = HostLogs(runtime)
        warm = _Run([await host.create() for _ in range(WARM_UP_SESSIONS)])
        await warm.append(flush_every, flush_every)
        runs: list[_Run] = []
        floors: list[float] = []
        cpu_s = peak_pss_mb = 0.0
        cpu_by_role: dict[str, float] = {}
        counters, calls = await host.store_stats(), host.append_calls()
        for _ in range(repeats):
            run = _Run(await asyncio.gather(*(host.create() for _ in range(sessions))))
            with Meter() as meter:
                await run.append(events, flush_every)
            runs.append(run)
            floors.append(await asyncio.to_thread(_floor, run, events, flush_every, sync_delay_ms, directory))
            cpu_s += meter.cpu_s
            peak_pss_mb = max(peak_pss_mb, meter.peak_pss_mb)
            for role, used in meter.cpu_by_role.items():
                cpu_by_role[role] = round(cpu_by_role.get(role, 0.0) + used, 2)
        counters = {key: value - counters[key] for key, value in (await host.store_stats()).items()}
        calls = host.append_calls() - calls
        await host.close()
        await _check(runtime.config.home, [(warm, flush_every), *((run, events) for run in runs)])
        line_bytes = len(runs[0].logs[0].log.last.line) + 1 if runs[0].logs[0].log.last is not None else 0
        home = runtime.config.home
        stored = await asyncio.to_thread(disk_bytes, home)
    per_run = stored * total // (repeats * total + WARM_UP_SESSIONS * flush_every)
    wall_s, floor_s = median(run.wall_s for run in runs), median(floors)
    return BenchReport(
        bench="append",
        value=total / wall_s,
        unit="events/s",
        floor=total / floor_s,
        ratio=floor_s / wall_s,
        wall_s=wall_s,
        cpu_s=cpu_s / repeats,
        peak_pss_mb=peak_pss_mb,
        figures={
            "sessions": sessions,
            "events": events,
            "flush_every": flush_every,
            "backend": backend,
            "compression": compression,
            "sync_delay_ms": sync_delay_ms,
            "repeats": repeats,
            "slowest": total / max(run.wall_s for run in runs),
            "fastest": total / min(run.wall_s for run in runs),
            "cpu_by_role": {role: round(used / repeats, 3) for role, used in cpu_by_role.items()},
            "append_us_per_event": median(run.append_cpu_s for run in runs) / total * 1e6,
            "bytes": per_run,
            "bytes_per_event": per_run / total,
            "line_bytes": line_bytes,
            "actor_calls": calls / repeats,
            "commits": counters["commits"] / repeats,
            "syncs": counters["syncs"] / repeats,
        },
    )


async def _settle(runtime: Runtime) -> None:
    """Have the runtime's own hosts up and idle: the start of their processes would be measured."""
    session = await runtime.workspace(runtime.config.home).create_session(profile=PROFILE, model=PLAIN_MODEL)
    await session.close()
    await runtime.connection.actor_calls()


def _floor(run: _Run, events: int, flush_every: int, sync_delay_ms: float, directory: str | None) -> float:
    """The bytes of one repeat by a plain loop, with the same flushes; a flush of all logs is waited for once."""
    last = run.logs[0].log.last
    line = b"" if last is None else last.line + b"\n"
    flushes = -(-events // flush_every)
    return plain_writes(
        [StoredStream(line * events, flushes)] * len(run.logs), directory, sync_delay_s=sync_delay_ms / 1000
    )


async def _check(home: str, runs: list[tuple[_Run, int]]) -> None:
    """See that every log holds its events, read by a fresh reader.

    Raises:
        KimiRayError: ``bench.incomplete``.
    """
    store = open_store(home)
    for run, events in runs:
        for opened in run.logs:
            stream = opened.controller.stream
            found = 0
            while lines := (await store.read_from(stream, found, 5000)).lines:
                found += _in_order(lines, found)
            if found != events:
                raise KimiRayError(f"{found} of {events} events of {stream} are stored", code="bench.incomplete")


def _in_order(lines: Sequence[bytes], first: int) -> int:
    """How many lines there are, which must be event ``first`` and those after it."""
    for seq, line in enumerate(lines, first):
        if not line.startswith(b'{"seq":%d,' % seq):
            raise KimiRayError(f"where event {seq} belongs stands {line[:40]!r}", code="bench.incomplete")
    return len(lines)
