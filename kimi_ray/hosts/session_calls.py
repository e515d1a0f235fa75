"""The way from an agent's host to the host of its session, which may be lost and come back elsewhere.

A session comes back when somebody resumes it: its driver with its next call, or its own main agent from here, which has
all that is needed. The agents of a swarm wait for the driver, who reads the swarm's rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.hosts.ports import Cluster, Group, is_lost
from kimi_ray.hosts.specs import SessionInfo, SessionSpec
from kimi_ray.hosts.steady_calls import RegistryCalls

CALL_S = 90.0
_WITHIN_S = 60.0
_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0


class SessionCalls:
    """One session, called from a host of its agents.

    Args:
        cluster: Where the hosts live.
        registry: Who knows where the session is.
        session_id: The session.
        resume: How to bring it back, made anew for each try; None waits for somebody else to do it.
        within_s: Longest wait for a lost session to be back, seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        registry: RegistryCalls,
        session_id: str,
        resume: Callable[[], SessionSpec] | None,
        *,
        within_s: float = _WITHIN_S,
    ) -> None:
        self._cluster = cluster
        self._registry = registry
        self._resume = resume
        self._within_s = within_s
        self._host: str | None = None
        self._left = False
        self._finding = asyncio.Lock()
        self.id = session_id

    def leave(self) -> None:
        """The caller is over: what is still to be said is said to the session while it is there, and it is not brought
        back for it."""
        self._left = True

    async def call(self, method: str, *args: Any, group: Group = "default", timeout_s: float = CALL_S) -> Any:
        """Call the session's host for something that may be asked twice.

        Raises:
            SessionError: ``session.not_live`` when it does not come back in time.
            KimiRayError: what the host raised.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._within_s
        pause_s = _PAUSE_S
        while True:
            host = await self._find()
            error: KimiRayError | None = None
            if host is not None:
                try:
                    return await self._cluster.peer(host).call(method, *args, timeout_s=timeout_s, group=group)
                except KimiRayError as failed:
                    if not (is_lost(failed.code) or failed.code == "session.not_live"):
                        raise
                    error = failed
                    await self._lost(host, failed)
            if (self._left and host is None) or loop.time() + pause_s >= deadline:
                raise self._gone() from error
            await asyncio.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, pause_s * 2)

    async def _find(self) -> str | None:
        """The host, as far as anybody knows it."""
        async with self._finding:
            if self._host is None:
                self._host = await self._registry.find_session(self.id)
            if self._host is None and self._resume is not None and not self._left:
                self._host = await self._bring_back(self._resume())
            return self._host

    async def _bring_back(self, spec: SessionSpec) -> str | None:
        host = await self._registry.place_session(self.id, spec.isolation)
        try:
            info: SessionInfo = await self._cluster.peer(host).call("resume_session", spec, timeout_s=CALL_S)
        except KimiRayError as error:
            if not (is_lost(error.code) or error.retryable):
                raise
            if is_lost(error.code):
                await self._registry.report_lost(host)
            return None
        return info.host

    async def _lost(self, host: str, error: KimiRayError) -> None:
        if is_lost(error.code) and not await self._registry.report_lost(host):
            return  # it was only slow
        if self._host == host:
            self._host = None
            if not is_lost(error.code) and await self._registry.find_session(self.id) == host:
                # It was let go of there, and the registry has not heard yet.
                await asyncio.sleep(_PAUSE_S)

    def _gone(self) -> SessionError:
        return SessionError(
            f"session {self.id} is live nowhere",
            code="session.not_live",
            hint="resume it, and ask again",
            details={"session_id": self.id},
            retryable=True,
        )
