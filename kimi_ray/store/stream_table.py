"""The streams that this process writes, each touched once and kept while its session is held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from kimi_ray.store.claims import Claims
from kimi_ray.store.fs import io_errors
from kimi_ray.store.in_threads import finish_in
from kimi_ray.store.seam import Stream


class HeldLog(Protocol):
    """What the table asks of a backend's log; each flag is read and set under ``lock``."""

    closed: bool
    """No grant is in force."""
    dropped: bool
    """The table has forgotten it."""
    removed: bool
    """Its session was deleted."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while its flags change."""
        ...


L = TypeVar("L", bound=HeldLog)


class StreamTable(Generic[L]):
    """Loaded logs by stream. A stream in here holds its session's claim. Lives on one event loop."""

    def __init__(
        self,
        claims: Claims,
        executor: Executor,
        home: str,
        *,
        touch: Callable[[Stream], L],
        forgotten: Callable[[L], None],
    ) -> None:
        """
        Args:
            claims: Where sessions are held.
            executor: Where ``touch`` runs.
            home: Named by a file call that fails.
            touch: The log as it is stored (blocking).
            forgotten: Called with a log that left the table.
        """
        self._claims = claims
        self._executor = executor
        self._home = home
        self._touch = touch
        self._forgotten = forgotten
        self._logs: dict[Stream, L] = {}
        self._loading: dict[Stream, asyncio.Future[None]] = {}

    def get(self, stream: Stream) -> L | None:
        """The stream when it is loaded."""
        return self._logs.get(stream)

    def __len__(self) -> int:
        return len(self._logs)

    async def load(self, stream: Stream) -> L:
        """The stream, touched if this is the first time.

        Raises:
            StoreError: ``session.in_use``, and what ``touch`` raises.
        """
        return await self._obtain(stream, lambda: self._touch(stream))

    async def create(self, stream: Stream, make: Callable[[], L]) -> L:
        """The stream when it is loaded, else what ``make`` (blocking) gives."""
        return await self._obtain(stream, make)

    @contextlib.asynccontextmanager
    async def making(self, stream: Stream) -> AsyncGenerator[None]:
        """Nobody else loads or makes this stream during the block."""
        while stream in self._loading:
            await asyncio.wait([self._loading[stream]])
        done = self._loading[stream] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._loading[stream]
            done.set_result(None)

    async def _obtain(self, stream: Stream, make: Callable[[], L]) -> L:
        found = self._logs.get(stream)
        if found is not None:
            return found
        while stream in self._loading:
            await asyncio.wait([self._loading[stream]])
            found = self._logs.get(stream)
            if found is not None:
                return found
        done = self._loading[stream] = asyncio.get_running_loop().create_future()
        try:
            await self._claims.claim(stream.session_id, None, stream)
            try:
                with io_errors(self._home):
                    log = await finish_in(self._executor, make)
            except BaseException:
                await self._claims.let_go(stream.session_id, stream)
                raise
            self._logs[stream] = log
            return log
        finally:
            del self._loading[stream]
            done.set_result(None)

    async def drop(self, stream: Stream) -> None:
        """Forget a stream if its grant ended; its session is given back when nothing else holds it."""
        log = self._logs.get(stream)
        if log is None:
            return
        with log.lock:
            log.dropped = log.closed
        if log.dropped:
            del self._logs[stream]
            self._forgotten(log)
            await self._claims.let_go(stream.session_id, stream)

    def drop_session(self, session_id: str, *, removed: bool) -> None:
        """Forget all streams of a session; ``removed`` makes what still arrives for them ``store.deleted``."""
        for stream in [stream for stream in self._logs if stream.session_id == session_id]:
            log = self._logs.pop(stream)
            with log.lock:
                log.removed = log.removed or removed
                log.closed = log.dropped = True
            self._forgotten(log)
