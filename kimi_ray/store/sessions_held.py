"""The sessions that this process holds, and the changes of their documents: the same for every backend.

A document changes only under the newest claim of its session, one change at a time; how it is kept is the backend's.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from kimi_ray.ids import workspace_id as workspace_id_of
from kimi_ray.store.claims import SESSION, Claims
from kimi_ray.store.layout import NO_WORKSPACE
from kimi_ray.store.named_locks import NamedLocks
from kimi_ray.store.owners import Owners
from kimi_ray.store.refusals import claim_superseded, session_fenced
from kimi_ray.store.seam import Document, SessionGrant, Stream


class SessionsHeld:
    """Opening sessions and writing their documents, under claims. Lives on one event loop."""

    def __init__(self, claims: Claims, owners: Owners) -> None:
        self._claims = claims
        self._owners = owners
        self._locks = NamedLocks()

    async def open(
        self,
        session_id: str,
        nonce: str,
        read: Callable[[bool], Awaitable[Document | None]],
        *,
        new: str | None = None,
    ) -> SessionGrant:
        """Claim a session that has its place already.

        Args:
            session_id: The session.
            nonce: Names the holder to be.
            read: Gives the document; it is told whether this process did not hold the session before.
            new: The workspace id of a session that must not be there.

        Raises:
            StoreError: ``session.in_use``, with ``new`` also ``store.exists``, and what ``read`` raises.
        """
        async with self.alone(session_id):
            first = session_id not in self._owners.held
            owner = await self._claims.claim(session_id, nonce, SESSION, new=new)
            document = await read(first)
        return SessionGrant(owner.grant, 0 if document is None else document.revision)

    async def write_document(self, session_id: str, grant: int, nonce: str, write: Callable[[], Awaitable[int]]) -> int:
        """Let ``write`` compare and set, if ``grant`` and ``nonce`` are the newest claim.

        Raises:
            StoreError: ``store.fenced``, ``session.in_use``, and what ``write`` raises.
        """
        async with self.alone(session_id):
            opened = self._claims.holds(session_id, SESSION)
            owner = await self._claims.claim(session_id, None, SESSION)
            if (owner.grant, owner.nonce) != (grant, nonce):
                if not opened:
                    await self._claims.let_go(session_id, SESSION)
                raise session_fenced(session_id, grant, owner.grant)
            return await write()

    async def check_claim(self, target: dict[str, Any] | Stream, claim: str | None) -> None:
        """Refuse a caller that acts for another claim than the newest; None does not look.

        Raises:
            StoreError: ``session.fenced``, ``session.in_use``.
        """
        if claim is None:
            return
        session_id = target.session_id if isinstance(target, Stream) else str(target.get("session_id", ""))
        async with self._claims.holding(session_id) as owner:
            if owner.nonce != claim:
                raise claim_superseded(session_id)

    @contextlib.asynccontextmanager
    async def alone(self, session_id: str) -> AsyncGenerator[None]:
        """Nobody else in this process opens the session or writes its document during the block."""
        async with self._locks.alone(session_id):
            yield


def target_of(header: dict[str, Any]) -> tuple[Stream, str]:
    """The stream that a header describes, and the workspace of its session if that is not placed yet."""
    cwd = header.get("cwd")
    stream = Stream(str(header.get("session_id", "")), str(header.get("agent_id", "")))
    return stream, workspace_id_of(cwd) if isinstance(cwd, str) else NO_WORKSPACE
