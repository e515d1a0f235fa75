"""The session host: an actor's content, holding many sessions and their swarms. The core of ``SessionActor``.

Operations on one session id are serialised. A session is prepared in private (claim, main agent) and published by its
document; whatever fails before leaves nothing listed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, RunError, SessionError
from kimi_ray.hosts.agent_forking import fork_agent
from kimi_ray.hosts.cold_sessions import ColdSessions
from kimi_ray.hosts.fork_words import ForkedSession, ForkSpec
from kimi_ray.hosts.live_session import HostServices, LiveSession
from kimi_ray.hosts.main_watch import MainWatch
from kimi_ray.hosts.ports import Cluster, Group
from kimi_ray.hosts.session_forking import SessionForking
from kimi_ray.hosts.session_opening import SessionOpening, already_there
from kimi_ray.hosts.session_services import HostName, LiveSessionServices, SessionHostServices
from kimi_ray.hosts.session_swarms import is_run_by, taken_over
from kimi_ray.hosts.specs import SessionInfo, SessionSpec
from kimi_ray.hosts.subagent_words import BeginSubagent, EndSubagent, ReadyChild, SpawnSubagent
from kimi_ray.hosts.swarm_run import SwarmRun
from kimi_ray.hosts.swarm_words import CancelMode, Rollout, RowPage, SwarmKey, SwarmProgress, SwarmSpec
from kimi_ray.hosts.tool_check import check_tools
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.scopes import assemble, dispose
from kimi_ray.session import Activity
from kimi_ray.session.refusals import not_live
from kimi_ray.store.named_locks import NamedLocks
from kimi_ray.store.seam import Document


class SessionHost:
    """Holds live sessions.

    Args:
        name: The host's name.
        cluster: Where it lives and how it reaches others.
        config: The runtime's settings.
    """

    PORT: ClassVar[dict[str, Group]] = {
        "create_session": "default",
        "resume_session": "default",
        "session_info": "control",
        "agent_host": "default",
        "find_agent": "control",
        "set_agent_model": "default",
        "list_agents": "store",
        "update_document": "store",
        "note_activity": "control",
        "flush_session": "store",
        "close_session": "default",
        "hand_over": "default",
        "archive_session": "default",
        "restore_session": "default",
        "delete_session": "default",
        "fork_sessions": "default",
        "fork_agent": "default",
        "spawn_subagent": "default",
        "begin_subagent": "default",
        "end_subagent": "store",
        "check_subagent": "control",
        "start_swarm": "default",
        "feed_swarm": "wait",
        "read_rows": "wait",
        "swarm_progress": "control",
        "cancel_swarm": "control",
        "forget_swarm": "control",
        "ping": "control",
        "stats": "control",
        "close": "control",
    }

    def __init__(self, name: str, cluster: Cluster, config: RuntimeConfig) -> None:
        self._name = name
        self._cluster = cluster
        self._config = config
        self._app = assemble(
            [SessionHostServices(), LiveSessionServices()],
            {RuntimeConfig: config, Cluster: cluster, HostName: HostName(name)},
        )
        self._sessions: dict[str, LiveSession] = {}
        self._coming: set[str] = set()
        """The sessions that are opened just now."""
        self._locks = NamedLocks()
        self._closing = False

    async def start(self) -> None:
        """Make the host's own services."""
        services = self._services = await self._app.get(HostServices)
        self._cold = ColdSessions(self._cluster, services.store, self._config.close_timeout_s)
        self._opening = SessionOpening(self._app, services, self._cold)
        self._forking = SessionForking(services, self._cold, self._only, self._placed, self._sessions)
        self._watch = MainWatch(self._cluster, self._sessions)
        self._watch.start()

    async def close(self) -> None:
        """Close every session. Idempotent.

        Raises:
            SessionError: ``session.close_failed`` naming the sessions that could not be made durable.
        """
        self._closing = True
        await self._watch.close()
        failures: dict[str, KimiRayError] = {}

        async def close_one(session_id: str) -> None:
            try:
                await self.close_session(session_id, False)
            except KimiRayError as error:
                failures[session_id] = error

        # Those that are opened just now, too: no other is opened any more.
        await asyncio.gather(*(close_one(session_id) for session_id in {*self._sessions, *self._coming}))
        if not failures:
            await self._opening.close()
            await dispose(self._app, self._name)
        if failures:
            first = next(iter(failures.values()))
            raise SessionError(
                f"{len(failures)} sessions could not be closed: {first}",
                code="session.close_failed",
                details={"sessions": sorted(failures), "first": first.to_data()},
            )

    async def ping(self) -> dict[str, Any]:
        """That it lives, and which sessions it holds."""
        return {
            "kind": "sessions",
            "name": self._name,
            "sessions": sorted(self._sessions),
            "agents": 0,
            "node_id": self._cluster.node_id,
            "pid": os.getpid(),
        }

    async def stats(self) -> dict[str, Any]:
        """Counters: sessions, and the swarms that run."""
        swarms = [swarm for session in self._sessions.values() for swarm in session.swarms.values()]
        return {
            "sessions": len(self._sessions),
            "swarms": sum(not swarm.done for swarm in swarms),
            "agent_calls": sum(swarm.agent_calls for swarm in swarms),
        }

    # -- lifecycle --------------------------------------------------------------------------------------------------

    async def create_session(self, spec: SessionSpec) -> SessionInfo:
        """Create a session with its main agent. The same nonce again is the same creation.

        The session is unpublished, and whoever opens the home next deletes what there is of it, until its first
        document is written: that is its publication.

        Raises:
            SessionError: ``session.exists``; ``session.not_live`` when its id belongs to another host. What the
                activation of main raised. Nothing is left then.
        """
        spec = spec.under_its_claim()
        async with self._only(spec.session_id):
            self._refuse_when_closing(spec.session_id)
            live = self._sessions.get(spec.session_id)
            if live is not None:
                if live.spec.nonce == spec.nonce:
                    return live.info()
                raise already_there(spec.session_id)
            async with self._placed(spec.session_id):
                live = await self._opened(spec, self._opening.create)
            return replace(live.info(), opened=True)

    async def resume_session(self, spec: SessionSpec) -> SessionInfo:
        """Bring a session back from its document and main's log; a live one is returned as it is.

        Raises:
            SessionError: ``session.not_found``; ``session.in_use`` {host, pid}; ``session.not_live`` when its id
                belongs to another host; what the activation raised.
        """
        spec = spec.under_its_claim()
        async with self._only(spec.session_id):
            self._refuse_when_closing(spec.session_id)
            live = self._sessions.get(spec.session_id)
            if live is not None:
                await live.look_after()
                return live.info()
            async with self._placed(spec.session_id):
                live = await self._opened(spec, self._opening.revive)
            return replace(live.info(), opened=True)

    async def archive_session(self, session_id: str, workspaces: Collection[str] | None = None) -> Document:
        """Archive a session; a live one is closed then. A cold one is not opened. Idempotent; ``updated_at`` stays.

        Args:
            session_id: Which.
            workspaces: Only if it is in one of these; None in any.

        Raises:
            SessionError: ``session.not_found``; ``session.in_use`` {host, pid}; ``session.not_live`` when its id
                belongs to another host; ``session.close_failed``: it is archived then, but still live.
            StoreError: why its document cannot be read or written.
        """
        async with self._only(session_id):
            live = self._sessions.get(session_id)
            if live is None:
                async with self._placed(session_id):
                    return await self._cold.set_archived(session_id, True, workspaces)
            live.document_in(workspaces)  # or it is not found
            await live.document.update({"archived": True})
            await self._close_live(live, force=False)
            return live.document_in(None)

    async def restore_session(self, session_id: str, workspaces: Collection[str] | None = None) -> Document:
        """Take a session out of the archive, without opening it. See ``archive_session``."""
        async with self._only(session_id):
            live = self._sessions.get(session_id)
            if live is None:
                async with self._placed(session_id):
                    return await self._cold.set_archived(session_id, False, workspaces)
            live.document_in(workspaces)  # or it is not found
            await live.document.update({"archived": False})
            return live.document_in(None)

    async def delete_session(self, session_id: str, workspaces: Collection[str] | None = None) -> None:
        """Delete a session with its logs and its private directories; a live one is closed first.

        Raises:
            SessionError, StoreError: as ``archive_session``.
        """
        async with self._only(session_id):
            live = self._sessions.get(session_id)
            if live is not None:
                live.document_in(workspaces)  # or it is not found
                await self._close_live(live, force=True)
            async with self._placed(session_id):
                await self._cold.delete(session_id, workspaces)

    async def session_info(self, session_id: str) -> SessionInfo:
        """A live session.

        Raises:
            SessionError: ``session.not_live``.
        """
        return self._session(session_id).info()

    async def close_session(self, session_id: str, force: bool = False) -> None:
        """Stop its agents, flush, give the claim back. Idempotent.

        Raises:
            KimiRayError: what could not be made durable; the session then stays live unless ``force``.
        """
        async with self._only(session_id):
            live = self._sessions.get(session_id)
            if live is not None:
                await self._close_live(live, force=force)

    async def hand_over(self) -> tuple[list[str], list[str]]:
        """Let go of the sessions without a swarm, for a node that is to be empty: their agents live on where they are,
        and the next call of a driver resumes them on another host.

        Returns:
            The sessions that were handed over, and those that stay.
        """
        gone: list[str] = []
        for session_id in list(self._sessions):
            async with self._only(session_id):
                live = self._sessions.get(session_id)
                if live is None or live.swarms or live.subagents.running:
                    continue
                try:
                    await live.log.flush()
                    await live.document.flush()
                except KimiRayError:
                    continue  # what is not durable stays here; the next look tries again
                if live.swarms or live.subagents.running or self._sessions.get(session_id) is not live:
                    continue
                del self._sessions[session_id]
                live.abandon(not_live(session_id, self._name))
                await self._opening.leave(session_id)
                await self._services.registry.forget_session(session_id, self._name)
                gone.append(session_id)
        return gone, sorted(self._sessions)

    async def flush_session(self, session_id: str) -> None:
        """Everything of a session is durable from here on."""
        await self._session(session_id).flush()

    async def update_document(self, session_id: str, patch: dict[str, Any]) -> SessionInfo:
        """A caller's change of ``title``, ``metadata``, ``tags``; on disk when it returns."""
        live = self._session(session_id)
        await live.document.update(patch)
        return live.info()

    async def note_activity(self, activities: list[Activity]) -> None:
        """What drivers saw main agents do, for the documents; of sessions that are not live here it is dropped."""
        for activity in activities:
            live = self._sessions.get(activity.session_id)
            if live is not None:
                live.document.note(activity)

    # -- agents -----------------------------------------------------------------------------------------------------

    async def agent_host(
        self, session_id: str, agent_id: str, suspect: str | None = None, model: ResolvedModel | None = None
    ) -> str:
        """The host of an agent; brings it to life where needed (``LiveSession.agent_host``)."""
        return await self._session(session_id).agent_host(agent_id, suspect, model)

    async def find_agent(self, session_id: str, agent_id: str) -> str | None:
        """The host of an agent that is alive, or None."""
        return self._session(session_id).host_of(agent_id)

    async def set_agent_model(self, session_id: str, agent_id: str, model: ResolvedModel) -> None:
        """Another model from the agent's next turn on, also after its host is lost."""
        await self._session(session_id).set_model(agent_id, model)

    async def list_agents(self, session_id: str) -> list[dict[str, Any]]:
        """Every agent of a session that has a log (``LiveSession.list_agents``)."""
        return await self._session(session_id).list_agents()

    async def fork_sessions(self, spec: ForkSpec) -> list[ForkedSession]:
        """Copies of a session, all or none, cold (``SessionForking.fork``)."""
        return await self._forking.fork(spec)

    async def fork_agent(self, session_id: str, agent_id: str, nonce: str, model: ResolvedModel | None = None) -> str:
        """A new agent with another's history (``agent_forking.fork_agent``)."""
        async with self._only(session_id):
            return await fork_agent(self._services, self._session(session_id), agent_id, nonce, model)

    async def spawn_subagent(self, session_id: str, spec: SpawnSubagent) -> ReadyChild:
        """A new child of an agent (``SessionSubagents.spawn``)."""
        return await self._session(session_id).subagents.spawn(spec)

    async def begin_subagent(self, session_id: str, spec: BeginSubagent) -> ReadyChild:
        """A child is to be given a prompt (``SessionSubagents.begin``)."""
        return await self._session(session_id).subagents.begin(spec)

    async def end_subagent(self, session_id: str, spec: EndSubagent) -> None:
        """A child has answered, or failed (``SessionSubagents.end``)."""
        await self._session(session_id).subagents.end(spec)

    async def check_subagent(self, session_id: str, caller: str | None, agent_id: str) -> ReadyChild:
        """Whether a child may be given a prompt (``SessionSubagents.check``); ``caller`` None: only what it is."""
        return await self._session(session_id).subagents.check(caller, agent_id)

    # -- swarms -----------------------------------------------------------------------------------------------------

    async def start_swarm(self, spec: SwarmSpec) -> None:
        """Begin a swarm, or take it over from another command; its rollouts follow in ``feed_swarm``."""
        live = self._session(spec.session_id)
        if is_run_by(live, spec):
            return
        await check_tools(self._cluster, self._services.registry, live.spec.main.stream, spec.code, spec.node_id)
        await live.start_swarm(
            spec,
            fenced=lambda error: self._fenced(live, error),
            still_here=lambda: self._session(spec.session_id),  # it may have been handed over meanwhile
        )

    async def feed_swarm(self, key: SwarmKey, rollouts: list[Rollout]) -> None:
        """The next rollouts of a swarm; returns when it wants more."""
        await self._swarm(key).feed(rollouts)

    async def read_rows(self, key: SwarmKey, cursor: int, max_rows: int, wait_s: float) -> RowPage:
        """What has ended, from a cursor on (``SwarmRun.read``)."""
        return await self._swarm(key).read(cursor, max_rows, wait_s)

    async def swarm_progress(self, key: SwarmKey) -> SwarmProgress:
        """Where a swarm stands."""
        return await self._swarm(key).progress()

    async def cancel_swarm(self, key: SwarmKey, grace_s: float, mode: CancelMode = "cancel") -> None:
        """Stop a swarm; returns at once, the rows follow (``SwarmRun.cancel``)."""
        self._swarm(key).cancel(grace_s, mode)

    async def forget_swarm(self, key: SwarmKey) -> None:
        """All rows of a swarm that is over have been read. Idempotent."""
        live = self._sessions.get(key.session_id)
        swarm = live.swarms.get(key.run_id) if live is not None else None
        if live is not None and swarm is not None and swarm.done and swarm.command == key.command:
            del live.swarms[key.run_id]
            live.tree.settle(key.run_id, swarm.spent_by_ended)

    def _fenced(self, live: LiveSession, error: KimiRayError) -> None:
        """The session lives on another host: this one was taken for lost, and must not touch it any more."""
        if self._sessions.get(live.id) is live:
            del self._sessions[live.id]
            live.abandon(error)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _opened(self, spec: SessionSpec, bring: Callable[[SessionSpec], Awaitable[LiveSession]]) -> LiveSession:
        self._coming.add(spec.session_id)
        try:
            live = self._sessions[spec.session_id] = await bring(spec)
        finally:
            self._coming.discard(spec.session_id)
        return live

    async def _close_live(self, live: LiveSession, *, force: bool) -> None:
        await self._watch.catch_up(live)
        await live.close(force=force)
        if self._sessions.get(live.id) is live:  # else it was fenced meanwhile
            del self._sessions[live.id]
        await self._opening.leave(live.id)

    def _refuse_when_closing(self, session_id: str) -> None:
        if self._closing:
            raise not_live(session_id, self._name)

    def _session(self, session_id: str) -> LiveSession:
        live = self._sessions.get(session_id)
        if live is None:
            raise not_live(session_id, self._name)
        return live

    def _swarm(self, key: SwarmKey) -> SwarmRun:
        swarm = self._session(key.session_id).swarms.get(key.run_id)
        if swarm is None:
            raise RunError(
                f"session {key.session_id} has no swarm {key.run_id}",
                code="swarm.not_found",
                details={"session_id": key.session_id, "run_id": key.run_id},
            )
        if swarm.command != key.command:
            raise taken_over(key.session_id, key.run_id)
        return swarm

    @asynccontextmanager
    async def _placed(self, session_id: str) -> AsyncGenerator[None]:
        """The registry sends whoever wants this session here, and forgets it unless it is live here afterwards.

        A caller may have been sent here by a name that was forgotten since, when another host has the session already.
        """
        registry = self._services.registry
        named = await registry.hold_session(session_id, self._name)
        if named != self._name:
            raise not_live(session_id, self._name)
        try:
            yield
        finally:
            if session_id not in self._sessions:
                await asyncio.shield(registry.forget_session(session_id, self._name))

    @asynccontextmanager
    async def _only(self, session_id: str) -> AsyncGenerator[None]:
        """One operation at a time on an id."""
        async with self._locks.alone(session_id):
            yield
