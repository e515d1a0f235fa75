"""Calls to the two actors that are restarted when they die, the store and the registry: again until they answer.

Whatever is called this way may be called twice: the store's methods are idempotent (by nonce, by revision, or because
they only read), and the registry's counts are soft.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from kimi_ray.errors import KimiRayError, RuntimeFault, StoreError, error_from_data
from kimi_ray.hosts.coalescing import Coalesced
from kimi_ray.hosts.ports import Cluster, Group, Peer, is_lost, registry_name, store_name
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.settings import Isolation
from kimi_ray.store.seam import (
    AppendResult,
    Batch,
    Document,
    ListedLog,
    LogView,
    Page,
    SessionCopy,
    SessionGrant,
    Stream,
    WriterGrant,
)
from kimi_ray.store.session_index_query import IndexStatus, SessionPage, SessionQuery
from kimi_ray.store.session_index_rows import IndexRow, SessionSummary
from kimi_ray.store.sharding import shard_of
from kimi_ray.store.wire import pack_call
from kimi_ray.store.workspace_registry import WorkspaceEntry

_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0
COPY_S = 600.0
"""How long a session of thousands of agents may take to be copied."""
_TRY_S = 20.0
"""One try: long enough for a claim, short enough that a restarted actor is asked again in time."""


async def call_steadily(
    peer: Peer,
    method: str,
    *args: Any,
    group: Group,
    within_s: float,
    gone: Callable[[str, KimiRayError], KimiRayError],
) -> Any:
    """Call until the callee answers, at most ``within_s`` seconds; ``gone`` makes the error for its silence.

    Raises:
        KimiRayError: what the callee raised, or what ``gone`` made.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    pause_s = _PAUSE_S
    while True:
        left = max(deadline - loop.time(), _PAUSE_S)
        try:
            return await peer.call(method, *args, timeout_s=min(left, _TRY_S), group=group)
        except KimiRayError as error:
            if not is_lost(error.code):
                raise
            if loop.time() + pause_s >= deadline:
                raise gone(method, error) from error
        await asyncio.sleep(pause_s)
        pause_s = min(_PAUSE_MAX_S, pause_s * 2)


class StoreCalls:
    """The store's shards as one object.

    Args:
        cluster: Where the store lives.
        shards: How many shards there are.
        within_s: Longest wait of a call, restarts of the store included.
    """

    def __init__(self, cluster: Cluster, shards: int, within_s: float) -> None:
        self._cluster = cluster
        self._shards = shards
        self._within_s = within_s
        self._documents = Coalesced(self._write_documents)

    async def open_session(
        self, session_id: str, nonce: str, workspace_id: str | None, *, create: bool = False
    ) -> SessionGrant:
        """Claim a session (``Store.open_session``)."""
        return await self._call(session_id, "open_session", session_id, nonce, workspace_id, create, group="store")

    async def begin_publication(self, home_shard_of: str, group: str, sessions: dict[str, str]) -> None:
        """Reserve ids (``Store.begin_publication``), with the store process that ``home_shard_of`` (a session id, the
        same for all calls of a group) belongs to."""
        await self._call(home_shard_of, "begin_publication", group, sessions, group="store")

    async def copy_session(self, group: str, copy: SessionCopy) -> None:
        """Make one session of a publication (``Store.copy_session``), with the store process of its own shard."""
        shard = shard_of(copy.session_id, self._shards)
        within_s = max(self._within_s, COPY_S)
        await self._call_shard(shard, "copy_session", group, copy, group="store", within_s=within_s)

    async def publish(self, home_shard_of: str, group: str) -> None:
        """Show a publication (``Store.publish``)."""
        await self._call(home_shard_of, "publish", group, group="store")

    async def discard_publication(self, home_shard_of: str, group: str) -> None:
        """Delete a publication that was not published (``Store.discard_publication``)."""
        await self._call(home_shard_of, "discard_publication", group, group="store")

    async def fork(self, source: Stream, cut: int, header: dict[str, Any], nonce: str) -> WriterGrant:
        """A new log from the beginning of another (``Store.fork``), with the store process of the new log's shard."""
        return await self._call(str(header["session_id"]), "fork", source, cut, header, nonce, group="store")

    async def close_session(self, session_id: str, nonce: str) -> None:
        """Give the claim back (``Store.close_session``)."""
        await self._call(session_id, "close_session", session_id, nonce, group="store")

    async def write_document(
        self, session_id: str, value: dict[str, Any], grant: int, nonce: str, revision: int
    ) -> int:
        """Compare and set (``Store.write_document``); a write whose answer was lost is recognised by its value."""
        try:
            shard = shard_of(session_id, self._shards)
            answer = await self._documents.add(shard, (session_id, value, grant, nonce, revision))
            if isinstance(answer, dict):
                raise error_from_data(cast("dict[str, Any]", answer))
            return answer
        except StoreError as error:
            if error.code != "store.conflict":
                raise
            stored = await self.read_document(session_id)
            if stored is None or stored.value != value:
                raise
            return stored.revision

    async def read_document(self, session_id: str) -> Document | None:
        """The document, or None (``Store.read_document``)."""
        return await self._call(session_id, "read_document", session_id, group="store")

    async def list_documents(self) -> list[Document]:
        """All documents (``Store.list_documents``): every store process can read the whole home."""
        return await self._call_shard(0, "list_documents", group="store")

    async def list_logs(self, session_id: str) -> list[ListedLog]:
        """The headers of a session's logs (``Store.list_logs``)."""
        return await self._call(session_id, "list_logs", session_id, group="store")

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """A page of a log (``Store.read_from``)."""
        return await self._call(stream.session_id, "read_from", stream, seq, limit, max_bytes, group="store")

    async def inspect(self, stream: Stream) -> LogView:
        """A log's header and end (``Store.inspect``)."""
        return await self._call(stream.session_id, "inspect", stream, group="store")

    async def locate(self, stream: Stream) -> str | None:
        """The path of a log on the storage node, where it has one (``Store.locate``)."""
        return await self._call(stream.session_id, "locate", stream, group="store")

    async def read_blob(self, session_id: str, digest: str) -> bytes:
        """A blob, from the shard of the session that refers to it (``Store.read_blob``)."""
        return await self._call(session_id, "read_blob", digest, group="store")

    async def open_writers(
        self, shard: int, targets: list[tuple[dict[str, Any] | Stream, str, str | None]]
    ) -> list[Any]:
        """Grants for many logs of a shard (``Store.open_writer`` each): a ``WriterGrant``, or an error's data."""
        return await self._call_shard(shard, "open_writers", targets, group="store")

    async def append(self, batch: Batch) -> AppendResult:
        """One batch, on the disk when it is answered (``Store.append``). Agents' own logs go by a ``WriteController``.

        Raises:
            StoreError: ``store.unavailable``. Why it was not appended is in the answer.
        """
        call = pack_call([batch], sync=True)
        results: list[AppendResult] = await self._call(batch.stream.session_id, "append", call, group="store")
        return results[0]

    async def close_writers(self, shard: int, grants: list[tuple[Stream, int, str]]) -> list[Any]:
        """Give grants of a shard back (``Store.close_writer`` each): None, or an error's data."""
        return await self._call_shard(shard, "close_writers", grants, group="store")

    async def remove(self, session_id: str) -> None:
        """Delete a session (``Store.remove``)."""
        await self._call(session_id, "remove", session_id, group="store")

    async def query_sessions(self, query: SessionQuery, *, aliases: bool = False) -> SessionPage:
        """The sessions that are asked for, from all shards (``PersistenceService.query_sessions``)."""
        return await self._call_shard(
            0, "query_sessions", query, await self._waiting_elsewhere(), aliases, group="store"
        )

    async def count_sessions(self, query: SessionQuery, *, aliases: bool = False) -> int:
        """How many sessions are asked for."""
        return await self._call_shard(
            0, "count_sessions", query, await self._waiting_elsewhere(), aliases, group="store"
        )

    async def get_session_summary(self, session_id: str) -> SessionSummary | None:
        """One session, or None: the process of its shard wrote its document last."""
        return await self._call(session_id, "get_session_summary", session_id, group="store")

    async def forget_session_summary(self, session_id: str) -> None:
        """Drop a session from the index until its next document or comparison; the session stays."""
        await self._call(session_id, "forget_session_summary", session_id, group="store")

    async def index_status(self) -> IndexStatus:
        """How the index is, as the first shard sees it."""
        return await self._call_shard(0, "index_status", group="store")

    async def prepare_index(self) -> IndexStatus:
        """See that the index is ready, if it can be."""
        return await self._call_shard(0, "prepare_index", group="store")

    async def home(self) -> str:
        """The directory of the home, where the store is."""
        stats: dict[str, Any] = await self._call_shard(0, "stats", group="control")
        return str(stats["home"])

    async def list_workspaces(self) -> list[WorkspaceEntry]:
        """All workspaces, the one opened last first."""
        return await self._call_shard(0, "list_workspaces", group="store")

    async def touch_workspace(self, root: str, name: str | None = None) -> WorkspaceEntry:
        """A directory is worked in now."""
        return await self._call_shard(0, "touch_workspace", root, name, group="store")

    async def update_workspace(self, workspace_id: str, name: str) -> WorkspaceEntry:
        """Give a workspace another name."""
        return await self._call_shard(0, "update_workspace", workspace_id, name, group="store")

    async def delete_workspace(self, workspace_id: str) -> None:
        """Forget a workspace; its sessions stay."""
        await self._call_shard(0, "delete_workspace", workspace_id, group="store")

    async def _waiting_elsewhere(self) -> dict[str, IndexRow | None] | None:
        if self._shards == 1:
            return None
        found = await asyncio.gather(
            *(self._call_shard(shard, "index_pending", group="store") for shard in range(1, self._shards))
        )
        return {one: row for waiting in found for one, row in waiting.items()}

    async def _write_documents(self, shard: int, writes: list[Any]) -> list[Any]:
        return await self._call_shard(shard, "write_documents", writes, group="store")

    async def _call(self, session_id: str, method: str, *args: Any, group: Group) -> Any:
        return await self._call_shard(shard_of(session_id, self._shards), method, *args, group=group)

    async def _call_shard(
        self, shard: int, method: str, *args: Any, group: Group, within_s: float | None = None
    ) -> Any:
        peer = self._cluster.peer(store_name(self._cluster.home_id, shard))
        bound_s = self._within_s if within_s is None else within_s

        def gone(method: str, error: KimiRayError) -> KimiRayError:
            return StoreError(
                f"the store {peer.name} did not answer {method} within {bound_s:g} s",
                code="store.unavailable",
                hint="kimi-ray status and kimi-ray logs show what its actor is doing",
                details={"method": method, "cause": str(error)},
                retryable=True,
            )

        return await call_steadily(peer, method, *args, group=group, within_s=bound_s, gone=gone)


class RegistryCalls:
    """The registry as one object.

    Args:
        cluster: Where the registry lives.
        within_s: Longest wait of a call, restarts of the registry included.
    """

    def __init__(self, cluster: Cluster, within_s: float) -> None:
        self._peer = cluster.peer(registry_name(cluster.home_id))
        self._within_s = within_s

    async def place_session(self, session_id: str, isolation: Isolation | None) -> str:
        """The session host to use."""
        return await self._call("place_session", session_id, isolation)

    async def find_session(self, session_id: str) -> str | None:
        """The session host that holds a session, or None."""
        return await self._call("find_session", session_id, group="control")

    async def hold_session(self, session_id: str, host: str) -> str:
        """The session host that a session belongs to; ``host`` if it was nobody's (``Registry.hold_session``)."""
        return await self._call("hold_session", session_id, host, group="control")

    async def forget_session(self, session_id: str, host: str | None = None) -> None:
        """A session is closed; with ``host`` only if it is that host's."""
        await self._call("forget_session", session_id, host, group="control")

    async def place_agents(self, wishes: list[PlaceAgent]) -> list[str]:
        """An agent host for each wish."""
        return await self._call("place_agents", wishes)

    async def released(self, host: str, count: int = 1) -> None:
        """Agents of a host are gone."""
        await self._call("released", host, count, group="control")

    async def report_lost(self, host: str) -> bool:
        """Whether a host that could not be reached is gone for good."""
        return await self._call("report_lost", host, group="control")

    async def _call(self, method: str, *args: Any, group: Group = "default") -> Any:
        def gone(method: str, error: KimiRayError) -> KimiRayError:
            return RuntimeFault(
                f"the registry did not answer {method} within {self._within_s:g} s",
                code="runtime.registry_unavailable",
                hint="kimi-ray status shows what runs; kimi-ray down ends what is left",
                details={"method": method, "cause": str(error)},
                retryable=True,
            )

        return await call_steadily(self._peer, method, *args, group=group, within_s=self._within_s, gone=gone)
