"""Lists of what a database holds, in pages; what is damaged is a row of the list, and hides no other."""

from __future__ import annotations

from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.seam import Document, Stream
from kimi_ray.store.sqlite.catalogue import StoredStream, head_of, session_of, stream_of
from kimi_ray.store.sqlite.failures import corrupt_row
from kimi_ray.store.sqlite.schema import Head

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


def streams_after(
    connection: Connection, file: str, after: int, session_id: str | None
) -> list[tuple[int, ListedStream]]:
    """A page of logs with a number above ``after``: all, or one session's."""
    where, facts = (
        ("s.id > ?", (after,)) if session_id is None else ("s.id > ? AND s.session_id = ?", (after, session_id))
    )
    rows = connection.execute(f"{_LOGS} WHERE {where} ORDER BY s.id LIMIT {_AT_ONCE}", facts).fetchall()
    return [(row[0], _listed(row, file)) for row in rows]


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


def documents_after(connection: Connection, file: str, after: int) -> list[tuple[int, Document | None]]:
    """A page of documents with a rowid above ``after``, None for a session without one; a damaged one has
    ``value={"error": ...}`` and revision -1. Every row is verified: also that it has none."""
    rows = connection.execute(f"{_SESSIONS} WHERE rowid > ? ORDER BY rowid LIMIT {_AT_ONCE}", (after,)).fetchall()
    found: list[tuple[int, Document | None]] = []
    for row in rows:
        try:
            document = session_of(row, file).to_document()
        except KimiRayError as error:
            document = Document(str(row[0]), str(row[1]), -1, {"error": error.to_data()})
        found.append((row[6], document))
    return found
