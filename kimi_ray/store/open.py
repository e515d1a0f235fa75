"""``open_store``: reading a home without Ray, also while a runtime writes to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.fs import Fs, RealFs, io_errors
from kimi_ray.store.identity import check_backend, require_identity
from kimi_ray.store.reader import open_reader
from kimi_ray.store.seam import (
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    StoreIdentity,
    StoreOptions,
    Stream,
    SurvivingPage,
    VerifyReport,
)

R = TypeVar("R")


class ReadStore:
    """A home opened for reading. Only ``load`` writes: it claims the session and commits its repair."""

    def __init__(
        self, home: str, identity: StoreIdentity, *, fs: Fs, network_home: bool, claim_timeout_s: float
    ) -> None:
        """Use ``open_store``."""
        self._reader = open_reader(fs, home, identity)
        self._fs = fs
        self._home = home
        self._options = StoreOptions(
            backend=identity.backend,
            compression=identity.compression,
            shards=identity.shards,
            network_home=network_home,
            claim_timeout_s=claim_timeout_s,
        )
        self.identity = identity
        """``store.json``."""
        self.home = home
        """Its directory."""

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        with io_errors(self._home):
            return await asyncio.to_thread(work, *args)

    async def list(self, session_id: str | None = None) -> list[ListedLog]:
        """Headers of all logs, or of one session's; a broken log is reported in its row."""
        return await self._run(self._reader.list_logs, session_id)

    async def load(self, stream: Stream, *, is_live: bool | None = None) -> LogView:
        """See ``Store.load``. The claim lasts for the call.

        Raises:
            StoreError: ``session.in_use``, ``log.turn_open``, ``store.not_found``, ``store.corrupt``.
        """
        store = await open_store_for_writing(self._home, self._options, fs=self._fs)
        try:
            return await store.load(stream, is_live=is_live)
        finally:
            await store.close()

    async def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        return await self._run(self._reader.inspect, stream)

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``Store.read_from``."""
        return await self._run(self._reader.read_from, stream, seq, limit, max_bytes)

    async def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        return await self._run(self._reader.locate, stream)

    async def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        return await self._run(self._reader.read_raw, stream)

    async def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        return await self._run(self._reader.read_document, session_id)

    async def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        return await self._run(self._reader.list_documents)

    async def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return await self._run(self._reader.read_blob, digest)

    async def snapshots(self, session_id: str | None = None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        return await self._run(self._reader.snapshots, session_id)

    async def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        return await self._run(self._reader.revision, stream)

    async def read_surviving(self, stream: Stream, cursor: int = 0, limit: int = 1000) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        return await self._run(self._reader.read_surviving, stream, cursor, limit)

    async def verify(self, stream: Stream) -> VerifyReport:
        """Check every row of a log, and report."""
        return await self._run(self._reader.verify, stream)


def open_store(
    home: str | os.PathLike[str], *, network_home: bool = False, claim_timeout_s: float = 15.0, fs: Fs | None = None
) -> ReadStore:
    """Open a home for reading; returns at once.

    Args:
        home: The directory of the store.
        network_home: Accept a network file system for ``load`` if its locks work.
        claim_timeout_s: How long ``load`` waits for an owner that may be dying.
        fs: The files; None takes the real ones.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``, ``store.format_unsupported``, ``store.backend_unavailable``.
    """
    files = fs if fs is not None else RealFs()
    path = os.path.abspath(str(home))
    identity = require_identity(files, path)
    check_backend(StoreOptions(backend=identity.backend, compression=identity.compression))
    return ReadStore(path, identity, fs=files, network_home=network_home, claim_timeout_s=claim_timeout_s)
