"""The streams that this process writes, each touched once and kept while its session is held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from kimi_ray.store.claims import Claims
from kimi_ray.store.fs import io_errors
from kimi_ray.store.in_threads import finish_in
from kimi_ray.store.layout import Layout
from kimi_ray.store.recovery import touch_or_reserved
from kimi_ray.store.seam import Stream
from kimi_ray.store.stream_log import LogTools, StreamLog


class StreamTable:
    """Loaded ``StreamLog`` objects by stream. A stream in here holds its session's claim. Lives on one event loop."""

    def __init__(self, tools: LogTools, layout: Layout, claims: Claims, executor: Executor) -> None:
        self._tools = tools
        self._layout = layout
        self._claims = claims
        self._executor = executor
        self._logs: dict[Stream, StreamLog] = {}
        self._loading: dict[Stream, asyncio.Future[None]] = {}

    def get(self, stream: Stream) -> StreamLog | None:
        """The stream when it is loaded."""
        return self._logs.get(stream)

    def __len__(self) -> int:
        return len(self._logs)

    async def load(self, stream: Stream) -> StreamLog:
        """The stream, touched if this is the first time.

        Raises:
            StoreError: ``session.in_use``, and what ``recovery.touch_or_reserved`` raises.
        """
        return await self._obtain(stream, lambda: touch_or_reserved(self._tools, self._layout, stream))

    async def create(self, stream: Stream, make: Callable[[], StreamLog]) -> StreamLog:
        """The stream when it is loaded, else what ``make`` (blocking) gives."""
        return await self._obtain(stream, make)

    async def _obtain(self, stream: Stream, make: Callable[[], StreamLog]) -> StreamLog:
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
                with io_errors(self._layout.home):
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
            self._tools.descriptors.drop(log.path)
            await self._claims.let_go(stream.session_id, stream)

    def drop_session(self, session_id: str, *, removed: bool) -> None:
        """Forget all streams of a session; ``removed`` makes what still arrives for them ``store.deleted``."""
        for stream in [stream for stream in self._logs if stream.session_id == session_id]:
            log = self._logs.pop(stream)
            with log.lock:
                log.removed = log.removed or removed
                log.closed = log.dropped = True
            self._tools.descriptors.drop(log.path)
