"""Senders and a store whose every sync takes longer: commits are shared, flushes wait for about two of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from kimi_ray.events import make_event
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.faults import FaultyFs
from kimi_ray.store.seam import AppendResult, Batch, Store, StoreOptions, Stream
from kimi_ray.store.sender import Sender
from kimi_ray.store.write_controller import WriteController
from tests.unit.store_writer.test_with_jsonl import header

SESSIONS = 8


class Flushing:
    """Logs that append and flush in turn, all at once, and what that took."""

    def __init__(self, logs: int, flushes: int, events: int) -> None:
        self.logs = logs
        self.flushes = flushes
        self.events = events
        self.waits_s: list[float] = []
        self.wall_s = 0.0
        self.calls = 0
        self.lost = 0

    async def run(self, store: Store) -> None:
        """All of it, on this store."""

        async def append(batches: list[Batch], sync: bool) -> list[AppendResult]:
            return await store.append(batches, sync=sync)

        sender = Sender(append, store.put_blobs)
        writers: list[WriteController] = []
        for number in range(self.logs):
            session_id = f"session_{number % SESSIONS}"
            if number < SESSIONS:
                await store.open_session(session_id, "claim", workspace_id="wd_test_000000000000")
            stream = Stream(session_id, f"agent-{number}")
            grant = await store.open_writer(header(session_id) | {"agent_id": stream.agent_id}, "nonce")
            writers.append(
                WriteController(stream, epoch=grant.epoch, nonce="nonce", first_seq=grant.next_seq, sender=sender)
            )
        began = time.monotonic()
        await asyncio.gather(*(self._log(writer) for writer in writers))
        self.wall_s = time.monotonic() - began
        stats = sender.stats()
        self.calls, self.lost = stats["calls"], stats["calls_lost"]
        assert all(writer.durable_seq == self.flushes * self.events for writer in writers)
        await sender.close()

    async def _log(self, writer: WriteController) -> None:
        for _ in range(self.flushes):
            for _ in range(self.events):
                writer.enqueue(make_event(writer.next_seq, 1, "note/added", {"text": "x" * 100}))
            began = time.monotonic()
            await writer.flush()
            self.waits_s.append(time.monotonic() - began)

    def summary(self) -> str:
        """One line of figures."""
        waits = sorted(self.waits_s)
        rate = self.logs * self.flushes * self.events / self.wall_s
        return (
            f"{self.logs} logs: flush median {statistics.median(waits) * 1000:.1f} ms, "
            f"p95 {waits[len(waits) * 95 // 100] * 1000:.1f} ms, {len(waits) / self.wall_s:.0f} flushes/s, "
            f"{rate:.0f} events/s, {self.calls} calls"
        )


@pytest.mark.parametrize("delay_ms", [2, 10])
@pytest.mark.parametrize(("backend", "compression"), [("jsonl", "none"), ("jsonl", "zstd")])
async def test_flushes_of_many_logs_share_slow_syncs(
    tmp_path: Path, backend: str, compression: str, delay_ms: int
) -> None:
    fs = FaultyFs(sync_delay_s=delay_ms / 1000)
    options = StoreOptions(backend=backend, compression=compression)  # type: ignore[arg-type]
    store = await open_store_for_writing(str(tmp_path / "home"), options, fs=fs)
    load = Flushing(logs=64, flushes=6, events=5)
    before = sum(fs.calls.get(name, 0) for name in ("fsync", "fdatasync", "sync_dir"))
    await load.run(store)
    syncs = sum(fs.calls.get(name, 0) for name in ("fsync", "fdatasync", "sync_dir")) - before
    print(delay_ms, load.summary(), syncs, "syncs")
    one_by_one_s = 64 * 6 * delay_ms / 1000
    assert load.lost == 0
    assert load.wall_s < max(one_by_one_s, 2.0)  # generous: the machine is shared
    assert load.calls <= 6 * 8  # flushes that come together travel together
    await store.close()
