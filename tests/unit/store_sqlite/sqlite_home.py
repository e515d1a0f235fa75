"""A home of SQLite whose processes can be killed inside the test's own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from kimi_ray.store import StoreOptions
from kimi_ray.store.sqlite import SqliteStore
from tests.unit.store.killable_fs import KillableFs


class SqliteHome:
    def __init__(self, path: Path, *, syncs: bool = True, shards: int = 1) -> None:
        self.path = path
        self.syncs = syncs
        self.shards = shards
        self._files: dict[int, KillableFs] = {}

    def options(self, **options: Any) -> StoreOptions:
        return StoreOptions(**{"backend": "sqlite", "claim_timeout_s": 2.0, "shards": self.shards, **options})

    async def open(self, **options: Any) -> SqliteStore:
        files = KillableFs(syncs=self.syncs)
        store = await SqliteStore.open(str(self.path), self.options(**options), fs=files)
        self._files[id(store)] = files
        return store

    async def kill(self, store: SqliteStore) -> None:
        """SIGKILL: the databases stay as their files are now, though closing a connection would tidy them up."""
        self._files.pop(id(store)).kill()
        store._closed = True
        for shard in store._shards:
            transactions = shard.transactions
            for timer in (transactions._timer, transactions._idle):
                if timer is not None:
                    timer.cancel()
            transactions._thread.shutdown(wait=True)
            with self._files_kept(Path(shard.file.path), transactions.open):
                connection, transactions._connection = transactions._connection, None
                if connection is not None:
                    connection.close()
                shard._readers.close()
                shard._onlooker.close()
        store._io.shutdown(wait=True)

    @contextlib.contextmanager
    def _files_kept(self, database: Path, was_open: bool) -> Any:
        if not was_open:
            yield
            return
        kept = self.path / "killed"
        kept.mkdir()
        names = [name for end in ("", "-wal", "-shm") if (name := Path(f"{database}{end}")).exists()]
        for name in names:
            shutil.copy2(name, kept / name.name)
        yield
        for name in names:
            os.replace(kept / name.name, name)
        kept.rmdir()


def damage(path: Path, sql: str, *facts: Any) -> None:
    """Change a database behind the store's back."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(sql, facts)
        connection.commit()
