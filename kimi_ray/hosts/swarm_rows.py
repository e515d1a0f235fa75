"""The rows of a swarm on their way to its driver: read by cursor, kept until acknowledged, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.swarm_words import RowEntry, RowPage

MAX_UNREAD = 50_000
_LINGER_S = 0.05
_ENOUGH = 100


class RowBuffer:
    """Entries in order of completion, for one reader.

    Args:
        on_room: Called when entries were acknowledged.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._entries: list[RowEntry] = []
        self._base = 0
        self._done = False
        self._error: KimiRayError | None = None
        self._news = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether nobody reads fast enough: nothing should start until somebody does."""
        return len(self._entries) >= MAX_UNREAD

    @property
    def done(self) -> bool:
        """Whether no entry will follow."""
        return self._done

    def put(self, *entries: RowEntry) -> None:
        """More entries."""
        self._entries.extend(entries)
        self._news.set()

    def finish(self, error: KimiRayError | None = None) -> None:
        """No entry will follow. The first call decides."""
        if not self._done:
            self._done = True
            self._error = error
        self._news.set()

    async def read(self, cursor: int, max_rows: int, wait_s: float) -> RowPage:
        """Entries from ``cursor``, which acknowledges those below it; waits up to ``wait_s`` for the first one.

        A read that finds few waits a moment for more, so that a row does not cost a call.
        """
        read = cursor - self._base
        if read > 0:
            # The page before has arrived: what it held need not be kept, and there is room again.
            del self._entries[:read]
            self._base = cursor
            self._on_room()
        while not self._entries and not self._done:
            self._news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                break
        if not self._done and 0 < len(self._entries) < _ENOUGH:
            await asyncio.sleep(_LINGER_S)
        page = tuple(self._entries[:max_rows])
        done = self._done and len(page) == len(self._entries)
        error = self._error.to_data() if done and self._error is not None else None
        return RowPage(page, self._base + len(page), done, error)
