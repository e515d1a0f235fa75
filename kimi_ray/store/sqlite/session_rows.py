"""Making and unmaking sessions as rows: what ``publications`` asks of this backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from sqlite3 import Connection
from typing import Any

from pydantic_core import to_json

from kimi_ray.store.layout import check_id
from kimi_ray.store.refusals import session_exists
from kimi_ray.store.seam import LogCopy, SessionCopy, Stream
from kimi_ray.store.sqlite.catalogue import place_session, refuse_removed, write_session
from kimi_ray.store.sqlite.leftovers import delete_some, mark_unmade
from kimi_ray.store.sqlite.places import Places
from kimi_ray.store.sqlite.shard import Shard
from kimi_ray.store.sqlite.shard_reads import ShardReads

CopyLog = Callable[[LogCopy, Stream, str], Awaitable[object]]
"""Makes a log of a session in a workspace."""


class SessionRows:
    """See ``publications.Maker``."""

    def __init__(
        self,
        shard_of: Callable[[str], Shard],
        places: Places,
        copy_log: CopyLog,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        """
        Args:
            shard_of: The shard that keeps a session.
            places: Where sessions will lie.
            copy_log: Copies a log into a session that is being made.
            run: Runs blocking work in a thread of the store.
        """
        self._shard_of = shard_of
        self._places = places
        self._copy_log = copy_log
        self._run = run

    def check_new(self, session_id: str, workspace_id: str) -> None:
        """See ``Maker.check_new``."""
        shard = self._shard_of(session_id)

        def taken(connection: Connection | None) -> bool:
            if connection is None or refuse_removed(connection, shard.file.path, session_id) is None:
                return False
            row = connection.execute(
                "SELECT 1 FROM sessions WHERE session_id = ?1 AND (document IS NOT NULL OR EXISTS (SELECT 1"
                " FROM streams s JOIN heads h ON h.stream = s.id WHERE s.session_id = ?1 AND h.published = 1))",
                (session_id,),
            ).fetchone()
            return row is not None

        if shard.read(taken):
            raise session_exists(session_id)
        self._places.forget(session_id)
        self._places.place(session_id, workspace_id)

    def forget(self, session_id: str) -> None:
        """See ``Maker.forget``."""
        self._places.forget(session_id)

    def has_document(self, session_id: str) -> bool:
        """See ``Maker.has_document``."""
        return has_document(self._shard_of(session_id), session_id)

    async def make(self, copy: SessionCopy) -> None:
        """See ``Maker.make``."""
        shard = self._shard_of(copy.session_id)
        made = await asyncio.gather(*(self._copy(copy, log) for log in copy.logs), return_exceptions=True)
        for error in made:
            if isinstance(error, BaseException):
                raise error
        data = to_json({key: item for key, item in copy.document.items() if key != "revision"})

        def write(connection: Connection) -> None:
            session = place_session(connection, shard.file.path, copy.session_id, copy.workspace_id)
            write_session(connection, session.with_document(data, 1))

        await shard.transactions.run(write, size=len(data))

    async def _copy(self, copy: SessionCopy, log: LogCopy) -> None:
        target = Stream(copy.session_id, check_id(str(log.header.get("agent_id", "")), "agent id"))
        await self._copy_log(log, target, copy.workspace_id)

    async def unmake(self, sessions: dict[str, str], *, shown: bool = False) -> None:
        """See ``Maker.unmake``: of a shard all go in one transaction, whoever could see them."""
        by_shard: dict[int, tuple[Shard, list[str]]] = {}
        for session_id in sessions:
            self._places.forget(session_id)
            shard = self._shard_of(session_id)
            by_shard.setdefault(shard.file.shard, (shard, []))[1].append(session_id)
        for shard, names in by_shard.values():
            if not await self._run(shard.file.exists):
                continue
            run = shard.transactions.run

            def mark(connection: Connection, names: list[str] = names, file: str = shard.file.path) -> list[int]:
                return [number for name in names for number in mark_unmade(connection, file, name)]

            for number in await run(mark, closing=True):
                while await run(partial(delete_some, stream=number), sync=False, closing=True):
                    pass

    async def settle(self, session_id: str) -> None:
        """See ``Maker.settle``."""
        await self._shard_of(session_id).transactions.run(lambda _: None)


def has_document(shard: ShardReads, session_id: str) -> bool:
    """Whether a session that is not removed has a document."""

    def look(connection: Connection | None) -> bool:
        if connection is None:
            return False
        row = connection.execute(
            "SELECT 1 FROM sessions WHERE session_id = ? COLLATE BINARY AND removed = 0 AND document IS NOT NULL",
            (session_id,),
        ).fetchone()
        return row is not None

    return shard.read(look)
