"""``Workspace``: a directory with its sessions, as a program holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kimi_ray.app import SessionSummary
from kimi_ray.errors import AgentError, SessionError
from kimi_ray.events import LogHeader, WriterRef
from kimi_ray.hosts.live_session import MAIN
from kimi_ray.hosts.specs import AgentSpec, SessionSpec
from kimi_ray.ids import new_session_id, new_ulid, workspace_id
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.log import epoch_ms
from kimi_ray.session import checked_metadata, checked_tags, checked_title
from kimi_ray.session_handle import Session, ToolLike, bind_profile, own_tools_for
from kimi_ray.session_lifecycle import ArchiveResult, checked_id
from kimi_ray.settings import Isolation, Limits, Profile, Sampling, Workdir, check_settings
from kimi_ray.store.seam import Stream
from kimi_ray.version import __version__

if TYPE_CHECKING:
    from kimi_ray.runtime import Runtime


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
            workdir: Where it works; None is this workspace.
            metadata: The caller's, plain JSON; kept in the session's document.
            tags: The caller's, text to text.
            isolation: ``dedicated`` gives session and agent processes of their own.

        Raises:
            SessionError: ``session.exists``, ``session.bad_id``, ``session.bad_metadata``.
            ConfigError: ``profile.unknown``, ``model.not_configured``, ``model.no_api_key``.
            ToolError: ``tool.unknown``, ``tool.bad_signature``, ``workdir.*``.
            StoreError: why the home cannot be written.
        """
        runtime = self._runtime
        check_settings(sampling=(Sampling, sampling), limits=(Limits, limits), workdir=(Workdir, workdir))
        chosen = new_session_id() if session_id is None else checked_id(session_id)
        bound, user_tools = bind_profile(profile, system_prompt, tools)
        resolved = runtime.resolve_model(model if model is not None else bound.model)
        place = workdir if workdir is not None else Workdir.shared(self.path, writes=True)
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
                metadata=checked_metadata(metadata or {}),
                tags=checked_tags(tags or {}),
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
        runtime = self._runtime
        bound = await runtime.binding(checked_id(session_id))
        if bound is None:
            raise SessionError(
                f"there is no session {session_id}",
                code="session.not_found",
                hint="kimi-ray sessions list shows those of this home",
                details={"session_id": session_id},
            )
        profile = Profile.model_validate(bound["profile"])
        own_tools = own_tools_for(profile, tools or (), joins=await runtime.is_live(session_id))
        workdir = None if bound.get("workdir") is None else _workdir(bound["workdir"])
        main = AgentSpec(
            stream=Stream(session_id, MAIN),
            nonce=new_ulid(),
            profile=profile,
            model=runtime.resolve_model(model if model is not None else bound.get("model")),
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
            node_id=runtime.pinned(workdir),
        )
        try:
            return await runtime.open(spec)
        except AgentError as error:
            if error.code != "agent.model_needed" or not main.model_as_stored:
                raise
            named = runtime.resolve_model(str(error.details["model"]))
            return await runtime.open(
                replace(spec, nonce=new_ulid(), main=replace(main, nonce=new_ulid(), model=named))
            )

    # -- by id ------------------------------------------------------------------------------------------------------

    async def archive(self, session_id: str) -> SessionSummary:
        """``Runtime.archive`` of a session of this workspace; another one's is ``session.not_found``."""
        return await self._runtime.lifecycle.archive(session_id, (self.id,))

    async def archive_many(self, session_ids: Iterable[str], *, concurrency: int = 8) -> list[ArchiveResult]:
        """``Runtime.archive_many`` of sessions of this workspace."""
        return await self._runtime.lifecycle.archive_many(session_ids, (self.id,), concurrency=concurrency)

    async def restore(self, session_id: str) -> SessionSummary:
        """``Runtime.restore`` of a session of this workspace."""
        return await self._runtime.lifecycle.restore(session_id, (self.id,))

    async def delete(self, session_id: str) -> None:
        """``Runtime.delete`` of a session of this workspace."""
        await self._runtime.lifecycle.delete(session_id, (self.id,))


def _workdir(data: dict[str, Any]) -> Workdir:
    """A workdir as a log's binding has it, without what the host noted about the prepared directory."""
    return Workdir.model_validate({key: value for key, value in data.items() if key in Workdir.model_fields})
