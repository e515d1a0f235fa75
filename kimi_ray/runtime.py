"""``Runtime``: the way in. Connect, open a workspace, create or resume sessions, list them, close."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from typing import Any

from kimi_ray.app import ModelCatalogue, SessionList, SessionSummary, WorkspaceList, checked_workspace
from kimi_ray.config import RuntimeConfig, load_config
from kimi_ray.errors import ConfigError, RuntimeFault, SessionError, StoreError
from kimi_ray.forks import Forks
from kimi_ray.handles import SessionServices
from kimi_ray.hosts.connection import Connection, connect_in_process
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.features import Features, load_features
from kimi_ray.hosts.specs import AgentSpec, SessionSpec
from kimi_ray.hosts.stored_binding import read_binding, read_last_binding
from kimi_ray.ids import MAIN
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.replay import HomeSource, RecordedSession, rebuild_session
from kimi_ray.replay.places import find_place, not_there, split_name
from kimi_ray.session_handle import Session
from kimi_ray.session_lifecycle import ArchiveResult, Lifecycle
from kimi_ray.session_link import Notes, SessionLink, open_session
from kimi_ray.settings import Workdir
from kimi_ray.store.open import open_store
from kimi_ray.store.seam import Stream
from kimi_ray.workspace_handle import Workspace

IN_PROCESS = "in-process"
DRAIN_SLACK_S = 30.0


class Runtime:
    """A connected runtime. One per program and home is enough; everything it gives lives on its event loop."""

    def __init__(self, connection: Connection, config: RuntimeConfig, features: Features | None = None) -> None:
        """Use ``Runtime.connect``."""
        self._connection = connection
        self.config = config
        """The settings it runs with."""
        self.features = load_features(config) if features is None else features
        """What Features bring here: names of tools, profiles, event types."""
        self._courier = Courier(connection.cluster, config)
        notes = Notes(self._courier)
        self._links: dict[str, SessionLink] = {}
        self._sessions: dict[str, Session] = {}
        self._forget_at = 64
        self._closing: asyncio.Task[None] | None = None
        self._opening: set[asyncio.Task[Session]] = set()
        self.lifecycle = Lifecycle(self._courier, notes, self._let_go)
        """Archive, restore, delete, for workspaces and commands."""
        self._services = SessionServices(self._courier, notes, self.resolve_model, self.lifecycle, self.features)
        self.forks = Forks(self._courier, notes, self.lifecycle)
        """Forks without bringing them to life: ``publish``."""
        self.models = ModelCatalogue(config)
        """The models that are configured, with their settings."""
        self.sessions = SessionList(self._courier.store)
        """All sessions of the home: ``list_recent``, ``page``, ``count``, ``get``."""
        self.workspaces = WorkspaceList(self._courier.store)
        """The directories that sessions were worked in: ``list``, ``get``, ``rename``, ``forget``."""

    @classmethod
    def connect(
        cls,
        home: str | os.PathLike[str] | None = None,
        address: str | None = None,
        namespace: str | None = None,
        config: RuntimeConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        runtime_env: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Connecting:
        """Join the runtime of a home, or start it. ``await`` it, or use it as ``async with``.

        Args:
            home: The home; None takes ``KIMI_RAY_HOME``, else ``~/.kimi-ray``.
            address: A Ray cluster; None starts a local Ray (or uses the one this program has initialised);
                ``in-process`` runs everything in this process without Ray.
            namespace: Ray namespace of all actors; None is ``kimi_ray``.
            config: A ``RuntimeConfig``, a mapping of settings, or a TOML file.
            runtime_env: Passed through to Ray for the hosts.
            settings: Single settings of ``RuntimeConfig``.

        Raises:
            ConfigError: ``config.*``.
            StoreError: why the home cannot be used.
            RuntimeFault: ``runtime.mismatch``, ``runtime.ending``, ``infra.*``.
        """
        return Connecting(home, address, namespace, config, runtime_env, settings)

    @property
    def connection(self) -> Connection:
        """The tie to the cluster: for commands that show or end it."""
        return self._connection

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    def workspace(self, path: str | os.PathLike[str] = ".") -> Workspace:
        """A directory to work in.

        Raises:
            SessionError: ``workspace.not_found``.
        """
        return Workspace(self, checked_workspace(path))

    async def archive(self, session_id: str) -> SessionSummary:
        """Put a session into the archive. A live one is closed first; a cold one is not opened, and need not have a
        directory or a model any more. Idempotent; ``updated_at`` stays. An archived session can be resumed.

        Raises:
            SessionError: ``session.not_found``, ``session.bad_id``; ``session.in_use`` {host, pid} when another
                program has it open; ``session.close_failed``: archived, but still live.
            StoreError: why its document cannot be read or written.
        """
        return await self.lifecycle.archive(session_id)

    async def archive_many(self, session_ids: Iterable[str], *, concurrency: int = 8) -> list[ArchiveResult]:
        """``archive`` for each, ``concurrency`` at a time; one answer per id, in order, none raises for another."""
        return await self.lifecycle.archive_many(session_ids, concurrency=concurrency)

    async def restore(self, session_id: str) -> SessionSummary:
        """Take a session out of the archive, without opening it: ``Workspace.resume`` does that. See ``archive``."""
        return await self.lifecycle.restore(session_id)

    async def delete(self, session_id: str) -> None:
        """Delete a session for good, with its logs and private working directories; a live one is closed first.

        Raises:
            SessionError: ``session.not_found``, ``session.bad_id``; ``session.in_use`` {host, pid}.
        """
        await self.lifecycle.delete(session_id)

    async def replay(self, what: Stream | str | os.PathLike[str], *, whole: bool = False) -> RecordedSession:
        """A session rebuilt in memory from its durable events: the same messages, the same requests. Nothing comes to
        life, and nothing is written.

        Args:
            what: A session's id, ``SESSION/AGENT`` or a ``Stream``, of this home; or the path of a session's directory,
                of a log, or of a run directory, of any home.
            whole: With the requests that were made before the session was forked off another one.

        Raises:
            SessionError: ``session.not_found``; AgentError: ``agent.not_found``; ConfigError: ``request.unknown_id``.
        """
        if not isinstance(what, Stream) and await asyncio.to_thread(os.path.exists, what):
            home, session_id, agent_id = await asyncio.to_thread(find_place, what)
            source = HomeSource(open_store(home, network_home=self.config.network_home))
            return await rebuild_session(source, session_id, agent_id, whole=whole)
        self._refuse_when_closed()
        self._courier.check_loop()
        session_id, agent_id = what if isinstance(what, Stream) else split_name(os.fspath(what))
        try:
            return await rebuild_session(self._courier.store, session_id, agent_id, whole=whole)
        except SessionError as error:
            if error.code != "session.not_found" or isinstance(what, Stream) or agent_id is None:
                raise
            raise not_there(os.fspath(what)) from error  # A/B may have been meant as a directory

    def resolve_model(self, name: str | ResolvedModel | None = None, base_url: str | None = None) -> ResolvedModel:
        """What a model's name means here, key included. None is the configured default.

        Raises:
            ConfigError: ``model.not_configured``, ``model.no_api_key``, ``model.bad_base_url``.
        """
        if isinstance(name, ResolvedModel):
            return name
        if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"model must be a name or what resolve_model gave, not {type(name).__name__}",
                code="request.bad_argument",
                details={"argument": "model"},
            )
        return self.models.resolve(name, base_url)

    async def drain_node(self, node_id: str, deadline_s: float = 300.0, *, force: bool = False) -> dict[str, Any]:
        """Empty a node before it goes: nothing new starts there, agents and sessions leave when they are idle, and
        its hosts end. It stays drained until ``undrain_node``.

        Args:
            node_id: Its id, a unique beginning of that, or its address.
            deadline_s: Longest wait for what still runs there, seconds.
            force: Cancel what runs at the deadline; else it is told and goes on.

        Returns:
            ``{node_id, done, moved, handed_over, stopped, running, pinned, sessions, cancelled, errors, elapsed_s,
            ...}``: ``running`` agents, ``pinned`` ones (idle, their directory is only there) and ``sessions`` (with a
            swarm) are still there; then ``done`` is false and the drain goes on behind.

        Raises:
            RuntimeFault: ``infra.unknown_node`` {nodes}, ``infra.last_node``.
        """
        self._courier.check_loop()
        bound_s = deadline_s + 2 * self.config.close_timeout_s + DRAIN_SLACK_S
        registry = self._connection.registry
        return await registry.call("drain_node", node_id, deadline_s, force, timeout_s=bound_s, group="wait")

    async def undrain_node(self, node_id: str) -> None:
        """Let a drained node take work again. Idempotent. Raises as ``drain_node``."""
        self._courier.check_loop()
        await self._connection.registry.call("undrain_node", node_id, timeout_s=DRAIN_SLACK_S, group="control")

    def agent_calls(self) -> int:
        """Calls that this driver made to agent hosts so far, for benches."""
        return self._courier.calls

    async def close(self) -> None:
        """Close the sessions that this program brought to life, then let go of the runtime. Idempotent, bounded.

        Raises:
            SessionError: ``session.close_failed`` naming what is not durable; everything was closed as far as it goes.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        failures: list[BaseException] = []
        now = self._ours()
        try:
            async with asyncio.timeout(2 * self.config.close_timeout_s):
                results = await asyncio.gather(
                    self._services.notes.flush(),
                    self._close_late(now),
                    *(self._sessions[session_id].close() for session_id in now),
                    return_exceptions=True,
                )
            failures = [result for result in results if isinstance(result, BaseException)]
        except TimeoutError:
            failures.append(
                SessionError(
                    f"the sessions could not be closed within {2 * self.config.close_timeout_s:g} s",
                    code="session.close_failed",
                    details={"sessions": self._ours()},
                )
            )
        finally:
            for opening in self._opening:
                opening.cancel()
            await self.workspaces.close()
            await self._courier.close()
            await self._connection.disconnect()
        if failures:
            raise failures[0]

    def _ours(self) -> list[str]:
        """The sessions that this program brought to life and has not closed."""
        return [link.id for link in self._links.values() if link.opened and not link.closed]

    async def _close_late(self, before: list[str]) -> None:
        """Close the sessions that were being opened when the close began."""
        if self._opening:
            await asyncio.wait(self._opening, timeout=self.config.close_timeout_s)
            await asyncio.gather(*(self._sessions[one].close() for one in self._ours() if one not in before))

    async def open(self, spec: SessionSpec) -> Session:
        """Create or resume what a spec says. Workspaces call this.

        A caller that gives up leaves a session that is there all the same; it is closed with the runtime.
        """
        self._refuse_when_closed()
        self._courier.check_loop()
        opening = asyncio.ensure_future(self._open(spec))
        self._opening.add(opening)
        opening.add_done_callback(self._opened)
        return await asyncio.shield(opening)

    def _opened(self, opening: asyncio.Task[Session]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled():
            opening.exception()  # perhaps nobody waits for it any more

    async def _open(self, spec: SessionSpec) -> Session:
        spec = replace(spec, models=self.models.reachable(self.features.profiles.values()))
        info, host = await open_session(self._courier, spec)
        if spec.cwd is not None:
            self.workspaces.touch(spec.cwd)
        again = replace(
            spec,
            create=False,
            cwd=info.document.get("cwd", spec.cwd),
            title=None,
            metadata={},
            tags={},
            main=replace(spec.main, header=None, model_as_stored=False),
        )
        link = self._links.get(spec.session_id)
        if link is None or link.closed:
            self._forget_closed()
            link = SessionLink(self._courier, again, host, opened=info.opened, main_host=info.main_host)
            self._links[spec.session_id] = link
            self._sessions[spec.session_id] = Session(link, self._services)
        else:
            link.host = host
            link.opened = link.opened or info.opened
        self._links[spec.session_id].came_back(info)
        return self._sessions[spec.session_id]

    def _forget_closed(self) -> None:
        """Let go of closed sessions, now and then: a program may open and close any number."""
        if len(self._links) < self._forget_at:
            return
        for session_id in [link.id for link in self._links.values() if link.closed]:
            del self._links[session_id], self._sessions[session_id]
        self._forget_at = 64 + 2 * len(self._links)

    def _refuse_when_closed(self) -> None:
        if self._closing is not None:
            raise RuntimeFault("the runtime is closed", code="runtime.closed", hint="connect again")

    def _let_go(self, session_id: str) -> None:
        """A session was closed by its id: the handles of it are at their end."""
        link = self._links.get(session_id)
        if link is not None and not link.closed:
            link.closed = True
            self._courier.forget(session_id)

    def known_main(self, session_id: str) -> AgentSpec | None:
        """The main agent of a session that this program has open, or None."""
        link = self._links.get(session_id)
        return None if link is None or link.closed else link.spec.main

    async def is_alive(self, node_id: str) -> bool:
        """Whether a node of the cluster is there."""
        return any(node.alive and node.node_id == node_id for node in await self._connection.cluster.nodes())

    async def binding(self, session_id: str, agent_id: str = MAIN) -> dict[str, Any] | None:
        """The profile, model, sampling, limits and workdir that a stored agent was bound with, or None."""
        try:
            return await read_binding(self._courier.store, Stream(session_id, agent_id))
        except StoreError as error:
            if error.code != "store.deleted":
                raise
            return None

    async def last_model(self, session_id: str, agent_id: str = MAIN) -> str | None:
        """The model that a stored agent's whole log names, after any switch; it is read from end to end."""
        bound = await read_last_binding(self._courier.store, Stream(session_id, agent_id))
        return None if bound is None else bound.get("model")

    async def is_live(self, session_id: str) -> bool:
        """Whether the session lives on some host of this runtime now."""
        return await self._courier.registry.find_session(session_id) is not None

    def pinned(self, workdir: Workdir | None) -> str | None:
        """The node on which an agent with this directory must live, or None."""
        shared = workdir is not None and workdir.kind == "shared"
        return self._connection.cluster.node_id if shared and not self.config.workspace_shared else None


class Connecting:
    """A connect under way: awaitable, and an async context manager that closes the runtime."""

    def __init__(
        self,
        home: str | os.PathLike[str] | None,
        address: str | None,
        namespace: str | None,
        config: RuntimeConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
        runtime_env: dict[str, Any] | None,
        settings: dict[str, Any],
    ) -> None:
        """Use ``Runtime.connect``."""
        self._arguments = (home, address, namespace, config, runtime_env, settings)
        self._runtime: Runtime | None = None

    def __await__(self) -> Generator[Any, Any, Runtime]:
        return self._connect().__await__()

    async def __aenter__(self) -> Runtime:
        self._runtime = await self._connect()
        return self._runtime

    async def __aexit__(self, *_exc: object) -> None:
        if self._runtime is not None:
            await self._runtime.close()

    async def _connect(self) -> Runtime:
        home, address, namespace, config, runtime_env, settings = self._arguments
        loaded = load_config(home, config, address=address, namespace=namespace, **settings)
        # What cannot be loaded, or does not fit, is told before anything is started.
        features = load_features(loaded)
        if not features.only_builtin:
            from kimi_ray.hosts.agent_container import host_container

            host_container(features, {})
        if loaded.address == IN_PROCESS:
            if runtime_env:
                raise ConfigError(
                    "runtime_env needs Ray",
                    code="config.invalid",
                    hint="leave it out with address='in-process'",
                    details={"key": "runtime_env"},
                )
            return Runtime(await connect_in_process(loaded), loaded, features)
        from kimi_ray.actors import connect

        return Runtime(await connect(loaded, runtime_env=runtime_env), loaded, features)
