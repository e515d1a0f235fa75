"""Making forks: sessions copied from another one's stored logs, that appear together or not at all.

The source is read, never opened. One that is live is flushed; without a point it must stand still besides, from the
taking of the cut until the forks are there. One that is cold is claimed for as long, so that nobody brings it to life.
The forks stay cold: whoever wants one resumes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from kimi_ray.errors import KimiRayError, SessionError, StoreError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.cold_sessions import ColdSessions
from kimi_ray.hosts.fork_words import ForkedSession, ForkSpec
from kimi_ray.hosts.fork_workdirs import ForkWorkdirs
from kimi_ray.hosts.live_session import HostServices, LiveSession
from kimi_ray.hosts.orphans import living_agents
from kimi_ray.hosts.ports import Peer, is_lost
from kimi_ray.hosts.quiescence import LEASE_S, active_swarm, active_turn, quiescence_lost
from kimi_ray.ids import MAIN, new_ulid
from kimi_ray.log import epoch_ms
from kimi_ray.session.fork_document import fork_document
from kimi_ray.session.fork_plan import ForkPlan, plan_fork
from kimi_ray.session.fork_point import ForkPoint, parse_fork_point
from kimi_ray.session.refusals import no_session
from kimi_ray.store.seam import Document, SessionCopy, Stream

_COPIES_AT_ONCE = 4
_BEGINNINGS = 3
"""So often a publication is begun when the store's process is lost with it."""
_CALL_S = 60.0
_RENEWALS = 4
"""So often within a lease it is renewed."""

Lock = Callable[[str], AbstractAsyncContextManager[None]]


@dataclass(slots=True)
class _Standing:
    """The agents of a source as they were found: by host, and by which name they are held, if they are."""

    by_host: dict[str, list[Stream]]
    holder: str | None = None
    claimed: bool = False
    lost: KimiRayError | None = None


class SessionForking:
    """Forks the sessions of one session host.

    Args:
        services: The host's.
        cold: Reads the documents of sessions that are not live.
        only: The lock of a session's id.
        placed: Takes the registry's name for a session that is not live here, while something is done with it.
        sessions: The live ones.
    """

    def __init__(
        self,
        services: HostServices,
        cold: ColdSessions,
        only: Lock,
        placed: Lock,
        sessions: Mapping[str, LiveSession],
    ) -> None:
        self._services = services
        self._cold = cold
        self._only = only
        self._placed = placed
        self._sessions = sessions

    async def fork(self, spec: ForkSpec) -> list[ForkedSession]:
        """Make the forks that a spec asks for, in the order of its targets. Asked again they are told, not made again.

        Raises:
            SessionError: in this order ``session.not_found``; ``session.in_use``, ``session.fork_active_turn``;
                ``session.fork_point_not_found``, ``session.fork_inconsistent``; ``session.exists``.
                ``session.quiescence_lost`` when the source did not stand still to the end.
            AgentError: ``agent.not_found``.
            ConfigError: ``request.invalid`` for the point.
            ToolError: ``workdir.*``.
            StoreError: why it cannot be copied. Nothing is left of the forks then.
        """
        source = Stream(*spec.source)
        async with AsyncExitStack() as stack:
            for session_id in sorted({source.session_id, *spec.targets}):
                await stack.enter_async_context(self._only(session_id))
            if source.session_id not in self._sessions:
                await stack.enter_async_context(self._placed(source.session_id))
            made = await self._published(spec)
            if made is not None:
                return made
            try:
                return await self._fork(spec, source)
            except StoreError as error:
                if error.code == "store.deleted" and error.details.get("session_id") == source.session_id:
                    raise no_session(source.session_id) from error  # another program deleted it meanwhile
                raise

    async def _fork(self, spec: ForkSpec, source: Stream) -> list[ForkedSession]:
        live = self._sessions.get(source.session_id)
        document = await self._document(spec, live)
        whole = spec.at is None and spec.turn_index is None
        async with self._standing(source.session_id, live, whole=whole) as standing:
            point = parse_fork_point(spec.at, spec.turn_index)
            plan = await self._plan(source, point, standing, live)
            if whole and plan.main.interrupted and not standing.claimed:
                # Its host was lost, and a turn began elsewhere before anybody could hold it.
                raise active_turn([source])
            return await self._make(spec, plan, document, standing)

    async def _published(self, spec: ForkSpec) -> list[ForkedSession] | None:
        """The forks if an earlier try made them."""
        found: list[ForkedSession] = []
        for session_id in spec.targets:
            try:
                stored = await self._services.store.read_document(session_id)
            except StoreError as error:
                if error.code != "store.deleted":
                    raise
                return None
            if stored is None or stored.value.get("fork_group") != spec.group:
                return None
            found.append(ForkedSession(session_id, stored.workspace_id, stored.value))
        return found

    async def _document(self, spec: ForkSpec, live: LiveSession | None) -> Document:
        if live is None:
            return (await self._cold.find(spec.source[0], spec.workspaces)).document()
        return live.document_in(spec.workspaces)

    # -- the source -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _standing(self, session_id: str, live: LiveSession | None, *, whole: bool) -> AsyncGenerator[_Standing]:
        """The source as its stored logs are enough: flushed, and with ``whole`` nobody moves until the block ends."""
        running = [] if live is None else [run_id for run_id, swarm in live.swarms.items() if not swarm.done]
        if whole and running:
            raise active_swarm(session_id, running)
        standing = _Standing(await living_agents(self._services.cluster, session_id))
        async with AsyncExitStack() as stack:
            if whole:
                if live is None:
                    await stack.enter_async_context(self._claimed(session_id))
                    standing.claimed = True
                await stack.enter_async_context(self._held(standing))
            if live is not None:
                await _told(live)
            await self._flush(standing)
            yield standing

    @asynccontextmanager
    async def _claimed(self, session_id: str) -> AsyncGenerator[None]:
        """The claim of a cold session: nobody brings it to life meanwhile."""
        store, nonce = self._services.store, new_ulid()
        await store.open_session(session_id, nonce, None)
        try:
            yield
        finally:
            await asyncio.shield(store.close_session(session_id, nonce))

    @asynccontextmanager
    async def _held(self, standing: _Standing) -> AsyncGenerator[None]:
        """The living agents held still; the lease is renewed for as long as the block runs."""
        holder = standing.holder = new_ulid()
        renewing: asyncio.Task[None] | None = None
        try:
            await self._quiesce(standing, holder)
            renewing = asyncio.create_task(self._renew(standing), name=f"renew {holder}")
            yield
        finally:
            if renewing is not None:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
            await asyncio.shield(self._release(standing, holder))

    async def _renew(self, standing: _Standing) -> None:
        while standing.lost is None:
            await asyncio.sleep(LEASE_S / _RENEWALS)
            try:
                await self._check(standing, lease_s=LEASE_S)
            except Exception as error:  # noqa: BLE001  the fork fails with it
                standing.lost = noted(error, "holding the agents of a fork still")

    async def _check(self, standing: _Standing, lease_s: float | None = None) -> None:
        """See that whoever was held stood still until now.

        Raises:
            SessionError: ``session.quiescence_lost``.
        """
        if standing.holder is None:
            return
        if standing.lost is not None:
            raise standing.lost
        for host, streams in standing.by_host.items():
            try:
                await self._services.cluster.peer(host).call(
                    "check_quiescence", standing.holder, lease_s, timeout_s=LEASE_S, group="control"
                )
            except KimiRayError as error:
                if is_lost(error.code):
                    raise quiescence_lost(standing.holder, streams) from error
                raise

    async def _release(self, standing: _Standing, holder: str) -> None:
        for host in standing.by_host:
            try:
                await self._services.cluster.peer(host).call(
                    "release_quiescence", holder, timeout_s=LEASE_S, group="control"
                )
            except KimiRayError:
                continue  # its lease runs out

    async def _quiesce(self, standing: _Standing, holder: str) -> None:
        """Hold the agents; a host that is lost holds none any more."""
        for host, streams in list(standing.by_host.items()):
            try:
                await self._services.cluster.peer(host).call(
                    "quiesce", streams, holder, LEASE_S, timeout_s=LEASE_S, group="control"
                )
            except KimiRayError as error:
                if not is_lost(error.code) or not await self._services.registry.report_lost(host):
                    raise
                del standing.by_host[host]

    async def _flush(self, standing: _Standing) -> None:
        """All that living agents have appended is durable. One that has ended in between is so by its own doing."""
        for host, streams in list(standing.by_host.items()):
            peer = self._services.cluster.peer(host)
            if not await _flushed(peer, streams):
                await asyncio.gather(*(_flushed(peer, [stream]) for stream in streams))

    async def _plan(
        self, source: Stream, point: ForkPoint | None, standing: _Standing, live: LiveSession | None
    ) -> ForkPlan:
        store = self._services.store
        alone = standing.claimed and not standing.by_host
        try:
            return await plan_fork(store, source, point, now=epoch_ms(), ended=alone)
        except SessionError as error:
            if error.code != "session.fork_point_not_found" or live is not None or standing.by_host:
                raise
            # A crash may have left the asked turn open; that it has ended is known once nobody else can hold it.
            try:
                async with self._claimed(source.session_id):
                    return await plan_fork(store, source, point, now=epoch_ms(), ended=True)
            except StoreError as held:
                if held.code != "session.in_use":
                    raise
                raise error from held

    # -- the forks --------------------------------------------------------------------------------------------------

    async def _make(self, spec: ForkSpec, plan: ForkPlan, source: Document, standing: _Standing) -> list[ForkedSession]:
        store, first = self._services.store, spec.targets[0]
        workspace = spec.workspace_id or source.workspace_id
        cwd = spec.cwd if spec.workspace_id is not None else source.value.get("cwd")
        documents = [
            fork_document(
                plan,
                source.value,
                session_id,
                workspace_id=workspace,
                cwd=cwd,
                group=spec.group,
                index=index,
                title=spec.title,
                child=spec.child,
                metadata=spec.metadata,
                tags=spec.tags,
            )
            for index, session_id in enumerate(spec.targets)
        ]
        for earlier in range(spec.attempt):
            for again in range(_BEGINNINGS):
                await store.discard_publication(first, _publication(spec, earlier, again))
        workdirs = ForkWorkdirs(self._services)
        begun: list[str] = []
        try:
            await self._begin(spec, workspace, begun)
            places = await workdirs.make(spec, plan)

            def copy(index: int) -> SessionCopy:
                logs = plan.for_target(
                    spec.targets[index],
                    group=spec.group,
                    index=index,
                    sampling=spec.sampling,
                    seed=None if spec.seeds is None else spec.seeds[index],
                    workdirs=None if places is None else {MAIN: places[index]},
                )
                return SessionCopy(spec.targets[index], workspace, documents[index], logs)

            while True:
                try:
                    await self._copy(begun[-1], len(documents), copy)
                    await self._check(standing)
                    await store.publish(first, begun[-1])
                    break
                except* StoreError as errors:
                    lost = _first_of(errors)
                    if not _is_forgotten(lost, begun[-1]) or len(begun) == _BEGINNINGS:
                        raise
                # The store's process was lost, and what it had begun with it.
                await self._begin(spec, workspace, begun)
        except BaseException as failure:  # noqa: BLE001  the first of a group is raised again
            made = await asyncio.shield(asyncio.ensure_future(self._take_back(spec, begun, workdirs)))
            cause = _first_of(failure)
            if made is not None and isinstance(cause, KimiRayError):
                return made  # the answer to the last call was lost, or an earlier try came through
            raise cause from None
        return [
            ForkedSession(session_id, workspace, value)
            for session_id, value in zip(spec.targets, documents, strict=True)
        ]

    async def _begin(self, spec: ForkSpec, workspace: str, begun: list[str]) -> None:
        publication = _publication(spec, spec.attempt, len(begun))
        begun.append(publication)  # also if the answer is lost
        try:
            await self._services.store.begin_publication(
                spec.targets[0], publication, dict.fromkeys(spec.targets, workspace)
            )
        except StoreError as error:
            raise _exists(error, spec) from error

    async def _copy(self, publication: str, count: int, copy: Callable[[int], SessionCopy]) -> None:
        """Copy them, a few at a time; a tree of many agents is planned anew for each, not held for all."""
        gate = asyncio.Semaphore(_COPIES_AT_ONCE)

        async def one(index: int) -> None:
            async with gate:
                await self._services.store.copy_session(publication, copy(index))

        async with asyncio.TaskGroup() as group:
            for index in range(count):
                group.create_task(one(index))

    async def _take_back(self, spec: ForkSpec, begun: list[str], workdirs: ForkWorkdirs) -> list[ForkedSession] | None:
        """Undo what can be reached; gives the forks if they were published after all.

        What cannot be reached is hidden: the next one to open the home deletes it, and sweeps remove directories.
        """
        try:
            for publication in begun:
                await self._services.store.discard_publication(spec.targets[0], publication)
            made = await self._published(spec)
        except KimiRayError:
            return None
        if made is None:
            await workdirs.drop(spec)
        return made


async def _flushed(peer: Peer, streams: list[Stream]) -> bool:
    """Whether all of them live there and have flushed."""
    try:
        await peer.call("flush", streams, timeout_s=_CALL_S, group="store")
    except KimiRayError as error:
        if error.code != "agent.not_found" and not is_lost(error.code):
            raise
        return False
    return True


async def _told(live: LiveSession) -> None:
    """What the session knows is in its agents' logs; an agent that is lost or has ended meanwhile says no more."""
    try:
        await live.flush()
    except KimiRayError as error:
        if error.code != "agent.not_found" and not is_lost(error.code):
            raise


def _publication(spec: ForkSpec, attempt: int, again: int) -> str:
    """A name for each beginning: what an earlier one left is discarded by its own."""
    return f"fork-{spec.group}-{attempt}-{again}"


def _is_forgotten(error: BaseException, publication: str) -> bool:
    return (
        isinstance(error, StoreError) and error.code == "store.not_found" and error.details.get("group") == publication
    )


def _exists(error: StoreError, spec: ForkSpec) -> KimiRayError:
    if error.code not in ("store.exists", "store.deleted", "session.in_use"):
        return error
    session_id = str(error.details.get("session_id") or spec.targets[0])
    return SessionError(
        f"there is or was a session {session_id} already",
        code="session.exists",
        hint="leave new_session_id out for a new one",
        details={"session_id": session_id},
    )


def _first_of(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = cast("BaseExceptionGroup[BaseException]", failure).exceptions[0]
    return failure
