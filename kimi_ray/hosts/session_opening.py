"""Bringing sessions to life: prepared in private (claim, main agent), then published by their document.

Whatever fails before leaves nothing listed. Whoever calls holds the lock of the session's id, and its name at the
registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dishka import AsyncContainer

from kimi_ray.errors import KimiRayError, SessionError, StoreError
from kimi_ray.hosts.activation import activate_agent
from kimi_ray.hosts.cold_sessions import ColdSessions
from kimi_ray.hosts.live_session import HostServices, LiveSession
from kimi_ray.hosts.orphans import adopt_living
from kimi_ray.hosts.session_services import ClaimedSession
from kimi_ray.hosts.specs import SessionSpec
from kimi_ray.ids import MAIN, new_ulid
from kimi_ray.log import epoch_ms
from kimi_ray.scopes import dispose, open_scope
from kimi_ray.session import new_document
from kimi_ray.store.seam import SessionGrant, Stream

_FORCED_S = 10.0
_CREATIONS = 3
"""So often a session is created when the store's process is lost with what was prepared."""
_FORGOTTEN = ("store.not_found", "session.fenced")


class SessionOpening:
    """Creates and resumes the sessions of one host, each in a Session container of its own.

    Args:
        app: The host's own container.
        services: What the host lends its sessions.
        cold: Reads the documents of sessions that are not live.
    """

    def __init__(self, app: AsyncContainer, services: HostServices, cold: ColdSessions) -> None:
        self._app = app
        self._services = services
        self._cold = cold
        self._scopes: dict[str, AsyncContainer] = {}

    async def create(self, spec: SessionSpec) -> LiveSession:
        """A new session with its main agent; its first document is written when it returns.

        Raises:
            SessionError: ``session.exists``. What the activation of main raised. Nothing is left then.
        """
        for _ in range(_CREATIONS - 1):
            activated: list[str] = []
            try:
                return await self._create(spec, activated)
            except StoreError as error:
                if activated or error.code not in _FORGOTTEN:
                    raise
                # The store's process was lost, and with it what was not published; of it nothing is left.
                spec = replace(spec, main=replace(spec.main, nonce=new_ulid()))
        return await self._create(spec, [])

    async def revive(self, spec: SessionSpec) -> LiveSession:
        """A session from its document and main's log; its agents that live somewhere are taken over.

        Raises:
            SessionError: ``session.not_found``; ``session.in_use`` {host, pid}; what the activation of main raised.
        """
        services = self._services
        stored = await self._cold.find(spec.session_id)
        grant = await services.store.open_session(spec.session_id, spec.nonce, stored.workspace_id or spec.workspace_id)
        host: str | None = None
        try:
            # What was read before the claim may be old.
            stored = await self._cold.find(spec.session_id)
            # An earlier claim that was never given back: agents may have outlived the host of their session.
            left = grant.grant > 1
            living = await adopt_living(services.cluster, spec.session_id, spec.nonce) if left else {}
            host = await self._activate_main(spec, living.pop(MAIN, None))
            grant = SessionGrant(grant.grant, stored.revision)
            claimed = ClaimedSession(spec, grant, stored.value, host, known_empty=False, mended=stored.mended)
            live = await self._live(claimed)
            await live.reconcile()
            await live.recount()
            await live.recovery.begin(living)
        except BaseException:
            if host is None:
                await self._undo(spec, host, logs=False)
            # Else main lives, with the prompts that it accepted: who resumes next finds it by this claim.
            raise
        return live

    async def leave(self, session_id: str) -> None:
        """Close a session's container. Idempotent."""
        scope = self._scopes.pop(session_id, None)
        if scope is not None:
            await dispose(scope, session_id)

    async def close(self) -> None:
        """Close the containers that are left."""
        for session_id in list(self._scopes):
            await self.leave(session_id)

    async def _create(self, spec: SessionSpec, activated: list[str]) -> LiveSession:
        services = self._services
        try:
            grant = await services.store.open_session(spec.session_id, spec.nonce, spec.workspace_id, create=True)
        except StoreError as error:
            if error.code in ("store.exists", "store.deleted"):
                raise already_there(spec.session_id) from error
            raise
        host: str | None = None
        try:
            host = await self._activate_main(spec)
            activated.append(host)
            value = new_document(
                spec.session_id,
                workspace_id=spec.workspace_id,
                cwd=spec.cwd,
                now=epoch_ms(),
                title=spec.title,
                metadata=spec.metadata,
                tags=spec.tags,
            )
            live = await self._live(ClaimedSession(spec, grant, value, host, known_empty=True))
            await live.document.flush()
        except BaseException as error:
            taken = _log_is_anothers(error)
            await self._undo(spec, host, logs=not taken)
            if taken:
                raise already_there(spec.session_id) from error
            raise
        return live

    async def _activate_main(self, spec: SessionSpec, at: str | None = None) -> str:
        services = self._services
        return await activate_agent(
            services.cluster,
            services.registry,
            services.store,
            spec.main,
            isolation=spec.isolation,
            node_id=spec.node_id,
            at=at,
        )

    async def _live(self, claimed: ClaimedSession) -> LiveSession:
        """The session in a Session container of its own; one that is left over from before is closed."""
        await self.leave(claimed.spec.session_id)
        scope = await open_scope(self._app, {ClaimedSession: claimed})
        self._scopes[claimed.spec.session_id] = scope
        return await scope.get(LiveSession)

    async def _undo(self, spec: SessionSpec, host: str | None, *, logs: bool) -> None:
        """Take back what a failed opening did, as far as it can be reached; the failure itself is what is raised.

        If another host has the id by now, this one was taken for lost, and what there is may be the other's.
        """
        services = self._services

        async def undo() -> None:
            try:
                if await services.registry.hold_session(spec.session_id, services.name) != services.name:
                    return
            except KimiRayError:
                return  # the next one to open the home deletes what was not published
            steps: list[Callable[[], Any]] = []
            if host is not None:
                placed = host
                peer = services.cluster.peer(host)
                stream = Stream(spec.session_id, MAIN)
                steps.append(
                    lambda: peer.call("close_agents", [stream], True, spec.nonce, timeout_s=_FORCED_S, group="store")
                )
                steps.append(lambda: services.registry.released(placed))
            if logs and host is not None:
                steps.append(lambda: services.store.remove(spec.session_id))
            steps.append(lambda: services.store.close_session(spec.session_id, spec.nonce))
            for step in steps:
                try:
                    await step()
                except KimiRayError:
                    continue

        await asyncio.shield(asyncio.ensure_future(undo()))


def already_there(session_id: str) -> SessionError:
    """``session.exists``."""
    return SessionError(
        f"there is a session {session_id} already",
        code="session.exists",
        hint="resume it, or leave the id out for a new one",
        details={"session_id": session_id},
    )


def _log_is_anothers(error: BaseException) -> bool:
    """Whether a creation failed because main's log is there: then it is not ours to remove."""
    return isinstance(error, StoreError) and error.code in ("store.exists", "store.deleted")
