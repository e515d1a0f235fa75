"""All cores in one process and one loop, behind the same ports: unit tests, ``run``, debugging.

Each core gets a view of the cluster of its own, so that a killed core can be cut off: its tasks are cancelled and
nothing it still tries to call gets through, which is as near to SIGKILL as one process allows.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

from kimi_ray.config import RuntimeConfig, without_models
from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.hosts.boundary import Answer, Core, actor_died, answer, timed_out, unexpected, unwrap, with_calls
from kimi_ray.hosts.ports import Cluster, Group, HostEnvironment, HostKind, HostListing, NodeInfo, Peer

NODE_ID = "local"

CoreFactory = Callable[[str, Cluster, RuntimeConfig], Core]


@dataclass(eq=False, slots=True)
class _Held:
    """A core that lives here. ``tasks`` are all tasks that its code started, however deep."""

    listing: HostListing
    core: Core | None = None
    dead: bool = False
    calls: Counter[str] = field(default_factory=Counter[str])
    tasks: WeakSet[asyncio.Task[Any]] = field(default_factory=WeakSet[asyncio.Task[Any]])


_running: ContextVar[_Held | None] = ContextVar("kimi_ray_core", default=None)


class LocalCluster:
    """A cluster of one process. Construct it inside the running loop; ``close`` ends all cores.

    Args:
        factories: How to build a core of a kind; None takes the real ones.
    """

    def __init__(
        self, home_id: str, config: RuntimeConfig, *, factories: dict[HostKind, CoreFactory] | None = None
    ) -> None:
        self._home_id = home_id
        self._config = without_models(config)
        self._factories = factories
        self._held: dict[str, _Held] = {}
        self._notes: dict[str, str] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._loop = asyncio.get_running_loop()
        self._before = self._loop.get_task_factory()
        self._factory: Any = self._owning_factory
        self._loop.set_task_factory(self._factory)

    @property
    def home_id(self) -> str:
        """The runtime's id."""
        return self._home_id

    @property
    def node_id(self) -> str:
        """The one node."""
        return NODE_ID

    def peer(self, name: str) -> Peer:
        """The core of that name."""
        return _LocalPeer(self, name, None)

    async def start_host(
        self,
        kind: HostKind,
        name: str,
        *,
        node_id: str | None = None,
        dedicated: bool = False,
        environment: HostEnvironment | None = None,
    ) -> HostListing:
        """Build a core and start it; the one that exists by that name is kept.

        Raises:
            RuntimeFault: ``infra.unschedulable`` for another node than this one; what ``start`` raised.
        """
        if node_id not in (None, NODE_ID):
            raise RuntimeFault(
                f"there is no node {node_id!r}: everything runs in this process",
                code="infra.unschedulable",
                details={"node_id": node_id},
            )
        async with self._starting.setdefault(name, asyncio.Lock()):
            held = self._held.get(name)
            if held is not None:
                return held.listing
            held = _Held(HostListing(name, kind, NODE_ID, os.getpid()))
            held.core = self._build(kind, name, _View(self, held))
            try:
                unwrap(await self._run(held, _started(held.core)))
            except BaseException:
                _cut_off(held)
                raise
            self._held[name] = held
            return held.listing

    async def stop_host(self, name: str) -> None:
        """End a core without asking it; ``close`` it first where that matters. Idempotent."""
        self.kill_host(name)

    def kill_host(self, name: str) -> None:
        """Drop a core as SIGKILL would: nothing is flushed, callers get ``infra.actor_died``. Idempotent.

        What the kernel takes from a killed process stays: a killed store's file locks live on with this process.
        """
        held = self._held.pop(name, None)
        if held is not None:
            _cut_off(held)

    async def list_hosts(self) -> list[HostListing]:
        """The cores that live here."""
        return [held.listing for held in self._held.values()]

    async def nodes(self) -> list[NodeInfo]:
        """This machine."""
        return [NodeInfo(NODE_ID, "127.0.0.1", float(os.cpu_count() or 1), is_head=True, has_storage=True)]

    async def keep_note(self, key: str, text: str) -> None:
        """Keep a text as long as this cluster lives."""
        self._notes[key] = text

    async def read_note(self, key: str) -> str | None:
        """What was kept under ``key``, or None."""
        return self._notes.get(key)

    async def close(self) -> None:
        """Close the cores, hosts first, the stores after them, the registry last; bounded by ``close_timeout_s``.

        Raises:
            KimiRayError: the first that a core could not be closed for; all are ended then too.
        """
        order: list[HostKind] = ["sessions", "agents", "store", "registry"]
        failures: list[BaseException] = []
        for kind in order:
            names = [name for name, held in self._held.items() if held.listing.kind == kind]
            ended = await asyncio.gather(*(self._close_host(name) for name in names), return_exceptions=True)
            failures += [result for result in ended if isinstance(result, BaseException)]
        for name in list(self._held):
            self.kill_host(name)
        if self._loop.get_task_factory() is self._factory:
            self._loop.set_task_factory(self._before)
        if failures:
            raise failures[0]

    async def _close_host(self, name: str) -> None:
        try:
            await self.peer(name).call("close", timeout_s=self._config.close_timeout_s + 1.0, group="control")
        finally:
            self.kill_host(name)

    def _build(self, kind: HostKind, name: str, view: Cluster) -> Core:
        if self._factories is not None:
            return self._factories[kind](name, view, self._config)
        return build_core(kind, name, view, self._config)

    async def _call(self, name: str, method: str, args: tuple[Any, ...], timeout_s: float, caller: _Held | None) -> Any:
        if caller is not None and caller.dead:
            raise actor_died(caller.listing.name, "it was killed and may not call any more")
        held = self._held.get(name)
        if held is None or held.core is None:
            raise actor_died(name, "no core of that name lives in this process")
        held.calls[method] += 1
        reply = await self._run(held, answer(held.core, method, _apart(args)), timeout_s=timeout_s, method=method)
        return unwrap(with_calls(reply, method, held.calls))

    async def _run(
        self, held: _Held, work: Coroutine[Any, Any, Answer], *, timeout_s: float | None = None, method: str = "start"
    ) -> Answer:
        """Run in the core's own context; the caller's end (time-out, cancel) does not end the work, as with a call."""
        context = Context()
        context.run(_running.set, held)
        task = self._loop.create_task(work, name=f"{held.listing.name}.{method}", context=context)
        # Task factories run in the creator's context: a first task is told by hand whose it is.
        held.tasks.add(task)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise timed_out(held.listing.name, method, timeout_s or 0.0)
        if task.cancelled():
            raise actor_died(held.listing.name, "it was killed during the call")
        return task.result()

    def _owning_factory(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any]
        if self._before is None:
            task = asyncio.Task(coro, loop=loop, **kwargs)
        else:
            task = cast("asyncio.Task[Any]", cast("Any", self._before)(loop, coro, **kwargs))
        held = _running.get()
        if held is not None:
            held.tasks.add(task)
            if held.dead:
                loop.call_soon(task.cancel)
        return task


class _View:
    """The cluster as one core sees it; cut off when the core is killed."""

    def __init__(self, cluster: LocalCluster, held: _Held) -> None:
        self._cluster = cluster
        self._held = held

    @property
    def home_id(self) -> str:
        return self._cluster.home_id

    @property
    def node_id(self) -> str:
        return NODE_ID

    def peer(self, name: str) -> Peer:
        return _LocalPeer(self._cluster, name, self._held)

    async def start_host(
        self,
        kind: HostKind,
        name: str,
        *,
        node_id: str | None = None,
        dedicated: bool = False,
        environment: HostEnvironment | None = None,
    ) -> HostListing:
        self._check_alive()
        return await self._cluster.start_host(kind, name, node_id=node_id, dedicated=dedicated)

    async def stop_host(self, name: str) -> None:
        self._check_alive()
        await self._cluster.stop_host(name)

    async def list_hosts(self) -> list[HostListing]:
        return await self._cluster.list_hosts()

    async def nodes(self) -> list[NodeInfo]:
        return await self._cluster.nodes()

    async def keep_note(self, key: str, text: str) -> None:
        self._check_alive()
        await self._cluster.keep_note(key, text)

    async def read_note(self, key: str) -> str | None:
        return await self._cluster.read_note(key)

    def _check_alive(self) -> None:
        if self._held.dead:
            raise actor_died(self._held.listing.name, "it was killed and may not call any more")


class _LocalPeer:
    def __init__(self, cluster: LocalCluster, name: str, caller: _Held | None) -> None:
        self._cluster = cluster
        self._name = name
        self._caller = caller

    @property
    def name(self) -> str:
        return self._name

    async def call(self, method: str, *args: Any, timeout_s: float, group: Group = "default") -> Any:
        return await self._cluster._call(self._name, method, args, timeout_s, self._caller)  # pyright: ignore[reportPrivateUsage]


def _cut_off(held: _Held) -> None:
    """End what a core runs; it reaches nobody any more."""
    held.dead = True
    held.core = None
    own = asyncio.current_task()
    for task in list(held.tasks):
        if task is not own:
            task.cancel("its core was killed")


def build_core(kind: HostKind, name: str, cluster: Cluster, config: RuntimeConfig) -> Core:
    """The core of a kind; its module is imported only here, so a store never pays for what agents need."""
    if kind == "agents":
        from kimi_ray.hosts.agent_host import AgentHost

        return AgentHost(name, cluster, config)
    if kind == "sessions":
        from kimi_ray.hosts.session_host import SessionHost

        return SessionHost(name, cluster, config)
    if kind == "store":
        from kimi_ray.hosts.store_host import StoreHost

        return StoreHost(name, cluster, config)
    from kimi_ray.hosts.registry import Registry

    return Registry(name, cluster, config)


async def _started(core: Core) -> Answer:
    try:
        await core.start()
    except KimiRayError as error:
        return ("err", error.to_data())
    except Exception as error:  # noqa: BLE001  recorded as data, nothing is lost
        return ("err", unexpected(error, f"{type(core).__name__}.start").to_data())
    return ("ok", None)


def _apart(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists and dicts of the caller are its own: a later change there must not reach the callee."""
    return tuple(_copied(arg) for arg in args)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return cast("list[Any]", value).copy()
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).copy()
    return value
