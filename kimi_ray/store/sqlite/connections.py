"""Connections to a shard's database: one that writes and checkpoints, and any number that read beside it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Generator
from urllib.parse import quote

from kimi_ray.errors import StoreError
from kimi_ray.settings import Durability
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.failures import corrupt_database, foreign, sqlite_errors
from kimi_ray.store.sqlite.schema import APPLICATION_ID, FORMAT, TABLES

BUSY_TIMEOUT_S = 10.0
_SPARE_READERS = 8
_OLDEST = (3, 37, 0)

_SYNC: dict[Durability, str] = {"disk": "FULL", "os": "NORMAL", "none": "OFF"}


def sync_level(durability: Durability, *, sync: bool) -> str:
    """``PRAGMA synchronous`` of a commit; ``sync``: somebody waits for it."""
    return _SYNC["os" if durability == "disk" and not sync else durability]


def check_library() -> None:
    """Refuse a SQLite library that is too old for the tables.

    Raises:
        StoreError: ``store.backend_unavailable``.
    """
    if sqlite3.sqlite_version_info < _OLDEST:
        raise StoreError(
            f"the SQLite library of this Python is {sqlite3.sqlite_version}; 3.37 or newer is needed",
            code="store.backend_unavailable",
            hint="use a Python with a newer SQLite, or backend='jsonl'",
            details={"backend": "sqlite", "library": sqlite3.sqlite_version},
        )


def uri_of(path: str, *options: str) -> str:
    """A ``file:`` URI of the path."""
    return f"file:{quote(path)}?{'&'.join(options)}"


def connect(file: DatabaseFile, *options: str, timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """A connection whose database is one of ours, of this store and shard. It may move between threads, not be shared.

    Raises:
        StoreError: ``store.foreign_database``, ``store.format_unsupported``, ``store.corrupt``, and as ``store_error``.
    """
    path = file.path
    with sqlite_errors(path):
        connection = sqlite3.connect(
            uri_of(path, *options),
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=64,
            uri=True,
        )
        try:
            connection.text_factory = _text
            for pragma in ("trusted_schema = OFF", "mmap_size = 0", "wal_autocheckpoint = 0", "cell_size_check = ON"):
                connection.execute(f"PRAGMA {pragma}")
            check_ours(connection, file)
        except BaseException:
            connection.close()
            raise
        return connection


def _text(data: bytes) -> str:
    # A damaged text must reach the checksum that it breaks.
    return data.decode("utf-8", "replace")


def check_ours(connection: sqlite3.Connection, file: DatabaseFile) -> None:
    """Refuse a database that is another's, newer, of another shard, or whose schema is not ours.

    Raises:
        StoreError: ``store.foreign_database``, ``store.format_unsupported``, ``store.wrong_home``, ``store.corrupt``.
        sqlite3.Error: As SQLite gave it.
    """
    path = file.path
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application & 0xFFFF_FFFF != APPLICATION_ID:
        raise foreign(path, f"its application id is {application}")
    if version > FORMAT:
        raise StoreError(
            f"{path} has format {version}; this program knows format {FORMAT}",
            code="store.format_unsupported",
            hint="upgrade the program",
            details={"file": path, "format": version},
        )
    found = [row[0] for row in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid")]
    if version != FORMAT or [sql for sql in found if not str(sql).startswith(_OWN)] != list(TABLES):
        raise corrupt_database(path, "its tables are not those of its format")
    facts = connection.execute("SELECT home_id, shard, shards FROM store").fetchone()
    expected = (file.identity.home_id, file.shard, file.identity.shards)
    if facts != expected:
        raise StoreError(
            f"{path} belongs to shard {facts and facts[1:]} of the store {facts and facts[0]}",
            code="store.wrong_home",
            hint=f"this is shard {expected[1:]} of the store {expected[0]}; put the right file in its place",
            details={"file": path, "found": facts and list(facts), "expected": list(expected)},
        )


_OWN = "CREATE TABLE sqlite_sequence"


def connect_writer(file: DatabaseFile, durability: Durability) -> sqlite3.Connection:
    """The connection that writes and checkpoints.

    Raises:
        StoreError: As ``connect``; ``store.unsafe_file``.
    """
    file.check_safe()
    connection = connect(file, "mode=rw")
    with sqlite_errors(file.path):
        set_sync(connection, sync_level(durability, sync=True))
    return connection


def set_sync(connection: sqlite3.Connection, level: str) -> None:
    """Whether the next commits are synced; not inside a transaction."""
    connection.execute(f"PRAGMA synchronous = {level}")


def checkpoint(connection: sqlite3.Connection, mode: str, *, wait_s: float) -> bool:
    """Move what is committed into the database; False when a reader or another writer stood in the way.

    Raises:
        sqlite3.Error: As SQLite gave it.
    """
    connection.execute(f"PRAGMA busy_timeout = {round(wait_s * 1000)}")
    try:
        busy, _, _ = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_S * 1000)}")
    return not busy


class Readers:
    """Reading connections beside the writer of this process, each used by one thread at a time."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._spare: deque[sqlite3.Connection] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """A connection inside a read transaction: what it sees is one state. Keep it short, it holds up checkpoints.

        Raises:
            StoreError: As ``connect`` and ``store_error``.
        """
        with self._lock:
            connection = self._spare.pop() if self._spare else None
        if connection is None:
            connection = connect(self._file, "mode=ro")
        whole = False
        try:
            with sqlite_errors(self._file.path):
                connection.execute("BEGIN")
                try:
                    yield connection
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            whole = True
        except StoreError as error:
            whole = error.code not in ("store.corrupt", "store.io_failed", "store.busy", "store.permission_denied")
            raise
        finally:
            self._give_back(connection, whole=whole)

    def _give_back(self, connection: sqlite3.Connection, *, whole: bool) -> None:
        with self._lock:
            if whole and not self._closed and len(self._spare) < _SPARE_READERS:
                self._spare.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is not in use; the rest when it is given back."""
        with self._lock:
            self._closed = True
            spare, self._spare = list(self._spare), deque()
        for connection in spare:
            connection.close()
