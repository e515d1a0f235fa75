"""Reading a database that this process does not write: beside its writer or after it, without writing a byte.

SQLite's own read-only mode creates and changes files beside the database. What is used instead, found by trying
(SQLite 3.22 and later):

- there is no log, or no whole frame in it: the file is opened as immutable, without locks; when the facts about the
  files have changed by the end of the read, it is read again (with a log of nothing but its header, SQLite waits ten
  seconds for a writer that is not there);
- there is a log, with its index (``-shm``): ``readonly_shm=1``. Beside a living writer its index is used, without a
  mark of our own; when the writer is dead, SQLite makes an index of its own in memory;
- there is a log but its index is gone, or too new to have a mark: plain ``mode=ro``, which makes a new index file
  beside the database (neither database nor log change).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kimi_ray.errors import KimiRayError
from kimi_ray.store.fs import io_errors
from kimi_ray.store.sqlite.connections import connect
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.failures import FAILURES, store_error
from kimi_ray.store.sqlite.wal_check import SMALLEST_WAL, check_wal

R = TypeVar("R")

_TRIES = 20
_SPARE = 4
_IMMUTABLE = ("mode=ro", "immutable=1")
_BESIDE = ("mode=ro", "readonly_shm=1")
_PLAIN = ("mode=ro",)
_NO_INDEX = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


class _State(NamedTuple):
    """Facts about the files that change with every commit."""

    inode: int
    size: int
    changed_ns: int
    wal_bytes: int
    wal_changed_ns: int

    @property
    def has_log(self) -> bool:
        """Whether anything can be committed in the log."""
        return self.wal_bytes >= SMALLEST_WAL


class Onlooker:
    """Read transactions on a database of somebody else. Blocking and thread-safe."""

    def __init__(self, file: DatabaseFile) -> None:
        self.file = file
        """Its database."""
        self._lock = threading.Lock()
        self._spare: list[tuple[_State, sqlite3.Connection]] = []
        self._sound: _State | None = None
        """The log that was last found whole."""

    def read(self, work: Callable[[sqlite3.Connection | None], R]) -> R:
        """What ``work`` finds, in one read transaction; None stands for a database that is not there.

        Raises:
            StoreError: As ``connections.connect`` and ``failures.store_error``, and what ``work`` raises.
        """
        options: tuple[str, ...] = ()
        for tries in range(_TRIES + 1):
            state = self._state()
            if state is None:
                return work(None)
            if tries == _TRIES:
                return self._read(state, _PLAIN, work)
            if options != _PLAIN:
                options = _BESIDE if state.has_log else _IMMUTABLE
            if state.has_log and state != self._sound:
                check_wal(self.file, None)
                self._sound = state
            try:
                result = self._read(state, options, work)
            except KimiRayError as error:
                cause = error.__cause__
                code = getattr(cause, "sqlite_errorcode", 0) & 0xFF if isinstance(cause, sqlite3.Error) else 0
                if options == _BESIDE and code in _NO_INDEX:
                    options = _PLAIN
                    continue
                if options == _IMMUTABLE and self._state() != state:
                    continue
                raise
            if options != _IMMUTABLE or self._state() == state:
                return result
        raise AssertionError("the last try returns or raises")

    def _read(self, state: _State, options: tuple[str, ...], work: Callable[[sqlite3.Connection | None], R]) -> R:
        connection = self._take(state, options)
        whole = False
        try:
            connection.execute("BEGIN")
            try:
                result = work(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            whole = True
        except FAILURES as error:
            raise store_error(error, self.file.path) from error
        finally:
            self._give_back(state, options, connection, whole=whole)
        return result

    def _state(self) -> _State | None:
        with io_errors(self.file.path):
            try:
                database = os.stat(self.file.path)
            except (FileNotFoundError, NotADirectoryError):
                if not self.file.exists():
                    return None
                database = os.stat(self.file.path)
            try:
                wal = os.stat(self.file.wal)
            except FileNotFoundError:
                return _State(database.st_ino, database.st_size, database.st_mtime_ns, 0, 0)
            return _State(database.st_ino, database.st_size, database.st_mtime_ns, wal.st_size, wal.st_mtime_ns)

    def _take(self, state: _State, options: tuple[str, ...]) -> sqlite3.Connection:
        with self._lock:
            stale = [connection for known, connection in self._spare if known != state]
            fresh = [spare for spare in self._spare if spare[0] == state]
            found = fresh.pop()[1] if fresh and options == _IMMUTABLE else None
            self._spare = fresh
        for connection in stale:
            connection.close()
        return found if found is not None else connect(self.file, *options)

    def _give_back(
        self, state: _State, options: tuple[str, ...], connection: sqlite3.Connection, *, whole: bool
    ) -> None:
        with self._lock:
            # One that maps the index read-only would keep a writer of this very process from writing to it.
            if whole and options == _IMMUTABLE and len(self._spare) < _SPARE:
                self._spare.append((state, connection))
                return
        connection.close()

    def close(self) -> None:
        """Close what is not in use; the rest when it is given back."""
        with self._lock:
            spare, self._spare = self._spare, []
        for _, connection in spare:
            connection.close()
