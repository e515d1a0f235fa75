"""What a store process runs: the store, opened lazily, behind one bounded queue, and what is kept over all its
documents: the session index and the registry of workspaces. Plain async, no Ray.

Its constructor does no I/O, so the process can always start; the first call opens the home.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

from kimi_ray.errors import StoreError
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.fs import Fs, RealFs
from kimi_ray.store.identity import is_network
from kimi_ray.store.seam import (
    AppendResult,
    Batch,
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    SessionCopy,
    SessionGrant,
    Store,
    StoreIdentity,
    StoreOptions,
    Stream,
    SurvivingPage,
    SweepReport,
    VerifyReport,
    WriterGrant,
)
from kimi_ray.store.session_index import IndexPace, SessionIndex
from kimi_ray.store.session_index_file import INDEX_NAME
from kimi_ray.store.session_index_marks import distrust_unsealed
from kimi_ray.store.session_index_mirror import Changes
from kimi_ray.store.session_index_query import IndexStatus, SessionPage, SessionQuery
from kimi_ray.store.session_index_rows import IndexRow, SessionSummary
from kimi_ray.store.wire import AppendCall, unpack_call
from kimi_ray.store.workspace_registry import WorkspaceEntry, WorkspaceRegistry

QUEUE_BYTES = 256 << 20
OPEN_TIMEOUT_S = 30.0
_OPEN_PAUSE_S = 0.1
_TOLD_AT_ONCE = ("store.io_failed", "store.disk_full")


class PersistenceService:
    """The store of one shard, for any number of concurrent callers on one event loop."""

    def __init__(
        self,
        home: str,
        options: StoreOptions | None = None,
        *,
        fs: Fs | None = None,
        queue_bytes: int = QUEUE_BYTES,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        index_pace: IndexPace | None = None,
    ) -> None:
        """
        Args:
            home: The directory of the store.
            options: How to open it.
            fs: The files; None takes the real ones, or what ``options.extra["fs"]`` says (``faults.fs_from_spec``).
            queue_bytes: Payload bytes of appends in progress above which a further one is ``store.busy``.
            open_timeout_s: How long opening is tried again while it fails in a way that may pass.
            index_pace: How often the session index does its work.
        """
        self._home = home
        self._options = options or StoreOptions()
        self._fs = fs
        self._queue_bytes = queue_bytes
        self._open_timeout = open_timeout_s
        self._index_pace = index_pace
        self._store: Store | None = None
        self._index: SessionIndex | None = None
        self._workspaces: WorkspaceRegistry | None = None
        self._places: dict[str, str] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        self._opening: asyncio.Lock | None = None
        self._queued = 0
        self._closed = False

    async def store(self) -> Store:
        """The open store.

        Raises:
            StoreError: as ``open_store_for_writing``; ``store.closed``.
        """
        if self._store is not None:
            return self._store
        if self._closed:
            raise StoreError("the store is closed", code="store.closed")
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._store is None:
                await asyncio.to_thread(self._look_at_index)
                store = await self._open()
                self._index = await asyncio.to_thread(self._make_index, store)
                self._workspaces = self._make_registry(self._index)
                with contextlib.suppress(StoreError):  # what cannot be removed now is with the next change
                    await self._workspaces.clear_leftovers()
                self._store = store
            return self._store

    async def index(self) -> SessionIndex:
        """The session index of the open store.

        Raises:
            StoreError: as ``store``.
        """
        await self.store()
        if self._index is None:
            raise StoreError("the store is closed", code="store.closed")
        return self._index

    async def workspaces(self) -> WorkspaceRegistry:
        """The registry of workspaces; one process of a home may change it.

        Raises:
            StoreError: as ``store``.
        """
        await self.store()
        if self._workspaces is None:
            raise StoreError("the store is closed", code="store.closed")
        return self._workspaces

    def _look_at_index(self) -> None:
        durable = self._options.durability == "disk"
        try:
            distrust_unsealed(self._home, INDEX_NAME, durable=durable)
        except OSError:  # no mark can be made: without an index nobody is misled
            with contextlib.suppress(OSError):
                os.unlink(f"{self._home}/{INDEX_NAME}")

    def _make_index(self, store: Store) -> SessionIndex:
        fs = RealFs()
        safe = (self._fs is None or isinstance(self._fs, RealFs)) and not is_network(fs.fs_type(self._home))
        return SessionIndex(
            self._home,
            store.identity.home_id,
            store.list_documents,
            durable=self._options.durability == "disk",
            enabled=safe,
            pace=self._index_pace,
        )

    def _make_registry(self, index: SessionIndex) -> WorkspaceRegistry:
        durable = self._options.durability == "disk"
        return WorkspaceRegistry(self._fs or RealFs(), self._home, index.places, durable=durable)

    async def _open(self) -> Store:
        deadline = time.monotonic() + self._open_timeout
        while True:
            try:
                return await open_store_for_writing(self._home, self._options, fs=self._fs)
            except StoreError as error:
                # A disk that fails or is full is told at once: the caller's own patience ends first, without a reason.
                if not error.retryable or error.code in _TOLD_AT_ONCE or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_OPEN_PAUSE_S)

    # -- appends -----------------------------------------------------------------------------------------------------

    async def append_call(self, call: AppendCall) -> list[AppendResult]:
        """Append what a host packed with ``wire.pack_call``; see ``Store.append``.

        Raises:
            StoreError: ``store.busy`` when the queue is full.
        """
        return await self._bounded(unpack_call(call), len(call.blob), sync=call.sync)

    async def append(self, batches: list[Batch], *, sync: bool) -> list[AppendResult]:
        """See ``Store.append``.

        Raises:
            StoreError: ``store.busy`` when the queue is full.
        """
        return await self._bounded(batches, sum(len(batch.payload) for batch in batches), sync=sync)

    async def _bounded(self, batches: list[Batch], size: int, *, sync: bool) -> list[AppendResult]:
        if self._queued and self._queued + size > self._queue_bytes:
            raise StoreError(
                f"{self._queued} bytes wait to be stored, {size} more do not fit",
                code="store.busy",
                hint="send it again in a moment; a slow disk or a full one is the usual cause",
                details={"queued_bytes": self._queued, "limit_bytes": self._queue_bytes},
                retryable=True,
            )
        self._queued += size
        try:
            store = self._store or await self.store()
            return await store.append(batches, sync=sync)
        finally:
            self._queued -= size

    # -- the seam, passed on -----------------------------------------------------------------------------------------

    async def identity(self) -> StoreIdentity:
        """``store.json``."""
        return (await self.store()).identity

    async def open_session(
        self, session_id: str, nonce: str, workspace_id: str | None = None, create: bool = False
    ) -> SessionGrant:
        """See ``Store.open_session``."""
        grant = await (await self.store()).open_session(session_id, nonce, workspace_id=workspace_id, create=create)
        if create and workspace_id is not None:
            self._places[session_id] = workspace_id
        return grant

    async def begin_publication(self, group: str, sessions: dict[str, str]) -> None:
        """See ``Store.begin_publication``."""
        await (await self.store()).begin_publication(group, sessions)
        self._groups[group] = tuple(sessions)

    async def copy_session(self, group: str, copy: SessionCopy) -> None:
        """See ``Store.copy_session``."""
        await (await self.store()).copy_session(group, copy)

    async def publish(self, group: str) -> None:
        """See ``Store.publish``."""
        index = await self._index_before_write()
        store = await self.store()
        await store.publish(group)
        # Each session was copied by the process of its own shard; this one shows them all, and tells the index.
        shown = self._groups.pop(group, None)
        if shown is None:
            index.missed()
            return
        for session_id in shown:
            try:
                document = await store.read_document(session_id)
            except StoreError:
                index.missed()  # it is published all the same
            else:
                if document is not None:
                    index.record(document)

    async def discard_publication(self, group: str) -> None:
        """See ``Store.discard_publication``."""
        await (await self.store()).discard_publication(group)
        self._groups.pop(group, None)

    async def close_session(self, session_id: str, nonce: str) -> None:
        """See ``Store.close_session``."""
        await (await self.store()).close_session(session_id, nonce)
        self._places.pop(session_id, None)

    async def open_writer(
        self, target: dict[str, Any] | Stream, nonce: str, *, claim: str | None = None
    ) -> WriterGrant:
        """See ``Store.open_writer``."""
        return await (await self.store()).open_writer(target, nonce, claim=claim)

    async def close_writer(self, stream: Stream, epoch: int, nonce: str) -> None:
        """See ``Store.close_writer``."""
        await (await self.store()).close_writer(stream, epoch, nonce)

    async def fork(self, source: Stream, cut: int, header: dict[str, Any], nonce: str) -> WriterGrant:
        """See ``Store.fork``."""
        return await (await self.store()).fork(source, cut, header, nonce)

    async def load(self, stream: Stream, is_live: bool | None = None) -> LogView:
        """See ``Store.load``."""
        return await (await self.store()).load(stream, is_live=is_live)

    async def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        return await (await self.store()).inspect(stream)

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``Store.read_from``."""
        return await (await self.store()).read_from(stream, seq, limit, max_bytes)

    async def list_logs(self, session_id: str | None = None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        return await (await self.store()).list_logs(session_id=session_id)

    async def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        return await (await self.store()).locate(stream)

    async def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        return await (await self.store()).read_raw(stream)

    async def verify(self, stream: Stream) -> VerifyReport:
        """See ``Store.verify``."""
        return await (await self.store()).verify(stream)

    async def snapshots(self, session_id: str | None = None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        return await (await self.store()).snapshots(session_id=session_id)

    async def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        return await (await self.store()).revision(stream)

    async def read_surviving(self, stream: Stream, cursor: int = 0, limit: int = 1000) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        return await (await self.store()).read_surviving(stream, cursor, limit)

    async def sweep_blobs(self, grace_s: float = 86_400.0, dry_run: bool = False) -> SweepReport:
        """See ``Store.sweep_blobs``."""
        return await (await self.store()).sweep_blobs(grace_s=grace_s, dry_run=dry_run)

    async def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        return await (await self.store()).read_document(session_id)

    async def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        return await (await self.store()).list_documents()

    async def write_document(
        self, session_id: str, value: dict[str, Any], grant: int, nonce: str, revision: int
    ) -> int:
        """See ``Store.write_document``; the index is told, and neither fails this nor holds it up."""
        index = await self._index_before_write()
        store = await self.store()
        written = await store.write_document(session_id, value, grant=grant, nonce=nonce, revision=revision)
        place = self._places.get(session_id)
        if place is None:
            try:
                stored = await store.read_document(session_id)
            except StoreError:
                stored = None
            if stored is None:
                index.missed()  # removed meanwhile, or somebody damaged it
                return written
            place = self._places[session_id] = stored.workspace_id
        index.record(Document(session_id, place, written, value))
        return written

    async def remove(self, session_id: str) -> None:
        """See ``Store.remove``."""
        index = await self._index_before_write()
        await (await self.store()).remove(session_id)
        self._places.pop(session_id, None)
        index.record_removed(session_id)

    async def _index_before_write(self) -> SessionIndex:
        index = await self.index()
        await index.before_write()
        return index

    # -- over all documents ------------------------------------------------------------------------------------------

    async def query_sessions(
        self, query: SessionQuery, waiting: Changes | None = None, *, aliases: bool = False
    ) -> SessionPage:
        """The sessions that are asked for.

        Args:
            query: Which.
            waiting: What other store processes of the home have written and not yet put into the index.
            aliases: The workspaces that are asked for stand for their directories, under every spelling.
        """
        return await (await self.index()).query(await self._with_aliases(query, aliases), waiting)

    async def count_sessions(
        self, query: SessionQuery, waiting: Changes | None = None, *, aliases: bool = False
    ) -> int:
        """How many sessions are asked for; see ``query_sessions``."""
        return await (await self.index()).count(await self._with_aliases(query, aliases), waiting)

    async def _with_aliases(self, query: SessionQuery, aliases: bool) -> SessionQuery:
        if not aliases or query.workspace_ids is None:
            return query
        ids = await (await self.workspaces()).aliases(query.workspace_ids)
        return query.model_copy(update={"workspace_ids": ids})

    async def get_session_summary(self, session_id: str, waiting: Changes | None = None) -> SessionSummary | None:
        """One session, or None."""
        return await (await self.index()).get(session_id, waiting)

    async def index_pending(self) -> dict[str, IndexRow | None]:
        """What was written here and is not in the index yet."""
        return {} if self._index is None else self._index.pending()

    async def forget_session_summary(self, session_id: str) -> None:
        """Drop a session from the index until its next document or comparison; the session stays."""
        await (await self.index()).remove(session_id)

    async def prepare_index(self) -> IndexStatus:
        """See that the index is ready, if it can be."""
        return await (await self.index()).prepare()

    async def index_status(self) -> IndexStatus:
        """How the index is."""
        return await (await self.index()).status()

    async def list_workspaces(self) -> list[WorkspaceEntry]:
        """All workspaces, the one opened last first."""
        return await (await self.workspaces()).list()

    async def touch_workspace(self, root: str, name: str | None = None) -> WorkspaceEntry:
        """A directory is worked in now."""
        return await (await self.workspaces()).touch(root, name)

    async def update_workspace(self, workspace_id: str, name: str) -> WorkspaceEntry:
        """Give a workspace another name."""
        return await (await self.workspaces()).update(workspace_id, name)

    async def delete_workspace(self, workspace_id: str) -> None:
        """Forget a workspace; its sessions stay."""
        await (await self.workspaces()).delete(workspace_id)

    # -- blobs, counters, end ----------------------------------------------------------------------------------------

    async def has_blob(self, digest: str) -> bool:
        """See ``Store.has_blob``."""
        return await (await self.store()).has_blob(digest)

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        """See ``Store.put_blobs``."""
        await (await self.store()).put_blobs(blobs)

    async def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return await (await self.store()).read_blob(digest)

    async def stats(self) -> dict[str, Any]:
        """Counters of the store, and ``queue_bytes`` of the appends in progress; empty counters before it is open;
        ``home`` is its directory."""
        counters: dict[str, Any] = {} if self._store is None else await self._store.stats()
        return {**counters, "queue_bytes": self._queued, "open": self._store is not None, "home": self._home}

    async def close(self) -> None:
        """Finish what was accepted, sync, release locks. Idempotent."""
        self._closed = True
        if self._opening is not None:
            async with self._opening:
                store, self._store = self._store, None
                index, self._index = self._index, None
                self._workspaces = None
            try:
                if index is not None:
                    await index.close()
            finally:
                if store is not None:
                    await store.close()
            if index is not None:
                await asyncio.to_thread(index.seal)
