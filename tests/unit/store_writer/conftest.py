"""A clock that only tests move, a small model of a store, and a rig that puts a sender and its logs between them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, RuntimeFault, StoreError
from kimi_ray.events import SessionEvent, make_event
from kimi_ray.store.chunk_rows import unpack_row
from kimi_ray.store.host_budget import HostBudget
from kimi_ray.store.seam import AppendResult, Batch, Stream
from kimi_ray.store.sender import Sender
from kimi_ray.store.write_controller import WriteController
from kimi_ray.store.writer_settings import WriterSettings

DISK = StoreError("no space", code="store.disk_full")
GONE = RuntimeFault("the store's actor died", code="infra.actor_died")


def task_of(coroutine: Any) -> asyncio.Task[Any]:
    """The coroutine as a task, begun at the next await."""
    return asyncio.get_running_loop().create_task(coroutine)


async def refused(task: asyncio.Future[Any], rig: Any) -> KimiRayError:
    """The error with which a task has ended."""
    with pytest.raises(KimiRayError) as caught:
        await rig.done(task)
    return caught.value


async def settle() -> None:
    """Let every task run until it waits for the clock or for a gate."""
    for _ in range(30):
        await asyncio.sleep(0)


class FakeAlarm:
    def __init__(self, at: float, callback: Callable[[], object]) -> None:
        self.at = at
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0
        self.count = 0
        self.heap: list[tuple[float, int, FakeAlarm]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> FakeAlarm:
        assert delay_s >= 0
        alarm = FakeAlarm(self.time + delay_s, callback)
        self.count += 1
        heapq.heappush(self.heap, (alarm.at, self.count, alarm))
        return alarm

    @property
    def alarms(self) -> int:
        return sum(alarm.callback is not None for _, _, alarm in self.heap)

    async def advance(self, seconds: float) -> None:
        end = self.time + seconds + 1e-9
        await settle()
        while self.heap and self.heap[0][0] <= end:
            at, _, alarm = heapq.heappop(self.heap)
            if alarm.callback is not None:
                self.time = max(self.time, at)
                alarm.callback()
                await settle()
        self.time = end


class StoredLog:
    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.durable = 0
        self.epoch = 1


class FakeStore:
    """The promises of the seam in a page: overlap compared, gaps and old grants refused, unsynced lines can be lost."""

    def __init__(self) -> None:
        self.logs: dict[Stream, StoredLog] = {}
        self.blobs: dict[str, bytes] = {}
        self.calls: list[tuple[list[Batch], bool]] = []
        self.blob_calls: list[dict[str, bytes]] = []
        self.trace: list[tuple[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.blob_gate = asyncio.Event()
        self.blob_gate.set()
        self.failures: list[BaseException] = []
        self.blob_failures: list[BaseException] = []
        self.down: BaseException | None = None
        self.refusals: dict[Stream, list[StoreError]] = {}
        self.in_flight = 0
        self.most_in_flight = 0

    def log(self, stream: Stream) -> StoredLog:
        return self.logs.setdefault(stream, StoredLog())

    def restart(self) -> None:
        """Come back with only what was synced."""
        for log in self.logs.values():
            del log.lines[log.durable :]

    async def append(self, batches: list[Batch], sync: bool) -> list[AppendResult]:
        self.calls.append((batches, sync))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            if self.down is not None:
                raise self.down
            return self.apply(batches, sync)
        finally:
            self.in_flight -= 1

    def apply(self, batches: list[Batch], sync: bool) -> list[AppendResult]:
        assert len({batch.stream for batch in batches}) == len(batches)
        return [self.apply_one(batch, sync) for batch in batches]

    def apply_one(self, batch: Batch, sync: bool) -> AppendResult:
        log = self.log(batch.stream)
        self.trace.append(("batch", batch))
        refusals = self.refusals.get(batch.stream)
        if refusals:
            return self._error(log, batch, refusals.pop(0))
        if batch.epoch != log.epoch:
            return self._error(log, batch, StoreError("old grant", code="store.fenced"))
        if batch.first_seq > len(log.lines):
            gap = StoreError("hole", code="store.gap", details={"expected": len(log.lines)}, retryable=True)
            return self._error(log, batch, gap)
        for at, line in enumerate(lines_of(batch), batch.first_seq):
            if at < len(log.lines):
                if log.lines[at] != line:
                    return self._error(log, batch, StoreError("different", code="store.conflict"))
            else:
                log.lines.append(line)
        if sync:
            log.durable = len(log.lines)
        return AppendResult(batch.stream, len(log.lines), log.durable)

    def _error(self, log: StoredLog, batch: Batch, error: StoreError) -> AppendResult:
        return AppendResult(batch.stream, len(log.lines), log.durable, error.to_data())

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        self.blob_calls.append(blobs)
        await self.blob_gate.wait()
        if self.blob_failures:
            raise self.blob_failures.pop(0)
        self.trace.append(("blobs", tuple(blobs)))
        self.blobs.update(blobs)


def lines_of(batch: Batch) -> list[bytes]:
    payload = bytes(batch.payload)
    assert len(batch.row_bytes) == len(batch.row_events) and sum(batch.row_bytes) == len(payload)
    lines: list[bytes] = []
    start = 0
    for size, count in zip(batch.row_bytes, batch.row_events, strict=True):
        row = payload[start : start + size]
        start += size
        assert row.endswith(b"\n") and row.count(b"\n") == 1
        unpacked = unpack_row(row[:-1])
        assert len(unpacked) == count
        lines += unpacked
    return lines


class Log:
    """A log with its controller: appends numbered events and remembers their bytes."""

    def __init__(self, rig: Rig, stream: Stream, **options: Any) -> None:
        self.lines: list[bytes] = []
        self.fenced: list[KimiRayError] = []
        self.failures: list[KimiRayError] = []
        self.writer = WriteController(
            stream,
            epoch=1,
            nonce="writer",
            first_seq=0,
            sender=rig.sender,
            on_fenced=self.fenced.append,
            on_failure=self.failures.append,
            **options,
        )

    @property
    def stream(self) -> Stream:
        return self.writer.stream

    def event(self, size: int = 0) -> SessionEvent:
        seq = len(self.lines)
        return make_event(seq, 1_700_000_000_000 + seq, "note/added", {"text": f"n{seq}" + "x" * size})

    def add(self, count: int = 1, *, size: int = 0) -> None:
        for _ in range(count):
            event = self.event(size)
            self.lines.append(event.line)
            self.writer.enqueue(event)


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.store = FakeStore()
        self.settings = WriterSettings(**settings)
        self.budget = HostBudget(self.settings.host_max_bytes)
        self.sender = Sender(
            self.store.append, self.store.put_blobs, settings=self.settings, clock=self.clock, budget=self.budget
        )
        self.logs: list[Log] = []

    def log(self, name: str = "s", **options: Any) -> Log:
        log = Log(self, Stream(name, "main"), **options)
        self.logs.append(log)
        return log

    async def advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def settle(self) -> None:
        await settle()

    def batches(self) -> list[tuple[int, int, bool]]:
        """``(first seq, next seq, sync)`` of every batch of every call."""
        return [(batch.first_seq, batch.next_seq, sync) for call, sync in self.store.calls for batch in call]

    def stored(self, log: Log) -> list[bytes]:
        return self.store.log(log.stream).lines

    def durable(self, log: Log) -> int:
        return self.store.log(log.stream).durable

    async def done(self, task: asyncio.Future[Any]) -> Any:
        await settle()
        assert task.done(), "still waiting"
        return task.result()


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    return Rig


@pytest.fixture
async def rig() -> Rig:
    return Rig()
