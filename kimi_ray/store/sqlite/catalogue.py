"""Sessions and logs by name: what there is, verified row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any, cast
from zlib import crc32

from pydantic_core import from_json, to_json

from kimi_ray.errors import StoreError
from kimi_ray.store.layout import deleted, not_found
from kimi_ray.store.log_scan import parse_header
from kimi_ray.store.seam import Document, Stream
from kimi_ray.store.sqlite.failures import corrupt_row
from kimi_ray.store.sqlite.schema import MAX_STREAM, Head, facts_crc

DELETED = "deleted"
"""``Head.copied_by`` of a log that is being deleted."""

_HEAD = "stream, next_seq, epoch, nonce, closed, published, copied_by, revision, crc"
_STREAM = "id, session_id, agent_id, incarnation, created_at, header, crc"


@dataclass(frozen=True, slots=True)
class StoredStream:
    """The unchanging facts of a log. ``incarnation`` tells it from an earlier log of the same name."""

    id: int
    stream: Stream
    incarnation: str
    header_line: bytes

    def header(self, file: str) -> dict[str, Any]:
        """The header.

        Raises:
            LogError: ``log.version_unsupported``.
        """
        return parse_header(self.header_line + b"\n", file)


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session; ``document`` is None when none was written yet."""

    session_id: str
    workspace_id: str
    removed: bool
    revision: int
    document: bytes | None
    rowid: int

    @property
    def crc(self) -> int:
        """The checksum that is stored with it."""
        body = -1 if self.document is None else crc32(self.document)
        return facts_crc(self.session_id, self.workspace_id, self.removed, self.revision, body)

    def with_document(self, document: bytes, revision: int) -> StoredSession:
        """The session with another document."""
        return replace(self, document=document, revision=revision)

    def to_document(self) -> Document | None:
        """The document as the seam gives it."""
        if self.document is None:
            return None
        return Document(self.session_id, self.workspace_id, self.revision, from_json(self.document))


# -- heads ------------------------------------------------------------------------------------------------------------


def read_head(connection: Connection, file: str, stream: int) -> Head | None:
    """The head of a log, or None.

    Raises:
        StoreError: ``store.corrupt``.
    """
    row = connection.execute(f"SELECT {_HEAD} FROM heads WHERE stream = ?", (stream,)).fetchone()
    return None if row is None else head_of(row, file)


def head_of(row: tuple[Any, ...], file: str) -> Head:
    """A row of ``heads``, verified."""
    stream, next_seq, epoch, nonce, closed, published, copied_by, revision, crc = row
    head = Head(stream, next_seq, epoch, nonce, closed == 1, published == 1, copied_by, revision)
    if closed not in (0, 1) or published not in (0, 1) or head.crc != crc:
        raise corrupt_row(file, stream, -1, "the head of a log does not verify", table="heads")
    return head


def write_head(connection: Connection, head: Head) -> None:
    """Insert or replace a head."""
    connection.execute(
        "INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (head.stream, head.next_seq, head.epoch, head.nonce, head.closed, head.published, head.copied_by,
         head.revision, head.crc),
    )  # fmt: skip


# -- streams ----------------------------------------------------------------------------------------------------------


def find_stream(connection: Connection, file: str, stream: Stream) -> StoredStream | None:
    """A log by its name, or None. An id that differs only in case is another.

    Raises:
        StoreError: ``store.corrupt``.
    """
    row = connection.execute(
        f"SELECT {_STREAM} FROM streams WHERE session_id = ? AND agent_id = ?", tuple(stream)
    ).fetchone()
    if row is None:
        return None
    found = stream_of(row, file)
    if found.stream == stream:
        return found
    if found.stream.session_id == stream.session_id and found.stream.agent_id.lower() == stream.agent_id.lower():
        return None
    raise corrupt_row(file, found.id, -1, f"the index leads from {stream} to {found.stream}", table="streams")


def stream_of(row: tuple[Any, ...], file: str) -> StoredStream:
    """A row of ``streams``, verified."""
    number, session_id, agent_id, incarnation, created_at, header, crc = row
    body = crc32(header) if isinstance(header, bytes) else -1
    if stream_crc(number, session_id, agent_id, incarnation, created_at, body) != crc:
        raise corrupt_row(file, number, -1, "the name or the header of a log does not verify", table="streams")
    return StoredStream(number, Stream(session_id, agent_id), incarnation, header)


def stream_crc(number: object, session_id: str, agent_id: str, incarnation: str, created_at: int, header: int) -> int:
    """The checksum of a row of ``streams``; ``header`` is that of the header alone."""
    return facts_crc(number, session_id, agent_id, incarnation, created_at, header)


def insert_stream(
    connection: Connection, file: str, stream: Stream, incarnation: str, created_at: int, header: dict[str, Any]
) -> int:
    """A new log without a head; returns its number.

    Raises:
        StoreError: ``store.invalid_id`` when only the case of the agent's id is new; ``store.busy`` is not possible.
    """
    twin = connection.execute(
        "SELECT agent_id FROM streams WHERE session_id = ? AND agent_id = ?", tuple(stream)
    ).fetchone()
    if twin is not None:
        raise case_twin("agent id", stream.agent_id, str(twin[0]))
    line = to_json(header)
    cursor = connection.execute(
        "INSERT INTO streams (session_id, agent_id, incarnation, created_at, header, crc) VALUES (?, ?, ?, ?, ?, 0)",
        (*stream, incarnation, created_at, line),
    )
    number = cast("int", cursor.lastrowid)
    if number >= MAX_STREAM:
        raise StoreError(f"{file} has had {number} logs and takes no more", code="store.io_failed")
    crc = stream_crc(number, *stream, incarnation, created_at, crc32(line))
    connection.execute("UPDATE streams SET crc = ? WHERE id = ?", (crc, number))
    return number


def replace_header(connection: Connection, found: StoredStream, created_at: int, header: dict[str, Any]) -> None:
    """Another header for a log that was never written."""
    line = to_json(header)
    crc = stream_crc(found.id, *found.stream, found.incarnation, created_at, crc32(line))
    connection.execute(
        "UPDATE streams SET header = ?, created_at = ?, crc = ? WHERE id = ?", (line, created_at, crc, found.id)
    )


def require_stream(connection: Connection, file: str, stream: Stream) -> tuple[StoredStream, Head]:
    """A log that readers see.

    Raises:
        StoreError: ``store.deleted``, ``store.not_found``, ``store.corrupt``.
    """
    found = find_stream(connection, file, stream)
    if found is None:
        refuse_gone(connection, file, stream.session_id)
        refuse_lost_name(connection, file, stream)
        raise not_found(stream)
    head = read_head(connection, file, found.id)
    if head is None:
        raise corrupt_row(file, found.id, -1, f"{stream} has no head", table="streams")
    if not head.published:
        raise not_found(stream).with_details(unborn=True)
    return found, head


def refuse_lost_name(connection: Connection, file: str, stream: Stream) -> None:
    """Refuse to call a log unknown that only the index has lost.

    Raises:
        StoreError: ``store.corrupt``.
    """
    row = connection.execute(
        "SELECT id FROM streams NOT INDEXED WHERE session_id = ? AND agent_id = ? COLLATE BINARY", tuple(stream)
    ).fetchone()
    if row is not None:
        raise corrupt_row(file, row[0], -1, f"the index does not lead to {stream}", table="streams")


# -- sessions ---------------------------------------------------------------------------------------------------------


def find_session(connection: Connection, file: str, session_id: str) -> StoredSession | None:
    """A session by its id, or None.

    Raises:
        StoreError: ``store.invalid_id`` when another one differs only in case, ``store.corrupt``.
    """
    row = connection.execute(
        "SELECT session_id, workspace_id, removed, revision, document, crc, rowid FROM sessions WHERE session_id = ?",
        (session_id,),
    ).fetchone()
    if row is None:
        _refuse_lost_session(connection, file, session_id)
        return None
    found = session_of(row, file)
    if found.session_id == session_id:
        return found
    if found.session_id.lower() == session_id.lower():
        raise case_twin("session id", session_id, found.session_id)
    raise corrupt_row(file, found.rowid, -1, f"the index leads from {session_id} elsewhere", table="sessions")


def _refuse_lost_session(connection: Connection, file: str, session_id: str) -> None:
    # Whoever has a log has a session: where the index of sessions knows nothing, that of logs may know better.
    row = connection.execute("SELECT id FROM streams WHERE session_id = ? LIMIT 1", (session_id,)).fetchone()
    if row is not None:
        why = f"{session_id} has logs, and the index of sessions does not lead to it"
        raise corrupt_row(file, row[0], -1, why, table="sessions")


def session_of(row: tuple[Any, ...], file: str) -> StoredSession:
    """A row of ``sessions``, verified."""
    session_id, workspace_id, removed, revision, document, crc, rowid = row
    found = StoredSession(session_id, workspace_id, removed == 1, revision, document, rowid)
    whole = removed in (0, 1) and (document is None or isinstance(document, bytes))
    if not whole or found.crc != crc:
        raise corrupt_row(file, rowid, -1, "a session does not verify", table="sessions")
    return found


def write_session(connection: Connection, session: StoredSession) -> None:
    """Insert or change a session."""
    facts = (session.session_id, session.workspace_id, session.removed, session.revision, session.document, session.crc)
    connection.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (session_id) DO UPDATE SET"
        " workspace_id = ?2, removed = ?3, revision = ?4, document = ?5, crc = ?6",
        facts,
    )


def refuse_removed(connection: Connection, file: str, session_id: str) -> StoredSession | None:
    """The session, unless it was removed.

    Raises:
        StoreError: ``store.deleted``, ``store.invalid_id``, ``store.corrupt``.
    """
    found = find_session(connection, file, session_id)
    if found is not None and found.removed:
        raise deleted(session_id)
    return found


def refuse_gone(connection: Connection, file: str, session_id: str) -> None:
    """As ``refuse_removed`` for somebody who looks for a session: one whose id differs in case is another.

    Raises:
        StoreError: ``store.deleted``, ``store.corrupt``.
    """
    try:
        refuse_removed(connection, file, session_id)
    except StoreError as error:
        if error.code != "store.invalid_id":
            raise


def place_session(connection: Connection, file: str, session_id: str, workspace_id: str) -> StoredSession:
    """The session, made when there is none.

    Raises:
        StoreError: As ``refuse_removed``.
    """
    found = refuse_removed(connection, file, session_id)
    if found is None:
        found = StoredSession(session_id, workspace_id, False, 0, None, -1)
        write_session(connection, found)
    return found


def case_twin(what: str, wanted: str, existing: str) -> StoreError:
    """``store.invalid_id``: two ids differ only in case."""
    return StoreError(
        f"{what} {wanted!r} differs only in case from {existing!r}",
        code="store.invalid_id",
        hint="some file systems would mix the two up; choose another id",
        details={"id": wanted, "existing": existing},
    )
