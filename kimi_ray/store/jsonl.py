"""The JSONL store, plain or compressed: one file a log, one file a document, nothing else to run.

``JsonlStore`` is the seam's ``Store``. It only joins the parts: claims, streams, commits, documents, blobs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.blobs import Blobs
from kimi_ray.store.claims import Claims
from kimi_ray.store.commit import Committer, SyncStrategy
from kimi_ray.store.descriptors import Descriptors
from kimi_ray.store.directories import Directories
from kimi_ray.store.documents import Documents
from kimi_ray.store.forking import fork_log
from kimi_ray.store.framing import framing_of
from kimi_ray.store.fs import Fs, RealFs, io_errors
from kimi_ray.store.identity import open_identity
from kimi_ray.store.in_threads import finish_in
from kimi_ray.store.jsonl_reader import JsonlReader, boot_id
from kimi_ray.store.layout import NO_WORKSPACE, Layout
from kimi_ray.store.leftovers import sweep_abandoned
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.owners import Owners
from kimi_ray.store.publications import Publications, Publishing
from kimi_ray.store.recovery import check_not_removed, touch, touch_or_reserved
from kimi_ray.store.refusals import already_exists, turn_open
from kimi_ray.store.removal import Finished, finish_removals, remove_session
from kimi_ray.store.reservations import Reservations
from kimi_ray.store.reserve import reserve_of
from kimi_ray.store.seam import (
    AppendResult,
    Batch,
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    SessionGrant,
    StoreIdentity,
    StoreOptions,
    Stream,
    SurvivingPage,
    SweepReport,
    VerifyReport,
    WriterGrant,
)
from kimi_ray.store.session_files import SessionFiles
from kimi_ray.store.sessions_held import SessionsHeld, target_of
from kimi_ray.store.stream_log import LogTools, StreamLog
from kimi_ray.store.stream_table import StreamTable
from kimi_ray.store.survey import closer_rows
from kimi_ray.store.sweep import sweep_blobs
from kimi_ray.store.unpublished import Unpublished

R = TypeVar("R")
_IO_THREADS = 16


class JsonlStore(Publishing):
    """A store process's access to one home. Build it with ``open``; it lives on the event loop it was opened on."""

    def __init__(
        self, fs: Fs, home: str, identity: StoreIdentity, options: StoreOptions, strategy: SyncStrategy | None = None
    ) -> None:
        """Use ``open``, which checks the home first."""
        durable = options.durability == "disk"
        boot = _boot_of(options)
        self._identity = identity
        self._fs = fs
        self._io = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="store-io")
        self._layout = Layout(fs, home)
        self._directories = Directories(fs, home, durable=durable)
        reservations = Reservations(fs, home, boot)
        framing = framing_of(identity.compression)
        reserve = reserve_of(fs, home, options)
        self._tools = LogTools(
            fs, self._directories, Descriptors(fs), reservations, options.durability, boot, framing, reserve
        )
        self._documents = Documents(fs, self._layout, self._directories, durable=durable, reserve=reserve)
        unpublished = Unpublished(self._layout, self._directories, self._documents.exists)
        maker = SessionFiles(
            self._tools,
            self._layout,
            self._documents,
            self._run,
            self._source_of,
            self._prune,
        )
        self._owners = Owners(
            fs, self._layout, self._directories, unpublished, maker.check_new, durable=durable, boot=boot
        )
        self._publications = Publications(unpublished, self._owners, maker, home, self._run, self._forget_streams)
        self._claims = Claims(self._owners, options.claim_timeout_s, self._publications.roll_back)
        self._sessions = SessionsHeld(self._claims, self._owners)
        self._streams = StreamTable(
            self._claims,
            self._io,
            home,
            touch=lambda stream: touch_or_reserved(self._tools, self._layout, stream),
            forgotten=lambda log: self._tools.descriptors.drop(log.path),
        )
        interval_ms = float(options.extra.get("sync_interval_ms", 1000))
        self._commits = Committer(strategy=strategy, sync_interval_s=interval_ms / 1000)
        self._blobs = Blobs(fs, self._layout, self._directories, durable=durable, reserve=reserve)
        self._reader = JsonlReader(fs, self._layout, self._documents, self._blobs, boot, identity, unpublished)
        self._closed = False

    @classmethod
    async def open(
        cls, home: str, options: StoreOptions, *, fs: Fs | None = None, strategy: SyncStrategy | None = None
    ) -> JsonlStore:
        """Open the store in ``home``, creating it when there is none.

        Raises:
            StoreError: as ``identity.open_identity``.
        """
        files = fs if fs is not None else RealFs()

        def prepare() -> tuple[str, StoreIdentity, Finished]:
            path = os.path.abspath(home)
            with io_errors(path):
                identity = open_identity(files, path, options)
                reservations = Reservations(files, path, _boot_of(options))
                directories = Directories(files, path, durable=options.durability == "disk")
                finished = finish_removals(Layout(files, path), directories, reservations)
                reservations.sweep()
                sweep_abandoned(files, path)
            return path, identity, finished

        path, identity, finished = await asyncio.to_thread(prepare)
        store = cls(files, path, identity, options, strategy)
        if finished.owned:
            await store._run(store._owners.forget, finished.owned)
        if finished.workspaces:
            await store._run(store._prune, finished.workspaces)
        await store._publications.recover()
        return store

    @property
    def identity(self) -> StoreIdentity:
        """``store.json``."""
        return self._identity

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        self._check_open()
        with io_errors(self._layout.home):
            return await finish_in(self._io, work, *args)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", code="store.closed")

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def open_session(
        self, session_id: str, nonce: str, *, workspace_id: str | None = None, create: bool = False
    ) -> SessionGrant:
        """See ``Store.open_session``."""

        def place() -> None:
            check_not_removed(self._layout, session_id)
            if workspace_id is None:
                self._layout.require_session_dir(session_id)
            else:
                self._layout.place(session_id, workspace_id)

        def read(first: bool) -> Document | None:
            if first:
                self._documents.clear_leftovers(session_id, self._owners.writer)
            return self._documents.read(session_id)

        self._check_open()
        new = await self._make_way(session_id, nonce, workspace_id or NO_WORKSPACE, create=create)
        if not create:
            await self._run(place)
        async with self._publications.claiming(session_id, new):
            return await self._sessions.open(session_id, nonce, lambda first: self._run(read, first), new=new)

    async def close_session(self, session_id: str, nonce: str) -> None:
        """See ``Store.close_session``."""
        self._check_open()
        if await self._came_to_nothing(session_id, nonce):
            return
        held = self._owners.held.get(session_id)
        if held is None or held.nonce != nonce:
            return
        self._streams.drop_session(session_id, removed=False)
        await self._claims.close_session(session_id, nonce)
        self._layout.forget(session_id)

    async def write_document(
        self, session_id: str, value: dict[str, Any], *, grant: int, nonce: str, revision: int
    ) -> int:
        """See ``Store.write_document``."""
        await self._run(check_not_removed, self._layout, session_id)

        async def write() -> int:
            written = await self._run(lambda: self._documents.write(session_id, value, revision=revision))
            await self._publications.shown(session_id)
            return written

        return await self._sessions.write_document(session_id, grant, nonce, write)

    async def remove(self, session_id: str) -> None:
        """See ``Store.remove``. Removing a removed session finishes what is left of it."""
        if await self._came_to_nothing(session_id):
            return
        async with self._claims.holding(session_id):
            self._forget_streams(session_id)
            await self._run(
                remove_session, self._layout, self._directories, self._tools.reservations, session_id, self._prune
            )
            self._forget_streams(session_id)  # an append in flight may have loaded one again
            await self._publications.removed(session_id)
            owner = self._owners.held.get(session_id)
            if owner is not None:
                await self._claims.close_session(session_id, owner.nonce)

    def _forget_streams(self, session_id: str) -> None:
        self._streams.drop_session(session_id, removed=True)

    def _prune(self, directories: set[str]) -> None:
        self._owners.prune(directories)

    def _source_of(self, stream: Stream) -> Callable[[], LogSource]:
        return self._reader.opener(stream, self._streams.get(stream))

    # -- writing logs ------------------------------------------------------------------------------------------------

    async def open_writer(
        self, target: dict[str, Any] | Stream, nonce: str, *, claim: str | None = None
    ) -> WriterGrant:
        """See ``Store.open_writer``."""
        self._check_open()
        await self._sessions.check_claim(target, claim)
        while True:
            log = await (self._streams.load(target) if isinstance(target, Stream) else self._create(target, nonce))
            grant = await self._run(log.grant, nonce)
            if grant is not None:
                return grant

    async def _create(self, header: dict[str, Any], nonce: str) -> StreamLog:
        stream, workspace = target_of(header)

        def make() -> StreamLog:
            check_not_removed(self._layout, stream.session_id)
            directory = self._layout.place(stream.session_id, workspace)
            self._layout.check_new_agent(stream, directory)
            try:
                return touch_or_reserved(self._tools, self._layout, stream)
            except StoreError as error:
                if error.code != "store.not_found":
                    raise
            return StreamLog(self._tools, stream, f"{directory}/agents/{stream.agent_id}", header)

        log = await self._streams.create(stream, make)
        if not log.born and log.nonce != nonce:
            log.header = header
        await self._refuse_other(log, nonce)
        return log

    async def _refuse_other(self, log: StreamLog, nonce: str) -> None:
        if log.born and log.nonce != nonce:
            await self._streams.drop(log.stream)
            raise already_exists(log.stream)

    async def append(self, batches: list[Batch], *, sync: bool) -> list[AppendResult]:
        """See ``Store.append``."""
        self._check_open()
        logs: list[StreamLog | KimiRayError | None] = [self._streams.get(batch.stream) for batch in batches]
        if None in logs:
            missing = list({batch.stream for batch, log in zip(batches, logs, strict=True) if log is None})
            found = dict(zip(missing, await asyncio.gather(*map(self._for_append, missing)), strict=True))
            logs = [log or found[batch.stream] for batch, log in zip(batches, logs, strict=True)]
        return await self._commits.append(batches, [log for log in logs if log is not None], sync=sync)

    async def _for_append(self, stream: Stream) -> StreamLog | KimiRayError:
        """A stream that is not loaded: after a restart of the store the log itself says whose grant is the newest."""
        try:
            log = await self._streams.load(stream)
        except KimiRayError as error:
            return error
        await self._streams.drop(stream)
        return log

    async def close_writer(self, stream: Stream, epoch: int, nonce: str) -> None:
        """See ``Store.close_writer``."""
        self._check_open()
        try:
            log = await self._streams.load(stream)
        except StoreError as error:
            if error.code in ("store.not_found", "store.deleted"):
                return
            raise
        await self._run(log.close, epoch, nonce)
        await self._streams.drop(stream)

    async def load(self, stream: Stream, *, is_live: bool | None = None) -> LogView:
        """See ``Store.load``."""
        self._check_open()
        log = self._streams.get(stream)
        if log is not None and log.granted_here and not log.closed:
            view = await self.inspect(stream)
            if view.closers:
                raise turn_open(stream, view)
            return view
        async with self._claims.holding(stream.session_id):
            found = await self._run(self._reader.survey, stream, None)
            view = await self._run(found.view)
            unknown = found.epoch is not None and not found.closed
            if view.closers and unknown and is_live is not False:
                raise turn_open(stream, view)
            if not view.closers and not found.tail.size:
                return view
            while True:
                log = await self._streams.load(stream)
                done = await self._run(self._close_turn, log) if view.closers else view
                if done is not None:
                    break
            epoch = log.epoch
            await self._streams.drop(stream)
            return LogView(done.header, done.next_seq, epoch, done.closers, done.cut, view.torn_bytes)

    def _close_turn(self, log: StreamLog) -> LogView | None:
        """Close the open turn under a grant of its own; nothing can be appended in between. None: load it again."""
        with log.sync_lock, log.lock:
            view = self._reader.survey(log.stream, log).view()
            if not view.closers:
                return view
            if log.granted_here and not log.closed:
                raise turn_open(log.stream, view)  # it became live meanwhile
            nonce, rows = new_ulid(), closer_rows(view.closers)
            grant = log.grant(nonce)
            if grant is None:
                return None
            try:
                batch = Batch(
                    log.stream,
                    grant.epoch,
                    nonce,
                    view.cut,
                    b"".join(rows),
                    tuple(map(len, rows)),
                    (1,) * len(rows),
                    closing=True,
                )
                (error,) = log.write([batch])
                if error is not None:
                    raise error
                log.close(grant.epoch, nonce)
            finally:
                log.granted_here = False  # one that failed leaves a grant that nobody has
            return view

    async def fork(self, source: Stream, cut: int, header: dict[str, Any], nonce: str) -> WriterGrant:
        """See ``Store.fork``; whole batches are copied without decoding."""
        self._check_open()
        target, workspace = target_of(header)
        read = self._reader.opener(source, self._streams.get(source))

        def make() -> StreamLog:
            check_not_removed(self._layout, target.session_id)
            directory = self._layout.place(target.session_id, workspace)
            self._layout.check_new_agent(target, directory)
            try:
                return touch(self._tools, self._layout, target)
            except StoreError as error:
                if error.code != "store.not_found":
                    raise
            with read() as opened:
                return fork_log(
                    self._tools, opened, cut, target, header, f"{directory}/agents/{target.agent_id}", nonce
                )

        log = await self._streams.create(target, make)
        await self._refuse_other(log, nonce)
        return await self.open_writer(target, nonce)

    # -- reading -----------------------------------------------------------------------------------------------------

    async def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        found = await self._run(self._reader.survey, stream, self._streams.get(stream))
        return await self._run(found.view)

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``Store.read_from``."""
        log = self._streams.get(stream)
        return await self._run(self._reader.read_from, stream, seq, limit, max_bytes, log)

    async def list_logs(self, *, session_id: str | None = None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        return await self._run(self._reader.list_logs, session_id)

    async def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        return await self._run(self._reader.locate, stream)

    async def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        return await self._run(self._reader.read_raw, stream)

    async def verify(self, stream: Stream) -> VerifyReport:
        """See ``Store.verify``."""
        return await self._run(self._reader.verify, stream, self._streams.get(stream))

    async def snapshots(self, *, session_id: str | None = None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        return await self._run(self._reader.snapshots, session_id)

    async def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        return await self._run(self._reader.revision, stream)

    async def read_surviving(self, stream: Stream, cursor: int = 0, limit: int = 1000) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        return await self._run(self._reader.read_surviving, stream, cursor, limit)

    async def sweep_blobs(self, *, grace_s: float = 86_400.0, dry_run: bool = False) -> SweepReport:
        """See ``Store.sweep_blobs``."""
        return await sweep_blobs(self._reader, self._blobs, self._run, grace_s=grace_s, dry_run=dry_run)

    async def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        return await self._run(self._reader.read_document, session_id)

    async def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        return await self._run(self._reader.list_documents)

    async def has_blob(self, digest: str) -> bool:
        """See ``Store.has_blob``."""
        return await self._run(self._blobs.has, digest)

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        """See ``Store.put_blobs``."""
        await asyncio.gather(*(self._run(self._blobs.put, digest, content) for digest, content in blobs.items()))

    async def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return await self._run(self._blobs.read, digest)

    async def stats(self) -> dict[str, Any]:
        """See ``Store.stats``."""
        commits = self._commits
        return {
            "commits": commits.commits,
            "syncs": commits.syncs,
            "events": commits.events,
            "bytes": commits.bytes,
            "queue_bytes": commits.queued_bytes,
            "streams": len(self._streams),
            "sessions": len(self._owners.held),
        }

    async def close(self) -> None:
        """See ``Store.close``."""
        if self._closed:
            return
        self._closed = True
        await self._commits.close()
        await asyncio.to_thread(self._io.shutdown, wait=True)
        self._tools.descriptors.close()
        await self._claims.close()


def _boot_of(options: StoreOptions) -> str:
    return str(options.extra.get("boot_id") or boot_id())
