"""What an agent is made of: the services of the Agent scope and those of the App scope that they need.

One dishka provider each; constructors name what they need and the containers find it. A host builds the App container
once, a Session container a session and an Agent container an activation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dishka import AsyncContainer, Provider, from_context, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.final_answer import FinalAnswer
from kimi_ray.agent.fold import AgentFold
from kimi_ray.agent.inbox import Inbox
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.limits import LimitMeter
from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.loop import TurnLoop
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.prompts import Prompts
from kimi_ray.agent.repeats import RepeatedCalls
from kimi_ray.agent.requester import Progress, Requester
from kimi_ray.agent.rollout_agent import RolloutFunctionAgent
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.specs import AgentSpec, Outcome
from kimi_ray.agent.summarizer import ModelSummarizer, Summarizer
from kimi_ray.agent.tool_runs import ToolRuns
from kimi_ray.app import ModelCatalogue
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import ToolError
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.limiter_leases import LimiterLeases
from kimi_ray.hosts.ports import Cluster
from kimi_ray.hosts.prepared_logs import Preparation
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.llm.chat import ChatProvider
from kimi_ray.llm.models import ResolvedModel, build_provider
from kimi_ray.llm.slots import SharedProvider
from kimi_ray.log import EventLog
from kimi_ray.scopes import LifecycleScope
from kimi_ray.session.projected import AgentProjections
from kimi_ray.settings import Workdir
from kimi_ray.store.write_controller import WriteController
from kimi_ray.tools.contract import Environment, Tool
from kimi_ray.tools.local import LocalEnvironment
from kimi_ray.tools.registry import select_tools
from kimi_ray.tools.workdirs import (
    FactoryContext,
    Leave,
    PreparedWorkdir,
    check_workdir,
    found_again,
    prepare_workdir,
    workdir_name,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionView:
    """The session of the agents in a Session container of this host."""

    session_id: str


@dataclass(slots=True)
class OpenedLog:
    """A log under this host's grant, its events folded, its controller attached."""

    log: EventLog
    fold: AgentFold
    controller: WriteController
    epoch: int
    is_new: bool
    preparation: Preparation | None = None
    """Of a stored log: until it is published, nothing can be appended."""
    ended: bool = False
    """The agent's work is done for good: its private directory may go."""


@dataclass(frozen=True, slots=True)
class AgentCallbacks:
    """How an agent tells its host."""

    on_outcome: Callable[[str, Outcome], None]
    on_idle: Callable[[], None]


class ModelPool:
    """The providers of this process: one for all agents that reach a server in the same way."""

    def __init__(self, leases: LimiterLeases) -> None:
        self._leases = leases
        self._providers: dict[str, ChatProvider] = {}

    def provider(self, model: ResolvedModel) -> ChatProvider:
        """The provider for a model, with its places where they are counted; built at first use."""
        key = model.cache_key()
        found = self._providers.get(key)
        if found is None:
            found = self._providers[key] = build_provider(model)
        slots = self._leases.slots(model)
        return found if slots is None else SharedProvider(found, slots)

    async def close(self) -> None:
        """Let go of all connections."""
        providers, self._providers = list(self._providers.values()), {}
        for provider in providers:
            await provider.close()


class FileThreads:
    """The threads in which the tools of all agents of this process touch files."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=16, thread_name_prefix="kimi_ray.files")


def workdirs_base(home_id: str) -> str:
    """Where this node keeps private working directories of a runtime."""
    return os.path.join(tempfile.gettempdir(), f"kimi-ray-{os.getuid()}", home_id, "workdirs")


class SleepingWorkdirs:
    """What factories want done at the end of directories whose agents sleep: their work goes on some day.

    By path. At the end of the process at the latest it is done: it cannot be handed to another one.
    """

    def __init__(self) -> None:
        self._leaves: dict[str, Leave] = {}

    def keep(self, workdir: PreparedWorkdir) -> None:
        """The agent is put to sleep."""
        if workdir.path is not None and workdir.leave is not None:
            self._leaves[workdir.path] = workdir.leave

    def wake(self, workdir: PreparedWorkdir) -> PreparedWorkdir:
        """The same directory for an agent that lives again."""
        leave = self._leaves.pop(workdir.path or "", None)
        return workdir if leave is None else replace(workdir, leave=leave)

    async def close(self) -> None:
        """Release everything; one that fails does not keep the others from it.

        Raises:
            ToolError: ``workdir.failed``, the first.
        """
        leaves, self._leaves = list(self._leaves.values()), {}
        results = await asyncio.gather(*(leave() for leave in leaves), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


class AppServices(Provider):
    """App scope: one of each in a host process."""

    scope = LifecycleScope.APP

    config = from_context(RuntimeConfig, scope=LifecycleScope.APP)
    cluster = from_context(Cluster, scope=LifecycleScope.APP)
    features = from_context(Features, scope=LifecycleScope.APP)

    @provide
    async def leases(self, cluster: Cluster) -> AsyncIterator[LimiterLeases]:
        """This host's places at the model servers."""
        leases = LimiterLeases(cluster)
        yield leases
        await leases.close()

    @provide
    async def models(self, leases: LimiterLeases) -> AsyncIterator[ModelPool]:
        """The model servers."""
        pool = ModelPool(leases)
        yield pool
        await pool.close()

    @provide
    def catalogue(self, config: RuntimeConfig) -> ModelCatalogue:
        """The models that are configured."""
        return ModelCatalogue(config)

    @provide
    async def threads(self) -> AsyncIterator[FileThreads]:
        """For file work."""
        threads = FileThreads()
        yield threads
        threads.executor.shutdown(wait=False, cancel_futures=True)

    @provide
    async def sleeping_workdirs(self) -> AsyncIterator[SleepingWorkdirs]:
        """Directories of agents that sleep."""
        sleeping = SleepingWorkdirs()
        yield sleeping
        await sleeping.close()

    @provide
    def store(self, cluster: Cluster, config: RuntimeConfig) -> StoreCalls:
        """The way to the store."""
        return StoreCalls(cluster, config.shards, config.store_timeout_s)


class SessionServices(Provider):
    """Session scope: what the agents of one session share on this host."""

    scope = LifecycleScope.SESSION

    view = from_context(SessionView, scope=LifecycleScope.SESSION)


class AgentServices(Provider):
    """Agent scope: one of each for an activation."""

    scope = LifecycleScope.AGENT

    spec = from_context(AgentSpec, scope=LifecycleScope.AGENT)
    opened = from_context(OpenedLog, scope=LifecycleScope.AGENT)
    callbacks = from_context(AgentCallbacks, scope=LifecycleScope.AGENT)

    @provide
    def progress(self) -> Progress:
        """What a watcher sees."""
        return Progress()

    @provide
    def journal(self, opened: OpenedLog, spec: AgentSpec, store: StoreCalls) -> Journal:
        """The log and its fold."""

        async def read_blob(digest: str) -> bytes:
            return await store.read_blob(spec.stream.session_id, digest)

        return Journal(opened.log, opened.fold, opened.controller, read_blob)

    @provide
    async def workdir(
        self, spec: AgentSpec, opened: OpenedLog, cluster: Cluster, sleeping: SleepingWorkdirs
    ) -> AsyncIterator[PreparedWorkdir]:
        """The working directory: made at the first activation, found again at a later one.

        A private directory goes when its rollout has ended; an agent that is only put to sleep finds it again.
        """
        bind: dict[str, Any] = opened.fold.bind or {}
        bound: dict[str, Any] = bind.get("workdir") or {}
        known = spec.workdir_path or bound.get("prepared")
        wanted = spec.workdir or Workdir.none()
        base = workdirs_base(cluster.home_id)
        if known is not None and wanted.kind != "none":
            await check_workdir(known)
            created = bool(bound.get("created"))
            workdir = sleeping.wake(found_again(known, wanted, created=created, base_dir=base))
        else:
            workdir = await prepare_workdir(
                wanted,
                base_dir=base,
                name=workdir_name(*spec.stream, spec.nonce),
                leave_out=spec.denied_paths,
                context=_factory_context(spec),
            )
        yield workdir
        if opened.ended:
            try:
                await workdir.release(keep=spec.keep_workdir)
            except ToolError as error:
                _logger.warning("%s: %s", spec.stream, error)  # its row is told already: nobody waits for this
        else:
            sleeping.keep(workdir)

    @provide
    async def environment(
        self, spec: AgentSpec, workdir: PreparedWorkdir, threads: FileThreads
    ) -> AsyncIterator[Environment]:
        """The place where the tools work."""
        environment = LocalEnvironment(workdir.path, denied_roots=spec.denied_paths, executor=threads.executor)
        yield environment
        await environment.close()

    @provide
    def slots(self, spec: AgentSpec, opened: OpenedLog, config: RuntimeConfig) -> AgentSlots:
        """Where others have a say; the guard against repeated calls is the first, but not in rollouts and below."""
        slots = AgentSlots()
        if config.repeat_guard and opened.log.header.run_id is None and spec.item is None:
            RepeatedCalls(slots)
        return slots

    @provide
    def inbox(self) -> Inbox:
        """What the runtime itself has to tell."""
        return Inbox()

    @provide
    async def tools(self, spec: AgentSpec, features: Features, container: AsyncContainer) -> list[Tool]:
        """The agent's tools: the profile's names, among the built-in ones, those of features and the user's."""
        offered = await features.tools_for(container, spec.profile.tools)
        own = {tool.name: tool for tool in spec.user_tools}
        offered = [tool for tool in offered if tool.name not in own]
        names = features.without_patterns(spec.profile.tools, offered)
        try:
            return select_tools(names, [*offered, *spec.user_tools])
        except ToolError as error:
            if error.code == "tool.unknown":
                error.hint = f"{error.hint}; a Feature that brings it must be installed on every node"
            raise

    @provide
    def provider(self, spec: AgentSpec, pool: ModelPool) -> ChatProvider:
        """The model server."""
        return pool.provider(spec.model)

    @provide
    def in_use(self, spec: AgentSpec, provider: ChatProvider) -> ModelInUse:
        """The model of the next turn."""
        return ModelInUse(spec.model, provider)

    @provide
    def summarizer(self, journal: Journal, in_use: ModelInUse, spec: AgentSpec) -> Summarizer:
        """Writes summaries for compactions: the agent's own model."""
        return ModelSummarizer(journal, in_use, spec.stream, spec.nonce)

    @provide
    def notices(self, journal: Journal) -> Notices:
        """Tells those who have no say."""
        return Notices(journal)

    @provide
    def projections(self, journal: Journal, store: StoreCalls, spec: AgentSpec) -> AgentProjections:
        """Folds of Features over the log."""
        return AgentProjections(journal, store, spec.stream)

    @provide
    def prompts(self, journal: Journal, slots: AgentSlots, notices: Notices) -> Prompts:
        """The queue."""
        return Prompts(journal, slots, notices)

    @provide
    def meter(self, spec: AgentSpec, journal: Journal) -> LimitMeter:
        """The limits."""
        meter = LimitMeter(spec.limits, journal.fold, spec.model.settings.price)
        meter.elsewhere = spec.elsewhere
        meter.scope = "session" if spec.stream.agent_id == "main" else "agent"
        return meter

    @provide
    def requester(self, spec: AgentSpec, journal: Journal, progress: Progress, meter: LimitMeter) -> Requester:
        """Asks the model."""
        return Requester(journal, spec.nonce, progress, meter)

    @provide
    def final(self, journal: Journal, slots: AgentSlots) -> FinalAnswer:
        """Checks the answers to prompts that have a schema."""
        return FinalAnswer(journal, slots)

    @provide
    def tool_runs(
        self,
        spec: AgentSpec,
        journal: Journal,
        tools: list[Tool],
        environment: Environment,
        config: RuntimeConfig,
        final: FinalAnswer,
        slots: AgentSlots,
    ) -> ToolRuns:
        """Runs tool calls."""
        return ToolRuns(
            journal,
            {final.name: final} | {tool.name: tool for tool in tools},
            environment,
            config.checkpoint,
            session_id=spec.stream.session_id,
            agent_id=spec.stream.agent_id,
            item=spec.item,
            slots=slots,
        )

    @provide
    def loop(
        self,
        spec: AgentSpec,
        journal: Journal,
        requester: Requester,
        tool_runs: ToolRuns,
        meter: LimitMeter,
        config: RuntimeConfig,
        progress: Progress,
        inbox: Inbox,
        slots: AgentSlots,
        notices: Notices,
    ) -> TurnLoop:
        """Runs turns."""
        return TurnLoop(
            journal,
            requester,
            tool_runs,
            meter,
            config.checkpoint,
            progress,
            session_id=spec.stream.session_id,
            agent_id=spec.stream.agent_id,
            inbox=inbox,
            slots=slots,
            notices=notices,
        )

    @provide
    def agent(
        self,
        spec: AgentSpec,
        opened: OpenedLog,
        journal: Journal,
        prompts: Prompts,
        loop: TurnLoop,
        meter: LimitMeter,
        provider: ChatProvider,
        environment: Environment,
        workdir: PreparedWorkdir,
        tools: list[Tool],
        progress: Progress,
        cluster: Cluster,
        callbacks: AgentCallbacks,
        inbox: Inbox,
        final: FinalAnswer,
        slots: AgentSlots,
        notices: Notices,
        in_use: ModelInUse,
    ) -> LiveAgent:
        """The agent itself."""
        agent = (LiveAgent if spec.rollout is None else RolloutFunctionAgent)(
            spec,
            opened.epoch,
            journal,
            prompts,
            loop,
            meter,
            provider,
            environment,
            tools,
            progress,
            on_outcome=callbacks.on_outcome,
            on_idle=callbacks.on_idle,
            inbox=inbox,
            slots=slots,
            notices=notices,
            in_use=in_use,
        )
        agent.final = final
        agent.workdir_path = workdir.path
        agent.workdir_created = workdir.created
        agent.node_id = cluster.node_id
        return agent


def _factory_context(spec: AgentSpec) -> FactoryContext:
    header: dict[str, Any] = spec.header or {}
    return FactoryContext(
        session_id=spec.stream.session_id,
        agent_id=spec.stream.agent_id,
        seed=None if spec.sampling is None else spec.sampling.seed,
        item=spec.item,
        attempt=header.get("attempt") or 1,
    )
