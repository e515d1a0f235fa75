"""The subagents of a live session: made, told of in their callers' logs, counted against the session's limits.

The caller's side (``subagent_calls``) gives a child its prompts and waits; here is what only the session can say: who
is whose child, how deep, who runs now. A run whose caller is lost is ended; one whose session host is lost is known to
the next one by the document (``in_flight``), and told there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kimi_ray.agent.specs import AgentSpec, LogEntry
from kimi_ray.errors import AgentError, StoreError
from kimi_ray.events import LogHeader, ParentRef, WriterRef
from kimi_ray.hosts.activation import activate_agent
from kimi_ray.hosts.agent_forking import beside, fork_agent
from kimi_ray.hosts.permission_calls import mode_of
from kimi_ray.hosts.session_swarms import tell_ancestors
from kimi_ray.hosts.stored_agents import read_agent
from kimi_ray.hosts.stored_binding import node_of_directory, workdir_of
from kimi_ray.hosts.subagent_watch import SubagentWatch
from kimi_ray.hosts.subagent_words import BeginSubagent, ChildRun, EndSubagent, Inherited, ReadyChild, SpawnSubagent
from kimi_ray.hosts.swarm_attempts import spent_of
from kimi_ray.ids import MAIN, new_ulid
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.log import epoch_ms
from kimi_ray.session import AgentEntry, parent_of_log
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from kimi_ray.version import __version__

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession

_CLOSE_S = 10.0
_REMEMBERED = 1024
_SPAWN = "spawn"
"""The header's word for the nonce of a spawn: the same one again is found by it."""


class SessionSubagents:
    """The children of the agents of one session.

    Args:
        live: The session.
    """

    def __init__(self, live: LiveSession) -> None:
        self._live = live
        self._runs: dict[str, ChildRun] = {}
        self._made: OrderedDict[str, asyncio.Future[ReadyChild]] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._headers: dict[str, dict[str, Any]] = {}
        self._inherited: dict[str, Inherited] = {}
        self._earlier: dict[str, str] | None = None
        """What earlier hosts of the session made, by nonce; this one holds its claim, so there will be no more."""
        self._watch = SubagentWatch(live, self._runs, self.end)

    @property
    def running(self) -> set[str]:
        """The children that are at work."""
        return set(self._runs)

    # -- making -----------------------------------------------------------------------------------------------------

    async def spawn(self, spec: SpawnSubagent) -> ReadyChild:
        """Make a child, alive and idle. The same nonce again is the same child.

        Raises:
            AgentError: ``agent.not_found`` of the caller; ``agent.depth_exceeded`` {depth, max}; ``limit.*``.
            KimiRayError: why it cannot be brought to life.
        """
        making = self._made.get(spec.nonce)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._made[spec.nonce] = asyncio.ensure_future(self._spawn(spec))
            if len(self._made) > _REMEMBERED:
                self._made.popitem(last=False)
        return await asyncio.shield(making)

    async def _spawn(self, spec: SpawnSubagent) -> ReadyChild:
        live = self._live
        depth = int((await self._header(spec.caller)).get("delegation_depth", 0)) + 1
        most = live.services.config.max_delegation_depth
        if depth > most:
            raise depth_exceeded(Stream(live.id, spec.caller), depth, most)
        await live.limits_left(None)
        made = await self._made_before(spec.nonce)
        if made is not None:
            return made
        if spec.inherited is None:
            spec = await self._as_its_caller(spec)
        spec = replace(spec, inherited=self._isolated(spec.inherited))
        if spec.fork:
            return await self._fork(spec)
        model = spec.model if spec.model is not None else await self._model_of(spec.caller)
        return await self._create(spec, model, depth)

    async def _create(self, spec: SpawnSubagent, model: ResolvedModel, depth: int) -> ReadyChild:
        live, inherited = self._live, spec.inherited or Inherited()
        (number,) = await live.next_numbers(1)
        stream = Stream(live.id, f"agent-{number}")
        labels = self._labels(spec)
        header = LogHeader(
            session_id=live.id,
            agent_id=stream.agent_id,
            created_at=epoch_ms(),
            cwd=spec.cwd if spec.cwd is not None else live.spec.cwd,
            parent=ParentRef(session_id=live.id, agent_id=spec.caller),
            origin="subagent",
            delegation_depth=depth,
            profile=spec.profile.name,
            labels=labels,
            writer=WriterRef(name="kimi-ray", version=__version__),
        )
        data = header.to_data() | {_SPAWN: spec.nonce}
        agent = AgentSpec(
            stream=stream,
            nonce=new_ulid(),
            profile=spec.profile,
            model=model,
            header=data,
            sampling=spec.sampling,
            limits=spec.profile.limits,
            workdir=spec.workdir,
            user_tools=inherited.user_tools,
            item=inherited.item,
            denied_paths=inherited.denied_paths,
            send_seed=inherited.send_seed,
            permission_mode=inherited.permission_mode,
            claim=live.spec.nonce,
            models=live.models_for(spec.profile),
        )
        self._headers[stream.agent_id] = data
        self._inherited[stream.agent_id] = inherited
        with live.arrivals.one():
            await live.recovery.remember_run(stream.agent_id, spec.caller)
            try:
                host = await activate_agent(
                    live.services.cluster,
                    live.services.registry,
                    live.services.store,
                    agent,
                    isolation=inherited.isolation,
                    node_id=inherited.node_id,
                )
            except BaseException:
                live.recovery.drop_run(stream.agent_id)
                raise
            live.hold(replace(agent, header=None), host, inherited.isolation, inherited.node_id)
        live.register_agents([AgentEntry(stream.agent_id, "sub", spec.caller, labels)])
        said = {"agent_id": stream.agent_id, "profile": spec.profile.name, "model": model.name, "labels": labels}
        live.log_of(spec.caller).add([LogEntry("subagent/spawned", {**said, **spec.about})])
        return ReadyChild(stream.agent_id, spec.profile.name, labels, host)

    async def _fork(self, spec: SpawnSubagent) -> ReadyChild:
        live, inherited = self._live, spec.inherited or Inherited()
        labels = self._labels(spec)
        agent_id = await fork_agent(
            live.services, live, spec.caller, spec.nonce, spec.model, labels=labels, about=spec.about
        )
        self._inherited[agent_id] = inherited
        host = await live.agent_host(agent_id, None, spec.model, directly=False)
        return ReadyChild(agent_id, spec.profile.name, labels, host)

    def _isolated(self, inherited: Inherited | None) -> Inherited:
        """An agent does not know whether it has a process of its own; its session does, and has its children so too."""
        found = inherited or Inherited()
        return replace(found, isolation=found.isolation or self._live.agents[MAIN].isolation)

    async def _model_of(self, agent_id: str) -> ResolvedModel:
        agent = self._live.agents.get(agent_id)
        return agent.spec.model if agent is not None else (await self._live.spec_for(agent_id, None)).model

    def _labels(self, spec: SpawnSubagent) -> dict[str, str]:
        return {**spec.labels, "parent_agent_id": spec.caller}

    async def _made_before(self, nonce: str) -> ReadyChild | None:
        """The child that an earlier host of this session made for the same call."""
        live = self._live
        if live.known_empty:
            return None
        if self._earlier is None:
            logs = await live.services.store.list_logs(live.id)
            headers = [(log.stream.agent_id, log.header) for log in logs if log.header is not None]
            by_nonce = [(header.get(_SPAWN) or header.get("fork_group"), told) for told, header in headers]
            self._earlier = {str(made): agent_id for made, agent_id in by_nonce if made is not None}
        agent_id = self._earlier.get(nonce)
        if agent_id is None:
            return None
        host = await live.agent_host(agent_id, None, None, directly=False)
        return replace(_told(agent_id, await self._header(agent_id)), host=host)

    async def _as_its_caller(self, spec: SpawnSubagent) -> SpawnSubagent:
        """What a program did not say: the child works where its caller does, with main's tools."""
        live = self._live
        main, stream = live.agents[MAIN], Stream(live.id, spec.caller)
        bound = await live.bound(stream)
        own = workdir_of(bound) or Workdir.none()
        node = await node_of_directory(live.services.store, stream, own)
        inherited = Inherited(
            main.spec.user_tools,
            main.spec.denied_paths,
            await mode_of(live, spec.caller if live.host_of(spec.caller) is not None else MAIN),
            send_seed=main.spec.send_seed,
            isolation=main.isolation,
            node_id=node or (main.node_id if own.kind != "none" else None),
        )
        return replace(spec, inherited=inherited, workdir=spec.workdir or beside(bound.get("workdir") or {}))

    # -- running ----------------------------------------------------------------------------------------------------

    async def check(self, caller: str | None, agent_id: str) -> ReadyChild:
        """A child that may be given a prompt; nothing is brought to life. ``caller`` None: any agent, whatever it does.

        Raises:
            AgentError: ``agent.not_found``, ``agent.not_a_subagent``, ``agent.not_owned``, ``agent.already_running``.
        """
        if caller is None:
            return _told(agent_id, await self._header(agent_id))
        child = await self._owned(caller, agent_id)
        run = self._runs.get(agent_id)
        if run is not None and not await self._watch.end_if_orphan(run):
            raise _already_running(agent_id)
        host = self._live.host_of(agent_id)
        if agent_id in self._runs or (host is not None and await self._watch.is_busy(host, agent_id)):
            raise _already_running(agent_id)
        return child

    async def begin(self, spec: BeginSubagent) -> ReadyChild:
        """A run begins: the child alive, its caller's log told. The same run id again is the same run.

        Raises:
            AgentError: ``agent.not_found``, ``agent.not_a_subagent``, ``agent.not_owned``, ``agent.already_running``;
                ``agent.model_needed`` {model}; ``limit.*`` when the session has nothing left.
            KimiRayError: why the child cannot be brought to life.
        """
        live, agent_id = self._live, spec.agent_id
        known = self._runs.get(agent_id)
        if known is not None and known.run_id != spec.run_id:
            if not await self._watch.end_if_orphan(known) or agent_id in self._runs:
                raise _already_running(agent_id)
            known = None
        run = known or ChildRun(spec.caller, agent_id, spec.run_id, spec.by_agent, live.host_of(spec.caller))
        self._runs[agent_id] = run
        self._watch.begin(run)
        try:
            child = await self._owned(spec.caller, agent_id)
            if spec.inherited is not None:
                self._inherited[agent_id] = self._isolated(spec.inherited)
            await live.recovery.remember_run(agent_id, spec.caller)
            host = await live.agent_host(agent_id, None, spec.model, directly=False)
            accounts = self._watch.accounts
            limits = await accounts.limits_for(run) if accounts.is_bound(run) else None
        except BaseException:
            if known is None:
                self._drop(run)
            raise
        if known is None:
            live.log_of(spec.caller).add([LogEntry("subagent/started", {"agent_id": agent_id})])
        return replace(child, host=host, limits=limits)

    async def end(self, spec: EndSubagent) -> None:
        """A run has ended: durable in the caller's log when it returns. Idempotent.

        Raises:
            KimiRayError: the caller's log cannot be written.
        """
        live, run = self._live, self._runs.get(spec.agent_id)
        if spec.run_id in self._over or (run is not None and run.run_id != spec.run_id):
            return
        if spec.seq < 0:
            stored = await read_agent(live.services.store, Stream(live.id, spec.agent_id))
            if stored is not None:
                spec = replace(spec, **stored.position)
        if run is not None and spec.totals is not None:
            self._watch.accounts.count(run, spent_of(spec.totals), over=True)
        self._over[spec.run_id] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        log = live.log_of(spec.caller)
        told = run is None or not run.by_agent or live.host_of(spec.caller) is not None or live.in_swarm(spec.caller)
        if told:
            log.add([ended_entry(spec)])
        if run is not None:
            self._drop(run)
        live.recovery.drop_run(spec.agent_id)
        if told:  # else the caller has ended for good, and is not brought back for it
            await log.flush()
        await self._watch.accounts.tell_above([spec.agent_id])
        if run is not None:
            self._watch.rest(spec.agent_id)
        if live.in_swarm(spec.caller) and all(other.caller != spec.caller for other in self._runs.values()):
            live.drop_log(spec.caller)  # it is over soon, and nobody is to bring it back for a flush
        if spec.caller != MAIN and spec.caller not in self._runs and not live.in_swarm(spec.caller):
            await tell_ancestors(live, spec.caller, "subagent ended")

    def inherited(self, agent_id: str) -> Inherited | None:
        """What a child has from its caller, as far as it was told in this life of the session."""
        return self._inherited.get(agent_id)

    async def close(self) -> None:
        """End all runs and wait, bounded, until they are told. For a session that is about to close."""
        if not self._runs:
            self.stop()
            return
        runs = list(self._runs.values())
        # Callers first, or a caller would go on with what it hears of its child's end.
        await self._watch.cancel([run.caller for run in runs if run.by_agent], "closed")
        await self._watch.cancel([run.agent_id for run in runs], "closed")
        waiting = [asyncio.ensure_future(run.ended.wait()) for run in runs]
        _, late = await asyncio.wait(waiting, timeout=_CLOSE_S)
        for one in late:
            one.cancel()
        self.stop()

    def stop(self) -> None:
        """Look after nothing any more."""
        self._watch.stop()

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _header(self, agent_id: str) -> dict[str, Any]:
        known = self._headers.get(agent_id)
        if known is None:
            stream = Stream(self._live.id, agent_id)
            try:
                known = (await self._live.services.store.inspect(stream)).header
            except StoreError as error:
                if error.code != "store.not_found":
                    raise
                raise _refused(
                    f"session {stream.session_id} has no agent {agent_id}", "agent.not_found", agent_id
                ) from error
            self._headers[agent_id] = known
        return known

    async def _owned(self, caller: str, agent_id: str) -> ReadyChild:
        header = await self._header(agent_id)
        if agent_id in (MAIN, caller):
            raise _refused(f"{agent_id} is no subagent", "agent.not_a_subagent", agent_id)
        parent = parent_of_log(header)
        if parent != caller:
            raise _refused(f"{agent_id} is a subagent of {parent}, not of {caller}", "agent.not_owned", agent_id)
        return _told(agent_id, header)

    def _drop(self, run: ChildRun) -> None:
        if self._runs.get(run.agent_id) is run:
            del self._runs[run.agent_id]
        run.ended.set()


def ended_entry(spec: EndSubagent) -> LogEntry:
    """What the caller's log is told of the end of a run, with the child's durable position."""
    data: dict[str, Any] = {"agent_id": spec.agent_id}
    if spec.seq >= 0:
        data |= {"seq": spec.seq, "epoch": spec.epoch}
    if spec.goes_on:
        return LogEntry("subagent/suspended", data | {"reason": spec.stop})
    if spec.error is None and spec.seq >= 0:
        data["status"] = spec.stop
        if spec.message_seq is not None:
            data["message_seq"] = spec.message_seq
        return LogEntry("subagent/completed", data)
    error = spec.error or AgentError(f"{spec.agent_id} ended: {spec.stop}", code=f"turn.{spec.stop}").to_data()
    return LogEntry("subagent/failed", data | {"error": error})


def _told(agent_id: str, header: dict[str, Any]) -> ReadyChild:
    return ReadyChild(agent_id, str(header.get("profile") or ""), dict(header.get("labels") or {}))


def depth_exceeded(caller: Stream, depth: int, most: int) -> AgentError:
    """The refusal of a child that would be too deep."""
    return AgentError(
        f"{caller.agent_id} cannot start an agent: it would be {depth} levels below main, and {most} are allowed",
        code="agent.depth_exceeded",
        hint="do the work yourself; the setting max_delegation_depth is the bound",
        details={"depth": depth, "max": most, "agent_id": caller.agent_id},
    )


def _already_running(agent_id: str) -> AgentError:
    return AgentError(
        f"{agent_id} is at work already",
        code="agent.already_running",
        hint="wait for its answer, or start another agent",
        details={"agent_id": agent_id},
        retryable=True,
    )


def _refused(message: str, code: str, agent_id: str) -> AgentError:
    return AgentError(message, code=code, details={"agent_id": agent_id})
