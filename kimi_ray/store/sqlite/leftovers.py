"""Deleting logs in short transactions, and finishing what a process left that died in the middle."""

from __future__ import annotations

from dataclasses import replace
from sqlite3 import Connection

from kimi_ray.errors import StoreError
from kimi_ray.store.fs import Fs
from kimi_ray.store.layout import NO_WORKSPACE, not_found
from kimi_ray.store.owners import is_held
from kimi_ray.store.sqlite.catalogue import DELETED, StoredSession, find_session, head_of, write_head, write_session
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.granting import forget_unborn
from kimi_ray.store.sqlite.schema import Head, row_id
from kimi_ray.wall_clock import epoch_ms

ROWS_AT_ONCE = 5000
_FORGET_AFTER_MS = 24 * 3600 * 1000
_HEADS = "SELECT stream, next_seq, epoch, nonce, closed, published, copied_by, revision, crc FROM heads"


def mark_removed(connection: Connection, file: str, session_id: str, workspace_id: str | None) -> list[int]:
    """The tombstone: from now on the session and its logs are gone for everyone. May be repeated.

    Args:
        connection: Inside a write transaction.
        file: The database, for messages.
        session_id: The session.
        workspace_id: Where a session lies that has nothing stored yet; None when it has no place.

    Returns:
        The numbers of all logs whose rows are still to be deleted.

    Raises:
        StoreError: ``store.not_found``.
    """
    try:
        found = find_session(connection, file, session_id)
    except StoreError as error:
        if error.code != "store.corrupt":
            raise
        found = StoredSession(session_id, workspace_id or NO_WORKSPACE, False, 0, None, -1)
    if found is None:
        if workspace_id is None:
            raise not_found(session_id)
        found = StoredSession(session_id, workspace_id, False, 0, None, -1)
    write_session(connection, replace(found, removed=True, revision=0, document=None))
    for (number,) in connection.execute("SELECT id FROM streams WHERE session_id = ?", (session_id,)).fetchall():
        mark_deleted(connection, number)
    marked = connection.execute("SELECT stream FROM heads WHERE published = 0 AND copied_by = ?", (DELETED,))
    return [number for (number,) in marked.fetchall()]


def mark_unmade(connection: Connection, file: str, session_id: str) -> list[int]:
    """Forget a session that never was, and leave no tombstone; one that was removed stays removed. May be repeated.

    Returns:
        The numbers of its logs, whose rows are still to be deleted.

    Raises:
        StoreError: ``store.corrupt``.
    """
    try:
        found = find_session(connection, file, session_id)
    except StoreError as error:
        if error.code not in ("store.corrupt", "store.invalid_id"):
            raise
        found = None
    if found is not None and found.removed:
        return []
    streams = connection.execute("SELECT id FROM streams WHERE session_id = ?", (session_id,)).fetchall()
    for (number,) in streams:
        mark_deleted(connection, number)
    connection.execute("DELETE FROM sessions WHERE session_id = ? COLLATE BINARY AND removed = 0", (session_id,))
    return [number for (number,) in streams]


def mark_deleted(connection: Connection, stream: int) -> None:
    """A log is given up, whatever its head says: its name is free, its rows are still to be deleted."""
    write_head(connection, Head(stream, 0, 0, "", True, False, DELETED, 0))
    connection.execute("DELETE FROM streams WHERE id = ?", (stream,))


def delete_some(connection: Connection, stream: int) -> bool:
    """Delete a bounded number of rows of a log that is marked; whether there may be more. May be repeated."""
    deleted = connection.execute(
        "DELETE FROM rows WHERE id IN (SELECT id FROM rows WHERE id >= ? AND id < ? LIMIT ?)",
        (row_id(stream, 0), row_id(stream + 1, 0), ROWS_AT_ONCE),
    ).rowcount
    if deleted == ROWS_AT_ONCE:
        return True
    connection.execute("DELETE FROM grants WHERE stream = ?", (stream,))
    connection.execute("DELETE FROM heads WHERE stream = ?", (stream,))
    return False


def clear_leftovers(connection: Connection, file: DatabaseFile, fs: Fs) -> None:
    """Finish deletions, give up forks whose writer is dead, and forget grants that nobody came back for within a day.

    Each step is a transaction of its own.

    Raises:
        sqlite3.Error: As SQLite gave it.
        StoreError: ``store.corrupt``.
    """
    for row in connection.execute(f"{_HEADS} WHERE published = 0").fetchall():
        try:
            head = head_of(row, file.path)
        except StoreError:
            continue  # damaged: told to whoever reads it
        if head.copied_by == "":
            _forget_if_old(connection, head)
            continue
        if head.copied_by != DELETED:
            if is_held(fs, f"{file.home}/writers/{head.copied_by}.lock"):
                continue
            connection.execute("BEGIN IMMEDIATE")
            mark_deleted(connection, head.stream)
            connection.execute("COMMIT")
        more = True
        while more:
            connection.execute("BEGIN IMMEDIATE")
            more = delete_some(connection, head.stream)
            connection.execute("COMMIT")


def has_leftovers(connection: Connection) -> bool:
    """Whether there may be something for ``clear_leftovers``: forks and deletions that are not finished."""
    return (
        connection.execute("SELECT 1 FROM heads WHERE published = 0 AND copied_by <> '' LIMIT 1").fetchone() is not None
    )


def _forget_if_old(connection: Connection, head: Head) -> None:
    row = connection.execute("SELECT session_id, created_at FROM streams WHERE id = ?", (head.stream,)).fetchone()
    if row is None or not isinstance(row[1], int) or row[1] > epoch_ms() - _FORGET_AFTER_MS:
        return
    connection.execute("BEGIN IMMEDIATE")
    # Its writer may have come back meanwhile.
    still = connection.execute("SELECT 1 FROM heads WHERE stream = ? AND published = 0", (head.stream,)).fetchone()
    if still is not None:
        forget_unborn(connection, head.stream, str(row[0]))
    connection.execute("COMMIT")
