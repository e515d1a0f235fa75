"""The SQLite store: one database a shard. ``SqliteStore`` is the seam's ``Store``; it only joins the parts.

A store process serves any session of its home; each shard's database is opened with the first use. Several processes
may have a home open: who writes a session is decided by its claim, the order of their commits by SQLite.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from sqlite3 import Connection
from typing import Any, TypeVar

from pydantic_core import to_json

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.blobs import Blobs
from kimi_ray.store.claims import Claims
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, RealFs, io_errors
from kimi_ray.store.identity import is_network, open_identity
from kimi_ray.store.in_threads import finish_in
from kimi_ray.store.layout import NO_WORKSPACE, Layout, check_id
from kimi_ray.store.owners import Owners
from kimi_ray.store.publications import Publications, Publishing
from kimi_ray.store.refusals import document_conflict, turn_open
from kimi_ray.store.reserve import reserve_of
from kimi_ray.store.seam import (
    AppendResult,
    Batch,
    Document,
    ListedLog,
    LogCopy,
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
from kimi_ray.store.sessions_held import SessionsHeld, target_of
from kimi_ray.store.sharding import shard_of
from kimi_ray.store.sqlite.appending import Written, append_batches, close_turn
from kimi_ray.store.sqlite.catalogue import place_session, refuse_removed, write_session
from kimi_ray.store.sqlite.connections import check_library
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.forking import fork_log
from kimi_ray.store.sqlite.granting import Granter
from kimi_ray.store.sqlite.held import HeldLog
from kimi_ray.store.sqlite.leftovers import delete_some, has_leftovers, mark_removed
from kimi_ray.store.sqlite.places import Places
from kimi_ray.store.sqlite.reader import SqliteReader
from kimi_ray.store.sqlite.schema import Head
from kimi_ray.store.sqlite.session_rows import SessionRows
from kimi_ray.store.sqlite.shard import Shard
from kimi_ray.store.stream_table import StreamTable
from kimi_ray.store.sweep import sweep_blobs
from kimi_ray.store.unpublished import Unpublished

R = TypeVar("R")
_IO_THREADS = 8


class SqliteStore(Publishing):
    """A store process's access to one home. Build it with ``open``; it lives on the event loop it was opened on."""

    def __init__(self, fs: Fs, home: str, identity: StoreIdentity, options: StoreOptions, boot: str) -> None:
        """Use ``open``, which checks the home first."""
        durable = options.durability == "disk"
        self._identity = identity
        self._home = home
        self._boot = boot
        self._mode = options.durability
        self._io = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="store-io")
        layout = Layout(fs, home)
        reserve = reserve_of(fs, home, options)
        directories = Directories(fs, home, durable=durable)
        self._places = Places()
        maker = SessionRows(self._shard, self._places, self._copy_log, self._run)
        unpublished = Unpublished(layout, directories, maker.has_document)
        self._owners = Owners(fs, layout, directories, unpublished, maker.check_new, durable=durable, boot=boot)
        self._publications = Publications(unpublished, self._owners, maker, home, self._run, self._forget_streams)
        self._claims = Claims(self._owners, options.claim_timeout_s, self._publications.roll_back)
        self._sessions = SessionsHeld(self._claims, self._owners)
        interval_s = float(options.extra.get("sync_interval_ms", 1000)) / 1000
        self._shards = [
            Shard(
                DatabaseFile(home, identity, number),
                fs,
                directories,
                options.durability,
                self._owners.writer,
                reserve,
                sync_interval_s=interval_s,
            )
            for number in range(identity.shards)
        ]
        self._blobs = Blobs(fs, layout, directories, durable=durable, reserve=reserve)
        self._reader = SqliteReader(self._shards, identity, self._blobs, unpublished)
        self._streams: StreamTable[HeldLog] = StreamTable(
            self._claims, self._io, home, touch=self._touch, forgotten=lambda _: None
        )
        self._events = self._bytes = 0
        self._closing_turns = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(cls, home: str, options: StoreOptions, *, fs: Fs | None = None) -> SqliteStore:
        """Open the store in ``home``, creating it when there is none.

        Raises:
            StoreError: as ``identity.open_identity``; ``store.unsupported_filesystem`` on any network file system,
                ``store.backend_unavailable`` with an old SQLite library.
        """
        files = fs if fs is not None else RealFs()

        def prepare() -> tuple[str, StoreIdentity]:
            check_library()
            path = os.path.abspath(home)
            with io_errors(path):
                identity = open_identity(files, path, options)
                kind = files.fs_type(path)
            if is_network(kind):
                raise _shares_no_memory(path, kind)
            return path, identity

        from kimi_ray.store.jsonl_reader import boot_id

        path, identity = await asyncio.to_thread(prepare)
        store = cls(files, path, identity, options, str(options.extra.get("boot_id") or boot_id()))
        await asyncio.gather(*map(store._finish_leftovers, store._shards))
        await store._publications.recover()
        return store

    async def _finish_leftovers(self, shard: Shard) -> None:
        """Finish what a process left that died while it deleted or forked."""

        def look() -> bool:
            return shard.read(lambda connection: connection is not None and has_leftovers(connection))

        # A database that cannot be read is told by every call that needs it, and hides no other.
        with contextlib.suppress(StoreError):
            if shard.file.exists() and await self._run(look):
                await shard.transactions.run(lambda _: None, sync=False)

    @property
    def identity(self) -> StoreIdentity:
        """``store.json``."""
        return self._identity

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        self._check_open()
        with io_errors(self._home):
            return await finish_in(self._io, work, *args)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", code="store.closed")

    def _shard(self, session_id: str) -> Shard:
        return self._shards[shard_of(check_id(session_id, "session id"), self._identity.shards)]

    def _granter(self, shard: Shard) -> Granter:
        return Granter(shard.file.path, self._boot, self._mode)

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def open_session(
        self, session_id: str, nonce: str, *, workspace_id: str | None = None, create: bool = False
    ) -> SessionGrant:
        """See ``Store.open_session``."""
        self._check_open()
        check_id(session_id, "session id")
        new = await self._make_way(session_id, nonce, workspace_id or NO_WORKSPACE, create=create)
        if not create:
            await self._run(self._place, session_id, workspace_id)
        async with self._publications.claiming(session_id, new):
            return await self._sessions.open(
                session_id, nonce, lambda _: self._run(self._reader.read_document, session_id), new=new
            )

    def _place(self, session_id: str, workspace_id: str | None) -> str:
        """The workspace of a session: stored, remembered, or now decided."""
        shard = self._shard(session_id)
        found = shard.read(
            lambda connection: None if connection is None else refuse_removed(connection, shard.file.path, session_id)
        )
        # Remembered also when it is stored: a log that was never written takes its session with it when it is closed.
        if found is not None:
            return self._places.place(session_id, found.workspace_id)
        return self._places.place(session_id, workspace_id)

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
        self._places.forget(session_id)

    async def write_document(
        self, session_id: str, value: dict[str, Any], *, grant: int, nonce: str, revision: int
    ) -> int:
        """See ``Store.write_document``."""
        await self._run(self._reader.read_document, session_id)  # one that was removed is told before all else
        shard = self._shard(session_id)
        data = to_json({key: item for key, item in value.items() if key != "revision"})
        tries = 0
        workspace_id = ""

        def write(connection: Connection) -> int:
            nonlocal tries
            tries += 1
            session = place_session(connection, shard.file.path, session_id, workspace_id)
            if tries > 1 and (session.revision, session.document) == (revision + 1, data):
                return session.revision  # the first try was committed after all
            if session.revision != revision:
                raise document_conflict(session_id, session.revision, revision)
            write_session(connection, session.with_document(data, revision + 1))
            return revision + 1

        async def placed() -> int:
            nonlocal workspace_id
            workspace_id = await self._run(self._place, session_id, None)
            written = await shard.transactions.run(write, size=len(data), closing=True)
            await self._publications.shown(session_id)
            return written

        return await self._sessions.write_document(session_id, grant, nonce, placed)

    async def remove(self, session_id: str) -> None:
        """See ``Store.remove``. Removing a removed session finishes what is left of it."""
        self._check_open()
        shard = self._shard(session_id)
        if await self._came_to_nothing(session_id):
            return
        async with self._claims.holding(session_id):
            self._forget_streams(session_id)
            place = self._places.find(session_id)
            run = shard.transactions.run
            marked = await run(lambda c: mark_removed(c, shard.file.path, session_id, place), closing=True)
            self._forget_streams(session_id)  # an append in flight may have loaded one again
            for number in marked:
                while await run(partial(delete_some, stream=number), sync=False, closing=True):
                    pass
            self._places.forget(session_id)
            await self._publications.removed(session_id)
            owner = self._owners.held.get(session_id)
            if owner is not None:
                await self._claims.close_session(session_id, owner.nonce)

    def _forget_streams(self, session_id: str) -> None:
        self._streams.drop_session(session_id, removed=True)

    async def _copy_log(self, log: LogCopy, target: Stream, workspace_id: str) -> None:
        await self._run(self._reader.head, log.source)  # one that nobody sees is no source
        await self._fork_log(log.source, log.cut, target, workspace_id, log.header, new_ulid(), log.tail)

    async def _fork_log(
        self,
        source: Stream,
        cut: int,
        target: Stream,
        workspace_id: str,
        header: dict[str, Any],
        nonce: str,
        tail: tuple[bytes, ...] | None,
    ) -> None:
        shard = self._shard(target.session_id)
        await fork_log(
            self._shard(source.session_id),
            source,
            cut,
            shard,
            target,
            workspace_id,
            header,
            nonce,
            granter=self._granter(shard),
            writer=self._owners.writer,
            read=self._run,
            tail=tail,
        )

    # -- writing logs ------------------------------------------------------------------------------------------------

    def _touch(self, stream: Stream) -> HeldLog:
        """A log that is there, or waits for its first batch."""
        shard = self._shard(stream.session_id)
        check_id(stream.agent_id, "agent id")
        head = shard.read(lambda connection: self._granter(shard).present(connection, stream))
        return HeldLog(stream, head)

    async def open_writer(
        self, target: dict[str, Any] | Stream, nonce: str, *, claim: str | None = None
    ) -> WriterGrant:
        """See ``Store.open_writer``."""
        self._check_open()
        await self._sessions.check_claim(target, claim)
        if isinstance(target, Stream):
            return await self._granted(target, nonce, lambda c, granter: granter.grant(c, target, nonce))
        header = target
        stream, workspace = target_of(header)
        place = await self._run(self._place, stream.session_id, self._places.find(stream.session_id) or workspace)
        check_id(stream.agent_id, "agent id")
        return await self._granted(
            stream, nonce, lambda c, granter: granter.create(c, stream, place, header, nonce), new=True
        )

    async def _granted(
        self, stream: Stream, nonce: str, grant: Callable[[Connection, Granter], Head], *, new: bool = False
    ) -> WriterGrant:
        shard = self._shard(stream.session_id)
        granter = self._granter(shard)
        async with self._claims.holding(stream.session_id):
            while True:
                log = await (
                    self._streams.create(stream, lambda: HeldLog(stream, None)) if new else self._streams.load(stream)
                )
                try:
                    head, header = await shard.transactions.run(
                        lambda connection: (grant(connection, granter), granter.header(connection, stream)),
                        closing=True,
                    )
                except BaseException:
                    await self._streams.drop(stream)
                    raise
                with log.lock:
                    if not log.dropped:
                        log.granted(head)
                        return WriterGrant(head.epoch, head.next_seq, header)

    async def append(self, batches: list[Batch], *, sync: bool) -> list[AppendResult]:
        """See ``Store.append``."""
        self._check_open()
        logs: dict[Stream, HeldLog | KimiRayError] = {}
        missing: list[Stream] = []
        for stream in dict.fromkeys(batch.stream for batch in batches):
            log = self._streams.get(stream)
            if log is None:
                missing.append(stream)
            else:
                logs[stream] = log
        if missing:
            logs.update(zip(missing, await asyncio.gather(*map(self._for_append, missing)), strict=True))
        answers: list[AppendResult | None] = [None] * len(batches)
        jobs: dict[tuple[int, bool], list[int]] = {}
        for index, batch in enumerate(batches):
            log = logs[batch.stream]
            if isinstance(log, KimiRayError):
                answers[index] = AppendResult(batch.stream, 0, 0, log.to_data())
            else:
                shard = shard_of(batch.stream.session_id, self._identity.shards)
                jobs.setdefault((shard, batch.closing), []).append(index)
        await asyncio.gather(
            *(
                self._append_to(self._shards[number], indexes, batches, logs, answers, sync=sync)
                for (number, _), indexes in jobs.items()
            )
        )
        return [answer for answer in answers if answer is not None]

    async def _for_append(self, stream: Stream) -> HeldLog | KimiRayError:
        """A stream that is not held: after a restart of the store the log itself says whose grant is the newest."""
        try:
            log = await self._streams.load(stream)
        except KimiRayError as error:
            return error
        await self._streams.drop(stream)
        return log

    async def _append_to(
        self,
        shard: Shard,
        indexes: list[int],
        batches: list[Batch],
        logs: dict[Stream, HeldLog | KimiRayError],
        answers: list[AppendResult | None],
        *,
        sync: bool,
    ) -> None:
        mine = [batches[index] for index in indexes]
        transactions = shard.transactions
        append = partial(append_batches, file=shard.file.path, batches=mine)
        size = sum(len(batch.payload) for batch in mine)
        future = transactions.submit(append, sync=sync, size=size, closing=mine[0].closing)
        found: list[Written]
        try:
            # What was accepted is finished, also when the caller goes away.
            found = await asyncio.shield(future)
        except KimiRayError as error:
            found = [error] * len(mine)
        for index, batch, written in zip(indexes, mine, found, strict=True):
            log = logs[batch.stream]
            assert isinstance(log, HeldLog)
            if isinstance(written, KimiRayError):
                durable = log.durable(transactions.synced)
                answers[index] = AppendResult(batch.stream, log.written, durable, written.to_data())
                continue
            log.wrote(written, commit=transactions.commits, synced=transactions.synced)
            durable = written if sync else min(log.durable(transactions.synced), written)
            self._events += sum(batch.row_events)
            self._bytes += len(batch.payload)
            answers[index] = AppendResult(batch.stream, written, durable)

    async def close_writer(self, stream: Stream, epoch: int, nonce: str) -> None:
        """See ``Store.close_writer``."""
        self._check_open()
        try:
            log = await self._streams.load(stream)
        except StoreError as error:
            if error.code in ("store.not_found", "store.deleted"):
                return
            raise
        shard = self._shard(stream.session_id)
        granter = self._granter(shard)
        async with self._claims.holding(stream.session_id):
            await shard.transactions.run(
                lambda connection: granter.close(connection, stream, epoch, nonce), closing=True
            )
            with log.lock:
                if (log.epoch, log.nonce) == (epoch, nonce):
                    log.closed, log.granted_here = True, False
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
        shard = self._shard(stream.session_id)
        granter = self._granter(shard)
        async with self._claims.holding(stream.session_id):
            while True:
                view = await self.inspect(stream)
                if not view.closers:
                    return view
                _, head = await self._run(self._reader.head, stream)
                log = self._streams.get(stream)
                became_live = log is not None and (log.granted_here or log.epoch != head.epoch)  # or is just granted
                if not head.closed and (is_live is not False or became_live):
                    raise turn_open(stream, view)
                close = partial(close_turn, granter=granter, stream=stream, view=view, nonce=new_ulid())
                epoch = await shard.transactions.run(close, closing=True)
                if epoch is not None:
                    return LogView(view.header, view.next_seq, epoch, view.closers, view.cut)

    async def fork(self, source: Stream, cut: int, header: dict[str, Any], nonce: str) -> WriterGrant:
        """See ``Store.fork``."""
        self._check_open()
        stream, workspace = target_of(header)
        place = await self._run(self._place, stream.session_id, self._places.find(stream.session_id) or workspace)
        check_id(stream.agent_id, "agent id")
        await self._run(self._reader.head, source)
        async with self._claims.holding(stream.session_id), self._streams.making(stream):
            await self._fork_log(source, cut, stream, place, header, nonce, None)
        return await self.open_writer(stream, nonce)

    # -- reading -----------------------------------------------------------------------------------------------------

    async def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        return await self._run(self._reader.inspect, stream)

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``Store.read_from``."""
        return await self._run(self._reader.read_from, stream, seq, limit, max_bytes)

    async def list_logs(self, *, session_id: str | None = None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        return await self._run(self._reader.list_logs, session_id)

    async def snapshots(self, *, session_id: str | None = None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        return await self._run(self._reader.snapshots, session_id)

    async def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        return await self._run(self._reader.revision, stream)

    async def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        return await self._run(self._reader.locate, stream)

    async def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        return await self._run(self._reader.read_raw, stream)

    async def verify(self, stream: Stream) -> VerifyReport:
        """See ``Store.verify``."""
        return await self._run(self._reader.verify, stream)

    async def read_surviving(self, stream: Stream, cursor: int = 0, limit: int = 1000) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        return await self._run(self._reader.read_surviving, stream, cursor, limit)

    async def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        return await self._run(self._reader.read_document, session_id)

    async def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        return await self._run(self._reader.list_documents)

    # -- blobs -------------------------------------------------------------------------------------------------------

    async def has_blob(self, digest: str) -> bool:
        """See ``Store.has_blob``."""
        return await self._run(self._blobs.has, digest)

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        """See ``Store.put_blobs``."""
        await asyncio.gather(*(self._run(self._blobs.put, digest, content) for digest, content in blobs.items()))

    async def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return await self._run(self._blobs.read, digest)

    async def sweep_blobs(self, *, grace_s: float = 86_400.0, dry_run: bool = False) -> SweepReport:
        """See ``Store.sweep_blobs``."""
        return await sweep_blobs(self._reader, self._blobs, self._run, grace_s=grace_s, dry_run=dry_run)

    # -- the process -------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """See ``Store.stats``."""
        parts = [shard.transactions for shard in self._shards]
        return {
            "commits": sum(part.commits for part in parts),
            "syncs": sum(part.syncs for part in parts),
            "events": self._events,
            "bytes": self._bytes,
            "queue_bytes": sum(part.queued_bytes for part in parts),
            "streams": len(self._streams),
            "sessions": len(self._owners.held),
        }

    async def close(self) -> None:
        """See ``Store.close``."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._io.shutdown, wait=True)
        await asyncio.gather(*(shard.close() for shard in self._shards))
        await self._claims.close()


def _shares_no_memory(home: str, kind: str) -> StoreError:
    return StoreError(
        f"the home {home} is on {kind}: the processes of SQLite share memory beside the database, which it cannot",
        code="store.unsupported_filesystem",
        hint="use a local disk, or backend='jsonl'",
        details={"home": home, "filesystem": kind},
    )
