"""Archive, restore and delete of sessions that nobody has open: claim, compare and set, let go.

No agent is opened and no model or working directory is needed, so it works for sessions whose directory is gone. The
caller holds the lock of the session's id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.hosts.orphans import stop_orphans
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.ids import MAIN, new_ulid, workspace_id
from kimi_ray.log import epoch_ms
from kimi_ray.session import loaded_document, new_document
from kimi_ray.session.document_value import with_patch
from kimi_ray.session.refusals import no_session
from kimi_ray.store.seam import Document

_GONE = ("store.not_found", "store.deleted")
_DROP_S = 60.0


@dataclass(frozen=True, slots=True)
class _Claim:
    nonce: str
    grant: int


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session's document as it is after its load; ``mended``: the store has it otherwise."""

    session_id: str
    workspace_id: str
    revision: int
    value: dict[str, Any]
    mended: bool = False

    def document(self, revision: int | None = None) -> Document:
        """The document, at another revision when it was written."""
        return Document(self.session_id, self.workspace_id, revision or self.revision, self.value)


class ColdSessions:
    """The changes of sessions that are not live.

    Args:
        cluster: To reach agents that outlived the host of their session, and the directories of deleted ones.
        store: The store.
        close_timeout_s: How long such agents have to end.
    """

    def __init__(self, cluster: Cluster, store: StoreCalls, close_timeout_s: float) -> None:
        self._cluster = cluster
        self._store = store
        self._close_within_s = close_timeout_s + 5.0

    async def find(self, session_id: str, workspaces: Collection[str] | None = None) -> StoredSession:
        """The session's document as it is read at a load; one whose document is lost gets it from main's log.

        Args:
            session_id: Which.
            workspaces: Only in these; None in all.

        Raises:
            SessionError: ``session.not_found``, ``session.version_unsupported``.
            StoreError: why the document cannot be read (``store.corrupt`` ...).
        """
        try:
            stored = await self._store.read_document(session_id) or await self._from_log(session_id)
        except StoreError as error:
            if error.code not in _GONE:
                raise
            stored = None
        if stored is None or (workspaces is not None and stored.workspace_id not in workspaces):
            raise no_session(session_id)
        value = loaded_document(session_id, stored.value)
        return StoredSession(session_id, stored.workspace_id, stored.revision, value, value != stored.value)

    async def set_archived(self, session_id: str, archived: bool, workspaces: Collection[str] | None) -> Document:
        """Archive or restore; a session that is so already is not touched. ``updated_at`` stays.

        Raises:
            SessionError, StoreError: as ``find``; ``session.in_use`` {host, pid}.
        """
        found = await self.find(session_id, workspaces)
        if found.value["archived"] == archived:
            return found.document()
        async with self._claimed(found) as claim:
            if claim.grant > 1:
                # An earlier claim was never given back: agents may have outlived the host of their session.
                await stop_orphans(self._cluster, session_id, (), self._close_within_s)
            found = await self.find(session_id, workspaces)  # what was read before the claim may be old
            if not with_patch(found.value, {"archived": archived}, now=epoch_ms()):
                return found.document()
            revision = await self._store.write_document(
                session_id, found.value, claim.grant, claim.nonce, found.revision
            )
        return found.document(revision)

    async def delete(self, session_id: str, workspaces: Collection[str] | None) -> None:
        """Delete for good: the tombstone first, so that nobody brings it back; then logs and private directories.

        One that is deleted already is not found, and what an earlier deletion may have left of its directories goes.

        Raises:
            SessionError, StoreError: as ``set_archived``. A document that cannot be read hinders only a caller that
                asks for certain workspaces.
        """
        try:
            found = await self.find(session_id, workspaces)
        except KimiRayError as error:
            if error.code == "session.not_found" and await self._is_deleted(session_id):
                await self.drop_workdirs(session_id)
            if workspaces is not None or error.code not in ("store.corrupt", "session.version_unsupported"):
                raise
            found = StoredSession(session_id, "", 0, {})
        async with self._claimed(found) as claim:
            if claim.grant > 1:
                try:
                    await stop_orphans(self._cluster, session_id, (), self._close_within_s)
                except KimiRayError:
                    pass  # whoever lives on is refused by the tombstone
            await self._store.remove(session_id)
        await self.drop_workdirs(session_id)

    async def _is_deleted(self, session_id: str) -> bool:
        try:
            await self._store.read_document(session_id)
        except StoreError as error:
            return error.code == "store.deleted"
        return False

    async def drop_workdirs(self, session_id: str) -> None:
        """Remove the private working directories of a deleted session on every node that has a host of agents.

        A node without one does so when its next host starts.
        """
        hosts = {host.node_id: host.name for host in await self._cluster.list_hosts() if host.kind == "agents"}

        async def drop(host: str) -> None:
            try:
                await self._cluster.peer(host).call("drop_workdirs", [session_id], timeout_s=_DROP_S, group="store")
            except KimiRayError as error:
                if not is_lost(error.code):
                    raise

        await asyncio.gather(*(drop(host) for host in hosts.values()))

    @asynccontextmanager
    async def _claimed(self, found: StoredSession) -> AsyncGenerator[_Claim]:
        nonce = new_ulid()
        session_id = found.session_id
        try:
            grant = await self._store.open_session(session_id, nonce, found.workspace_id or None)
        except StoreError as error:
            if error.code in _GONE:
                raise no_session(session_id) from error
            raise
        try:
            yield _Claim(nonce, grant.grant)
        finally:
            await asyncio.shield(self._store.close_session(session_id, nonce))

    async def _from_log(self, session_id: str) -> Document | None:
        logs = await self._store.list_logs(session_id)
        header: dict[str, Any] | None = next((log.header for log in logs if log.stream.agent_id == MAIN), None)
        if header is None:
            return None
        cwd = header.get("cwd")
        workspace = workspace_id(cwd) if isinstance(cwd, str) else ""
        value = new_document(session_id, workspace_id=workspace, cwd=cwd, now=int(header["created_at"]))
        return Document(session_id, workspace, 0, value)
