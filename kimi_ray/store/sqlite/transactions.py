"""Group commit: everything that waits to be written to one database goes into one transaction.

One thread writes. Each job runs inside a savepoint, so one that is refused does not fail the others; when the
transaction itself fails, the connection is thrown away and each job is tried once more, alone, on a fresh one: whatever
became of the failed commit, a job finds it out by reading (appends compare, grants know their nonce, documents their
revision).

A commit that somebody waits for is synced, and so is everything committed before it; other commits are synced when
``sync_interval_s`` is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.settings import Durability
from kimi_ray.store.reserve import Reserve, is_full
from kimi_ray.store.sqlite.connections import checkpoint, set_sync, sync_level
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.failures import FAILURES, is_damage, store_error

R = TypeVar("R")

MAX_GROUP_BYTES = 32 << 20
MAX_GROUP_JOBS = 2000
CHECKPOINT_PAGES = 4000
TRUNCATE_ABOVE_BYTES = 64 << 20
_TRY_AGAIN_BYTES = 16 << 20
_PAGES_BESIDES = 64 << 10
"""What a transaction writes beside the bytes of its rows."""
_IDLE_S = 1.0
_CHECKPOINT_WAIT_S = 0.2

Work = Callable[[sqlite3.Connection], R]


class _Job(Generic[R]):
    __slots__ = ("closing", "error", "future", "result", "size", "sync", "work")

    def __init__(self, work: Work[R], future: asyncio.Future[R], size: int, *, sync: bool, closing: bool) -> None:
        self.work = work
        self.future = future
        self.size = size
        self.sync = sync
        self.closing = closing
        self.result: R | None = None
        self.error: KimiRayError | None = None


class Transactions:
    """The writes of one database. Lives on one event loop; SQLite is called in its own thread."""

    def __init__(
        self,
        file: DatabaseFile,
        durability: Durability,
        connect: Callable[[], sqlite3.Connection],
        reserve: Reserve,
        *,
        sync_interval_s: float,
        sync_delay_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            file: The database.
            durability: What a commit that is waited for survives.
            connect: Opens the writing connection, ready for use; in the writer's thread.
            reserve: Space for what ends something, when the disk is full.
            sync_interval_s: Seconds after which commits are synced that nobody waits for.
            sync_delay_s: Seconds that a synced commit takes in addition, for tests and benches of slow disks.
        """
        self._file = file
        self._sync_delay_s = sync_delay_s
        self._durability: Durability = durability
        self._connect = connect
        self._reserve = reserve
        self._interval = sync_interval_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"store-sqlite-{file.shard}")
        self._connection: sqlite3.Connection | None = None
        self._level = ""
        self._suspect = False
        self._full = False
        """The disk was full: what is freed for what ends something is not for a checkpoint, which extends the file."""
        self._waiting: deque[_Job[Any]] = deque()
        self._running = False
        self._closed = False
        self._truncate_at = TRUNCATE_ABOVE_BYTES
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self.commits = self.syncs = 0
        self.synced = 0
        """The number of the last commit that is durable; see ``commits``."""

    @property
    def open(self) -> bool:
        """Whether this process has the database open for writing."""
        return self._connection is not None

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait to be written."""
        return sum(job.size for job in self._waiting)

    async def run(self, work: Work[R], *, sync: bool = True, size: int = 0, closing: bool = False) -> R:
        """What ``work`` returns, committed (and synced); a cancelled caller still waits until it has ended.

        Args:
            work: Reads and writes inside a transaction; it may be called twice, and must find out what the first call
                did.
            sync: Whether the answer may come only when it is durable.
            size: Payload bytes, for the bound of a group.
            closing: It ends something, and may use the reserve when the disk is full.

        Raises:
            KimiRayError: What ``work`` raised (then it changed nothing), or why nothing could be committed.
        """
        future = self.submit(work, sync=sync, size=size, closing=closing)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise

    def submit(self, work: Work[R], *, sync: bool, size: int, closing: bool = False) -> asyncio.Future[R]:
        """As ``run``, but the answer is a future.

        Raises:
            StoreError: ``store.closed``.
        """
        if self._closed:
            raise StoreError("the store is closed", code="store.closed")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(work, future, size, sync=sync, closing=closing))
        self._kick()
        return future

    def _kick(self) -> None:
        if self._running or not self._waiting:
            return
        group: list[_Job[Any]] = []
        size = 0
        while self._waiting and len(group) < MAX_GROUP_JOBS:
            size += self._waiting[0].size
            if group and size > MAX_GROUP_BYTES:
                break
            group.append(self._waiting.popleft())
        self._running = True
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        loop = asyncio.get_running_loop()
        run = loop.run_in_executor(self._thread, self._commit, group)
        run.add_done_callback(lambda done: self._answer(group, done))

    def _answer(self, group: list[_Job[Any]], done: asyncio.Future[None]) -> None:
        failure = done.exception()
        for job in group:
            error = failure or job.error
            if job.future.done():
                continue
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(job.result)
        self._running = False
        self._kick()
        self._arm()

    def _arm(self) -> None:
        if self._running:
            return
        loop = asyncio.get_running_loop()
        if self.synced < self.commits and self._timer is None:
            self._timer = loop.call_later(self._interval, self._sync_soon)
        if self.synced == self.commits and self._connection is not None and self._idle is None:
            self._idle = loop.call_later(_IDLE_S, self._when_idle)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _sync_soon(self) -> None:
        self._timer = None
        if self.synced < self.commits:
            future = self.submit(lambda _: None, sync=True, size=0)
            future.add_done_callback(_looked_at)

    def _when_idle(self) -> None:
        self._idle = None
        if not self._running and self._file.wal_bytes():
            self._running = True
            run = asyncio.get_running_loop().run_in_executor(self._thread, self._truncate)
            run.add_done_callback(self._truncated)

    def _truncated(self, done: asyncio.Future[None]) -> None:
        self._running = False
        done.exception()
        self._kick()
        if not self._running and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # -- in the writer's thread --------------------------------------------------------------------------------------

    def _commit(self, group: list[_Job[Any]]) -> None:
        # Where no commit is synced, being written is all there is to wait for.
        sync = self._durability != "disk" or any(job.sync for job in group)
        try:
            connection = self._begin(sync=sync)
        except KimiRayError as error:
            for job in group:
                job.error = error
                if job.closing and is_full(error):
                    self._once_more(job)
            return
        try:
            self._work(connection, group, sync=sync)
        except FAILURES as error:
            self._throw_away(error)
            if len(group) == 1:
                group[0].error = store_error(error, self._file.path)
                if group[0].error.code == "store.corrupt":
                    return
            for job in group:
                self._once_more(job)
            return
        self.commits += 1
        if sync:
            self.synced = self.commits
            self.syncs += self._durability == "disk"
        if self._full:
            self._full = False
            self._pace(connection)
        self._reserve.keep()
        if self._file.wal_bytes() > self._truncate_at:
            self._truncate()
            self._truncate_at = max(TRUNCATE_ABOVE_BYTES, self._file.wal_bytes() + _TRY_AGAIN_BYTES)

    def _begin(self, *, sync: bool) -> sqlite3.Connection:
        """The connection, inside a write transaction."""
        try:
            connection = self._connection or self._reconnect()
            level = sync_level(self._durability, sync=sync)
            if level != self._level:
                set_sync(connection, level)
                self._level = level
            connection.execute("BEGIN IMMEDIATE")
            return connection
        except FAILURES as error:
            self._throw_away(error)
            raise store_error(error, self._file.path) from error

    def _reconnect(self) -> sqlite3.Connection:
        connection = self._connect()
        try:
            if self._suspect:
                self._settle(connection)
            if not self._full:
                self._pace(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._level = connection, ""
        return connection

    def _pace(self, connection: sqlite3.Connection) -> None:
        """From here on the log is moved into the database as it grows."""
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")

    def _work(self, connection: sqlite3.Connection, group: list[_Job[Any]], *, sync: bool) -> None:
        before = connection.total_changes
        refused = False
        for job in group:
            job.error = None
            connection.execute("SAVEPOINT job")
            try:
                job.result = job.work(connection)
            except (KimiRayError, *FAILURES) as error:
                # A page that cannot be read is the trouble of who needs it; anything else ends the transaction.
                if not isinstance(error, KimiRayError) and not is_damage(error):
                    raise
                job.error = error if isinstance(error, KimiRayError) else store_error(error, self._file.path)
                refused = True
                connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
        if sync and self._durability == "disk" and (refused or connection.total_changes == before):
            # Without a page to write SQLite would sync nothing, and what was found may only be in the page cache.
            connection.execute("UPDATE store SET syncs = syncs + 1")
        connection.execute("COMMIT")
        if sync:
            time.sleep(self._sync_delay_s())

    def _once_more(self, job: _Job[Any]) -> None:
        job.error = None
        try:
            if job.closing:
                self._reserve.spend(job.size + _PAGES_BESIDES, lambda: self._alone(job))
            else:
                self._alone(job)
        except KimiRayError as error:
            job.error = error

    def _alone(self, job: _Job[Any]) -> None:
        """A transaction of its own.

        Raises:
            KimiRayError: Why there was none; what the job itself raised is its error.
        """
        connection = self._begin(sync=True)
        try:
            self._work(connection, [job], sync=True)
        except FAILURES as error:
            self._throw_away(error)
            raise store_error(error, self._file.path) from error
        self.commits += 1
        self.synced = self.commits

    def _settle(self, connection: sqlite3.Connection) -> None:
        """After a failed write or sync the kernel may have dropped pages of the log that it calls clean: all of it is
        written again, into the database, before anything is acknowledged."""
        set_sync(connection, sync_level(self._durability, sync=True))
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE store SET syncs = syncs + 1")
        connection.execute("COMMIT")
        if not checkpoint(connection, "FULL", wait_s=_CHECKPOINT_WAIT_S):
            raise StoreError(
                f"{self._file.path} failed, and cannot be written again while others read it",
                code="store.busy",
                hint="it is tried again",
                details={"path": self._file.path},
                retryable=True,
            )
        self._suspect = False

    def _throw_away(self, error: Exception) -> None:
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(code, int) and code & 0xFF == sqlite3.SQLITE_IOERR:
            self._suspect = True
        self._full = self._full or code == sqlite3.SQLITE_FULL
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _truncate(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            checkpoint(connection, "TRUNCATE", wait_s=_CHECKPOINT_WAIT_S)
        except FAILURES as error:
            self._throw_away(error)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    async def close(self) -> None:
        """Finish what was accepted, sync it, close the connection."""
        for timer in (self._timer, self._idle):
            if timer is not None:
                timer.cancel()
        self._timer = self._idle = None
        if self._running or self._waiting or self.synced < self.commits:
            future = self.submit(lambda _: None, sync=True, size=0)
            await asyncio.wait([future])
            _looked_at(future)
        self._closed = True
        while self._running:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        for timer in (self._timer, self._idle):
            if timer is not None:
                timer.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)


def _looked_at(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
