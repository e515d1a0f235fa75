"""The session index: which sessions a home has, newest first, without reading their documents.

::

    uninitialized --first read, first document--> preparing --all documents compared--> ready
    ready --the file fails or is gone, a writer died--> degraded --5 s--> preparing --> ready
    ready --every 60 s: documents compared (somebody may have edited or deleted some)--> ready

It is a cache in ``<home>/index.sqlite``. While it is not ready, reads join one scan of the documents. Every store
process of a home puts the documents that it wrote into the same file; ``session_index_marks`` says when to believe it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from sqlite3 import Connection, DatabaseError
from typing import Any, ParamSpec, TypeVar

from kimi_ray.errors import KimiRayError
from kimi_ray.store.in_threads import finish_in
from kimi_ray.store.seam import Document
from kimi_ray.store.session_index_answers import count, find, page
from kimi_ray.store.session_index_file import IndexFile, IndexLost, IndexReplaced, Noted, is_damage
from kimi_ray.store.session_index_marks import READY, STALE, Marks, WriterMark, distrust, read_marks, remove_marks, seal
from kimi_ray.store.session_index_mirror import BATCH, FAILURES, INDEX_FAILURES, Changes, Mirror
from kimi_ray.store.session_index_query import IndexStatus, SessionPage, SessionQuery, count_of, page_of
from kimi_ray.store.session_index_rows import IndexRow, SessionSummary, row_of
from kimi_ray.store.session_index_sql import read_places
from kimi_ray.wall_clock import epoch_ms

P = ParamSpec("P")
R = TypeVar("R")

_SHARE = 20
"""Comparing all documents may take one part in so many of the time."""
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class IndexPace:
    """How often, in seconds."""

    reconcile_s: float = 60.0
    """Between two comparisons with the documents, at least."""
    again_s: float = 5.0
    """Between two attempts to prepare, at least."""
    window_s: float = 0.02
    """How long a written document waits for others on its way into the index."""


@dataclass(slots=True)
class _Scan:
    """A reading of all documents under way, and what was written since it began."""

    rows: asyncio.Task[dict[str, IndexRow]]
    since: dict[str, IndexRow | None] = field(default_factory=dict[str, "IndexRow | None"])


class SessionIndex:
    """The index as one store process sees and keeps it. For one event loop.

    Args:
        home: The home.
        home_id: Its store's.
        documents: Reads them all.
        durable: Whether documents survive a power cut.
        enabled: False reads the documents each time and keeps no index (a home whose file system has no safe locks).
        pace: How often.
    """

    def __init__(
        self,
        home: str,
        home_id: str,
        documents: Callable[[], Awaitable[list[Document]]],
        *,
        durable: bool = True,
        enabled: bool = True,
        pace: IndexPace | None = None,
    ) -> None:
        self._home = home
        self._documents = documents
        self._enabled = enabled
        self._durable = durable
        self._pace = pace or IndexPace()
        self._file = IndexFile(home, home_id)
        self._mark = WriterMark(home, durable=durable)
        self._marking = asyncio.Lock()
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="session-index-read")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="session-index-write")
        self._mirror = Mirror(
            self._record, failed=self._flush_failed, flushed=self._flushed, window_s=self._pace.window_s
        )
        self._state = "uninitialized" if enabled else "degraded"
        self._reason: str | None = None if enabled else "this file system has no locks that an index needs"
        self._generation = 0
        self._degraded = 0
        self._damaged = False
        self._losses = 0
        self._made_up_for = 0
        self._took_s = 0.0
        self._scan: _Scan | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._attempted = asyncio.Event()
        self._regular: asyncio.Task[None] | None = None
        self._closed = False
        self._left_whole = False

    @property
    def state(self) -> str:
        """``uninitialized``, ``preparing``, ``ready`` or ``degraded``."""
        return self._state

    # -- the write side ----------------------------------------------------------------------------------------------

    async def before_write(self) -> None:
        """Call before documents change on disk: if this process dies, nobody believes the index without a look."""
        if self._mark.held or not self._enabled:
            return
        async with self._marking:
            if not self._mark.held:
                try:
                    await asyncio.to_thread(self._mark.put)
                except OSError:
                    # No file can be made. Without a mark the index could lie after our death: better none.
                    with contextlib.suppress(OSError):
                        await self._in(self._writes, self._file.delete)

    def record(self, document: Document) -> None:
        """A document was written, and is durable. Never blocks and never fails."""
        if self._enabled:
            self._take(document.session_id, row_of(document))

    def record_removed(self, session_id: str) -> None:
        """A session was removed. Never blocks and never fails."""
        if self._enabled:
            self._take(session_id, None)

    def missed(self) -> None:
        """Documents were written that are not known here: all are to be compared."""
        if self._enabled:
            self._losses += 1
            self._degrade("documents appeared that the index was not told of")

    def _take(self, session_id: str, row: IndexRow | None) -> None:
        if self._closed:
            with contextlib.suppress(OSError):
                distrust(self._home, durable=self._durable)
            return
        if self._scan is not None:
            self._scan.since[session_id] = row
        if not self._mirror.add(session_id, row):
            self._losses += 1
            self._degrade("too many documents waited for the index")
        self.start()

    async def _record(self, changes: Changes) -> None:
        await self._in(self._writes, self._file.record, changes)

    def _flush_failed(self, error: BaseException, failures: int) -> None:
        self._say(STALE)
        if isinstance(error, IndexLost) or is_damage(error) or failures >= FAILURES:
            self._mirror.hold()
            self._fail(error)

    def _flushed(self) -> None:
        if self._state == "ready":
            self._say(READY)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self._mark.say(what)

    async def remove(self, session_id: str) -> None:
        """Drop the row of a session (the session stays); it comes back with its next document or comparison."""
        await self._mirror.evict(session_id)
        if self._state == "ready":
            try:
                await self._in(self._writes, self._file.forget, session_id)
            except INDEX_FAILURES as error:
                self._fail(error)

    # -- the read side -----------------------------------------------------------------------------------------------

    async def query(self, query: SessionQuery, extra: Changes | None = None) -> SessionPage:
        """The sessions that are asked for; ``extra`` is what other store processes have not yet put into the index.

        Raises:
            StoreError: The documents cannot be read either.
        """
        pending = self._folded(extra)
        return await self._answer(lambda found: page(found, query, pending), lambda rows: page_of(rows, query), extra)

    async def count(self, query: SessionQuery, extra: Changes | None = None) -> int:
        """How many sessions are asked for."""
        pending = self._folded(extra)
        return await self._answer(lambda found: count(found, query, pending), lambda rows: count_of(rows, query), extra)

    async def get(self, session_id: str, extra: Changes | None = None) -> SessionSummary | None:
        """One session, or None."""
        pending = self._folded(extra)

        def among(rows: Sequence[IndexRow]) -> SessionSummary | None:
            return next((row.to_summary() for row in rows if row.id == session_id), None)

        return await self._answer(lambda found: find(found, session_id, pending), among, extra)

    async def places(self) -> list[tuple[str, str]]:
        """``(workspace id, directory)`` of all sessions, each pair once."""
        pending = self._folded(None)

        def merged(found: Connection) -> list[tuple[str, str]]:
            more = {(row.workspace_id, row.cwd) for row in pending.values() if row is not None and row.cwd is not None}
            return sorted({*read_places(found), *more})

        return await self._answer(merged, places_of, None)

    def pending(self) -> dict[str, IndexRow | None]:
        """What was written here and is not in the index yet."""
        return self._mirror.pending()

    async def prepare(self, within_s: float = 10.0) -> IndexStatus:
        """See that the index is ready, if it can be, within so many seconds; the status then."""
        if self._enabled and self._state != "ready":
            self.start()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._attempted.wait()
        return await self.status()

    async def status(self) -> IndexStatus:
        """How the index is."""
        sessions: int | None = None
        if self._state == "ready":
            with contextlib.suppress(*INDEX_FAILURES):
                everything = SessionQuery(archived=None)
                pending = self._mirror.pending()
                sessions = await self._in(self._reads, self._read, lambda found: count(found, everything, pending))
        return IndexStatus(
            state=self._state,
            generation=self._generation,
            reason=self._reason,
            degraded_count=self._degraded,
            pending=self._mirror.size,
            sessions=sessions,
        )

    def _folded(self, extra: Changes | None) -> dict[str, IndexRow | None]:
        return fold(dict(extra or {}), self._mirror.pending())

    async def _answer(
        self,
        from_index: Callable[[Connection], R],
        from_rows: Callable[[Sequence[IndexRow]], R],
        extra: Changes | None,
    ) -> R:
        self.start()
        if self._state == "ready":
            try:
                return await self._in(self._reads, self._read, from_index)
            except INDEX_FAILURES as error:
                self._fail(error)
        scan = self._join_scan()
        rows = await asyncio.shield(scan.rows)
        since = fold(dict(extra or {}), dict(scan.since))

        def answer() -> R:
            folded = fold({**rows}, since)
            return from_rows([row for row in folded.values() if row is not None])

        return await asyncio.to_thread(answer)

    def _read(self, work: Callable[[Connection], R]) -> R:
        marks = read_marks(self._home, self._mark.name)
        if not marks.trusted:
            raise IndexLost("a store process has died, or cannot keep the index")
        with self._file.read() as connection:
            try:
                return work(connection)
            except (ValueError, TypeError) as error:  # what is in a row is no row
                raise DatabaseError(f"the index is damaged: {error}") from error

    # -- scans -------------------------------------------------------------------------------------------------------

    def _join_scan(self) -> _Scan:
        """The scan under way, or a new one; one that has ended is never used again."""
        if self._scan is None or self._scan.rows.done():
            self._scan = _Scan(asyncio.get_running_loop().create_task(self._read_documents()))
            self._scan.rows.add_done_callback(self._scan_ended)
        return self._scan

    def _scan_ended(self, task: asyncio.Task[dict[str, IndexRow]]) -> None:
        if self._scan is not None and self._scan.rows is task:
            self._scan = None
        if not task.cancelled():
            task.exception()  # told to those who joined, if there are any left

    async def _read_documents(self) -> dict[str, IndexRow]:
        documents = await self._documents()
        return await asyncio.to_thread(lambda: {document.session_id: row_of(document) for document in documents})

    # -- the states --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the index ready in the background, unless it is, or was tried just now."""
        if self._state == "uninitialized" and not self._closed:
            self._state = "preparing"
            self._preparing = self._spawn(self._prepare(0.0))
        if self._regular is None and self._enabled and not self._closed:
            self._regular = self._spawn(self._reconcile_regularly())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def _fail(self, error: BaseException) -> None:
        self._damaged = self._damaged or (is_damage(error) and not isinstance(error, IndexLost))
        if isinstance(error, IndexReplaced):
            self._losses += 1  # the one that is there may be an older one
        self._degrade(f"{type(error).__name__}: {error}")

    def _degrade(self, reason: str) -> None:
        if self._state in ("ready", "preparing"):
            self._degraded += self._state == "ready"
            self._state = "degraded"
        self._reason = reason
        self._say(STALE)
        if not self._closed and (self._preparing is None or self._preparing.done()):
            self._preparing = self._spawn(self._prepare(max(self._pace.again_s, _SHARE * self._took_s)))

    async def _prepare(self, wait_s: float) -> None:
        while True:
            await asyncio.sleep(wait_s)
            self._state = "preparing"
            ready = False
            try:
                await self._make_ready()
                ready = self._made_up_for == self._losses and self._mirror.is_open
            except INDEX_FAILURES as error:
                self._damaged = self._damaged or is_damage(error)
                self._reason = f"{type(error).__name__}: {error}"
            except KimiRayError as error:
                self._reason = f"{error.code}: {error.message}"
            if ready:
                await self._vouch()
            self._state = "ready" if ready else "degraded"
            attempted, self._attempted = self._attempted, asyncio.Event()
            attempted.set()
            if ready:
                self._reason = None
                if not self._mirror.size:
                    self._say(READY)
                return
            wait_s = max(self._pace.again_s, _SHARE * self._took_s)

    async def _vouch(self) -> None:
        """Tell who reads the file beside this process that somebody keeps it, also before the first document."""
        async with self._marking:
            with contextlib.suppress(OSError):  # where none can be made, the documents are read
                await asyncio.to_thread(self._mark.put)

    async def _make_ready(self) -> None:
        losses = self._losses
        self._mirror.hold()
        if self._damaged:
            await self._in(self._writes, self._file.delete)
            self._damaged = False
        await self._in(self._writes, self._file.close)
        await self._in(self._writes, self._file.open)
        self._mirror.open()
        marks = await self._in(self._reads, read_marks, self._home, self._mark.name)
        facts = await self._in(self._reads, self._file.facts)
        self._generation = int(facts["generation"])
        if not self._generation or marks.dead or losses != self._made_up_for:
            await self._compare(marks, publish=True)
            self._made_up_for = losses

    async def _compare(self, marks: Marks, *, publish: bool) -> None:
        """Read all documents and put right what the index has otherwise."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        noted = await self._in(self._writes, self._file.note)
        if self._scan is not None:  # it may have read what the index had newer already
            await asyncio.wait([self._scan.rows])
        rows = await asyncio.shield(self._join_scan().rows)
        changed, absent = await asyncio.to_thread(_differing, noted, rows)
        for first in range(0, len(changed), BATCH):
            await self._in(self._writes, self._file.correct, noted, changed[first : first + BATCH], ())
        for first in range(0, len(absent), BATCH):
            await self._in(self._writes, self._file.correct, noted, (), absent[first : first + BATCH])
        self._took_s = loop.time() - began
        took_ms = round(self._took_s * 1000)
        self._generation = await self._in(
            self._writes, lambda: self._file.settle(noted, checked_at=epoch_ms(), took_ms=took_ms, publish=publish)
        )
        await self._in(self._writes, remove_marks, self._home, marks.dead)

    async def _reconcile_regularly(self) -> None:
        wait_s = self._pace.again_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._pace.again_s
            if self._state != "ready":
                continue
            try:
                facts = await self._in(self._reads, self._file.facts)
                every_s = max(self._pace.reconcile_s, _SHARE * facts["took_ms"] / 1000)
                ago_s = abs(epoch_ms() - facts["checked_at"]) / 1000  # by whichever process of the home
                if ago_s < every_s:
                    wait_s = max(wait_s, every_s - ago_s)
                else:
                    await self._compare(Marks(), publish=False)
            except INDEX_FAILURES as error:
                self._fail(error)
            except KimiRayError as error:
                self._degrade(f"{error.code}: {error.message}")

    async def close(self) -> None:
        """Put what waits into the index and leave it to others, in about two seconds at most. Idempotent."""
        if self._closed:
            return
        deadline = asyncio.get_running_loop().time() + _CLOSE_S
        if self._preparing is not None and self._state == "preparing":
            await asyncio.wait([self._preparing], timeout=_CLOSE_S / 2)
        self._closed = True
        for task in (self._preparing, self._regular):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._scan is not None:
            self._scan.rows.cancel()
            await asyncio.wait([self._scan.rows])
        whole = await self._mirror.drain(max(0.1, deadline - asyncio.get_running_loop().time()))
        await self._mirror.close()
        await self._in(self._writes, self._leave, whole and self._losses == self._made_up_for)
        self._reads.shutdown(wait=False)
        self._writes.shutdown(wait=False)

    def _leave(self, whole: bool) -> None:
        try:
            whole = whole and self._file.is_whole()
            self._file.close(durable=whole and self._mark.held and self._durable)
            if whole:
                self._mark.take_away()
                self._left_whole = self._enabled
        except INDEX_FAILURES:
            self._file.close()
        finally:
            self._mark.drop()  # where it still is, it says that the index was left behind

    def seal(self) -> None:
        """Call it when the store is closed, too, after ``close``: who comes next may believe the index. Blocking."""
        if self._left_whole:
            with contextlib.suppress(OSError):
                seal(self._home)

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await finish_in(threads, work, *args, **kwargs)


def fold(rows: dict[str, IndexRow | None], newer: Changes) -> dict[str, IndexRow | None]:
    """``rows`` with what is newer, in place; of two versions of a document the later one stays."""
    for session_id, row in newer.items():
        known = rows.get(session_id)
        if row is None or known is None or row.revision >= known.revision:
            if row is not None and known is None and session_id in rows:
                continue  # removed for good
            rows[session_id] = row
    return rows


def places_of(rows: Sequence[IndexRow]) -> list[tuple[str, str]]:
    """``(workspace id, directory)`` of sessions, each pair once."""
    return sorted({(row.workspace_id, row.cwd) for row in rows if row.cwd is not None})


def _differing(noted: Noted, rows: dict[str, IndexRow]) -> tuple[list[IndexRow], list[str]]:
    changed = [row for row in rows.values() if session_differs(noted, row)]
    return changed, [session_id for session_id in noted.rows if session_id not in rows]


def session_differs(noted: Noted, row: IndexRow) -> bool:
    """Whether the index had another row for a session, or none."""
    known = noted.rows.get(row.id)
    return known is None or known[1] != row.digest
