"""One shard as a store process has it: opened with the first use, for reading and for writing."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

from kimi_ray.settings import Durability
from kimi_ray.store.directories import Directories
from kimi_ray.store.faults import FaultyFs
from kimi_ray.store.fs import Fs
from kimi_ray.store.reserve import Reserve
from kimi_ray.store.sqlite.beside import Onlooker
from kimi_ray.store.sqlite.connections import Readers, checkpoint, connect_writer
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.leftovers import clear_leftovers
from kimi_ray.store.sqlite.transactions import Transactions
from kimi_ray.store.sqlite.wal_check import check_wal

R = TypeVar("R")

_OPEN_WAIT_S = 2.0
_OPEN_PAUSE_S = 0.01


class Shard:
    """A database of this process."""

    def __init__(
        self,
        file: DatabaseFile,
        fs: Fs,
        directories: Directories,
        durability: Durability,
        writer: str,
        reserve: Reserve,
        *,
        sync_interval_s: float,
    ) -> None:
        """
        Args:
            file: The database.
            fs: The files beside it.
            directories: Makes the directory.
            durability: Of its commits.
            writer: Names the lock of this process.
            reserve: As in ``Transactions``.
            sync_interval_s: As in ``Transactions``.
        """
        self.file = file
        self._fs = fs
        self._directories = directories
        self._durability: Durability = durability
        self._writer = writer
        self._touched = False
        self._readers = Readers(file)
        self._onlooker = Onlooker(file)
        self.transactions = Transactions(
            file,
            durability,
            self._open,
            reserve,
            sync_interval_s=sync_interval_s,
            # SQLite syncs its files itself: of files that are slow on purpose only the delay is taken over.
            sync_delay_s=lambda: fs.sync_delay_s if isinstance(fs, FaultyFs) else 0.0,
        )

    def _open(self) -> sqlite3.Connection:
        """The writing connection; with the first one, all that was found is made durable and leftovers go.

        Raises:
            StoreError: As ``connect_writer``; ``store.corrupt`` also for a damaged log.
            sqlite3.Error: As SQLite gave it.
        """
        file = self.file
        if not file.exists():
            file.create(self._fs, self._directories, self._writer)
        elif not self._touched:
            file.clear_unmade(self._fs)
            check_wal(file, self._writer)
        self._onlooker.close()
        deadline = time.monotonic() + _OPEN_WAIT_S
        while True:
            connection = connect_writer(file, self._durability)
            try:
                self._make_ready(connection)
            except BaseException as error:
                connection.close()
                code = getattr(error, "sqlite_errorcode", 0)
                if code & 0xFF != sqlite3.SQLITE_READONLY or time.monotonic() >= deadline:
                    raise
                # Somebody in this process reads, and has mapped the index read-only for the length of a read.
                time.sleep(_OPEN_PAUSE_S)
                continue
            self._touched = True
            return connection

    def _make_ready(self, connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE store SET syncs = syncs + 1")
        if self._touched:
            return
        if self._durability == "disk":
            # What is found may only be in the page cache, left by a process that died.
            checkpoint(connection, "TRUNCATE", wait_s=_OPEN_WAIT_S)
        clear_leftovers(connection, self.file, self._fs)

    def read(self, work: Callable[[sqlite3.Connection | None], R]) -> R:
        """What ``work`` finds, in one read transaction; None stands for a database that is not there. Blocking.

        Raises:
            StoreError: As ``connections.connect`` and ``failures.store_error``, and what ``work`` raises.
        """
        if self.transactions.open:
            with self._readers.reading() as connection:
                return work(connection)
        return self._onlooker.read(work)

    async def close(self) -> None:
        """Finish what was accepted; close every connection, the writer last: only that one can tidy up."""
        self._readers.close()
        self._onlooker.close()
        await self.transactions.close()
