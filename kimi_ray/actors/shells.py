"""The Ray actors: a thin shell around one core, one method a concurrency group.

Ray gives each concurrency group a thread and an event loop of its own. A core lives in one loop, the default group's;
calls of the other groups hop there. What the groups buy is admission: a ping is accepted while a thousand long polls
hang. Errors leave as data. Constructors do no I/O: an exception there at a restart would be an actor's end for good.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import ray as typed_ray

from kimi_ray.errors import KimiRayError
from kimi_ray.garbage import collect_seldom
from kimi_ray.hosts.boundary import Answer, Core, answer, unexpected, with_calls
from kimi_ray.hosts.local_cluster import build_core
from kimi_ray.hosts.ports import Cluster, HostKind

if TYPE_CHECKING:
    from kimi_ray.actors.ray_cluster import RaySpec

ray: Any = typed_ray
"""Ray's own annotations do not know ``concurrency_groups``."""

DEFAULT_CALLS = 1000
"""Activations, submits, reads at once in one actor; further ones queue at the actor."""

GROUPS = {"wait": 2000, "store": 256, "control": 256}
"""``wait``: long polls, at 49 KB each, a few per caller and host. ``store``: appends and flushes, one per host in
flight. ``control``: cancel, ping, stats, leases."""

PENDING_CALLS = 20_000
"""Calls that one caller may have outstanding at one actor; beyond: ``infra.pending_limit``."""


class _Shell:
    """One core and its loop.

    Args:
        kind: What the core is.
        name: The actor's full name.
        spec: How to build the cluster port here.
    """

    def __init__(self, kind: HostKind, name: str, spec: RaySpec) -> None:
        self._kind: HostKind = kind
        self._name = name
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._core: Core | None = None
        self._starting: asyncio.Lock | None = None
        self._calls: Counter[str] = Counter()

    def __repr__(self) -> str:
        return self._name

    async def call_default(self, method: str, args: tuple[Any, ...]) -> Answer:
        """A call of the default group."""
        return await self._call(method, args)

    @ray.method(concurrency_group="wait")
    async def call_wait(self, method: str, args: tuple[Any, ...]) -> Answer:
        """A long poll."""
        return await self._call(method, args)

    @ray.method(concurrency_group="store")
    async def call_store(self, method: str, args: tuple[Any, ...]) -> Answer:
        """A call that makes something durable."""
        return await self._call(method, args)

    @ray.method(concurrency_group="control")
    async def call_control(self, method: str, args: tuple[Any, ...]) -> Answer:
        """A short call that must get through."""
        return await self._call(method, args)

    async def nothing(self) -> None:
        """An empty call, the floor that benches compare with."""

    @ray.method(concurrency_group="control")
    async def tail_log(self, max_bytes: int) -> dict[str, str]:
        """The ends of this process's own log files, by file name."""
        from kimi_ray.actors.worker_logs import tail_own_logs

        return await asyncio.to_thread(tail_own_logs, max_bytes)

    def _build(self, cluster: Cluster) -> Core:
        return build_core(self._kind, self._name, cluster, self._spec.config)

    async def _call(self, method: str, args: tuple[Any, ...]) -> Answer:
        if asyncio.get_running_loop() is self._loop:
            return await self._answer(method, args)
        hop = asyncio.run_coroutine_threadsafe(self._answer(method, args), self._loop)
        return await asyncio.wrap_future(hop)

    async def _answer(self, method: str, args: tuple[Any, ...]) -> Answer:
        self._calls[method] += 1
        core = self._core
        if core is None:
            try:
                core = await self._started()
            except KimiRayError as error:
                return ("err", error.to_data())
            except Exception as error:  # noqa: BLE001  recorded as data, nothing is lost
                return ("err", unexpected(error, f"starting {self._name}").to_data())
        reply = with_calls(await answer(core, method, args), method, self._calls)
        return ("ok", {**reply[1], "environment": self._spec.environment}) if _is_pong(method, reply) else reply

    async def _started(self) -> Core:
        """The core, started by whoever calls first; a start that failed is tried again by the next call."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._core is None:
                from kimi_ray.actors.ray_cluster import RayCluster

                core = self._build(RayCluster(self._spec))
                await core.start()
                collect_seldom()
                self._core = core
            return self._core


def _is_pong(method: str, reply: Answer) -> bool:
    return method == "ping" and reply[0] == "ok"


@ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=DEFAULT_CALLS, concurrency_groups=GROUPS)
class RegistryActor(_Shell):
    """Who lives where; restarted by Ray when it dies."""


@ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=DEFAULT_CALLS, concurrency_groups=GROUPS)
class PersistenceActor(_Shell):
    """The store; restarted by Ray when it dies."""


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=DEFAULT_CALLS, concurrency_groups=GROUPS)
class SessionActor(_Shell):
    """A host of sessions; never restarted, an empty one behind an old handle would be worse than none."""


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=DEFAULT_CALLS, concurrency_groups=GROUPS)
class AgentActor(_Shell):
    """A host of agents; never restarted."""


ACTORS: dict[HostKind, Any] = {
    "registry": RegistryActor,
    "store": PersistenceActor,
    "sessions": SessionActor,
    "agents": AgentActor,
}
