"""The containers of an agent host: one for each session that has agents here, and one for each agent in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dishka import AsyncContainer

from kimi_ray.hosts.agent_services import SessionView
from kimi_ray.hosts.features import Features
from kimi_ray.store.seam import Stream


class HostScopes:
    """Opens a scope for each agent, under one of its session that is made for the first and closed with the last.

    Args:
        app: The host's own container.
        features: What is built with each scope.
    """

    def __init__(self, app: AsyncContainer, features: Features) -> None:
        self._app = app
        self._features = features
        self._sessions: dict[str, asyncio.Future[AsyncContainer]] = {}
        self._agents = Counter[str]()
        self._scopes: dict[Stream, AsyncContainer] = {}

    @property
    def sessions(self) -> int:
        """How many sessions have a scope here."""
        return len(self._sessions)

    async def enter(self, stream: Stream, context: dict[Any, Any]) -> AsyncContainer:
        """The scope of an agent; ``leave`` closes it."""
        session_id = stream.session_id
        opening = self._sessions.get(session_id)
        if opening is None:
            opening = self._sessions[session_id] = asyncio.ensure_future(self._open_session(session_id))
        self._agents[session_id] += 1
        try:
            session = await asyncio.shield(opening)
            scope = await session(context=context).__aenter__()
            await self._begin(scope, self._features.on_agent())
            self._scopes[stream] = scope
        except BaseException:
            await self._let_go(session_id)
            raise
        return scope

    async def leave(self, stream: Stream) -> None:
        """Close the scope of an agent, if it has one. Idempotent."""
        scope = self._scopes.pop(stream, None)
        if scope is None:
            return
        try:
            await scope.close()
        finally:
            await self._let_go(stream.session_id)

    async def close(self) -> None:
        """Close all, agents first."""
        for stream in list(self._scopes):
            await self.leave(stream)

    async def _open_session(self, session_id: str) -> AsyncContainer:
        scope = await self._app(context={SessionView: SessionView(session_id)}).__aenter__()
        await self._begin(scope, self._features.on_session())
        return scope

    async def _begin(self, scope: AsyncContainer, services: Sequence[type]) -> None:
        """Build what is built with a scope; the first that fails takes the scope with it."""
        try:
            for service in services:
                await scope.get(service)
        except BaseException:
            await scope.close()
            raise

    async def _let_go(self, session_id: str) -> None:
        self._agents[session_id] -= 1
        if self._agents[session_id] > 0:
            return
        del self._agents[session_id]
        opening = self._sessions.pop(session_id)
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().close()
