"""``fork``: the log of a long session is copied by the runtime's store, whole and durable when the call returns."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from kimi_ray.bench.event_streams import EVENTS_A_TURN
from kimi_ray.bench.floor import plain_copy
from kimi_ray.bench.fork_times import ForkTimes
from kimi_ray.bench.host_logs import HostLogs, bench_runtime, log_files
from kimi_ray.bench.large_log import build_session
from kimi_ray.bench.processes import Meter
from kimi_ray.bench.report import BenchReport
from kimi_ray.errors import KimiRayError
from kimi_ray.events import LogHeader, WriterRef
from kimi_ray.events.header import ParentRef
from kimi_ray.ids import MAIN, new_session_id, new_ulid
from kimi_ray.log import epoch_ms
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream
from kimi_ray.version import __version__


async def bench_fork(
    *,
    events: int = 200_000,
    flush_every: int = EVENTS_A_TURN,
    repeats: int = 3,
    backend: Literal["jsonl", "sqlite"] = "jsonl",
    compression: Literal["none", "zstd"] = "none",
    sync_delay_ms: float = 0.0,
    directory: str | None = None,
) -> BenchReport:
    """Seconds for a fork of a long log at its end, the median of some; and by how much memory grew meanwhile.

    The store is in this process, so its memory is this process's. The floor copies the bytes of the log's file and
    syncs them once (SQLite: of the whole database).

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
        source = Stream(session_id, MAIN)
        files = await asyncio.to_thread(log_files, home)
        host = HostLogs(runtime)
        times = ForkTimes()
        targets: list[Stream] = []
        with Meter() as meter:
            for _ in range(repeats):
                header = _header(source, count)
                claim = await host.claim(header.session_id)
                with times.one():
                    await host.call_store(header.session_id, "fork", source, count, header.to_data(), new_ulid())
                targets.append(Stream(header.session_id, MAIN))
                await host.call_store(header.session_id, "close_session", header.session_id, claim)
        floor_s = min([await asyncio.to_thread(plain_copy, files, directory) for _ in range(3)])
        await _check(home, source, targets, count)
    setting = {
        "events": count,
        "flush_every": flush_every,
        "backend": backend,
        "compression": compression,
        "sync_delay_ms": sync_delay_ms,
    }
    return times.report("fork", meter, floor_s, setting)


def _header(source: Stream, count: int) -> LogHeader:
    return LogHeader(
        session_id=new_session_id(),
        agent_id=MAIN,
        created_at=epoch_ms(),
        parent=ParentRef(session_id=source.session_id, agent_id=source.agent_id),
        seed_length=count,
        origin="fork",
        writer=WriterRef(name="kimi-ray bench", version=__version__),
    )


async def _check(home: str, source: Stream, targets: list[Stream], count: int) -> None:
    """See that each fork has the source's events: how many, and the last 50 byte for byte.

    Raises:
        KimiRayError: ``bench.incomplete``.
    """
    store = open_store(home)
    tail = (await store.read_from(source, max(0, count - 50), 50)).lines
    for target in targets:
        copied = await store.inspect(target)
        if copied.next_seq != count or (await store.read_from(target, max(0, count - 50), 50)).lines != tail:
            raise KimiRayError(f"the fork {target} is not its source", code="bench.incomplete")
