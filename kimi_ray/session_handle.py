"""A session as a program holds it, and what a swarm needs to begin in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, TypedDict, Unpack

from kimi_ray.agent.subagents import SubagentResult
from kimi_ray.app import SessionSummary
from kimi_ray.errors import AgentError, ConfigError, ToolError
from kimi_ray.features.permissions import Approval
from kimi_ray.handles import Agent, SessionServices
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.limiter_history import LimiterHistory
from kimi_ray.hosts.permission_calls import approvals_of
from kimi_ray.ids import MAIN, agent_number, new_ulid
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.runs.execute import RunSink, open_run, reopen_run
from kimi_ray.runs.manifest import seed_of
from kimi_ray.runs.plan import OnInterrupted, RunPlan, plan_run
from kimi_ray.runs.prompts import Prompt, checked_prompt
from kimi_ray.runs.report import SwarmReport
from kimi_ray.runs.rollouts import SwarmSettings
from kimi_ray.runs.run_directory import read_manifest
from kimi_ray.runs.schedule import DEFAULT_RETRY_ON
from kimi_ray.runs.seeds import RunSeed
from kimi_ray.session_events import AgentEvent, session_events
from kimi_ray.session_link import SessionLink
from kimi_ray.settings import Isolation, Item, Limits, Profile, Sampling, Workdir, check_settings
from kimi_ray.subagent_handle import SubagentHandle, SubagentOptions, start_subagent
from kimi_ray.swarm_handle import SwarmAgent, SwarmHandle
from kimi_ray.tools.carried import carried
from kimi_ray.tools.contract import Tool
from kimi_ray.tools.function import as_tool
from kimi_ray.tools.output_schema import schema_of
from kimi_ray.tools.rollout_function import Rollout, carried_rollout

ToolLike = str | Tool | Callable[..., Any]
"""A built-in tool's name, ``package.module:function``, a ``Tool``, or a typed function."""


class AgentSwarmOptions(TypedDict, total=False):
    """What ``Agent.swarm`` takes beyond prompt and items; ``Session.start_swarm`` says what each means."""

    profile: str | Profile
    rollout: Rollout | str | None
    model: str | ResolvedModel | None
    system_prompt: str | None
    tools: Sequence[ToolLike] | None
    sampling: Sampling | None
    output_schema: Any
    repeats: int
    seed: int | None
    max_concurrency: int
    limits: Limits | None
    total_limits: Limits | None
    retries: int
    retry_on: Sequence[str]
    fail_on: str | None
    on_interrupted: OnInterrupted
    workdir: Workdir | None
    keep_workdirs: bool
    isolation: Isolation | None
    tags: dict[str, str] | None
    metadata: dict[str, Any] | None
    run_id: str | None
    out: str | os.PathLike[str] | None
    resume: bool
    retry: Sequence[str]


class SwarmOptions(AgentSwarmOptions, total=False):
    """What ``Session.swarm`` takes beyond prompt and items."""

    parent: str


class Session:
    """A live session. Get one from a ``Workspace``; leave it with ``close`` or as ``async with``."""

    def __init__(self, link: SessionLink, services: SessionServices) -> None:
        """Use ``workspace.create_session`` or ``workspace.resume``."""
        self._link = link
        self._services = services
        self._agents: dict[str, Agent] = {}
        link.on_waiting = self._wake

    def __repr__(self) -> str:
        return f"Session({self.id})"

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """The session's id."""
        return self._link.id

    @property
    def cwd(self) -> str | None:
        """Its working directory."""
        return self._link.spec.cwd

    @property
    def main(self) -> Agent:
        """Its main agent."""
        return self.agent(MAIN)

    def agent(self, agent_id: str) -> Agent:
        """An agent by id; a cold one comes to life with its first prompt.

        Raises:
            AgentError: ``agent.not_found`` for what can be no agent's id.
        """
        if agent_id != MAIN and (not isinstance(agent_id, str) or agent_number(agent_id) is None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise AgentError(
                f"{str(agent_id)[:80]!r} is no id of an agent",
                code="agent.not_found",
                hint="main, or agent-<n>: session.agents() lists them",
                details={"session_id": self.id, "agent_id": str(agent_id)[:80]},
            )
        found = self._agents.get(agent_id)
        if found is None:
            found = self._agents[agent_id] = Agent(self, self._link, self._services, agent_id)
        return found

    def _wake(self, waiting: dict[str, str]) -> None:
        """Prompts that these agents accepted before a crash are to run, and only here their models are known."""
        for agent_id in waiting:
            self._services.courier.afterwards(self.agent(agent_id).wake())

    async def agents(self) -> list[dict[str, Any]]:
        """Every agent that has a log: ``{agent_id, type, live, labels, profile, run_id, item_id, repeat, ...}``."""
        return await self._link.call("list_agents", self.id, group="store")

    async def fork_agent(self, agent_id: str = MAIN) -> Agent:
        """A new agent of this session that begins with the history of another one, which may be in the middle of a
        turn: what is open in the history is closed for the new one alone, as of unknown outcome. It has the source's
        profile, model and directory, and is ready for ``submit``; nothing of it runs before.

        Args:
            agent_id: Whose history.

        Raises:
            AgentError: ``agent.not_found``.
            ConfigError: ``model.not_configured`` for the model of a cold source.
        """
        nonce = new_ulid()
        model: ResolvedModel | None = None
        for _ in range(2):
            try:
                made: str = await self._link.call("fork_agent", self.id, agent_id, nonce, model)
            except AgentError as error:
                if error.code != "agent.model_needed" or model is not None:
                    raise
                model = self._services.resolve_model(str(error.details["model"]))
            else:
                return self.agent(made)
        raise AssertionError

    async def approvals(self) -> list[Approval]:
        """The tool calls of its agents that wait for an answer, oldest first: ``agent.decide(call_id, "allow")``.

        Nothing waits unless the setting ``permission_wait_s`` gives it time.
        """
        return await approvals_of(self._services.courier.cluster, self.id)

    async def metadata(self) -> dict[str, Any]:
        """The session's document (``state.json``): title, times, cwd, agents, ``custom`` and tags of the caller."""
        await self._services.notes.flush()
        return (await self._link.call("session_info", self.id, group="control")).document

    async def update(
        self,
        *,
        title: str | None = None,
        metadata: dict[str, Any] | None = None,
        tags: dict[str, str | None] | None = None,
    ) -> dict[str, Any]:
        """Change the document; on disk when it returns. Keys of ``metadata`` and ``tags`` are merged, None removes.

        Raises:
            SessionError: ``session.bad_metadata``.
        """
        patch = {"title": title, "metadata": metadata, "tags": tags}
        said = {key: value for key, value in patch.items() if value is not None}
        return (await self._link.call("update_document", self.id, said, group="store")).document

    async def flush(self) -> None:
        """Everything of this session is durable from here on: its agents' logs and its document.

        Raises:
            StoreError: ``store.unavailable``.
        """
        await self._services.notes.flush()
        await self._link.call("flush_session", self.id, group="store")

    async def close(self, *, force: bool = False) -> None:
        """Stop its agents (queued prompts are cancelled, then the running one), flush, let go. Idempotent.

        Args:
            force: Drop what cannot be made durable instead of raising.

        Raises:
            SessionError: ``session.close_failed`` naming the streams that are not durable.
        """
        if self._link.closed:
            return
        await self._services.notes.flush()
        await self._link.close(force)
        self._services.courier.forget(self.id)

    async def archive(self) -> SessionSummary:
        """Put the session into the archive; it is closed then. Idempotent. Raises as ``Runtime.archive``."""
        return await self._services.lifecycle.archive(self.id)

    async def delete(self) -> None:
        """Delete the session for good, with its logs and private directories. Raises as ``Runtime.delete``."""
        await self._services.lifecycle.delete(self.id)

    async def events(
        self,
        cursor: dict[str, int] | None = None,
        types: Sequence[str] | None = None,
        agents: Sequence[str] | None = None,
        *,
        follow: bool = False,
    ) -> AsyncIterator[AgentEvent]:
        """The events of its agents; each agent's in order, the agents one after the other (with ``follow`` as they
        come, those of new agents too).

        Args:
            cursor: By agent, the seq to begin at; 0 for those not named. ``cursor.update(found.cursor)`` after each
                event keeps one to go on with later.
            types: Only these types.
            agents: Only these agents.
            follow: Go on with what is to come, until the loop is left. Only durable events are told, so each comes
                once, also when its agent moves to another host.

        Raises:
            AgentError: ``agent.not_found`` for an agent that is named and not there.
            ConfigError: ``request.invalid`` {key, value} for a type that there is not.
            SessionError: ``session.not_found``, also when it is deleted meanwhile.
            LogError: ``log.rewound`` {stream, seq, end} when a power cut took back what was told.
        """
        catalog = self._services.features.catalog
        events = session_events(self._services.courier, self.id, cursor, types, agents, follow=follow, catalog=catalog)
        async with aclosing(events):
            async for found in events:
                yield found

    # -- subagents --------------------------------------------------------------------------------------------------

    async def run_subagent(self, prompt: str, **options: Unpack[SubagentOptions]) -> SubagentResult:
        """``start_subagent`` with the same arguments, and its result."""
        return await (await self.start_subagent(prompt, **options)).result()

    async def start_subagent(self, prompt: str, **options: Unpack[SubagentOptions]) -> SubagentHandle:
        """Start an agent below one of this session's, with a task; it works where its caller works.

        Args:
            prompt: The task.
            **options: ``profile``: the kind of agent; None is ``coder``. ``agent_id``: the caller, main by default: its
                log tells of the subagent. ``model``: None is the profile's, else the caller's. ``fork``: begin with the
                caller's history, as what the caller is. ``resume``: a subagent of the caller's to go on with, one of
                an earlier life of the session as well. ``description``: a few words, for the log. ``labels``: kept
                with the subagent for good. ``timeout_s``: longest run, seconds. ``summary``: when to ask again for a
                longer answer.

        Raises:
            ConfigError: ``profile.unknown``, ``model.not_configured``, ``request.conflict``.
            AgentError: ``agent.depth_exceeded`` {depth, max}; ``agent.not_found``, ``agent.not_a_subagent``,
                ``agent.not_owned``, ``agent.already_running`` of ``resume``; ``prompt.empty``; ``limit.*``.
            KimiRayError: why it cannot be brought to life. How its run fails is in the result.
        """
        return await start_subagent(self.agent, self._link, self._services, prompt, **options)

    # -- swarms -----------------------------------------------------------------------------------------------------

    async def swarm(
        self, prompt: Prompt | None, items: Iterable[str | dict[str, Any] | Item], **options: Unpack[SwarmOptions]
    ) -> SwarmReport:
        """``start_swarm`` with the same arguments, and its result."""
        return await (await self.start_swarm(prompt, items, **options)).result()

    async def start_swarm(
        self,
        prompt: Prompt | None,
        items: Iterable[str | dict[str, Any] | Item],
        *,
        profile: str | Profile = "explore",
        rollout: Rollout | str | None = None,
        model: str | ResolvedModel | None = None,
        system_prompt: str | None = None,
        tools: Sequence[ToolLike] | None = None,
        sampling: Sampling | None = None,
        output_schema: Any = None,
        repeats: int = 1,
        seed: int | None = None,
        max_concurrency: int = 32,
        limits: Limits | None = None,
        total_limits: Limits | None = None,
        retries: int = 0,
        retry_on: Sequence[str] = DEFAULT_RETRY_ON,
        fail_on: str | None = None,
        on_interrupted: OnInterrupted = "continue",
        workdir: Workdir | None = None,
        keep_workdirs: bool = False,
        isolation: Isolation | None = None,
        tags: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
        run_id: str | None = None,
        out: str | os.PathLike[str] | None = None,
        resume: bool = False,
        retry: Sequence[str] = (),
        parent: str = MAIN,
    ) -> SwarmHandle:
        """Run one prompt over many items, each by an agent of its own. A failing one is data in its row.

        Args:
            prompt: A template with ``{{item}}`` or ``{{column}}``, or a function from an item to its prompt; None with
                a ``rollout`` is the item itself.
            items: Strings, dicts of columns, or ``Item`` objects.
            profile: The kind of agent.
            rollout: A function that runs in place of the loop, ``async def rollout(ctx: RolloutContext)``, or its
                ``package.module:function``. It runs on the agent's host; what it returns is the row's ``output``.
            model: A name, or what ``runtime.resolve_model`` gave; None is the profile's, else the main agent's.
            system_prompt: In place of the profile's.
            tools: In place of the profile's. None is the profile's less Bash, Write, Edit, Agent and AgentSwarm.
            sampling: For all; an item's own is on top.
            output_schema: A pydantic model, or a JSON schema, that each final answer (or what the rollout function
                returns) must fit: it is the row's ``output``.
            repeats: How often each item is run.
            seed: The run's seed. None draws one that is recorded and not sent.
            max_concurrency: Most rollouts at once.
            limits: Bounds of each rollout.
            total_limits: Bounds of the whole; reaching one ends what runs.
            retries: Further attempts after a failure whose class is in ``retry_on``.
            retry_on: Error classes that are tried again.
            fail_on: ``N`` or ``P%`` failed rollouts: nothing new starts any more.
            on_interrupted: Whether a rollout whose host was lost goes on from its log or begins again.
            workdir: Where each works, with placeholders. None is the session's directory for agents with tools.
            keep_workdirs: Leave private working directories in place.
            isolation: ``dedicated`` gives each rollout a process of its own.
            tags: Of all rows.
            metadata: Of all rows.
            run_id: The run's id; None makes one.
            out: A directory for ``run.json``, ``results.jsonl`` and ``attempts.jsonl``, written as rows come.
            resume: Go on with the run in ``out``, called with the arguments of its start: what is finished is kept,
                what is missing runs, and the report has every key. Its id and seed are taken from ``run.json``.
            retry: With ``resume``: error classes that are run again beyond those that always are.
            parent: The agent of this session whose children these are: its log tells of them, and they are one level
                deeper in the tree than it. A cold one comes to life for it.

        Raises:
            RunError: ``items.*``, ``swarm.*``, ``run.exists`` and other ``run.*`` of the directory; ``run.mismatch``
                when the prompt or the items of a resumed run are others.
            ConfigError: ``profile.unknown``, ``model.not_configured``, ``output.bad_schema``.
            ToolError: ``tool.unknown``, ``tool.bad_signature``; ``tool.not_importable`` for the code of tools and
                rollout functions.
            AgentError: ``agent.not_found`` for a parent that this session does not have.
        """
        check_settings(
            sampling=(Sampling, sampling),
            limits=(Limits, limits),
            total_limits=(Limits, total_limits),
            workdir=(Workdir, workdir),
        )
        bound, user_tools = bind_profile(profile, system_prompt, tools, self._services.features)
        resolved = self._model_for(model, bound)
        settings = SwarmSettings.of(
            profile=bound,
            model=resolved.name,
            system_prompt=system_prompt,
            tools=None if tools is None else bound.tools,
            sampling=sampling,
            limits=limits,
            workdir=workdir,
            isolation=isolation,
            tags=tags or {},
            metadata=metadata or {},
        )
        if resume and out is None:
            raise ConfigError(
                "resume says nothing without out", code="request.conflict", hint="give the run's directory as out"
            )
        run_seed: int | RunSeed | None = seed
        if resume and out is not None:
            manifest = await asyncio.to_thread(read_manifest, out)
            run_id = str(manifest["run_id"])
            run_seed = seed_of(manifest) if seed is None else seed
        function = None if rollout is None else carried_rollout(rollout)
        schema = None if output_schema is None else schema_of(output_schema)
        plan = plan_run(
            checked_prompt(prompt, needed=function is None),
            items,
            self.with_workdir(settings),
            run_id=run_id,
            repeats=repeats,
            seed=run_seed,
            max_concurrency=max_concurrency,
            total_limits=total_limits,
            retries=retries,
            retry_on=retry_on,
            fail_on=fail_on,
            on_interrupted=on_interrupted,
            keep_workdirs=keep_workdirs,
            user_tools=user_tools,
            rollout=function,
            output_schema=schema,
        )
        if out is None:
            return await self.start_plan(plan, resolved, parent=parent)
        if resume:
            plan, sink = await reopen_run(plan, out, retry=retry)
            return await self.start_plan(plan, resolved, sink=sink, parent=parent)
        arguments = {"profile": bound.said(), "model": resolved.name, "max_concurrency": max_concurrency}
        config = self._services.courier.config.model_dump(mode="json")
        sink = await open_run(plan, out, arguments=arguments, config=config, model=resolved, cwd=self.cwd or ".")
        return await self.start_plan(plan, resolved, sink=sink, parent=parent)

    def with_workdir(self, settings: SwarmSettings) -> SwarmSettings:
        """The settings with the session's directory for agents that have tools and were told no other."""
        if settings.workdir is not None or not settings.tool_names or self.cwd is None:
            return settings
        return settings.model_copy(update={"workdir": Workdir.shared(self.cwd)})

    async def start_plan(
        self, plan: RunPlan, model: ResolvedModel, *, sink: RunSink | None = None, parent: str = MAIN
    ) -> SwarmHandle:
        """Run a checked plan (``runs.plan_run``), with its rows kept in a run directory if there is a ``sink``.

        The sink is closed when the swarm is over, or when it cannot begin.
        """
        settings = plan.settings
        workdir = settings.workdir
        courier = self._services.courier
        pinned = workdir is not None and workdir.kind == "shared" and not courier.config.workspace_shared
        denied = [courier.config.home, *plan.denied_paths, *([str(sink.path)] if sink is not None else [])]
        agent = SwarmAgent(
            profile=settings.profile.model_copy(
                update={
                    "tools": settings.tool_names,
                    "system_prompt": settings.system_prompt
                    if settings.system_prompt is not None
                    else settings.profile.system_prompt,
                }
            ),
            model=model,
            isolation=settings.isolation,
            node_id=courier.cluster.node_id if pinned else None,
            cwd=self.cwd,
            price_date=datetime.now(UTC).date().isoformat() if model.settings.price is not None else None,
            denied_paths=tuple(dict.fromkeys(denied)),
            parent=parent,
        )
        kept = LimiterHistory(courier.cluster, model, sink) if sink is not None else None
        handle = SwarmHandle(
            self._link,
            plan,
            agent,
            sink=kept.write if kept is not None else None,
            run_dir=str(sink.path) if sink is not None else None,
            on_end=kept.close if kept is not None else None,
            wake_parent=self.agent(parent).wake if parent != MAIN else None,
        )
        try:
            if kept is not None:
                await kept.begin()
            await handle.start()
        except BaseException:
            if sink is not None:
                await sink.close()
            raise
        return handle

    def _model_for(self, model: str | ResolvedModel | None, profile: Profile) -> ResolvedModel:
        said = model if model is not None else profile.model
        return self._link.spec.main.model if said is None else self._services.resolve_model(said)


def bind_profile(
    profile: str | Profile, system_prompt: str | None, tools: Sequence[ToolLike] | None, features: Features
) -> tuple[Profile, tuple[Tool, ...]]:
    """A profile with what the caller said in its place, and the caller's own tools; ``features`` know further ones.

    Raises:
        ConfigError: ``profile.unknown``.
        ToolError: ``tool.unknown``, ``tool.bad_signature``, ``tool.not_importable``.
    """
    bound = features.profile(profile)
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"tools must be a list of names, tools and functions, not {type(tools).__name__}",
            code="request.bad_argument",
            details={"argument": "tools"},
        )
    own: list[Tool] = []
    changes: dict[str, Any] = {}
    if system_prompt is not None:
        changes["system_prompt"] = system_prompt
    if tools is not None:
        names: list[str] = []
        for thing in tools:
            if isinstance(thing, str) and ":" not in thing:
                names.append(thing)
                continue
            made = as_tool(thing)
            own.append(made)
            names.append(made.name)
        changes["tools"] = tuple(dict.fromkeys(names))
    if changes:
        bound = bound.model_copy(update=changes)
    features.check_tools(bound.tools, own)
    return bound, carried(own)


def own_tools_for(profile: Profile, tools: Sequence[ToolLike], features: Features, *, joins: bool) -> tuple[Tool, ...]:
    """The user's tools for a profile that names them already; who joins a live session need not have them.

    Raises:
        ToolError: ``tool.unknown`` for a tool of the profile that is neither built in nor among ``tools``.
    """
    own = carried(as_tool(thing) for thing in tools if not isinstance(thing, str) or ":" in thing)
    try:
        features.check_tools(profile.tools, own)
    except ToolError as error:
        if error.code != "tool.unknown":
            raise
        if joins:
            return own
        raise ToolError(
            error.message,
            code=error.code,
            hint=f"the profile {profile.name} had it: give it again with tools=[...]",
            details=error.details,
        ) from None
    return own
