"""Group commit: write everything that waits, then sync each stream in a pool, and answer as each sync returns.

One thread writes, so a commit is a handful of small writes into the page cache; the next commit is written while the
syncs of the last still run. ``SyncStrategy`` is the seam for another way to make many files durable.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kimi_ray.errors import KimiRayError, as_error
from kimi_ray.store.seam import AppendResult, Batch
from kimi_ray.store.stream_log import MAX_UNSYNCED_BYTES, StreamLog

MAX_COMMIT_BYTES = 32 << 20
MAX_COMMIT_STREAMS = 2000
SYNC_THREADS = 32


class SyncStrategy(Protocol):
    """How jobs that block on the disk are run at once."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon, in a thread; it must not raise."""
        ...

    def close(self) -> None:
        """Finish what was submitted."""
        ...


class ThreadPoolSync:
    """Up to ``limit`` threads that take jobs from one queue; threads start only while all others are busy."""

    def __init__(self, limit: int = SYNC_THREADS) -> None:
        self._limit = limit
        self._jobs: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """See ``SyncStrategy.submit``."""
        with self._condition:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._condition.notify()
            elif len(self._threads) < self._limit:
                thread = threading.Thread(target=self._run, name=f"store-sync-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """See ``SyncStrategy.close``."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        condition, jobs = self._condition, self._jobs
        while True:
            with condition:
                while not jobs:
                    if self._closed:
                        return
                    self._idle += 1
                    condition.wait()
                    self._idle -= 1
                job = jobs.popleft()
            job()


class AppendJob:
    """One ``append``: its batches, its answers, and how many of them are still open."""

    __slots__ = ("answers", "batches", "future", "logs", "open", "size", "sync")

    def __init__(
        self,
        batches: list[Batch],
        logs: list[StreamLog | KimiRayError],
        future: asyncio.Future[list[AppendResult]],
        *,
        sync: bool,
    ) -> None:
        self.batches = batches
        self.logs = logs
        self.future = future
        self.sync = sync
        self.open = len(batches)
        self.answers: list[AppendResult | None] = [None] * len(batches)
        self.size = sum(len(batch.payload) for batch in batches)


Waiter = tuple[AppendJob, int]


class Committer:
    """Accepts appends of any number of callers and commits them in groups. Lives on one event loop."""

    def __init__(self, *, strategy: SyncStrategy | None = None, sync_interval_s: float = 1.0) -> None:
        """
        Args:
            strategy: How syncs run; None takes ``ThreadPoolSync``.
            sync_interval_s: Seconds after which bytes are synced that nobody waits for.
        """
        self._strategy = strategy or ThreadPoolSync()
        self._interval = sync_interval_s
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._waiting: deque[AppendJob] = deque()
        self._writing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished: deque[tuple[Waiter, AppendResult]] = deque()
        self._scheduled = False
        self._wake_lock = threading.Lock()
        self._unsynced: set[StreamLog] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._open_jobs: set[asyncio.Future[list[AppendResult]]] = set()
        self.commits = self.syncs = self.events = self.bytes = 0

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait to be written."""
        return sum(job.size for job in self._waiting)

    async def append(
        self, batches: list[Batch], logs: list[StreamLog | KimiRayError], *, sync: bool
    ) -> list[AppendResult]:
        """Commit these batches; an error in ``logs`` is the answer for its batch."""
        if not batches:
            return []
        loop = self._loop = asyncio.get_running_loop()
        job = AppendJob(batches, logs, loop.create_future(), sync=sync)
        self._open_jobs.add(job.future)
        job.future.add_done_callback(self._open_jobs.discard)
        self._waiting.append(job)
        self._kick()
        # what was accepted is finished, also when the caller goes away
        return await asyncio.shield(job.future)

    def _kick(self) -> None:
        if self._writing or not self._waiting or self._loop is None:
            return
        group: list[AppendJob] = []
        size = streams = 0
        while self._waiting:
            job = self._waiting[0]
            size += job.size
            streams += len(job.batches)
            if group and (size > MAX_COMMIT_BYTES or streams > MAX_COMMIT_STREAMS):
                break
            group.append(self._waiting.popleft())
        self._writing = True
        self.commits += 1
        self._loop.run_in_executor(self._writer, self._write, group).add_done_callback(self._written)

    def _written(self, done: asyncio.Future[None]) -> None:
        self._writing = False
        if not done.cancelled():
            done.result()
        self._kick()

    def _write(self, group: list[AppendJob]) -> None:
        """In the writer thread: one write per stream, then hand each stream to the pool."""
        per_log: dict[StreamLog, list[Waiter]] = {}
        for job in group:
            for index, log in enumerate(job.logs):
                if isinstance(log, StreamLog):
                    per_log.setdefault(log, []).append((job, index))
                else:
                    self._answer((job, index), _failed(job.batches[index], log))
        # All writes come before the first sync: a journal that commits meanwhile would hold up the writes behind it.
        to_sync: list[StreamLog] = []
        for log, waiters in per_log.items():
            if not log.born or log.poisoned is not None:
                self._strategy.submit(lambda log=log, waiters=waiters: self._create_stream(log, waiters))
            elif self._write_stream(log, waiters):
                to_sync.append(log)
        for log in to_sync:
            self._strategy.submit(lambda log=log: self._sync_stream(log))

    def _create_stream(self, log: StreamLog, waiters: list[Waiter]) -> None:
        if self._write_stream(log, waiters):
            self._sync_stream(log)

    def _write_stream(self, log: StreamLog, waiters: list[Waiter]) -> bool:
        """Write, and answer who does not wait for a sync; whether the caller must have the stream synced."""
        try:
            with log.lock:
                errors = log.write([job.batches[index] for job, index in waiters])
                written, durable = log.next_seq, log.durable_seq
                start_sync = False
                for waiter, error in zip(waiters, errors, strict=True):
                    job, index = waiter
                    batch = job.batches[index]
                    if error is not None:
                        self._answer(waiter, _failed(batch, error, written, durable))
                        continue
                    self.events += sum(batch.row_events)
                    self.bytes += len(batch.payload)
                    if not job.sync or batch.next_seq <= durable:
                        self._answer(waiter, AppendResult(batch.stream, written, durable))
                    else:
                        log.waiters.append((batch.next_seq, waiter))
                        start_sync = True
                start_sync = (start_sync or log.unsynced_bytes > MAX_UNSYNCED_BYTES) and not log.sync_running
                if start_sync:
                    log.sync_running = True
                elif durable < written and not log.sync_running:
                    self._sync_later(log)
            return start_sync
        except Exception as error:  # noqa: BLE001  recorded as the answer of every batch of this stream
            failure = as_error(error, code="store.io_failed")
            for job, index in waiters:
                self._answer((job, index), _failed(job.batches[index], failure))
            return False

    def _sync_stream(self, log: StreamLog) -> None:
        """In a pool thread: sync until nobody waits."""
        while True:
            error: KimiRayError | None = None
            try:
                log.sync()
                self.syncs += 1
            except Exception as failure:  # noqa: BLE001  recorded as the answer of everybody who waits
                error = as_error(failure, code="store.io_failed")
            with log.lock:
                written, durable = log.next_seq, log.durable_seq
                ready = log.waiters if error is not None else [entry for entry in log.waiters if entry[0] <= durable]
                log.waiters = [] if error is not None else [entry for entry in log.waiters if entry[0] > durable]
                more = bool(log.waiters)
                if not more:
                    log.sync_running = False
                    if durable < written and error is None:
                        self._sync_later(log)
            for _, waiter in ready:
                job, index = waiter
                batch = job.batches[index]
                answer = AppendResult(batch.stream, written, durable)
                self._answer(waiter, answer if error is None else _failed(batch, error, written, durable))
            if not more:
                return

    def _answer(self, waiter: Waiter, result: AppendResult) -> None:
        with self._wake_lock:
            self._finished.append((waiter, result))
            if self._scheduled:
                return
            self._scheduled = True
        self._call_soon(self._deliver)

    def _deliver(self) -> None:
        with self._wake_lock:
            self._scheduled = False
        while self._finished:
            (job, index), result = self._finished.popleft()
            if job.answers[index] is not None:
                continue
            job.answers[index] = result
            job.open -= 1
            if job.open == 0 and not job.future.done():
                job.future.set_result([answer for answer in job.answers if answer is not None])

    def _sync_later(self, log: StreamLog) -> None:
        with self._wake_lock:
            if log in self._unsynced:
                return
            self._unsynced.add(log)
        self._call_soon(self._arm)

    def _arm(self) -> None:
        if self._timer is None and self._unsynced and self._loop is not None:
            self._timer = self._loop.call_later(self._interval, self._sync_unsynced)

    def _sync_unsynced(self) -> None:
        self._timer = None
        with self._wake_lock:
            logs, self._unsynced = self._unsynced, set()
        for log in logs:
            self.sync_soon(log)

    def sync_soon(self, log: StreamLog) -> None:
        """Sync a stream in the background, for nobody in particular."""

        def start() -> None:
            with log.lock:
                if log.sync_running or log.size <= log.synced or log.removed or log.poisoned is not None:
                    return
                log.sync_running = True
            self._sync_stream(log)

        self._strategy.submit(start)

    def _call_soon(self, callback: Callable[..., Any]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    async def close(self) -> None:
        """Finish every accepted append and sync what was only written."""
        while self._open_jobs:
            await asyncio.wait(list(self._open_jobs))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sync_unsynced()
        await asyncio.to_thread(self._strategy.close)
        self._writer.shutdown(wait=True)


def _failed(batch: Batch, error: KimiRayError, written: int = 0, durable: int = 0) -> AppendResult:
    return AppendResult(batch.stream, written, durable, error.to_data())
