"""The file of a shard: where it lies, how it comes to be, and what is refused before SQLite opens it.

The file of a database is never opened here once it has its name: closing any descriptor of it would drop the locks
that SQLite holds on it in this process. Its log (``-wal``) has no such locks.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from dataclasses import dataclass

from kimi_ray.errors import StoreError
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, io_errors, names_in
from kimi_ray.store.owners import is_held
from kimi_ray.store.seam import StoreIdentity
from kimi_ray.store.sqlite.failures import sqlite_errors
from kimi_ray.store.sqlite.schema import APPLICATION_ID, FORMAT, PAGE_SIZE, TABLES

_MAKING = ".making-"


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """The place of one shard's database."""

    home: str
    identity: StoreIdentity
    shard: int

    @property
    def directory(self) -> str:
        """``<home>/shards``."""
        return f"{self.home}/shards"

    @property
    def path(self) -> str:
        """The database."""
        return f"{self.directory}/{self.shard}.db"

    @property
    def wal(self) -> str:
        """What is committed but not yet in the database."""
        return f"{self.path}-wal"

    def exists(self) -> bool:
        """Whether the shard has a database yet.

        Raises:
            StoreError: ``store.corrupt`` when only its log is there: a new database would take the log for its own.
        """
        with io_errors(self.path):
            if os.path.lexists(self.path):
                return True
            # Looked at once more, for one that another process makes just now has its log after its name.
            if self.wal_bytes() == 0 or os.path.lexists(self.path):
                return os.path.lexists(self.path)
        raise StoreError(
            f"{self.path} is gone, and its log {self.wal} is there",
            code="store.corrupt",
            hint="restore the file from a backup, or move the log away",
            details={"file": self.path, "offset": 0, "rowid": -1, "seq": -1},
        )

    def wal_bytes(self) -> int:
        """The size of the log; 0 when there is none."""
        try:
            return os.stat(self.wal).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def check_safe(self) -> None:
        """Refuse a file that others could put in place of ours.

        Raises:
            StoreError: ``store.unsafe_file``.
        """
        with io_errors(self.path):
            facts = os.lstat(self.path)
        if not stat.S_ISREG(facts.st_mode):
            raise _unsafe(self.path, "it is no regular file")
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _unsafe(self.path, f"others than its owner may write it (mode {stat.S_IMODE(facts.st_mode):04o})")

    def create(self, fs: Fs, directories: Directories, writer: str) -> None:
        """Make an empty database unless there is one: complete under another name, then linked, so that it is never
        seen half made. Of two racing creators one wins.

        Args:
            fs: For the directory and its entries.
            directories: Makes and syncs the directory.
            writer: Part of the other name: the lock of this process (``clear_unmade``).

        Raises:
            StoreError: As ``io_error`` and ``store_error``.
        """
        temporary = f"{self.directory}/{self.shard}{_MAKING}{writer}"
        with io_errors(self.path):
            directories.ensure(self.directory)
            self.clear_unmade(fs)
            fs.close(fs.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            try:
                with sqlite_errors(self.path), contextlib.closing(sqlite3.connect(temporary)) as connection:
                    self._initialise(connection)
                fd = fs.open(temporary, os.O_RDONLY)
                try:
                    fs.fsync(fd)
                finally:
                    fs.close(fd)
                with contextlib.suppress(FileExistsError):
                    fs.link(temporary, self.path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(temporary)
            directories.sync(self.directory)

    def _initialise(self, connection: sqlite3.Connection) -> None:
        connection.isolation_level = None
        execute = connection.execute
        execute("PRAGMA journal_mode = MEMORY")
        execute("PRAGMA auto_vacuum = NONE")
        execute(f"PRAGMA page_size = {PAGE_SIZE}")
        execute("BEGIN IMMEDIATE")
        execute(f"PRAGMA application_id = {APPLICATION_ID}")
        execute(f"PRAGMA user_version = {FORMAT}")
        for table in TABLES:
            execute(table)
        facts = (self.identity.home_id, self.shard, self.identity.shards)
        execute("INSERT INTO store VALUES (1, ?, ?, ?, 0)", facts)
        execute("COMMIT")
        execute("PRAGMA journal_mode = WAL")

    def clear_unmade(self, fs: Fs) -> None:
        """Remove what processes left that died while making a database."""
        for name in names_in(fs, self.directory):
            _, making, rest = name.partition(_MAKING)
            if making and not is_held(fs, f"{self.home}/writers/{rest.partition('-')[0]}.lock"):
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(f"{self.directory}/{name}")


def _unsafe(path: str, why: str) -> StoreError:
    return StoreError(
        f"{path} is not opened for writing: {why}",
        code="store.unsafe_file",
        hint="put the file itself in its place, with chmod 600",
        details={"path": path},
    )
