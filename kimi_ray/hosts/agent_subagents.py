"""``Subagents`` for an agent on its host: the rules for its model, the slots around a child, the calls behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.profiles import BUILTIN, resolve_profile
from kimi_ray.agent.slots import AgentSlots, ChildEnded, ChildStarting
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.subagents import (
    DEFAULT_PROFILE,
    SubagentInfo,
    SubagentPlan,
    SubagentResult,
    Subagents,
    SummaryPolicy,
)
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, KimiRayError, as_error
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.ports import Cluster
from kimi_ray.hosts.session_calls import SessionCalls
from kimi_ray.hosts.session_subagents import depth_exceeded
from kimi_ray.hosts.specs import SessionSpec
from kimi_ray.hosts.subagent_calls import RunWish, SubagentCalls
from kimi_ray.hosts.subagent_words import Inherited, SpawnSubagent
from kimi_ray.ids import MAIN, new_ulid, workspace_id
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.scopes import LifecycleScope
from kimi_ray.settings import Profile, Workdir
from kimi_ray.tools.workdirs import PreparedWorkdir

FORK_NOTICE = (
    "You are a fork: what is above is the conversation of the agent that started you, and yours only to know. Your task"
    " follows. Do it and answer once, with all that the other one needs of it: of your work it sees that answer alone."
)
_END_S = 10.0


class AgentSubagents:
    """``Subagents`` on an agent's host.

    Args:
        spec: The caller.
        journal: Its log.
        slots: Who is asked about its children.
        workdir: Where it works, and so do they.
        features: Their profiles.
        config: The settings.
        cluster: Where the caller lives.
        courier: Of this host.
        in_use: The caller's model.
        notices: Tells of its children's ends.
    """

    def __init__(
        self,
        spec: AgentSpec,
        journal: Journal,
        slots: AgentSlots,
        workdir: PreparedWorkdir,
        features: Features,
        config: RuntimeConfig,
        cluster: Cluster,
        courier: Courier,
        in_use: ModelInUse,
        notices: Notices,
    ) -> None:
        self._spec = spec
        self._notices = notices
        self._in_use = in_use
        self._journal = journal
        self._slots = slots
        self._workdir = workdir
        self._features = features
        self._config = config
        self._cluster = cluster
        self._id = spec.stream.agent_id
        resume = self._session_spec if self._id == MAIN else None
        self._session = SessionCalls(cluster, courier.registry, spec.stream.session_id, resume)
        self._calls = SubagentCalls(courier, self._session, self._id, self._resolve, by_agent=True)
        self._fresh: dict[str, SubagentPlan] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def offered(self) -> list[Profile]:
        """See ``Subagents.offered``."""
        known = {**BUILTIN, **self._features.profiles}
        return [profile for name, profile in known.items() if self._is_allowed(name)]

    def plan(self, profile: str | None = None, model: str | None = None, *, fork: bool = False) -> SubagentPlan:
        """See ``Subagents.plan``."""
        depth = self._journal.log.header.delegation_depth + 1
        if depth > self._config.max_delegation_depth:
            raise depth_exceeded(self._spec.stream, depth, self._config.max_delegation_depth)
        if fork:
            return SubagentPlan(self._spec.profile, self._in_use.model, fork=True)
        name = profile or DEFAULT_PROFILE
        bound = resolve_profile(name, self._features.profiles)
        if not self._is_allowed(name):
            allowed = self._spec.profile.subagents or ()
            raise AgentError(
                f"an agent of the profile {self._spec.profile.name} may not start one of the profile {name}",
                code="agent.type_not_allowed",
                hint=f"it may start {', '.join(allowed)}" if allowed else "it may start none",
                details={"profile": name, "allowed": list(allowed)},
            )
        if model is not None:
            return SubagentPlan(bound, self._chosen(model))
        return SubagentPlan(bound, self._in_use.model if bound.model is None else self._resolve(bound.model))

    async def spawn(
        self,
        plan: SubagentPlan,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        call_id: str | None = None,
        background: bool = False,
    ) -> str:
        """See ``Subagents.spawn``."""
        spec, workdir = self._spec, self._workdir.path
        about = {"description": description, "call_id": call_id, "background": background or None}
        child = await self._calls.spawn(
            SpawnSubagent(
                self._id,
                new_ulid(),
                plan.profile if plan.fork else self._with_own_tools(plan.profile),
                plan.model,
                fork=plan.fork,
                sampling=spec.sampling,
                workdir=Workdir.none() if workdir is None else Workdir.shared(workdir, writes=True),
                cwd=self._journal.log.header.cwd,
                labels=dict(labels or {}),
                about={key: value for key, value in about.items() if value is not None},
                inherited=self._inherited(),
            )
        )
        self._fresh[child.agent_id] = plan
        return child.agent_id

    async def run(
        self,
        agent_id: str,
        prompt: str | None,
        *,
        timeout_s: float | None = None,
        summary: SummaryPolicy | None = None,
        signal: asyncio.Event | None = None,
        on_started: Callable[[], None] | None = None,
        will_retry: bool = False,
    ) -> SubagentResult:
        """See ``Subagents.run``."""
        if agent_id in self._stops:
            raise _already_running(agent_id)
        if self._closed:
            raise AgentError(f"the agent {self._spec.stream} is closed", code="agent.closed")
        task = asyncio.current_task()
        stop = self._stops[agent_id] = asyncio.Event()
        if task is not None:
            self._running.add(task)
        linked = asyncio.ensure_future(_link(signal, stop)) if signal is not None else None
        try:
            try:
                text = prompt if prompt is None else await self._prepared(agent_id, prompt)
            except Exception as error:  # noqa: BLE001  whatever a handler raises fails what it was asked about
                return SubagentResult(agent_id, "", "failed", error=as_error(error).to_data())
            wish = RunWish(timeout_s or None, summary, stop, on_started, will_retry)
            result = await self._calls.run(agent_id, text, wish, self._inherited())
            if result.status == "completed" and self._slots.child_ended:
                self._notices.tell(self._slots.child_ended, ChildEnded(agent_id, result.profile, result.text))
            return result
        finally:
            if linked is not None:
                linked.cancel()
            del self._stops[agent_id]
            if task is not None:
                self._running.discard(task)

    async def check_resume(self, agent_id: str) -> SubagentInfo:
        """See ``Subagents.check_resume``."""
        if agent_id in self._stops:
            raise _already_running(agent_id)
        child = await self._calls.check(agent_id)
        return SubagentInfo(child.agent_id, child.profile, child.labels)

    async def cancel(self, agent_id: str) -> None:
        """See ``Subagents.cancel``."""
        stop = self._stops.get(agent_id)
        if stop is not None:
            stop.set()

    async def labels_of(self, agent_id: str) -> dict[str, str]:
        """See ``Subagents.labels_of``."""
        return dict((await self._calls.check(agent_id, whosever=True)).labels)

    async def close(self) -> None:
        """The caller is over: its children's runs end with it. Bounded."""
        self._closed = True
        self._session.leave()
        for stop in self._stops.values():
            stop.set()
        own = asyncio.current_task()
        waits = [task for task in self._running if task is not own]
        if waits:
            await asyncio.wait(waits, timeout=_END_S)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _prepared(self, agent_id: str, prompt: str) -> str:
        """The prompt, behind what others have to say first."""
        plan = self._fresh.pop(agent_id, None)
        before = [FORK_NOTICE] if plan is not None and plan.fork else []
        if self._slots.child_starting:
            child = None if plan is not None else await self._calls.check(agent_id, whosever=True)
            profile = plan.profile.name if plan is not None else child.profile if child is not None else ""
            starting = ChildStarting(agent_id, profile, prompt, first=plan is not None)
            before += (await self._slots.child_starting.run(starting)).before
        return "\n\n".join([*(text for text in before if text), prompt])

    def _is_allowed(self, name: str) -> bool:
        allowed = self._spec.profile.subagents or ()
        return "*" in allowed or name in allowed

    def _with_own_tools(self, profile: Profile) -> Profile:
        """The profile with the caller's user tools: they are of the work and not of the kind of agent."""
        own = [tool.name for tool in self._spec.user_tools if tool.name in self._spec.profile.tools]
        return profile.model_copy(update={"tools": tuple(dict.fromkeys([*profile.tools, *own]))}) if own else profile

    def _chosen(self, name: str) -> ResolvedModel:
        """The model that the caller's model asked for: a configured one, or its own. Others are no business of it.

        Raises:
            ConfigError: ``model.not_configured``, ``model.no_api_key``.
        """
        return self._in_use.known(name) or self._spec.models.configured(name)

    def _resolve(self, name: str) -> ResolvedModel:
        return self._in_use.known(name) or self._spec.models.resolve(name, os.environ)

    def _inherited(self) -> Inherited:
        spec, config = self._spec, self._config
        kind = spec.workdir.kind if spec.workdir is not None else "none"
        # A directory of the caller's own, and a shared one that is not on all nodes, is where the caller is.
        bound = kind != "none" and not (kind == "shared" and config.workspace_shared)
        return Inherited(
            spec.user_tools,
            spec.denied_paths,
            self._journal.fold.permission_mode or spec.permission_mode,
            item=spec.item,
            send_seed=spec.send_seed,
            node_id=self._cluster.node_id if bound else None,
        )

    def _session_spec(self) -> SessionSpec:
        """How the main agent has its own session brought back."""
        spec, claim = self._spec, new_ulid()
        header = self._journal.log.header
        own = replace(spec, header=None, nonce=new_ulid(), claim=claim, model=self._in_use.model)
        kind = spec.workdir.kind if spec.workdir is not None else "none"
        pinned = kind == "shared" and not self._config.workspace_shared
        return SessionSpec(
            session_id=spec.stream.session_id,
            nonce=claim,
            workspace_id=workspace_id(header.cwd or ""),
            cwd=header.cwd,
            create=False,
            main=own,
            node_id=self._cluster.node_id if pinned else None,
            models=spec.models,
        )


class SubagentServices(Provider):
    """What an agent host provides for agents that have subagents."""

    @provide(scope=LifecycleScope.APP)
    async def courier(self, cluster: Cluster, config: RuntimeConfig) -> AsyncIterator[Courier]:
        """The way to agents on other hosts."""
        courier = Courier(cluster, config)
        yield courier
        await courier.close()

    children = provide(AgentSubagents, scope=LifecycleScope.AGENT)

    @provide(scope=LifecycleScope.AGENT)
    async def subagents(self, children: AgentSubagents) -> AsyncIterator[Subagents]:
        """The agent's children."""
        yield children
        await children.close()


async def _link(signal: asyncio.Event, stop: asyncio.Event) -> None:
    await signal.wait()
    stop.set()


def _already_running(agent_id: str) -> KimiRayError:
    return AgentError(
        f"{agent_id} is at work already",
        code="agent.already_running",
        hint="wait for its answer, or start another agent",
        details={"agent_id": agent_id},
        retryable=True,
    )
