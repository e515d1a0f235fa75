"""The containers of an agent host: one for each session that has agents here, and one for each agent in it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from dishka import AsyncContainer

from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.hosts.agent_services import SessionView
from kimi_ray.hosts.features import Features
from kimi_ray.scopes import dispose, open_scope, service_name
from kimi_ray.store.seam import Stream

_T = TypeVar("_T")
_LEAVE_S = 60.0

_logger = logging.getLogger(__name__)


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
        self._leaving: dict[Stream, asyncio.Event] = {}

    @property
    def sessions(self) -> int:
        """How many sessions have a scope here."""
        return len(self._sessions)

    async def enter(self, stream: Stream, context: dict[Any, Any], service: type[_T]) -> _T:
        """Open the scope of an agent, with what is built with each, and build a service in it; ``leave`` closes it.

        One of the same agent that is being closed is waited for, for a minute: what it holds the next one may need.

        Raises:
            AgentError: ``agent.start_failed`` naming the service that could not be built, or what its constructor
                raised of ours; what was built of the scope is disposed by then.
        """
        await self._gone(stream)
        session_id = stream.session_id
        opening = self._sessions.get(session_id)
        if opening is None:
            opening = self._sessions[session_id] = asyncio.ensure_future(self._open_session(session_id))
        self._agents[session_id] += 1
        try:
            session = await asyncio.shield(opening)
            scope = await open_scope(session, context)
            built = await _built(scope, [*self._features.on_agent(), service], str(stream))
            self._scopes[stream] = scope
        except BaseException:
            await self._let_go(session_id)
            raise
        return built

    async def service(self, stream: Stream, service: type[_T]) -> _T:
        """A service of an agent's scope.

        Raises:
            AgentError: ``agent.not_found``: it has no scope here (any more).
        """
        scope = self._scopes.get(stream)
        if scope is None:
            raise AgentError(f"the agent {stream} does not live here", code="agent.not_found", retryable=True)
        return await scope.get(service)

    async def leave(self, stream: Stream) -> None:
        """Close the scope of an agent, if it has one. Idempotent."""
        scope = self._scopes.pop(stream, None)
        if scope is None:
            return
        gone = self._leaving[stream] = asyncio.Event()
        try:
            await dispose(scope, str(stream))
        finally:
            gone.set()
            if self._leaving.get(stream) is gone:
                del self._leaving[stream]
            await self._let_go(stream.session_id)

    async def close(self) -> None:
        """Close all, agents first."""
        for stream in list(self._scopes):
            await self.leave(stream)

    async def _gone(self, stream: Stream) -> None:
        gone = self._leaving.get(stream)
        if gone is None:
            return
        try:
            async with asyncio.timeout(_LEAVE_S):
                await gone.wait()
        except TimeoutError:
            _logger.warning("%s is not yet gone after %g s and comes back all the same", stream, _LEAVE_S)

    async def _open_session(self, session_id: str) -> AsyncContainer:
        scope = await open_scope(self._app, {SessionView: SessionView(session_id)})
        await _built(scope, self._features.on_session(), session_id)
        return scope

    async def _let_go(self, session_id: str) -> None:
        self._agents[session_id] -= 1
        if self._agents[session_id] > 0:
            return
        del self._agents[session_id]
        opening = self._sessions.pop(session_id)
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await dispose(opening.result(), session_id)


async def _built(scope: AsyncContainer, services: Sequence[type[Any]], name: str) -> Any:
    """Build services in a scope, in order; gives the last. The first that fails takes the scope with it."""
    built: Any = None
    service: type[Any] | None = None
    try:
        for service in services:
            built = await scope.get(service)
    except KimiRayError:
        await dispose(scope, name)
        raise
    except Exception as error:
        await dispose(scope, name)
        raise AgentError(
            f"{name} cannot live: {service_name(service)} could not be built: {type(error).__name__}: {error}",
            code="agent.start_failed",
            hint="the service or tool named, or one that it needs, raised while it was built",
            details={"service": service_name(service), "exception": type(error).__name__},
        ) from error
    except BaseException:
        await dispose(scope, name)
        raise
    return built
