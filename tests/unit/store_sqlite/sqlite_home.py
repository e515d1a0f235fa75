"""A home of SQLite whose processes can be killed inside the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Coroutine, Iterator
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
        self._stores: list[SqliteStore] = []

    def options(self, **options: Any) -> StoreOptions:
        return StoreOptions(**{"backend": "sqlite", "claim_timeout_s": 2.0, "shards": self.shards, **options})

    async def open(self, **options: Any) -> SqliteStore:
        files = KillableFs(syncs=self.syncs)
        store = await SqliteStore.open(str(self.path), self.options(**options), fs=files)
        self._files[id(store)] = files
        self._stores = [other for other in self._stores if not other._closed] + [store]
        return store

    async def kill(self, store: SqliteStore) -> None:
        """SIGKILL: the databases stay as their files are now, though closing a last connection would tidy them up."""
        self._files.pop(id(store)).kill()
        self._stores.remove(store)
        store._closed = True
        for number, shard in enumerate(store._shards):
            transactions = shard.transactions
            for timer in (transactions._timer, transactions._idle):
                if timer is not None:
                    timer.cancel()
            transactions._thread.shutdown(wait=True)
            others = any(other._shards[number].transactions.open for other in self._stores)
            with self._files_kept(Path(shard.file.path), transactions.open and not others):
                connection, transactions._connection = transactions._connection, None
                if connection is not None:
                    connection.close()
                shard._readers.close()
                shard._onlooker.close()
        store._io.shutdown(wait=True)

    @contextlib.contextmanager
    def _files_kept(self, database: Path, keep: bool) -> Iterator[None]:
        kept = self.path / "killed"
        names = [name for end in ("", "-wal", "-shm") if (name := Path(f"{database}{end}")).exists()]
        if keep:
            kept.mkdir()
            for name in names:
                shutil.copy2(name, kept / name.name)
        yield
        if keep:
            for name in names:
                os.replace(kept / name.name, name)
            kept.rmdir()

    def database(self, shard: int = 0) -> Path:
        """The file of a shard."""
        return self.path / "shards" / f"{shard}.db"


class SqliteMachineHome(SqliteHome):
    """Under the machine: on an event loop of its own."""

    name = "sqlite"

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="kimi-ray-sqlite-")
        super().__init__(Path(self._directory) / "home", syncs=False, shards=2)
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end, within a bound."""
        return self._loop.run_until_complete(asyncio.wait_for(work, 20))

    def power_cut(self, seed: int) -> bool:
        """Not possible with real files."""
        del seed
        return False

    def close(self) -> None:
        """Give everything back."""
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        shutil.rmtree(self._directory)


def damage(path: Path, sql: str, *facts: Any) -> None:
    """Change a database behind the store's back."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(sql, facts)
        connection.commit()
