"""The index for somebody who only reads the home, beside its writers or after them, writing no byte.

It is believed when every process that writes documents keeps it, or has left it whole; else the documents are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from kimi_ray.store.fs import RealFs
from kimi_ray.store.identity import is_network
from kimi_ray.store.open import ReadStore
from kimi_ray.store.session_index import places_of
from kimi_ray.store.session_index_answers import count, find, page
from kimi_ray.store.session_index_file import INDEX_NAME, fact, file_uri
from kimi_ray.store.session_index_marks import Marks, read_marks
from kimi_ray.store.session_index_mirror import INDEX_FAILURES
from kimi_ray.store.session_index_query import SessionPage, SessionQuery, count_of, page_of
from kimi_ray.store.session_index_rows import IndexRow, SessionSummary, row_of
from kimi_ray.store.session_index_sql import SCHEMA, read_ids_ending, read_places

R = TypeVar("R")

Standing = Literal["ready", "degraded", "none"]
"""Where an answer came from: the index; the documents, as the index is not to be believed; or as there is none."""

_TRIES = 3
_BUSY_S = 0.25
_ENDINGS = 1000


@dataclass(frozen=True, slots=True)
class _Place:
    inode: int
    changed_ns: int
    size: int
    wal_bytes: int
    marks: Marks


class SessionsReader:
    """The sessions of a home, from its index or from their documents."""

    def __init__(self, store: ReadStore) -> None:
        """``store`` reads the documents."""
        self._store = store
        self._home = store.home
        self._rows: list[IndexRow] | None = None
        self.standing: Standing = "none"
        """Where the last answer came from."""

    async def page(self, query: SessionQuery) -> SessionPage:
        """The sessions that are asked for.

        Raises:
            StoreError: The documents cannot be read either.
        """
        return await self._answer(lambda found: page(found, query, {}), lambda rows: page_of(rows, query))

    async def count(self, query: SessionQuery) -> int:
        """How many sessions are asked for, cursors and limit aside."""
        return await self._answer(lambda found: count(found, query, {}), lambda rows: count_of(rows, query))

    async def get(self, session_id: str) -> SessionSummary | None:
        """One session, or None."""

        def among(rows: list[IndexRow]) -> SessionSummary | None:
            return next((row.to_summary() for row in rows if row.id == session_id), None)

        return await self._answer(lambda found: find(found, session_id, {}), among)

    async def ids_ending(self, end: str, limit: int = _ENDINGS) -> list[str]:
        """Session ids that end in a text, in any case; in an empty one none does."""

        def among(rows: list[IndexRow]) -> list[str]:
            return sorted(row.id for row in rows if row.id.lower().endswith(end.lower()))[:limit]

        return await self._answer(lambda found: read_ids_ending(found, end, limit), among) if end else []

    async def places(self) -> list[tuple[str, str]]:
        """``(workspace id, directory)`` of all sessions, each pair once."""
        return await self._answer(read_places, places_of)

    async def _answer(
        self, from_index: Callable[[sqlite3.Connection], R], from_rows: Callable[[list[IndexRow]], R]
    ) -> R:
        if self._rows is None:
            for _ in range(_TRIES):
                try:
                    found = await asyncio.to_thread(self._from_index, from_index)
                except (*INDEX_FAILURES, ValueError, TypeError):
                    self.standing = "degraded"
                    break
                if found is not None:
                    return found[0]
            self._rows = [row_of(document) for document in await self._store.list_documents()]
        return from_rows(self._rows)

    def _from_index(self, work: Callable[[sqlite3.Connection], R]) -> tuple[R] | None:
        """The answer; None: it is not there, not to be believed, or changed meanwhile (then it may be tried again)."""
        path = f"{self._home}/{INDEX_NAME}"
        before = _place(self._home, path)
        if before is None:
            self.standing = "none"
            return None
        marks = before.marks
        if not marks.believed or is_network(RealFs().fs_type(self._home)):
            self.standing = "degraded"
            return None
        # Without a writer and without a log the file is read as it is: SQLite's own read-only mode makes files.
        still = not marks.living and not before.wal_bytes
        options = "mode=ro&immutable=1" if still else "mode=ro"
        connection = sqlite3.connect(
            f"file:{file_uri(path)}?{options}", uri=True, timeout=_BUSY_S, isolation_level=None
        )
        with contextlib.closing(connection):
            connection.execute("BEGIN")
            if fact(connection, "schema") != SCHEMA or fact(connection, "home_id") != self._store.identity.home_id:
                self.standing = "degraded"
                return None
            if not fact(connection, "generation"):
                self.standing = "none"
                return None
            answer = work(connection)
        after = _place(self._home, path)
        if after is None or not after.marks.believed or after.inode != before.inode or (still and after != before):
            self.standing = "degraded"
            return None
        self.standing = "ready"
        return (answer,)


def _place(home: str, path: str) -> _Place | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    try:
        wal_bytes = os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        wal_bytes = 0
    return _Place(found.st_ino, found.st_mtime_ns, found.st_size, wal_bytes, read_marks(home))
