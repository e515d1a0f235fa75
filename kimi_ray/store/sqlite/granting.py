"""Grants: who may write a log, in its head, and the history of it beside the events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any

from kimi_ray.ids import new_ulid
from kimi_ray.store.layout import not_found
from kimi_ray.store.refusals import already_exists
from kimi_ray.store.seam import Stream
from kimi_ray.store.sqlite.catalogue import (
    StoredStream,
    find_stream,
    insert_stream,
    place_session,
    read_head,
    refuse_gone,
    replace_header,
    write_head,
)
from kimi_ray.store.sqlite.failures import corrupt_row
from kimi_ray.store.sqlite.schema import Head, StoredGrant
from kimi_ray.wall_clock import epoch_ms


@dataclass(frozen=True, slots=True)
class Granter:
    """What every grant of this process records: the boot of the kernel, and the durability."""

    file: str
    boot: str
    mode: str

    def create(
        self, connection: Connection, stream: Stream, workspace_id: str, header: dict[str, Any], nonce: str
    ) -> Head:
        """A grant on a new log; again for the same nonce; a newer one on a log that was never written.

        Raises:
            StoreError: ``store.exists``, ``store.deleted``, ``store.invalid_id``, ``store.corrupt``.
        """
        place_session(connection, self.file, stream.session_id, workspace_id)
        found = find_stream(connection, self.file, stream)
        if found is None:
            number = insert_stream(connection, self.file, stream, new_ulid(), epoch_ms(), header)
            return self.next_epoch(connection, Head(number, 0, 0, "", True, False, "", 0), nonce)
        head = self.head_of(connection, found)
        if head.published and head.nonce != nonce:
            raise already_exists(stream)
        if not head.published and head.nonce != nonce:
            replace_header(connection, found, epoch_ms(), header)
        return self._grant(connection, head, nonce)

    def present(self, connection: Connection | None, stream: Stream) -> Head:
        """The head of an existing log, also of one that waits for its first batch; None is no database.

        Raises:
            StoreError: ``store.not_found``, ``store.deleted``, ``store.corrupt``.
        """
        found = None if connection is None else find_stream(connection, self.file, stream)
        if connection is None or found is None:
            if connection is not None:
                refuse_gone(connection, self.file, stream.session_id)
            raise not_found(stream)
        return self.head_of(connection, found)

    def grant(self, connection: Connection, stream: Stream, nonce: str) -> Head:
        """A newer grant on an existing log, or the present one again for the same nonce.

        Raises:
            StoreError: ``store.not_found``, ``store.deleted``, ``store.corrupt``.
        """
        return self._grant(connection, self.present(connection, stream), nonce)

    def head_of(self, connection: Connection, found: StoredStream) -> Head:
        """The head of a log that is there; a fork in the making is not.

        Raises:
            StoreError: ``store.not_found``, ``store.corrupt``.
        """
        head = read_head(connection, self.file, found.id)
        if head is None:
            raise corrupt_row(self.file, found.id, -1, f"{found.stream} has no head", table="streams")
        if head.copied_by:
            raise not_found(found.stream)
        return head

    def header(self, connection: Connection, stream: Stream) -> dict[str, Any] | None:
        """The header of a log that is there.

        Raises:
            LogError: ``log.version_unsupported``.
            StoreError: ``store.corrupt``.
        """
        found = find_stream(connection, self.file, stream)
        return None if found is None else found.header(self.file)

    def _grant(self, connection: Connection, head: Head, nonce: str) -> Head:
        if head.nonce == nonce and not head.closed:
            return head
        return self.next_epoch(connection, head, nonce)

    def next_epoch(self, connection: Connection, head: Head, nonce: str) -> Head:
        """Record a grant above the newest one."""
        head = replace(head, epoch=head.epoch + 1, nonce=nonce, closed=False, revision=head.revision + 1)
        write_grant(connection, StoredGrant(head.stream, head.epoch, head.next_seq, nonce, self.boot, self.mode, -1))
        write_head(connection, head)
        return head

    def close(self, connection: Connection, stream: Stream, epoch: int, nonce: str) -> None:
        """Give this grant back; another's is left alone. A log that was never written is forgotten.

        Raises:
            StoreError: ``store.corrupt``.
        """
        found = find_stream(connection, self.file, stream)
        head = None if found is None else read_head(connection, self.file, found.id)
        if head is None or head.closed or head.copied_by or (head.epoch, head.nonce) != (epoch, nonce):
            return
        if not head.published:
            forget_unborn(connection, head.stream, stream.session_id)
            return
        given = read_grant(connection, self.file, head.stream, epoch)
        write_grant(connection, replace(given, closed_seq=head.next_seq))
        write_head(connection, replace(head, closed=True, revision=head.revision + 1))


def forget_unborn(connection: Connection, number: int, session_id: str) -> None:
    """Forget a log that has no events, and its session when nothing else is known of that."""
    for table, key in (("streams", "id"), ("heads", "stream"), ("grants", "stream")):
        connection.execute(f"DELETE FROM {table} WHERE {key} = ?", (number,))
    connection.execute(
        "DELETE FROM sessions WHERE session_id = ?1 AND NOT removed AND document IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM streams WHERE session_id = ?1)",
        (session_id,),
    )


def write_grant(connection: Connection, grant: StoredGrant) -> None:
    """Insert or replace a grant in the history."""
    connection.execute(
        "INSERT OR REPLACE INTO grants VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (grant.stream, grant.epoch, grant.seq, grant.nonce, grant.boot, grant.mode, grant.closed_seq, grant.crc),
    )


def read_grants(connection: Connection, file: str, stream: int) -> list[StoredGrant]:
    """The history of a log, oldest first.

    Raises:
        StoreError: ``store.corrupt``.
    """
    found = connection.execute("SELECT * FROM grants WHERE stream = ? ORDER BY epoch", (stream,)).fetchall()
    return [_grant_of(row, file) for row in found]


def read_grant(connection: Connection, file: str, stream: int, epoch: int) -> StoredGrant:
    """One grant.

    Raises:
        StoreError: ``store.corrupt``, also when it is not there.
    """
    row = connection.execute("SELECT * FROM grants WHERE stream = ? AND epoch = ?", (stream, epoch)).fetchone()
    if row is None:
        raise corrupt_row(file, stream, -1, f"the grant {epoch} is missing", table="grants")
    return _grant_of(row, file)


def _grant_of(row: tuple[Any, ...], file: str) -> StoredGrant:
    *facts, crc = row
    grant = StoredGrant(*facts)
    if grant.crc != crc:
        raise corrupt_row(file, grant.stream, grant.seq, f"the grant {grant.epoch} does not verify", table="grants")
    return grant
