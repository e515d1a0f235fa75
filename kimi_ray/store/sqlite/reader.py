"""Everything that only reads a SQLite home: beside a live writer, without a claim, without writing a byte.

Long reads go in pages, each a read transaction of its own: none holds up the checkpoints of a writer for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from sqlite3 import Connection
from typing import TypeVar

from kimi_ray.errors import StoreError
from kimi_ray.store.blobs import Blobs
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs
from kimi_ray.store.layout import Layout, check_id, not_found
from kimi_ray.store.seam import (
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    StoreIdentity,
    Stream,
    SurvivingPage,
    VerifyReport,
)
from kimi_ray.store.sharding import shard_of
from kimi_ray.store.sqlite.beside import Onlooker
from kimi_ray.store.sqlite.catalogue import StoredSession, StoredStream, refuse_removed, require_stream
from kimi_ray.store.sqlite.connections import check_library
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.listing import ListPage, documents_after, lost_documents, lost_logs, streams_after
from kimi_ray.store.sqlite.paging import read_page, rows_from
from kimi_ray.store.sqlite.schema import Head
from kimi_ray.store.sqlite.session_rows import has_document
from kimi_ray.store.sqlite.shard_reads import ShardReads
from kimi_ray.store.sqlite.surviving import surviving_rows
from kimi_ray.store.sqlite.verifying import Verifier, survivors_of
from kimi_ray.store.survey import OpenTurn, closers_of
from kimi_ray.store.unpublished import Unpublished, unpublished_in

R = TypeVar("R")
T = TypeVar("T")

_ROWS_AT_ONCE = 2000


class SqliteReader:
    """Blocking reads of one home. Thread-safe."""

    def __init__(
        self, shards: Sequence[ShardReads], identity: StoreIdentity, blobs: Blobs, unpublished: Unpublished
    ) -> None:
        """
        Args:
            shards: One per shard, in order.
            identity: ``store.json``.
            blobs: The blobs beside the databases.
            unpublished: The sessions that nobody sees yet.
        """
        self._shards = shards
        self._identity = identity
        self._blobs = blobs
        self._unpublished = unpublished
        self._verifier = Verifier()

    def shard(self, session_id: str) -> ShardReads:
        """The shard that keeps a session.

        Raises:
            StoreError: ``store.invalid_id``.
        """
        return self._shards[shard_of(check_id(session_id, "session id"), self._identity.shards)]

    def _in(self, stream: Stream, work: Callable[[Connection, str, StoredStream, Head], R]) -> R:
        """What ``work`` finds about a log that is there."""
        shard = self.shard(stream.session_id)
        check_id(stream.agent_id, "agent id")
        file = shard.file.path

        def found(connection: Connection | None) -> R:
            if connection is None:
                raise not_found(stream)
            return work(connection, file, *require_stream(connection, file, stream))

        answer = shard.read(found)
        self._check_seen(stream)
        return answer

    def _check_seen(self, stream: Stream) -> None:
        if self._unpublished.hides(stream.session_id):
            raise not_found(stream)

    def head(self, stream: Stream) -> tuple[StoredStream, Head]:
        """Name, header and head of a log.

        Raises:
            StoreError: ``store.not_found``, ``store.deleted``, ``store.corrupt``.
        """
        return self._in(stream, lambda _, __, found, head: (found, head))

    def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        found, head = self.head(stream)
        file = self.shard(stream.session_id).file.path
        turn = OpenTurn()
        seq = 0
        while seq < head.next_seq:
            rows, seq = self._in(stream, lambda c, f, s, h, seq=seq: _some_rows(c, f, s, seq, found.id, head.next_seq))
            turn.feed(b"".join(rows))
        closers = closers_of(turn.rows)
        return LogView(
            header=found.header(file),
            next_seq=head.next_seq + len(closers),
            epoch=head.epoch,
            closers=tuple(closers),
            cut=head.next_seq,
        )

    def read_from(self, stream: Stream, seq: int, limit: int, max_bytes: int, *, chunks: bool = True) -> Page:
        """See ``Store.read_from``."""
        return self._in(stream, lambda c, file, _, head: read_page(c, file, head, seq, limit, max_bytes, chunks))

    def list_logs(self, session_id: str | None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        return _headers(self._seen(session_id, lambda _, __: ""))

    def all_logs(self) -> list[ListedLog]:
        """Headers of all logs, those of unpublished sessions too."""
        return _headers(self._listed(None, lambda _, __: ""))

    def snapshots(self, session_id: str | None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        return self._seen(session_id, self._revision_of)

    def _seen(self, session_id: str | None, revision: Callable[[StoredStream, Head], str]) -> list[LogSnapshot]:
        if session_id is not None:
            rows = self._listed(session_id, revision)
            return [] if rows and self._unpublished.hides(session_id) else rows
        return self._unpublished.seen(lambda: self._listed(None, revision), lambda row: row.stream.session_id)

    def _listed(self, session_id: str | None, revision: Callable[[StoredStream, Head], str]) -> list[LogSnapshot]:
        found: list[LogSnapshot] = []
        for shard in self._shards if session_id is None else [self.shard(session_id)]:
            for row in _pages(shard, lambda c, file, after: streams_after(c, file, after, session_id)):
                if row.error is not None:
                    found.append(LogSnapshot(row.stream, "", row.header, row.error))
                elif row.found is not None and row.head is not None:
                    found.append(LogSnapshot(row.stream, revision(row.found, row.head), row.header))
            if session_id is None:
                lost = _read(shard, lost_logs, [])
                found.extend(LogSnapshot(stream, "", None, error.to_data()) for stream, error in lost)
        return sorted(found, key=lambda row: row.stream)

    def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        return self._revision_of(*self.head(stream))

    def _revision_of(self, found: StoredStream, head: Head) -> str:
        return f"{self._identity.home_id}:{found.incarnation}:{head.revision}"

    def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``: there is no file per log."""
        self.shard(stream.session_id)
        return None

    def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``: there is none."""
        self.head(stream)
        raise StoreError(
            f"{stream} has no file of its own: its rows are in {self.shard(stream.session_id).file.path}",
            code="store.no_raw_artifact",
            hint="read its events, or export it",
            details={"stream": list(stream)},
        )

    def verify(self, stream: Stream) -> VerifyReport:
        """See ``Store.verify``."""
        check_id(stream.agent_id, "agent id")
        report = self._verifier.verify(self.shard(stream.session_id), stream)
        self._check_seen(stream)
        return report

    def read_surviving(self, stream: Stream, cursor: int, limit: int) -> SurvivingPage:
        """See ``Store.read_surviving``; the cursor is a seq."""
        page = self.surviving(stream, cursor, limit)
        self._check_seen(stream)
        return page

    def surviving(self, stream: Stream, cursor: int, limit: int) -> SurvivingPage:
        """As ``read_surviving``, of an unpublished session too."""
        check_id(stream.agent_id, "agent id")
        shard = self.shard(stream.session_id)
        file = shard.file.path

        def work(connection: Connection | None) -> SurvivingPage:
            if connection is None:
                raise not_found(stream)
            log = survivors_of(connection, file, stream)
            found = surviving_rows(connection, file, log.number, cursor, limit, end=log.next_seq)
            damage = [*(log.damage if cursor == 0 else ()), *found.damage]
            return SurvivingPage(
                log.header, tuple(found.events), found.next_seq, tuple(error.to_data() for error in damage)
            )

        return shard.read(work)

    def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        shard = self.shard(session_id)

        def find(connection: Connection, file: str) -> StoredSession | None:
            try:
                return refuse_removed(connection, file, session_id)
            except StoreError as error:
                if error.code != "store.invalid_id":
                    raise
                return None  # the one that is there has another id, in other letters

        session = _read(shard, find, None)
        document = None if session is None else session.to_document()
        return None if document is None or self._unpublished.hides(session_id) else document

    def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""

        def stored() -> list[Document]:
            found: list[Document] = []
            for shard in self._shards:
                found.extend(document for document in _pages(shard, documents_after) if document is not None)
                found.extend(_read(shard, lost_documents, []))
            return found

        return self._unpublished.seen(stored, lambda document: document.session_id)

    def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return self._blobs.read(digest)

    def close(self) -> None:
        """Close the connections that are not in use."""
        for shard in self._shards:
            if isinstance(shard, Onlooker):
                shard.close()


def _headers(rows: list[LogSnapshot]) -> list[ListedLog]:
    return [ListedLog(row.stream, row.header, None, row.error) for row in rows]


def _read(shard: ShardReads, work: Callable[[Connection, str], T], nothing: T) -> T:
    return shard.read(lambda connection: nothing if connection is None else work(connection, shard.file.path))


def _pages(shard: ShardReads, page_after: Callable[[Connection, str, int], ListPage[T]]) -> Iterator[T]:
    """The items of all pages; each page is a read transaction."""
    after: int | None = 0
    nothing: ListPage[T] = ListPage([], None)
    while after is not None:
        page = _read(shard, lambda c, file, after=after: page_after(c, file, after), nothing)
        yield from page.items
        after = page.after


def _some_rows(
    connection: Connection, file: str, found: StoredStream, seq: int, number: int, end: int
) -> tuple[list[bytes], int]:
    """The next rows of a log that is still the same one, and the seq after them."""
    if found.id != number:
        raise not_found(found.stream)
    rows: list[bytes] = []
    for _, at, events, data, _ in rows_from(connection, file, number, seq, end):
        rows.append(data)
        if len(rows) >= _ROWS_AT_ONCE:
            return rows, at + events
    return rows, end


def sqlite_reader(fs: Fs, home: str, identity: StoreIdentity) -> SqliteReader:
    """The reader of a SQLite home that this process does not write.

    Raises:
        StoreError: ``store.backend_unavailable`` with an old SQLite library.
    """
    check_library()
    shards: list[ShardReads] = [Onlooker(DatabaseFile(home, identity, shard)) for shard in range(identity.shards)]
    layout = Layout(fs, home)
    blobs = Blobs(fs, layout, Directories(fs, home, durable=False), durable=False)

    def with_document(session_id: str) -> bool:
        return has_document(shards[shard_of(session_id, identity.shards)], session_id)

    return SqliteReader(shards, identity, blobs, unpublished_in(layout, with_document))
