"""``Workspace``: a directory with its sessions, as a program holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kimi_ray.app import SessionSummary
from kimi_ray.errors import AgentError, ConfigError
from kimi_ray.events import LogHeader, WriterRef
from kimi_ray.features.permissions import checked_mode
from kimi_ray.forks import Home, fork_spec
from kimi_ray.hosts.fork_words import ForkSpec, ForkWorkdir
from kimi_ray.hosts.specs import AgentSpec, SessionSpec
from kimi_ray.ids import MAIN, new_session_id, new_ulid, workspace_id
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.log import epoch_ms
from kimi_ray.session import checked_metadata, checked_tags, checked_title
from kimi_ray.session.refusals import no_session
from kimi_ray.session_handle import Session, ToolLike, bind_profile, own_tools_for
from kimi_ray.session_lifecycle import ArchiveResult, checked_id
from kimi_ray.settings import Isolation, Limits, PermissionModeName, Profile, Sampling, Workdir, check_settings
from kimi_ray.store.seam import Stream
from kimi_ray.tools.carried import carried_workdir
from kimi_ray.version import __version__

if TYPE_CHECKING:
    from kimi_ray.runtime import Runtime

_LIVE_AT_ONCE = 8
"""So many forks of one call come to life at the same time."""


class Workspace:
    """A directory with its sessions."""

    def __init__(self, runtime: Runtime, path: str) -> None:
        """Use ``runtime.workspace``."""
        self._runtime = runtime
        self.path = path
        self.id = workspace_id(path)

    def __repr__(self) -> str:
        return f"Workspace({self.path})"

    async def create_session(
        self,
        session_id: str | None = None,
        title: str | None = None,
        profile: str | Profile = "agent",
        model: str | ResolvedModel | None = None,
        system_prompt: str | None = None,
        tools: Sequence[ToolLike] | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        workdir: Workdir | None = None,
        metadata: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        isolation: Isolation | None = None,
        permission_mode: PermissionModeName | None = None,
    ) -> Session:
        """A new session with a main agent. If it cannot be made, nothing is left.

        Args:
            session_id: Must be free and fit into a path; None makes one.
            title: None lets the first prompt give one.
            profile: The kind of agent.
            model: A name, or what ``runtime.resolve_model`` gave; None is the profile's, else the configured default.
            system_prompt: In place of the profile's.
            tools: In place of the profile's: names, ``Tool`` objects, typed functions.
            sampling: Of all its turns.
            limits: Of the session's tree: main and all agents of its swarms together, over their whole life. The two
                times are main's alone.
            workdir: Where it works; relative paths are relative to this workspace. None is this workspace.
            metadata: The caller's, plain JSON; kept in the session's document.
            tags: The caller's, text to text.
            isolation: ``dedicated`` gives session and agent processes of their own.
            permission_mode: Which tool calls of its agents run unasked: ``manual``, ``auto`` or ``yolo``; None is the
                setting ``permission_mode``.

        Raises:
            SessionError: ``session.exists``, ``session.bad_id``, ``session.bad_metadata``.
            ConfigError: ``profile.unknown``, ``model.not_configured``, ``model.no_api_key``.
            ToolError: ``tool.unknown``, ``tool.bad_signature``, ``workdir.*``.
            StoreError: why the home cannot be written.
        """
        runtime = self._runtime
        check_settings(sampling=(Sampling, sampling), limits=(Limits, limits), workdir=(Workdir, workdir))
        checked_mode(permission_mode)
        chosen = new_session_id() if session_id is None else checked_id(session_id)
        bound, user_tools = bind_profile(profile, system_prompt, tools, runtime.features)
        resolved = runtime.resolve_model(model if model is not None else bound.model)
        own = workdir if workdir is not None else Workdir.shared(self.path, writes=True)
        place = carried_workdir(own.within(self.path))
        header = LogHeader(
            session_id=chosen,
            agent_id=MAIN,
            created_at=epoch_ms(),
            cwd=self.path,
            origin="main",
            profile=bound.name,
            writer=WriterRef(name="kimi-ray", version=__version__),
        )
        main = AgentSpec(
            stream=Stream(chosen, MAIN),
            nonce=new_ulid(),
            profile=bound,
            model=resolved,
            header=header.to_data(),
            sampling=sampling,
            limits=limits,
            workdir=place,
            user_tools=user_tools,
            denied_paths=(runtime.config.home,),
            permission_mode=permission_mode,
        )
        return await runtime.open(
            SessionSpec(
                session_id=chosen,
                nonce=new_ulid(),
                workspace_id=self.id,
                cwd=self.path,
                create=True,
                main=main,
                title=checked_title(title),
                metadata=checked_metadata(metadata),
                tags=checked_tags(tags),
                isolation=isolation,
                node_id=runtime.pinned(place),
            )
        )

    async def resume(
        self,
        session_id: str,
        *,
        model: str | ResolvedModel | None = None,
        tools: Sequence[ToolLike] | None = None,
        isolation: Isolation | None = None,
    ) -> Session:
        """A session that exists, with the profile, sampling, limits and directory that its log says. A live one is
        joined as it is; prompts that were pending run.

        Args:
            session_id: Which.
            model: Another model than the one that its log names.
            tools: The user's own tools among those that its profile names: code is not in the log.
            isolation: As for ``create_session``.

        Raises:
            SessionError: ``session.not_found``; ``session.in_use`` {host, pid}.
            ConfigError: ``model.not_configured`` when the model of the log is not known here.
            ToolError: ``tool.unknown`` for a tool of its profile that is neither built in nor given.
        """
        return await self._bring_back(session_id, {}, model, tools, isolation)

    async def _bring_back(
        self,
        session_id: str,
        known: Mapping[str, ResolvedModel],
        model: str | ResolvedModel | None,
        tools: Sequence[ToolLike] | None,
        isolation: Isolation | None,
    ) -> Session:
        """``resume``; models among ``known`` need not be configured."""
        runtime = self._runtime
        bound = await runtime.binding(checked_id(session_id))
        if bound is None:
            raise no_session(session_id)
        profile = Profile.model_validate(bound["profile"])
        own_tools = own_tools_for(profile, tools or (), runtime.features, joins=await runtime.is_live(session_id))
        workdir = None if bound.get("workdir") is None else _workdir(bound["workdir"])
        main = AgentSpec(
            stream=Stream(session_id, MAIN),
            nonce=new_ulid(),
            profile=profile,
            model=await self._stored_model(Stream(session_id, MAIN), model, bound, known),
            sampling=None if bound.get("sampling") is None else Sampling.model_validate(bound["sampling"]),
            limits=None if bound.get("limits") is None else Limits.model_validate(bound["limits"]),
            workdir=workdir,
            user_tools=own_tools,
            denied_paths=(runtime.config.home,),
            model_as_stored=model is None and bound.get("model") is not None,
        )
        spec = SessionSpec(
            session_id=session_id,
            nonce=new_ulid(),
            workspace_id=self.id,
            cwd=workdir.path if workdir is not None and workdir.kind == "shared" else self.path,
            create=False,
            main=main,
            isolation=isolation,
            node_id=runtime.pinned(workdir) or await self._node_of(bound),
        )
        try:
            return await runtime.open(spec)
        except AgentError as error:
            if error.code != "agent.model_needed" or not main.model_as_stored:
                raise
            named = self._model(None, error.details, known)
            return await runtime.open(
                replace(spec, nonce=new_ulid(), main=replace(main, nonce=new_ulid(), model=named))
            )

    def _model(
        self, model: str | ResolvedModel | None, bound: Mapping[str, Any], known: Mapping[str, ResolvedModel]
    ) -> ResolvedModel:
        named: str | None = bound.get("model")
        if model is None and named is not None and named in known:
            return known[named]
        return self._runtime.resolve_model(model if model is not None else named)

    async def _stored_model(
        self,
        stream: Stream,
        model: str | ResolvedModel | None,
        bound: Mapping[str, Any],
        known: Mapping[str, ResolvedModel],
    ) -> ResolvedModel:
        """As ``_model``; a model that is not known here any more may have been switched to another one later on."""
        try:
            return self._model(model, bound, known)
        except ConfigError:
            last = None if model is not None else await self._runtime.last_model(*stream)
            if last is None or last == bound.get("model"):
                raise
            return self._model(None, {"model": last}, known)

    async def _node_of(self, bound: Mapping[str, Any]) -> str | None:
        """The node on which a directory was made for a session before it was there, if it still is one."""
        workdir: dict[str, Any] = bound.get("workdir") or {}
        node: str | None = workdir.get("node")
        if node is None or self._runtime.config.workspace_shared:
            return None
        return node if await self._runtime.is_alive(node) else None

    # -- forks ------------------------------------------------------------------------------------------------------

    async def fork(
        self,
        session_id: str,
        agent_id: str = MAIN,
        at: str | None = None,
        turn_index: int | None = None,
        new_session_id: str | None = None,
        title: str | None = None,
        workdir: ForkWorkdir = "shared",
        sampling: Sampling | None = None,
        metadata: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        *,
        model: str | ResolvedModel | None = None,
        tools: Sequence[ToolLike] | None = None,
        isolation: Isolation | None = None,
    ) -> Session:
        """A live copy of a session of this workspace, from its beginning to a point. The source is not touched.

        ``continue_turn`` runs it on without a new message: its first request is the source's next one, but for what
        is said here. Prompts that were open at the point are the source's and not run; limits count from the fork on.

        Args:
            session_id: The source: live or cold, archived or not.
            agent_id: The agent that becomes ``main``; the agents below it come along as far as it had heard of them.
            at: ``"3"``: through the end of turn 3; ``"0.17"``: through step 17 of turn 0 and its tool results;
                ``"^3"``: as it was when turn 3's prompt came. None is the whole: the source must be idle then.
            turn_index: The same as ``at=str(turn_index)``.
            new_session_id: Must be free; None makes one.
            title: None makes ``Fork: ...``, which a prompt may replace.
            workdir: ``shared``: the source's directory, which goes when its agent does if it is a private one;
                ``copy``: a copy of it as it is now; ``git``: a worktree of its repository; or a ``Workdir``, whose
                relative path is relative to this workspace.
            sampling: Over the source's.
            metadata: Over the source's, of which ``goal`` is left out.
            tags: Over the source's.
            model: Another model than the source's.
            tools: The user's own tools among those of its profile; None takes those of the source, where this program
                has it open.
            isolation: As for ``create_session``.

        Raises:
            SessionError: ``session.not_found``; ``session.fork_active_turn`` (retryable; only without a point),
                ``session.in_use`` {host, pid}; ``session.fork_point_not_found`` {turns, steps};
                ``session.fork_inconsistent``; ``session.exists``; ``session.quiescence_lost`` (retryable).
            AgentError: ``agent.not_found``.
            ConfigError: ``request.invalid`` for what cannot be a point; ``model.not_configured``.
            ToolError: ``workdir.*``, ``tool.unknown``.
        """
        spec = fork_spec(
            session_id,
            1,
            agent_id=agent_id,
            at=at,
            turn_index=turn_index,
            new_session=new_session_id,
            title=title,
            workdir=self._within(workdir),
            sampling=sampling,
            metadata=metadata,
            tags=tags,
            home=Home(self.id, self.path),
        )
        return (await self._forked(spec, model, tools, isolation))[0]

    async def fork_many(
        self,
        session_id: str,
        count: int,
        agent_id: str = MAIN,
        at: str | None = None,
        turn_index: int | None = None,
        title: str | None = None,
        workdir: ForkWorkdir = "shared",
        sampling: Sampling | None = None,
        metadata: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        seeds: int | Sequence[int] | None = None,
        *,
        model: str | ResolvedModel | None = None,
        tools: Sequence[ToolLike] | None = None,
        isolation: Isolation | None = None,
    ) -> list[Session]:
        """``count`` live forks of one point: exactly so many, or none. ``metadata()`` of each has ``fork_group``, the
        same for all, and ``fork_index``.

        Args:
            session_id: The source.
            count: 1 to 1,000.
            agent_id: See ``fork``; so are the arguments that follow.
            at: See ``fork``.
            turn_index: See ``fork``.
            title: Of each.
            workdir: See ``fork``; ``copy`` and ``git`` make one for each.
            sampling: Of all.
            metadata: Of all.
            tags: Of all.
            seeds: None leaves the source's seed; a base, from which each fork has its own by its index; or one seed
                for each.
            model: See ``fork``.
            tools: See ``fork``.
            isolation: As for ``create_session``.

        Raises:
            KimiRayError: as ``fork``; ``request.invalid`` for ``count`` and ``seeds``.
        """
        spec = fork_spec(
            session_id,
            count,
            agent_id=agent_id,
            at=at,
            turn_index=turn_index,
            title=title,
            workdir=self._within(workdir),
            sampling=sampling,
            seeds=seeds,
            metadata=metadata,
            tags=tags,
            home=Home(self.id, self.path),
        )
        return await self._forked(spec, model, tools, isolation)

    async def create_child(
        self,
        session_id: str,
        title: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        new_session_id: str | None = None,
        model: str | ResolvedModel | None = None,
        tools: Sequence[ToolLike] | None = None,
        isolation: Isolation | None = None,
    ) -> Session:
        """A fork of a whole session that is listed as its child: its metadata has ``parent_session_id`` and
        ``child_session_kind``. Without a title it is ``Child: ...``. Raises as ``fork``."""
        spec = fork_spec(
            session_id,
            1,
            new_session=new_session_id,
            title=title,
            metadata=metadata,
            child=True,
            home=Home(self.id, self.path),
        )
        return (await self._forked(spec, model, tools, isolation))[0]

    def _within(self, workdir: ForkWorkdir) -> ForkWorkdir:
        return workdir.within(self.path) if isinstance(workdir, Workdir) else workdir

    async def _forked(
        self,
        spec: ForkSpec,
        model: str | ResolvedModel | None,
        tools: Sequence[ToolLike] | None,
        isolation: Isolation | None,
    ) -> list[Session]:
        runtime = self._runtime
        runtime.forks.check_open()
        spec = replace(spec, workspaces=await self._ids())
        source = runtime.known_main(spec.source.session_id)
        known = {} if source is None else {source.model.name: source.model}
        if tools is None and source is not None:
            tools = source.user_tools
        # What would keep the forks from coming to life is better known before they are made.
        bound = await runtime.binding(*spec.source)
        if bound is not None:
            await self._stored_model(spec.source, model, bound, known)
            own_tools_for(Profile.model_validate(bound["profile"]), tools or (), runtime.features, joins=False)
        made = await runtime.forks.make(spec)
        gate = asyncio.Semaphore(_LIVE_AT_ONCE)

        async def live(session_id: str) -> Session:
            async with gate:
                return await self._bring_back(session_id, known, model, tools, isolation)

        tasks = [asyncio.ensure_future(live(fork.session_id)) for fork in made]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.shield(asyncio.ensure_future(runtime.forks.undo([fork.session_id for fork in made])))
            raise

    # -- by id ------------------------------------------------------------------------------------------------------

    async def archive(self, session_id: str) -> SessionSummary:
        """``Runtime.archive`` of a session of this workspace; another one's is ``session.not_found``."""
        return await self._runtime.lifecycle.archive(session_id, await self._ids())

    async def archive_many(self, session_ids: Iterable[str], *, concurrency: int = 8) -> list[ArchiveResult]:
        """``Runtime.archive_many`` of sessions of this workspace."""
        return await self._runtime.lifecycle.archive_many(session_ids, await self._ids(), concurrency=concurrency)

    async def restore(self, session_id: str) -> SessionSummary:
        """``Runtime.restore`` of a session of this workspace."""
        return await self._runtime.lifecycle.restore(session_id, await self._ids())

    async def delete(self, session_id: str) -> None:
        """``Runtime.delete`` of a session of this workspace."""
        await self._runtime.lifecycle.delete(session_id, await self._ids())

    async def _ids(self) -> tuple[str, ...]:
        """The workspace's id and those of other spellings of its directory."""
        entry = await self._runtime.workspaces.get(self.id)
        return (self.id,) if entry is None else (self.id, entry.id, *entry.alias_ids)


def _workdir(data: dict[str, Any]) -> Workdir:
    """A workdir as a log's binding has it, without what the host noted about the prepared directory."""
    return Workdir.model_validate({key: value for key, value in data.items() if key in Workdir.model_fields})
