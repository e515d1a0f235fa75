"""``StoreHost``: the store behind a port. Every method is the seam's, batched where hosts have many streams to open.

Appends have the group ``store`` to themselves, with the blobs that a flush covers: a claim that waits for a dying
owner, a fork or a scan can never hold up what somebody waits to be durable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any, ClassVar, TypeVar

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Cluster, Group
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import (
    AppendResult,
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    SessionCopy,
    SessionGrant,
    StoreIdentity,
    StoreOptions,
    Stream,
    SurvivingPage,
    SweepReport,
    VerifyReport,
    WriterGrant,
)
from kimi_ray.store.session_index_mirror import Changes
from kimi_ray.store.session_index_query import IndexStatus, SessionPage, SessionQuery
from kimi_ray.store.session_index_rows import IndexRow, SessionSummary
from kimi_ray.store.wire import AppendCall
from kimi_ray.store.workspace_registry import WorkspaceEntry

T = TypeVar("T")


class StoreHost:
    """One shard of the store. Opens it with the first call; the constructor and ``start`` do no I/O."""

    PORT: ClassVar[dict[str, Group]] = {
        "append": "store",
        "has_blob": "store",
        "put_blobs": "store",
        "open_writers": "default",
        "close_writers": "default",
        "open_session": "default",
        "close_session": "default",
        "read_document": "default",
        "list_documents": "default",
        "write_document": "default",
        "write_documents": "default",
        "read_from": "default",
        "inspect": "default",
        "load": "default",
        "fork": "default",
        "begin_publication": "default",
        "copy_session": "default",
        "publish": "default",
        "discard_publication": "default",
        "verify": "default",
        "snapshots": "default",
        "revision": "default",
        "read_surviving": "default",
        "sweep_blobs": "default",
        "list_logs": "default",
        "locate": "default",
        "read_raw": "default",
        "read_blob": "default",
        "remove": "default",
        "query_sessions": "default",
        "count_sessions": "default",
        "get_session_summary": "default",
        "forget_session_summary": "default",
        "index_pending": "default",
        "index_status": "default",
        "prepare_index": "default",
        "list_workspaces": "default",
        "touch_workspace": "default",
        "update_workspace": "default",
        "delete_workspace": "default",
        "identity": "default",
        "stats": "control",
        "ping": "control",
    }

    def __init__(
        self, name: str, cluster: Cluster, config: RuntimeConfig, *, service: PersistenceService | None = None
    ) -> None:
        """``service`` is the store to serve; None makes the one that ``config`` describes."""
        self._name = name
        self._cluster = cluster
        options = store_options(config, expected_home_id=cluster.home_id)
        self._service = service or PersistenceService(config.home, options, queue_bytes=config.store_queue_bytes)

    async def start(self) -> None:
        """Nothing yet: the first call opens the store, so a home that cannot be opened is an answer and not a death."""

    async def close(self) -> None:
        """Finish what was accepted, sync, release locks. Idempotent."""
        await self._service.close()

    async def ping(self) -> dict[str, Any]:
        """Proof of life; does not open the store."""
        return {
            "kind": "store",
            "agents": 0,
            "sessions": [],
            "node_id": self._cluster.node_id,
            "pid": os.getpid(),
        }

    async def append(self, call: AppendCall) -> list[AppendResult]:
        """Append what ``wire.pack_call`` packed; one answer per batch, in order.

        Raises:
            StoreError: ``store.busy`` when the queue is full, or why the store cannot be opened.
        """
        return await self._service.append_call(call)

    async def open_writers(
        self, targets: list[tuple[dict[str, Any] | Stream, str, str | None]]
    ) -> list[WriterGrant | dict[str, Any]]:
        """A grant for each ``(header of a new log or stream, nonce, claim)``, all at once; for each the grant, or the
        error as data: one that is refused does not fail the others."""
        open_writer = self._service.open_writer
        return list(
            await asyncio.gather(
                *(_or_error(open_writer(target, nonce, claim=claim)) for target, nonce, claim in targets)
            )
        )

    async def close_writers(self, grants: list[tuple[Stream, int, str]]) -> list[dict[str, Any] | None]:
        """End grants ``(stream, epoch, nonce)``, all at once; for each None or the error as data."""
        return list(
            await asyncio.gather(
                *(_or_error(self._service.close_writer(stream, epoch, nonce)) for stream, epoch, nonce in grants)
            )
        )

    async def open_session(
        self, session_id: str, nonce: str, workspace_id: str | None = None, create: bool = False
    ) -> SessionGrant:
        """See ``Store.open_session``."""
        return await self._service.open_session(session_id, nonce, workspace_id, create)

    async def begin_publication(self, group: str, sessions: dict[str, str]) -> None:
        """See ``Store.begin_publication``."""
        await self._service.begin_publication(group, sessions)

    async def copy_session(self, group: str, copy: SessionCopy) -> None:
        """See ``Store.copy_session``."""
        await self._service.copy_session(group, copy)

    async def publish(self, group: str) -> None:
        """See ``Store.publish``."""
        await self._service.publish(group)

    async def discard_publication(self, group: str) -> None:
        """See ``Store.discard_publication``."""
        await self._service.discard_publication(group)

    async def close_session(self, session_id: str, nonce: str) -> None:
        """See ``Store.close_session``."""
        await self._service.close_session(session_id, nonce)

    async def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        return await self._service.read_document(session_id)

    async def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        return await self._service.list_documents()

    async def write_document(
        self, session_id: str, value: dict[str, Any], grant: int, nonce: str, revision: int
    ) -> int:
        """See ``Store.write_document``."""
        return await self._service.write_document(session_id, value, grant, nonce, revision)

    async def write_documents(
        self, writes: list[tuple[str, dict[str, Any], int, str, int]]
    ) -> list[int | dict[str, Any]]:
        """``write_document`` for each, all at once; for each the new revision or the error as data."""
        return list(await asyncio.gather(*(_or_error(self._service.write_document(*write)) for write in writes)))

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``Store.read_from``."""
        return await self._service.read_from(stream, seq, limit, max_bytes)

    async def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        return await self._service.inspect(stream)

    async def load(self, stream: Stream, is_live: bool | None = None) -> LogView:
        """See ``Store.load``."""
        return await self._service.load(stream, is_live)

    async def fork(self, source: Stream, cut: int, header: dict[str, Any], nonce: str) -> WriterGrant:
        """See ``Store.fork``."""
        return await self._service.fork(source, cut, header, nonce)

    async def verify(self, stream: Stream) -> VerifyReport:
        """See ``Store.verify``."""
        return await self._service.verify(stream)

    async def snapshots(self, session_id: str | None = None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        return await self._service.snapshots(session_id)

    async def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        return await self._service.revision(stream)

    async def read_surviving(self, stream: Stream, cursor: int = 0, limit: int = 1000) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        return await self._service.read_surviving(stream, cursor, limit)

    async def sweep_blobs(self, grace_s: float = 86_400.0, dry_run: bool = False) -> SweepReport:
        """See ``Store.sweep_blobs``."""
        return await self._service.sweep_blobs(grace_s, dry_run)

    async def list_logs(self, session_id: str | None = None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        return await self._service.list_logs(session_id)

    async def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        return await self._service.locate(stream)

    async def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        return await self._service.read_raw(stream)

    async def has_blob(self, digest: str) -> bool:
        """See ``Store.has_blob``."""
        return await self._service.has_blob(digest)

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        """See ``Store.put_blobs``."""
        await self._service.put_blobs(blobs)

    async def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return await self._service.read_blob(digest)

    async def remove(self, session_id: str) -> None:
        """See ``Store.remove``."""
        await self._service.remove(session_id)

    async def query_sessions(
        self, query: SessionQuery, waiting: Changes | None = None, aliases: bool = False
    ) -> SessionPage:
        """See ``PersistenceService.query_sessions``."""
        return await self._service.query_sessions(query, waiting, aliases=aliases)

    async def count_sessions(self, query: SessionQuery, waiting: Changes | None = None, aliases: bool = False) -> int:
        """See ``PersistenceService.count_sessions``."""
        return await self._service.count_sessions(query, waiting, aliases=aliases)

    async def get_session_summary(self, session_id: str, waiting: Changes | None = None) -> SessionSummary | None:
        """See ``PersistenceService.get_session_summary``."""
        return await self._service.get_session_summary(session_id, waiting)

    async def forget_session_summary(self, session_id: str) -> None:
        """See ``PersistenceService.forget_session_summary``."""
        await self._service.forget_session_summary(session_id)

    async def index_pending(self) -> dict[str, IndexRow | None]:
        """See ``PersistenceService.index_pending``."""
        return await self._service.index_pending()

    async def index_status(self) -> IndexStatus:
        """See ``PersistenceService.index_status``."""
        return await self._service.index_status()

    async def prepare_index(self) -> IndexStatus:
        """See ``PersistenceService.prepare_index``."""
        return await self._service.prepare_index()

    async def list_workspaces(self) -> list[WorkspaceEntry]:
        """See ``PersistenceService.list_workspaces``; like the three below for the first shard alone."""
        return await self._service.list_workspaces()

    async def touch_workspace(self, root: str, name: str | None = None) -> WorkspaceEntry:
        """See ``PersistenceService.touch_workspace``."""
        return await self._service.touch_workspace(root, name)

    async def update_workspace(self, workspace_id: str, name: str) -> WorkspaceEntry:
        """See ``PersistenceService.update_workspace``."""
        return await self._service.update_workspace(workspace_id, name)

    async def delete_workspace(self, workspace_id: str) -> None:
        """See ``PersistenceService.delete_workspace``."""
        await self._service.delete_workspace(workspace_id)

    async def identity(self) -> StoreIdentity:
        """``store.json``, opening the store."""
        return await self._service.identity()

    async def stats(self) -> dict[str, Any]:
        """Counters of this shard."""
        return await self._service.stats()


def store_options(config: RuntimeConfig, *, expected_home_id: str | None = None) -> StoreOptions:
    """How the settings open a store; ``expected_home_id`` refuses any other home (``store.wrong_home``)."""
    return StoreOptions(
        backend=config.backend,
        compression=config.compression,
        shards=config.shards,
        durability=config.durability,
        network_home=config.network_home,
        claim_timeout_s=config.claim_timeout_s,
        expected_home_id=expected_home_id,
        extra={"fs": config.fs_spec} if config.fs_spec else {},
    )


async def _or_error(work: Awaitable[T]) -> T | dict[str, Any]:
    try:
        return await work
    except KimiRayError as error:
        return error.to_data()
