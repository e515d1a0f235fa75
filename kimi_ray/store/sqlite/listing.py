"""Lists of what a database holds, in pages; what is damaged is a row of the list, and hides no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, Generic, TypeVar

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.seam import Document, Stream
from kimi_ray.store.sqlite.catalogue import StoredStream, head_of, session_of, stream_of
from kimi_ray.store.sqlite.failures import corrupt_row
from kimi_ray.store.sqlite.schema import Head

T = TypeVar("T")

_AT_ONCE = 500
_LOGS = (
    "SELECT s.id, s.session_id, s.agent_id, s.incarnation, s.created_at, s.header, s.crc,"
    " h.stream, h.next_seq, h.epoch, h.nonce, h.closed, h.published, h.copied_by, h.revision, h.crc"
    " FROM streams s LEFT JOIN heads h ON h.stream = s.id"
)
_SESSIONS = "SELECT session_id, workspace_id, removed, revision, document, crc, rowid FROM sessions"


@dataclass(frozen=True, slots=True)
class ListedStream:
    """A log in a list. ``found`` and ``head`` are None for one that nobody sees yet, or that is damaged."""

    stream: Stream
    header: dict[str, Any] | None = None
    found: StoredStream | None = None
    head: Head | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """Items of a list in the order of their keys, and the key to go on after; None: there are no more."""

    items: list[T]
    after: int | None


def streams_after(connection: Connection, file: str, after: int, session_id: str | None) -> ListPage[ListedStream]:
    """A page of logs with a number above ``after`` (0: from the first row on): all, or one session's."""
    # A search for the first row would pass one whose damaged number is below it.
    where = "s.id > ?1" if after else "?1 IS NOT NULL"
    of_session = "" if session_id is None else " AND s.session_id = ?2"
    facts = (after,) if session_id is None else (after, session_id)
    select = f"{_LOGS} WHERE {where}{of_session} ORDER BY s.id LIMIT {_AT_ONCE}"
    rows = connection.execute(select, facts).fetchall()

    def damaged(row: tuple[Any, ...], error: KimiRayError) -> ListedStream:
        return ListedStream(Stream(str(row[1]), str(row[2])), error=error.to_data())

    return _page(rows, file, "streams", 0, after, lambda row: _listed(row, file), damaged)


def _page(
    rows: list[tuple[Any, ...]],
    file: str,
    table: str,
    key: int,
    after: int,
    item: Callable[[tuple[Any, ...]], T],
    damaged: Callable[[tuple[Any, ...], KimiRayError], T],
) -> ListPage[T]:
    """Only a damaged tree has keys out of their order. Such a row is told as damage, and never is the place to go on
    from: a reader would come back to it for ever."""
    items: list[T] = []
    last = after
    for row in rows:
        if isinstance(row[key], int) and row[key] > last:
            last = row[key]
            items.append(item(row))
        else:
            items.append(damaged(row, corrupt_row(file, row[key], -1, "the row is out of its order", table=table)))
    return ListPage(items, last if len(rows) == _AT_ONCE and last > after else None)


def _listed(row: tuple[Any, ...], file: str) -> ListedStream:
    stream = Stream(str(row[1]), str(row[2]))
    header: dict[str, Any] | None = None
    try:
        found = stream_of(row[:7], file)
        if row[7] is None:
            raise corrupt_row(file, row[0], -1, f"{stream} has no head", table="streams")
        head = head_of(row[7:], file)
        if not head.published:
            return ListedStream(stream)
        header = found.header(file)
        return ListedStream(stream, header, found, head)
    except KimiRayError as error:
        return ListedStream(stream, header, error=error.to_data())


def lost_logs(connection: Connection, file: str) -> list[tuple[Stream, StoreError]]:
    """Logs that have a head but no name any more."""
    rows = connection.execute(
        "SELECT stream FROM heads WHERE published = 1 AND NOT EXISTS (SELECT 1 FROM streams WHERE id = stream)"
    ).fetchall()
    return [
        (Stream("", f"{number}"), corrupt_row(file, number, -1, "a log has lost its name", table="heads"))
        for (number,) in rows
    ]


def documents_after(connection: Connection, file: str, after: int) -> ListPage[Document | None]:
    """A page of documents with a rowid above ``after`` (0: from the first row on), None for a session without one; a
    damaged one has ``value={"error": ...}`` and revision -1. Every row is verified: also that it has none."""
    where = "rowid > ?" if after else "? IS NOT NULL"
    rows = connection.execute(f"{_SESSIONS} WHERE {where} ORDER BY rowid LIMIT {_AT_ONCE}", (after,)).fetchall()

    def damaged(row: tuple[Any, ...], error: KimiRayError) -> Document | None:
        return Document(str(row[0]), str(row[1]), -1, {"error": error.to_data()})

    def found(row: tuple[Any, ...]) -> Document | None:
        try:
            return session_of(row, file).to_document()
        except KimiRayError as error:
            return damaged(row, error)

    return _page(rows, file, "sessions", 6, after, found, damaged)


def lost_documents(connection: Connection, file: str) -> list[Document]:
    """Sessions that are in the table's index and in the table no more, each as a damaged document."""
    by_index = "FROM sessions INDEXED BY sqlite_autoindex_sessions_1"
    ((indexed, stored),) = connection.execute(
        f"SELECT (SELECT COUNT(session_id) {by_index}), (SELECT COUNT(*) FROM sessions NOT INDEXED)"
    )
    if indexed <= stored:
        return []
    names = connection.execute(f"SELECT session_id {by_index} EXCEPT SELECT session_id FROM sessions NOT INDEXED")
    why = "a session has lost its row"
    error = corrupt_row(file, -1, -1, why, table="sessions").to_data()
    return [Document(str(name), "", -1, {"error": error}) for (name,) in names.fetchall()]
