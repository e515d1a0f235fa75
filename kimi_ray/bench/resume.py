"""``resume``: a session with a long log comes back to life, and a long log is read at its end.

The parts are measured each by itself, all with warm file caches:

* activation: in a fresh process without Ray, ``workspace.resume`` and one prompt, until a model without latency has
  answered; all that a host does to bring an agent to life from its log is in it, and the flushes of that turn; not the
  start of Python and its imports;
* tail: a reader that has never seen the log gives its last 50 events;
* inspect: such a reader says where the log stands;
* read: such a reader pages through all events.

Activation, reading, and reading the tail run in processes of their own, whose peak memory is told: ``VmHWM`` of the
whole process, Python and imports included, and beside it what it was before the work began.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, Literal

from kimi_ray.bench.event_streams import EVENTS_A_TURN
from kimi_ray.bench.floor import read_once
from kimi_ray.bench.host_logs import bench_runtime, disk_bytes, log_files
from kimi_ray.bench.large_log import build_session
from kimi_ray.bench.processes import Meter, peak_rss_mb
from kimi_ray.bench.report import BenchReport
from kimi_ray.bench.workload import PLAIN_MODEL
from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.ids import MAIN
from kimi_ray.runtime import Runtime
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream

TAIL_EVENTS = 50
PROBE_BOUND_S = 600.0
Probe = Literal["read", "tail", "resume"]


async def bench_resume(
    *,
    events: int = 200_000,
    flush_every: int = EVENTS_A_TURN,
    backend: Literal["jsonl", "sqlite"] = "jsonl",
    compression: Literal["none", "zstd"] = "none",
    directory: str | None = None,
) -> BenchReport:
    """Seconds from ``resume`` of a long session to its next answer; and what reading costs.

    Args:
        events: Events of its log, in turns of 50.
        flush_every: Events of a batch.
        backend: How the store keeps them.
        compression: Of JSONL logs.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    settings: dict[str, Any] = {"backend": backend, "compression": compression}
    async with bench_runtime("in-process", directory, settings) as runtime:
        home = runtime.config.home
        began = time.perf_counter()
        session_id, count = await build_session(runtime, events, flush_every)
        build_s = time.perf_counter() - began
        files = await asyncio.to_thread(log_files, home)
        stored = await asyncio.to_thread(disk_bytes, home)
        floor_s = min([await asyncio.to_thread(read_once, files) for _ in range(3)])
        await runtime.close()
        with Meter() as meter:
            began = time.perf_counter()
            read = await _probe("read", home, session_id)
            tail = await _probe("tail", home, session_id)
            resumed = await _probe("resume", home, session_id)
            wall_s = time.perf_counter() - began
    if read["events"] != count or tail["events"] != TAIL_EVENTS:
        raise KimiRayError(f"{read['events']} of {count} events were read", code="bench.incomplete")
    return BenchReport(
        bench="resume",
        value=resumed["s"],
        unit="s",
        floor=floor_s,
        ratio=resumed["s"] / floor_s,
        wall_s=wall_s,
        cpu_s=read["cpu_s"] + tail["cpu_s"] + resumed["cpu_s"],
        peak_pss_mb=max(meter.peak_pss_mb, resumed["peak_mb"]),
        figures={
            "events": count,
            "flush_every": flush_every,
            "backend": backend,
            "compression": compression,
            "bytes": stored,
            "tail_ms": tail["s"] * 1000,
            "inspect_ms": tail["inspect_s"] * 1000,
            "read_s": read["s"],
            "read_cpu_s": read["cpu_s"],
            "resumed_s": resumed["resumed_s"],
            "resume_cpu_s": resumed["cpu_s"],
            "resume_peak_mb": resumed["peak_mb"],
            "resume_before_mb": resumed["before_mb"],
            "read_peak_mb": read["peak_mb"],
            "tail_peak_mb": tail["peak_mb"],
            "read_before_mb": read["before_mb"],
            "build_s": build_s,
        },
    )


async def _probe(what: Probe, home: str, session_id: str) -> dict[str, Any]:
    program = f"from kimi_ray.bench.resume import probe_main; probe_main({what!r}, {home!r}, {session_id!r})"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KIMI_RAY_HOME": home},
        start_new_session=True,  # Ctrl-C is the bench's, which then ends it
    )
    try:
        async with asyncio.timeout(PROBE_BOUND_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    told: dict[str, Any] = json.loads(out) if out else {}
    if "error" in told or process.returncode != 0:
        raise error_from_data(told.get("error", {"code": "bench.incomplete", "message": f"{what} failed"}))
    return told


def probe_main(what: Probe, home: str, session_id: str) -> None:
    """What one process of the bench does; prints its figures as JSON."""
    try:
        told = asyncio.run(_PROBES[what](home, session_id))
    except KimiRayError as error:
        told = {"error": error.to_data()}
    sys.stdout.write(json.dumps(told))


async def _read(home: str, session_id: str) -> dict[str, Any]:
    before_mb, cpu_s, began = peak_rss_mb(), time.process_time(), time.perf_counter()
    store = open_store(home)
    count = 0
    while lines := (await store.read_from(Stream(session_id, MAIN), count, 2000)).lines:
        count += len(lines)
    return {"events": count, "before_mb": before_mb, **_spent(began, cpu_s)}


async def _tail(home: str, session_id: str) -> dict[str, Any]:
    """The best of some: each with a reader of its own, after one that pays for imports."""
    stream = Stream(session_id, MAIN)
    cpu_s, count, walls, inspects = time.process_time(), 0, list[float](), list[float]()
    for _ in range(6):
        began = time.perf_counter()
        view = await open_store(home).inspect(stream)
        read = time.perf_counter()
        count = len((await open_store(home).read_from(stream, view.next_seq - TAIL_EVENTS, TAIL_EVENTS)).lines)
        walls.append(time.perf_counter() - read)
        inspects.append(read - began)
    spent = _spent(0.0, cpu_s)
    return {**spent, "events": count, "s": sorted(walls[1:])[2], "inspect_s": sorted(inspects[1:])[2]}


async def _resume(home: str, session_id: str) -> dict[str, Any]:
    identity = open_store(home).identity
    stored: dict[str, Any] = {"backend": identity.backend, "compression": identity.compression}
    async with Runtime.connect(home=home, address="in-process", **stored) as runtime:
        workspace = runtime.workspace(home)
        # Modules are loaded and threads are up before the clock starts.
        first = await workspace.create_session(model=PLAIN_MODEL)
        (await (await first.main.submit("look")).result()).raise_for_state()
        before_mb, cpu_s, began = peak_rss_mb(), time.process_time(), time.perf_counter()
        session = await workspace.resume(session_id)
        resumed_s = time.perf_counter() - began
        (await (await session.main.submit("look")).result()).raise_for_state()
        return {**_spent(began, cpu_s), "resumed_s": resumed_s, "before_mb": before_mb}


def _spent(began: float, cpu_s: float) -> dict[str, Any]:
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s, "peak_mb": peak_rss_mb()}


_PROBES = {"read": _read, "tail": _tail, "resume": _resume}
