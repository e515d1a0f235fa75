"""``session-fork``: a whole session with a long log is forked through the public API."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from kimi_ray.bench.event_streams import EVENTS_A_TURN
from kimi_ray.bench.floor import plain_copy
from kimi_ray.bench.fork_times import ForkTimes
from kimi_ray.bench.host_logs import bench_runtime, log_files
from kimi_ray.bench.large_log import build_session
from kimi_ray.bench.processes import Meter
from kimi_ray.bench.report import BenchReport
from kimi_ray.errors import KimiRayError
from kimi_ray.ids import MAIN
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream


async def bench_session_fork(
    *,
    events: int = 200_000,
    flush_every: int = EVENTS_A_TURN,
    repeats: int = 3,
    backend: Literal["jsonl", "sqlite"] = "jsonl",
    compression: Literal["none", "zstd"] = "none",
    sync_delay_ms: float = 0.0,
    directory: str | None = None,
) -> BenchReport:
    """Seconds for ``runtime.forks.publish`` of a cold session, the median of some; and by how much memory grew.

    The whole source is read for the plan, copied and published; a fork by its last turn but one and a fork that comes
    to life (``workspace.fork``, which reads the copy into memory) are told beside it. All hosts are in this process, so
    the memory is that of all of them. The floor copies the bytes of the log's file and syncs them once (SQLite: of the
    whole database).

    Args:
        events: Events of the log, in turns of 50.
        flush_every: Events of a batch.
        repeats: How many forks, one after the other.
        backend: How the store keeps them.
        compression: Of JSONL logs.
        sync_delay_ms: Milliseconds that every sync takes in addition, while forks are made.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    settings: dict[str, Any] = {"backend": backend, "compression": compression}
    if sync_delay_ms:
        settings["fs_spec"] = f"sync_delay_ms={sync_delay_ms:g}"
    async with bench_runtime("in-process", directory, settings) as runtime:
        home = runtime.config.home
        session_id, count = await build_session(runtime, events, events if sync_delay_ms else flush_every)
        files = await asyncio.to_thread(log_files, home)
        times = ForkTimes()
        forks: list[str] = []
        with Meter() as meter:
            for _ in range(repeats):
                with times.one():
                    (fork,) = await runtime.forks.publish(session_id)
                forks.append(fork.id)
        began = time.perf_counter()
        (early,) = await runtime.forks.publish(session_id, at="0")
        early_s = time.perf_counter() - began
        began = time.perf_counter()
        live = await runtime.workspace(home).fork(session_id)
        live_s = time.perf_counter() - began
        await live.close()
        floor_s = min([await asyncio.to_thread(plain_copy, files, directory) for _ in range(3)])
        await _check(home, session_id, [*forks, live.id], count)
        assert early.forked_from is not None
    setting = {
        "events": count,
        "flush_every": flush_every,
        "backend": backend,
        "compression": compression,
        "sync_delay_ms": sync_delay_ms,
    }
    return times.report("session-fork", meter, floor_s, setting, at_turn_0_s=early_s, live_s=live_s)


async def _check(home: str, source: str, forks: list[str], count: int) -> None:
    """See that each fork has the source's events, the last 50 byte for byte.

    Raises:
        KimiRayError: ``bench.incomplete``.
    """
    store = open_store(home)
    first = max(0, count - 50)
    tail = (await store.read_from(Stream(source, MAIN), first, 50)).lines
    for fork in forks:
        copied = await store.inspect(Stream(fork, MAIN))
        lines = (await store.read_from(Stream(fork, MAIN), first, count - first)).lines
        if copied.next_seq < count + 2 or lines != tail:
            raise KimiRayError(f"the fork {fork} is not its source", code="bench.incomplete")
