"""A session while it is live: its claim, its document, its agents and where they are, its swarms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from kimi_ray.agent.profiles import models_for
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.hosts.activation import activate_agent
from kimi_ray.hosts.arrivals import Arrivals
from kimi_ray.hosts.ports import Cluster, Group, Peer, is_lost
from kimi_ray.hosts.reconciling import reconcile
from kimi_ray.hosts.session_closing import close_session
from kimi_ray.hosts.session_flush import flush_session
from kimi_ray.hosts.session_log import SessionLog
from kimi_ray.hosts.session_subagents import SessionSubagents
from kimi_ray.hosts.session_swarms import begin_swarm
from kimi_ray.hosts.specs import AgentSpec, SessionInfo, SessionSpec
from kimi_ray.hosts.steady_calls import RegistryCalls, StoreCalls
from kimi_ray.hosts.stored_binding import read_binding, workdir_of
from kimi_ray.hosts.swarm_run import SwarmRun
from kimi_ray.hosts.swarm_words import SwarmSpec
from kimi_ray.hosts.tree_limits import TreeLimits
from kimi_ray.hosts.tree_recovery import TreeRecovery
from kimi_ray.ids import MAIN, agent_number, new_ulid
from kimi_ray.llm.models import Price, ResolvedModel
from kimi_ray.llm.reachable import ReachableModels
from kimi_ray.session import AgentEntry, SessionDocument, parent_of_log
from kimi_ray.session.refusals import no_agent, no_session, not_live
from kimi_ray.settings import Isolation, Limits, Profile, Sampling
from kimi_ray.store.named_locks import NamedLocks
from kimi_ray.store.seam import Document, Stream

_PING_S = 2.0
_FLUSH_S = 60.0
_TRIES = 4
_IN_SWARM_S = 30.0
_IN_SWARM_PAUSE_S = 0.05


@dataclass(slots=True)
class LiveAgent:
    """An agent that this session keeps alive, and how to bring it back."""

    spec: AgentSpec
    host: str
    isolation: Isolation | None = None
    node_id: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class HostServices:
    """What a session host lends its sessions."""

    name: str
    cluster: Cluster
    config: RuntimeConfig
    registry: RegistryCalls
    store: StoreCalls


class LiveSession:
    """One live session. Built by ``SessionHost`` under the lock of the session's id.

    Args:
        services: The host's.
        spec: As it was asked for.
        document: Its document.
        main: Its main agent, alive.
        known_empty: Whether the session is new, so that no subagent can exist.
    """

    def __init__(
        self,
        services: HostServices,
        spec: SessionSpec,
        document: SessionDocument,
        main: LiveAgent,
        *,
        known_empty: bool,
    ) -> None:
        self.spec = spec
        self.id = spec.session_id
        self.document = document
        self.agents: dict[str, LiveAgent] = {MAIN: main}
        self.swarms: dict[str, SwarmRun] = {}
        self.tree = TreeLimits(main.spec.limits)
        self.services = services
        self.arrivals = Arrivals(lambda: not_live(self.id, services.name))
        """Agents that are brought to life just now; none any more when the session ends."""
        self.recovery = TreeRecovery(self)
        self.subagents = SessionSubagents(self)
        self._logs: dict[str, SessionLog] = {}
        self._next_number: int | None = 1 if known_empty else None
        self.known_empty = known_empty
        self._numbering = asyncio.Lock()
        self._addressing = NamedLocks()
        self.log = self.log_of(MAIN)
        """The pen for main's log."""
        self._models: dict[str, ResolvedModel] = {main.spec.model.name: main.spec.model}

    def info(self) -> SessionInfo:
        """What callers are told."""
        return SessionInfo(
            self.id,
            self.spec.workspace_id,
            self.services.name,
            self.document.snapshot(),
            self.document.revision,
            main_host=self.host_of(MAIN),
            waiting=dict(self.recovery.waiting),
        )

    def document_in(self, workspaces: Collection[str] | None) -> Document:
        """The document as it is now, if it is in one of these workspaces; None: in any.

        Raises:
            SessionError: ``session.not_found``.
        """
        value = self.document.snapshot()
        workspace = str(value.get("workspace_id") or self.spec.workspace_id)
        if workspaces is not None and workspace not in workspaces:
            raise no_session(self.id)
        return Document(self.id, workspace, self.document.revision, value)

    @property
    def price(self) -> Price | None:
        """What the tree's limits count in."""
        return self.agents[MAIN].spec.model.settings.price

    # -- agents -----------------------------------------------------------------------------------------------------

    def host_of(self, agent_id: str) -> str | None:
        """The host on which an agent lives now, as far as this session knows; nothing is brought to life."""
        agent = self.agents.get(agent_id)
        if agent is not None:
            return agent.host
        for swarm in self.swarms.values():
            host = swarm.host_of(agent_id)
            if host is not None:
                return host
        return self.recovery.living.get(agent_id)

    def in_swarm(self, agent_id: str) -> bool:
        """Whether an agent is one of a rollout that has not ended."""
        return any(swarm.holds(agent_id) for swarm in self.swarms.values())

    def hold(self, spec: AgentSpec, host: str, isolation: Isolation | None, node_id: str | None) -> None:
        """Keep alive, from now on, an agent that lives on ``host``."""
        self.agents[spec.stream.agent_id] = LiveAgent(spec, host, isolation, node_id)
        self._models[spec.model.name] = spec.model

    async def agent_host(
        self, agent_id: str, suspect: str | None, model: ResolvedModel | None, *, directly: bool = True
    ) -> str:
        """The host of an agent, which is brought to life if it is not alive.

        Args:
            agent_id: ``main`` or ``agent-<n>``.
            suspect: A host that the caller could not reach: if the agent is thought to be there, look first.
            model: How to reach the model of a cold agent, when this session does not know it.
            directly: Somebody is about to speak to it whom its parent does not know of.

        Raises:
            AgentError: ``agent.not_found``; ``agent.model_needed`` {model}.
            SessionError: ``session.not_live`` when the session is ending.
            KimiRayError: what the activation raised.
        """
        host = await self._host_in_swarm(agent_id)
        with self.arrivals.one():
            while host is None:
                host = await self._host_of_living(agent_id, suspect, model)
        if agent_id != MAIN and directly:
            await self.recovery.remember_agent(agent_id)
        return host

    async def _host_of_living(self, agent_id: str, suspect: str | None, model: ResolvedModel | None) -> str | None:
        """``agent_host`` of an agent of no swarm; None when it was put to sleep just now."""
        if agent_id not in self.agents:
            async with self._addressing.alone(agent_id):
                if agent_id not in self.agents:
                    await self._address(agent_id, model)
        agent = self.agents.get(agent_id)
        if agent is None:
            return None
        async with agent.lock:
            if self.agents.get(agent_id) is not agent:
                return None
            if suspect is not None and suspect == agent.host and not await self._holds(agent):
                await self._relocate(agent)
            return agent.host

    async def _host_in_swarm(self, agent_id: str) -> str | None:
        """The host of a swarm's agent, which the swarm brings back itself; None for an agent of no swarm."""
        for _ in range(round(_IN_SWARM_S / _IN_SWARM_PAUSE_S)):
            swarm = next((swarm for swarm in self.swarms.values() if swarm.holds(agent_id)), None)
            host = swarm.host_of(agent_id) if swarm is not None else None
            if swarm is None or host is not None:
                return host
            await asyncio.sleep(_IN_SWARM_PAUSE_S)
        raise AgentError(
            f"{agent_id} of {self.id} is just being brought to life by its swarm",
            code="agent.not_found",
            hint="ask again",
            details={"session_id": self.id, "agent_id": agent_id},
            retryable=True,
        )

    async def call_agent(
        self,
        agent_id: str,
        method: str,
        *args: Any,
        group: Group,
        timeout_s: float = _FLUSH_S,
        model: ResolvedModel | None = None,
        directly: bool = True,
    ) -> Any:
        """Call the host of an agent for something that may be asked twice; it is brought to life where needed.

        Raises:
            KimiRayError: what the host raised, or why the agent cannot be brought to life (``agent_host``).
        """
        suspect: str | None = None
        for attempt in range(_TRIES):
            host = await self.agent_host(agent_id, suspect, model, directly=directly)
            try:
                return await self.services.cluster.peer(host).call(method, *args, timeout_s=timeout_s, group=group)
            except KimiRayError as error:
                if attempt == _TRIES - 1 or not (is_lost(error.code) or error.code == "agent.not_found"):
                    raise
                suspect = host
        raise AssertionError

    async def look_after(self) -> None:
        """Bring back agents whose hosts were lost meanwhile; of main's failure the caller hears.

        Raises:
            KimiRayError: why main cannot be brought back.
        """
        others = [agent_id for agent_id in self.agents if agent_id != MAIN]
        results = await asyncio.gather(
            *(self.agent_host(agent_id, self.agents[agent_id].host, None) for agent_id in [MAIN, *others]),
            return_exceptions=True,
        )
        for agent_id, result in zip([MAIN, *others], results, strict=True):
            if isinstance(result, BaseException):
                if agent_id == MAIN or not isinstance(result, KimiRayError):
                    raise result
                self.recovery.failures[agent_id] = result

    async def set_model(self, agent_id: str, model: ResolvedModel) -> None:
        """Another model from the agent's next turn on; an agent that is lost later comes back with it."""
        self._models[model.name] = model
        stream = Stream(self.id, agent_id)
        await self.call_agent(agent_id, "set_model", stream, model, self.spec.nonce, group="control", model=model)
        agent = self.agents.get(agent_id)
        if agent is not None:
            agent.spec = replace(agent.spec, model=model)

    async def next_numbers(self, count: int) -> range:
        """``count`` agent numbers that were never used and never will be again."""
        async with self._numbering:
            if self._next_number is None:
                logs = await self.services.store.list_logs(self.id)
                document = self.document.snapshot()
                known = [log.stream.agent_id for log in logs] + list(document["agents"]) + list(self.agents)
                numbers = [number for name in known if (number := agent_number(name)) is not None]
                # A fork's log may speak of agents that were left behind: its header has the highest number.
                numbers += [int((log.header or {}).get("highest_agent") or 0) for log in logs]
                self._next_number = max([0, *numbers]) + 1
            first = self._next_number
            self._next_number += count
        return range(first, first + count)

    async def list_agents(self) -> list[dict[str, Any]]:
        """Every agent with a log, by number: ``{agent_id, type, parent_agent_id, live, labels, profile, ...}``."""
        rows: list[dict[str, Any]] = []
        for log in await self.services.store.list_logs(self.id):
            header = log.header or {}
            agent_id = log.stream.agent_id
            failed = self.recovery.failures.get(agent_id)
            rows.append(
                {
                    "agent_id": agent_id,
                    "type": "main" if agent_id == MAIN else "sub",
                    "parent_agent_id": None if agent_id == MAIN else parent_of_log(header),
                    "delegation_depth": header.get("delegation_depth", 0),
                    "live": self.host_of(agent_id) is not None,
                    "labels": header.get("labels", {}),
                    **{
                        key: header.get(key)
                        for key in ("profile", "created_at", "run_id", "item_id", "repeat", "attempt")
                    },
                    "error": log.error or (failed.to_data() if failed is not None else None),
                }
            )
        return sorted(rows, key=lambda row: agent_number(row["agent_id"]) or 0)

    async def _address(self, agent_id: str, model: ResolvedModel | None) -> None:
        """Bring a subagent to life from its log, or take over the one that an earlier host of the session left."""
        place = self.subagents.inherited(agent_id) or self.agents[MAIN]
        spec = await self.spec_for(agent_id, model)
        at = self.recovery.living.get(agent_id)
        host = await self._activate(spec, place.isolation, place.node_id, at)
        self.hold(spec, host, place.isolation, place.node_id)
        for gone in (self.recovery.living, self.recovery.waiting, self.recovery.failures):
            gone.pop(agent_id, None)

    async def spec_for(self, agent_id: str, model: ResolvedModel | None) -> AgentSpec:
        """How a stored subagent is brought to life.

        Raises:
            AgentError: ``agent.not_found``; ``agent.model_needed`` {model}; ``agent.bad_bind``.
        """
        stream = Stream(self.id, agent_id)
        main = self.agents[MAIN]
        bound = await self.bound(stream)
        name = str(bound.get("model") or main.spec.model.name)
        if model is not None:
            self._models[model.name] = model
        resolved = model or self._models.get(name) or self.spec.models.models.get(name)
        if resolved is None:
            raise AgentError(
                f"{stream} speaks to the model {name!r}, which this session has not been told how to reach",
                code="agent.model_needed",
                hint="resolve the model and ask again",
                details={"model": name},
            )
        inherited = self.subagents.inherited(agent_id) or main.spec
        try:
            profile = Profile.model_validate(bound["profile"])
            return replace(
                main.spec,
                stream=stream,
                nonce=new_ulid(),
                header=None,
                profile=profile,
                models=self.models_for(profile),
                model=resolved,
                model_as_stored=model is None,
                sampling=_read(Sampling, bound.get("sampling")),
                limits=_read(Limits, bound.get("limits")),
                workdir=workdir_of(bound),
                workdir_path=None,
                user_tools=inherited.user_tools,
                item=inherited.item,
                denied_paths=inherited.denied_paths,
                send_seed=inherited.send_seed,
                permission_mode=inherited.permission_mode,
            )
        except (ValidationError, KeyError) as error:
            raise AgentError(
                f"the profile in the log of {stream} cannot be read: {error}", code="agent.bad_bind"
            ) from error

    def models_for(self, profile: Profile) -> ReachableModels:
        """What agents of a profile may give to theirs: nothing, unless they start any."""
        return models_for(profile, self.spec.models)

    async def bound(self, stream: Stream) -> dict[str, Any]:
        """How a stored agent is bound (``read_binding``). Raises ``agent.not_found``."""
        bound = await read_binding(self.services.store, stream)
        if bound is None:
            raise no_agent(stream)
        return bound

    async def _holds(self, agent: LiveAgent) -> bool:
        """Whether the host is there and still has the agent."""
        try:
            peer = self.services.cluster.peer(agent.host)
            # It tells of those agents that live there, and is silent about one that broke or was fenced.
            return bool(await peer.call("progress", [agent.spec.stream], timeout_s=_PING_S, group="control"))
        except KimiRayError as error:
            if is_lost(error.code):
                return not await self.services.registry.report_lost(agent.host)
            return error.code != "agent.not_found"

    async def _relocate(self, agent: LiveAgent) -> None:
        spec = replace(agent.spec, header=None, nonce=new_ulid())
        if agent is self.agents[MAIN] and self.tree.bound:
            spec = replace(spec, elsewhere=self.tree.elsewhere())
        agent.host = await self._activate(spec, agent.isolation, agent.node_id)
        agent.spec = spec

    async def _activate(
        self, spec: AgentSpec, isolation: Isolation | None, node_id: str | None, at: str | None = None
    ) -> str:
        services = self.services
        return await activate_agent(
            services.cluster, services.registry, services.store, spec, isolation=isolation, node_id=node_id, at=at
        )

    def _main_peer(self) -> Peer:
        return self.services.cluster.peer(self.agents[MAIN].host)

    def log_of(self, agent_id: str) -> SessionLog:
        """The pen for an agent's log; the agent is brought to life where that is needed."""
        log = self._logs.get(agent_id)
        if log is None:
            stream = Stream(self.id, agent_id)

            def peer() -> Peer:
                host = self.host_of(agent_id)
                if host is None:
                    raise AgentError(f"{stream} does not live", code="agent.not_found", retryable=True)
                return self.services.cluster.peer(host)

            async def recover() -> None:
                await self.agent_host(agent_id, self.host_of(agent_id), None)

            log = self._logs[agent_id] = SessionLog(stream, peer, recover, claim=self.spec.nonce)
        return log

    def drop_log(self, agent_id: str) -> None:
        """Nothing more is to be said in an agent's log, and nothing waits to be."""
        self._logs.pop(agent_id, None)

    # -- swarms -----------------------------------------------------------------------------------------------------

    async def start_swarm(
        self, spec: SwarmSpec, *, fenced: Callable[[KimiRayError], None], still_here: Callable[[], object]
    ) -> None:
        """Begin a swarm of one of the session's agents. The same run id again is the same swarm.

        Args:
            spec: What to run; ``parent`` is brought to life if it is cold.
            fenced: Called when the session turns out to live on another host.
            still_here: Raises when the session has left its host.

        Raises:
            AgentError: ``agent.not_found``, ``agent.model_needed`` of the parent; ``limit.*`` of the tree.
            RunError: ``swarm.*``.
        """
        await begin_swarm(self, spec, fenced, still_here)

    # -- the whole --------------------------------------------------------------------------------------------------

    async def reconcile(self) -> None:
        """The log wins for the last prompt, the last turn's reason and ``updated_at`` (``reconciling.reconcile``)."""
        await reconcile(self)

    async def recount(self) -> None:
        """After a resume: what the tree has used before, where that matters."""
        if self.tree.bound:
            main = self.agents[MAIN]
            await self.tree.recount(self.services.store, self.id, main.spec.model.settings.price)
            await self.tell_main()

    async def limits_left(self, total: Limits | None) -> Limits | None:
        """A swarm's total limits under what the session's tree has left.

        Raises:
            AgentError: ``limit.*`` when the tree has nothing left.
        """
        if not self.tree.bound:
            return total
        stream = self.agents[MAIN].spec.stream
        used = await self._main_peer().call("totals", stream, timeout_s=_FLUSH_S, group="control")
        return self.tree.left(total, used)

    async def tell_main(self) -> None:
        """Main's limits count what the other agents have used."""
        if self.tree.bound:
            stream = self.agents[MAIN].spec.stream
            try:
                await self._main_peer().call(
                    "spent_elsewhere", stream, self.tree.elsewhere(), timeout_s=_FLUSH_S, group="control"
                )
            except KimiRayError as error:
                # A main that is lost is told when it is brought to life again.
                if not is_lost(error.code) and error.code != "agent.not_found":
                    raise

    def register_agents(self, entries: list[AgentEntry]) -> None:
        """Subagents exist."""
        self.document.register(entries)

    async def flush(self) -> None:
        """All live agents of the session and its document are durable from here on; what is cold is so already.

        Raises:
            KimiRayError: the first failure, after all were asked.
        """
        await flush_session(self, list(self._logs.values()))

    def abandon(self, error: KimiRayError) -> None:
        """The session lives elsewhere: end everything here without writing a word."""
        self.arrivals.refuse()
        self.recovery.stop()
        self.subagents.stop()
        for swarm in self.swarms.values():
            swarm.abandon(error)
        for log in self._logs.values():
            log.abandon()

    async def close(self, *, force: bool) -> None:
        """Stop the swarms and agents, flush, give the claim back.

        Raises:
            KimiRayError: the first failure, after everything was tried; with ``force`` what is not durable is dropped.
        """
        await close_session(self, list(self._logs.values()), force=force)


def _read(kind: Any, value: Any) -> Any:
    return None if value is None else kind.model_validate(value)
