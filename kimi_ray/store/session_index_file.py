"""The file of the index: made, opened, changed in short transactions, and thrown away when it is damaged.

Each change gives its rows a *stamp*, the number of the transaction. Whoever compares the documents with the index notes
the stamps first and then changes only rows whose stamp is still the same: what somebody wrote meanwhile is newer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kimi_ray.store.fs import RealFs, wait_for_lock
from kimi_ray.store.session_index_rows import IndexRow
from kimi_ray.store.session_index_sql import SCHEMA, TABLES, UPSERT, UPSERT_NEWER, values_of

INDEX_NAME = "index.sqlite"
_LOG = "-wal"
_BESIDE = (_LOG, "-shm", "-journal")
_LOCK_WAIT_S = 5.0
_PAUSE_S = 0.005

R = TypeVar("R")


class IndexLost(Exception):
    """The index is not to be believed."""


class IndexReplaced(IndexLost):
    """The file, or SQLite's log of it, was deleted or replaced while it was open: what was written may be missing."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What was in the index before the documents were read."""

    rows: dict[str, tuple[int, bytes]]
    """Stamp and digest by session."""
    gone: dict[str, int]


class IndexFile:
    """One process's open index. Blocking and thread-safe: reads and writes have a connection each."""

    def __init__(self, home: str, home_id: str, *, busy_s: float = 0.25) -> None:
        """
        Args:
            home: The home.
            home_id: Its store: an index of another one is made anew.
            busy_s: How long a transaction waits for another process's, in seconds.
        """
        self.path = f"{home}/{INDEX_NAME}"
        self._lock_path = f"{home}/index.lock"
        self._home_id = home_id
        self._busy_s = busy_s
        self._reading = _Slot()
        self._writing = _Slot()
        self._inode: tuple[int, int] | None = None
        self._log_inode: tuple[int, int] | None = None

    # -- the file ----------------------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Open the index, or make an empty one in place of none, a damaged one or another store's.

        Returns:
            Whether it was there.

        Raises:
            sqlite3.Error, OSError: It cannot be used.
        """
        with self._reading.lock, self._writing.lock, self._exclusively():
            self._close()
            try:
                if os.path.exists(self.path) and self._connect():
                    return True
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
                    raise
            self._close()
            self._delete()
            self._make()
            if not self._connect():
                raise sqlite3.OperationalError(f"{self.path} cannot be read back")
            return False

    def _connect(self) -> bool:
        for slot in (self._writing, self._reading):
            slot.connection = sqlite3.connect(
                f"file:{file_uri(self.path)}?mode=rw", uri=True, timeout=self._busy_s, isolation_level=None,
                check_same_thread=False,
            )  # fmt: skip
            slot.connection.execute("PRAGMA synchronous = NORMAL")
        try:
            known = dict(self._writing.connection_.execute("SELECT name, value FROM facts").fetchall())
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return False
        whole = known.get("schema") == SCHEMA and known.get("home_id") == self._home_id
        if whole:
            self._inode = _inode(self.path)
            self._log_inode = _inode(self.path + _LOG)  # it stays the same one while anybody has the index open
        return whole

    def _make(self) -> None:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            facts = (
                ("schema", SCHEMA),
                ("home_id", self._home_id),
                ("stamp", 0),
                ("generation", 0),
                ("checked_at", 0),
                ("took_ms", 0),
            )
            rows = ", ".join("(?, ?)" for _ in facts)
            with _transaction(connection):
                for statement in TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"INSERT INTO facts VALUES {rows}", [value for pair in facts for value in pair])
        finally:
            connection.close()

    def _delete(self) -> None:
        for end in ("", *_BESIDE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + end)

    def delete(self) -> None:
        """Close it and delete the file: it is damaged, or could not be told that it is out of date.

        Raises:
            OSError: It is still there.
        """
        with self._reading.lock, self._writing.lock, self._exclusively():
            mine = self._inode is None or self._is_ours()
            self._close()
            if mine:  # else somebody has made another one already
                self._delete()

    @contextlib.contextmanager
    def _exclusively(self) -> Generator[None]:
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            wait_for_lock(RealFs(), fd, fcntl.LOCK_EX, _LOCK_WAIT_S, _PAUSE_S)
            yield
        finally:
            os.close(fd)

    def _is_ours(self) -> bool:
        return self._inode is not None and self._inode == _inode(self.path)

    def is_whole(self) -> bool:
        """Whether the file that was opened is still the index, with all that was written into it; True when closed."""
        if self._inode is None:
            return True
        return self._is_ours() and self._log_inode in (None, _inode(self.path + _LOG))

    def close(self, *, durable: bool = False) -> None:
        """Close the connections. ``durable``: what was written survives a power cut."""
        with self._reading.lock, self._writing.lock:
            connection = self._writing.connection
            if durable and connection is not None:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._close()

    def _close(self) -> None:
        self._inode = None
        for slot in (self._reading, self._writing):
            connection, slot.connection = slot.connection, None
            if connection is not None:
                connection.close()

    # -- reading and writing -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Generator[sqlite3.Connection]:
        """A read transaction.

        Raises:
            IndexReplaced, sqlite3.Error
        """
        with self._reading.lock:
            connection = self._reading.connection
            if connection is None or not self.is_whole():
                raise IndexReplaced(self.path)
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self) -> Generator[tuple[sqlite3.Connection, int]]:
        """A write transaction, and its stamp.

        Raises:
            IndexReplaced, sqlite3.Error
        """
        with self._writing.lock:
            connection = self._writing.connection
            if connection is None or not self.is_whole():
                raise IndexReplaced(self.path)
            with _transaction(connection):
                connection.execute("UPDATE facts SET value = value + 1 WHERE name = 'stamp'")
                yield connection, int(fact(connection, "stamp"))
            if not self.is_whole():
                raise IndexReplaced(self.path)

    def record(self, changes: Mapping[str, IndexRow | None]) -> None:
        """Sessions that were written, or removed (None). What is newer stays, and what was removed stays removed."""
        with self.write() as (connection, stamp):
            removed = [session_id for session_id, row in changes.items() if row is None]
            connection.executemany("DELETE FROM sessions WHERE id = ?", [(one,) for one in removed])
            connection.executemany("INSERT OR REPLACE INTO gone VALUES (?, ?)", [(one, stamp) for one in removed])
            rows = [row for row in changes.values() if row is not None and not _is_gone(connection, row.id)]
            _put(connection, UPSERT_NEWER, rows, stamp)

    def forget(self, session_id: str) -> None:
        """Drop the row of a session; it comes back with its next document, or when the documents are read again."""
        with self.write() as (connection, _):
            connection.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def note(self) -> Noted:
        """What is there now."""
        with self._writing.lock:  # readers are not to wait for it
            connection = self._writing.connection
            if connection is None or not self.is_whole():
                raise IndexReplaced(self.path)
            connection.execute("BEGIN")
            try:
                rows = connection.execute("SELECT id, stamp, digest FROM sessions INDEXED BY by_stamp").fetchall()
                gone = connection.execute("SELECT id, stamp FROM gone").fetchall()
            finally:
                connection.execute("ROLLBACK")
        return Noted({one: (stamp, digest) for one, stamp, digest in rows}, dict(gone))

    def correct(self, noted: Noted, rows: Sequence[IndexRow], absent: Sequence[str]) -> int:
        """Change what differs from the documents, except what was changed since ``noted``.

        Args:
            noted: The index before the documents were read.
            rows: Sessions as they should be.
            absent: Sessions that have no document.

        Returns:
            How many rows were changed.
        """
        with self.write() as (connection, stamp):
            still = [row for row in rows if _unchanged(connection, noted, row.id)]
            _put(connection, UPSERT, still, stamp)
            connection.executemany(
                "DELETE FROM gone WHERE id = ?", [(row.id,) for row in still if row.id in noted.gone]
            )
            lost = [(one,) for one in absent if _unchanged(connection, noted, one)]
            connection.executemany("DELETE FROM sessions WHERE id = ?", lost)
            return len(still) + len(lost)

    def settle(self, noted: Noted, *, checked_at: int, took_ms: int, publish: bool) -> int:
        """The documents have been compared: forget old removals; ``publish`` makes a new generation of the index.

        Args:
            noted: The index before the documents were read.
            checked_at: When, in epoch milliseconds.
            took_ms: How long it took.
            publish: The index is whole, and may be believed from now on.

        Returns:
            The generation.
        """
        with self.write() as (connection, _):
            connection.executemany("DELETE FROM gone WHERE id = ? AND stamp = ?", list(noted.gone.items()))
            connection.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)", [("checked_at", checked_at), ("took_ms", took_ms)]
            )
            if publish:
                connection.execute("UPDATE facts SET value = value + 1 WHERE name = 'generation'")
            return int(fact(connection, "generation"))

    def facts(self) -> dict[str, Any]:
        """``generation`` (0: not built yet); ``checked_at`` and ``took_ms`` of the last comparison; and the like."""
        with self.read() as connection:
            return dict(connection.execute("SELECT name, value FROM facts").fetchall())


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: sqlite3.Connection | None = None

    @property
    def connection_(self) -> sqlite3.Connection:
        assert self.connection is not None
        return self.connection


def fact(connection: sqlite3.Connection, name: str) -> Any:
    """One of the facts about the index; None when it is not there."""
    found = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return None if found is None else found[0]


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _put(connection: sqlite3.Connection, statement: str, rows: Iterable[IndexRow], stamp: int) -> None:
    connection.executemany(statement, [values_of(row, stamp) for row in rows])


def _is_gone(connection: sqlite3.Connection, session_id: str) -> bool:
    return connection.execute("SELECT 1 FROM gone WHERE id = ?", (session_id,)).fetchone() is not None


def _unchanged(connection: sqlite3.Connection, noted: Noted, session_id: str) -> bool:
    row = connection.execute("SELECT stamp FROM sessions WHERE id = ?", (session_id,)).fetchone()
    gone = connection.execute("SELECT stamp FROM gone WHERE id = ?", (session_id,)).fetchone()
    before = noted.rows.get(session_id)
    return (row and row[0]) == (before and before[0]) and (gone and gone[0]) == noted.gone.get(session_id)


def _is_damage(error: sqlite3.OperationalError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CANTOPEN)


def is_damage(error: BaseException) -> bool:
    """Whether the file is not a sound database, as against one that is busy, full or cannot be written."""
    if isinstance(error, sqlite3.OperationalError):
        return _is_damage(error)
    return isinstance(error, sqlite3.DatabaseError)


def file_uri(path: str) -> str:
    """A path as it stands in an SQLite URI."""
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
