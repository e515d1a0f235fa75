"""Written documents on their way into the index: coalesced by session, never waited for by whoever wrote them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Mapping

from kimi_ray.store.session_index_file import IndexLost
from kimi_ray.store.session_index_rows import IndexRow

Changes = Mapping[str, IndexRow | None]
"""Sessions as they were written last; None: removed."""

BATCH = 500
LIMIT = 10_000
FAILURES = 5
"""So many failed flushes in a row are more than bad luck."""
_PAUSE_S = 0.1
_PAUSE_MAX_S = 2.0

INDEX_FAILURES = (IndexLost, sqlite3.Error, OSError)
"""What the index's file gives when it cannot be used."""


class Mirror:
    """The queue between the documents and the index's file.

    Args:
        write: Puts changes into the index; raises one of ``INDEX_FAILURES``.
        failed: Told of each failed flush, with how many failed in a row.
        flushed: Told when nothing waits any more.
        window_s: How long the first of some changes waits for others, in seconds.
    """

    def __init__(
        self,
        write: Callable[[Changes], Awaitable[None]],
        *,
        failed: Callable[[BaseException, int], None],
        flushed: Callable[[], None],
        window_s: float = 0.02,
    ) -> None:
        self._write = write
        self._failed = failed
        self._flushed = flushed
        self._window_s = window_s
        self._pending: dict[str, IndexRow | None] = {}
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._open = False
        self._hurry = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the index's file can be written."""
        return self._open

    @property
    def size(self) -> int:
        """How many sessions wait."""
        return len(self._pending)

    def pending(self) -> dict[str, IndexRow | None]:
        """What waits, now."""
        return dict(self._pending)

    def add(self, session_id: str, row: IndexRow | None) -> bool:
        """Queue a session as it is now.

        Returns:
            False when too many wait: all are dropped then, and the index misses them.
        """
        self._pending[session_id] = row
        whole = len(self._pending) <= LIMIT
        if not whole:
            self._pending.clear()
        self._go()
        return whole

    async def evict(self, session_id: str) -> None:
        """Drop a session from the queue; a flush that is under way is waited for."""
        self._pending.pop(session_id, None)
        async with self._flushing:
            self._pending.pop(session_id, None)

    def open(self) -> None:
        """The index's file can be written from now on."""
        self._open = True
        self._go()

    def hold(self) -> None:
        """The index's file cannot be written until it is opened again."""
        self._open = False

    async def drain(self, within_s: float) -> bool:
        """Flush all that waits, without waiting for more; whether that is done within so many seconds."""
        self._hurry.set()
        self._go()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s)
        self._hurry.clear()
        self._go()
        return not self._pending

    async def close(self) -> None:
        """Flush no more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _go(self) -> None:
        if self._open and not self._closed and self._pending and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        wait_s = self._window_s
        while self._pending and self._open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._hurry.wait()
            async with self._flushing:
                batch = dict(list(self._pending.items())[:BATCH])
                try:
                    await self._write(batch)
                except INDEX_FAILURES as error:
                    self._failures += 1
                    self._failed(error, self._failures)
                    wait_s = min(_PAUSE_MAX_S, _PAUSE_S * 2**self._failures)
                    if self._hurry.is_set():
                        return
                else:
                    self._failures = 0
                    wait_s = self._window_s if len(self._pending) <= len(batch) else 0.0
                    for session_id, row in batch.items():
                        if session_id in self._pending and self._pending[session_id] is row:
                            del self._pending[session_id]
            if not self._pending:
                self._flushed()
