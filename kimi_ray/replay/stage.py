"""An agent built as a host builds it, but on a log in memory, with another model and other tools.

What Features register at an agent's slots is not built: what it said is in the recording, and is said again from there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, cast

from dishka import AsyncContainer, Provider, from_context, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.fold import FOLLOWED, AgentFold
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.summarizer import Summarizer
from kimi_ray.config import RuntimeConfig, load_models
from kimi_ray.errors import RuntimeFault
from kimi_ray.events import LogHeader, SessionEvent
from kimi_ray.hosts.agent_container import host_services
from kimi_ray.hosts.agent_services import AgentCallbacks, OpenedLog, SessionView, workdirs_base
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.ports import Cluster
from kimi_ray.ids import new_ulid
from kimi_ray.llm.chat import ChatProvider
from kimi_ray.log import EventLog
from kimi_ray.scopes import LifecycleScope, assemble, dispose, open_scope
from kimi_ray.session.projected import AgentProjections
from kimi_ray.store.seam import Page, Stream
from kimi_ray.store.write_controller import WriteController
from kimi_ray.tools.contract import Tool

T = TypeVar("T")
ReadBlob = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a replayed agent has in the place of a host's.

    Attributes:
        provider: Its model.
        tools: Makes its tools, in its scope.
        read_blob: Reads what the recording keeps by reference.
        summarizer: Makes what writes its summaries.
    """

    provider: ChatProvider
    tools: Callable[[AsyncContainer], Awaitable[list[Tool]]]
    read_blob: ReadBlob
    summarizer: Callable[[Journal, ModelInUse, AgentSpec], Summarizer]


@dataclass(slots=True)
class MemoryStore:
    """Where the log of a replay is durable: nowhere, and at once. Also the only store that its agent can read.

    Attributes:
        stream: The agent's.
        lines: Its log, from the seed on.
        blobs: What it put there by reference.
    """

    stream: Stream
    lines: list[bytes] = field(default_factory=list[bytes])
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def durable_seq(self) -> int:
        """See ``Durable``."""
        return 1 << 62

    def attach_blob(self, digest: str, data: bytes) -> None:
        """See ``Durable``."""
        self.blobs[digest] = data

    async def flush(self) -> None:
        """See ``Durable``."""

    async def wait_for_room(self) -> None:
        """See ``Durable``."""

    def follow(self, event: SessionEvent) -> None:
        """Keep the next event of the log."""
        self.lines.append(event.line)

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``LogReader``.

        Raises:
            RuntimeFault: ``runtime.closed``: it is the log of another agent, which is not there.
        """
        if stream != self.stream:
            raise _not_here(f"read_from({stream})")
        end, size = seq, 0
        while end < min(len(self.lines), seq + limit) and (end == seq or size + len(self.lines[end]) <= max_bytes):
            size += len(self.lines[end])
            end += 1
        return Page(seq, tuple(self.lines[seq:end]), len(self.lines))

    async def list_logs(self, session_id: str) -> NoReturn:
        """See ``LogReader``.

        Raises:
            RuntimeFault: ``runtime.closed``: a replay has no session.
        """
        raise _not_here(f"list_logs({session_id})")


class ReplayServices(Provider):
    """The services of a replayed agent that are not a host's."""

    scope = LifecycleScope.AGENT

    parts = from_context(Parts, scope=LifecycleScope.AGENT)

    @provide(override=True)
    def provider(self, parts: Parts) -> ChatProvider:
        """The model."""
        return parts.provider

    @provide(override=True)
    def summarizer(self, parts: Parts, journal: Journal, in_use: ModelInUse, spec: AgentSpec) -> Summarizer:
        """Writes the summaries."""
        return parts.summarizer(journal, in_use, spec)

    @provide(override=True)
    async def tools(self, parts: Parts, container: AsyncContainer) -> list[Tool]:
        """The tools."""
        return await parts.tools(container)

    @provide(override=True)
    def journal(self, opened: OpenedLog, parts: Parts) -> Journal:
        """The log and its fold."""
        memory = cast("MemoryStore", opened.controller)

        async def read_blob(digest: str) -> bytes:
            own = memory.blobs.get(digest)
            return own if own is not None else await parts.read_blob(digest)

        return Journal(opened.log, opened.fold, memory, read_blob)

    @provide(override=True)
    def projections(self, opened: OpenedLog, journal: Journal, spec: AgentSpec) -> AgentProjections:
        """Folds of Features over the log, which is here and in no store."""
        return AgentProjections(journal, cast("MemoryStore", opened.controller), spec.stream)


class Stage:
    """Builds replayed agents, all in this process.

    Args:
        config: The settings of today.
        features: What Features bring today: their tools.
    """

    def __init__(self, config: RuntimeConfig, features: Features) -> None:
        own = [*host_services(), *features.services(host_services())]
        nowhere = _Nowhere()
        self._place = os.path.dirname(workdirs_base(nowhere.home_id))
        values: Mapping[type, Any] = {RuntimeConfig: config, Cluster: nowhere, Features: features}
        self._app = assemble([*own, ReplayServices()], values, features.asked())
        self.config = config
        self.models = load_models(config)
        self.features = features

    async def enter(self, spec: AgentSpec, header: LogHeader, seed: list[bytes], parts: Parts) -> AgentScope:
        """The scope of one agent, whose log begins with a seed; ``leave`` ends it.

        Raises:
            LogError: ``log.*``: why the seed cannot be read.
        """
        log = EventLog(header, catalog=self.features.catalog, max_event_bytes=self.config.max_event_bytes)
        fold = AgentFold(seed_bind=(header.model_extra or {}).get("bind"))
        log.read_back(seed, follow=fold.apply, types=FOLLOWED)
        # Its work is done for good when the replay is: a private directory goes with it.
        memory = MemoryStore(spec.stream, list(seed))
        log.observe(memory.follow)
        opened = OpenedLog(log, fold, cast("WriteController", memory), epoch=1, is_new=True, ended=True)
        session = await open_scope(self._app, {SessionView: SessionView(spec.stream.session_id)})
        context = {
            AgentSpec: spec,
            OpenedLog: opened,
            AgentCallbacks: AgentCallbacks(_nobody, lambda: None),
            Parts: parts,
        }
        return AgentScope(session, await open_scope(session, context), str(spec.stream))

    async def close(self) -> None:
        """Let go of everything, and remove what private directories were made in. Idempotent."""
        await dispose(self._app, "replay")
        await asyncio.to_thread(shutil.rmtree, self._place, ignore_errors=True)


class AgentScope:
    """The services of one replayed agent."""

    def __init__(self, session: AsyncContainer, agent: AsyncContainer, name: str) -> None:
        self._session = session
        self._agent = agent
        self._name = name

    async def get(self, service: type[T]) -> T:
        """One of them."""
        return await self._agent.get(service)

    async def leave(self) -> None:
        """End them all."""
        await dispose(self._agent, self._name)
        await dispose(self._session, self._name)


def _nobody(_prompt_id: str, _outcome: object) -> None:
    """Nobody waits for an outcome."""


class _Nowhere:
    """The cluster of a replay, and whatever it might reach: nothing is there, and who asks for something is told so."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.home_id = f"replay-{new_ulid()}"
        self.node_id = "replay"

    def peer(self, name: str) -> _Nowhere:
        return _Nowhere(name)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[NoReturn]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def refuse(*what: object, **_how: object) -> NoReturn:
            raise _not_here(".".join([self.name or "the cluster", str(what[0]) if what else method]))

        return refuse


def _not_here(what: str) -> RuntimeFault:
    return RuntimeFault(
        f"{what} was called in a replay, which has no other agents", code="runtime.closed", details={"called": what}
    )
