"""``RayCluster``: the ``Cluster`` port on Ray, built from plain data in the driver and again inside every actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast

from kimi_ray.actors.calls import call, in_thread
from kimi_ray.config import RuntimeConfig, without_models
from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.hosts.boundary import actor_died, group_of, kind_of, unwrap
from kimi_ray.hosts.ports import Group, HostEnvironment, HostKind, HostListing, NodeInfo, Peer, registry_name

STORAGE_RESOURCE = "kimi_ray_storage"
NOTES = b"kimi_ray"
"""Namespace of our notes in the cluster's control store."""

HEAD_RESOURCE = "node:__internal_head__"
SHARE = 0.001
"""Of a resource that says where an actor may be; it never runs out."""

START_BOUND_S = 90.0
"""Longest wait for a new process: a cold worker takes seconds, on a busy machine many."""

LOOKUP_BOUND_S = 20.0


@dataclass(frozen=True)
class RaySpec:
    """All that an actor needs to be part of a runtime. Holds no secret: models and their headers stay with drivers.

    ``storage`` is the resource that pins the stores, ``runtime_env`` what every actor runs in (None: the job's), with
    ``environment`` as its name.
    """

    home_id: str
    namespace: str
    config: RuntimeConfig
    storage: dict[str, float] = field(default_factory=dict[str, float])
    runtime_env: dict[str, Any] | None = field(default=None, repr=False)
    environment: str = ""


def config_for_actors(config: RuntimeConfig) -> RuntimeConfig:
    """The settings without what only a driver needs: model tables may hold headers with keys."""
    return without_models(config).model_copy(update={"address": None})


class RayCluster:
    """Actors by name in one namespace. Handles are cached and looked up again after a failure."""

    def __init__(self, spec: RaySpec) -> None:
        from kimi_ray.actors.sealing import seal_with_ray

        seal_with_ray()
        self.spec = spec
        self._handles: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kimi_ray.lookup")
        self._node_id: str | None = None

    @property
    def home_id(self) -> str:
        """The runtime's id."""
        return self.spec.home_id

    @property
    def node_id(self) -> str:
        """The node on which this process runs."""
        if self._node_id is None:
            self._node_id = str(_ray().get_runtime_context().get_node_id())
        return self._node_id

    def peer(self, name: str) -> Peer:
        """The actor of that name."""
        return _RayPeer(self, name)

    async def start_host(
        self,
        kind: HostKind,
        name: str,
        *,
        node_id: str | None = None,
        dedicated: bool = False,
        environment: HostEnvironment | None = None,
    ) -> HostListing:
        """Create a detached actor, or find the one of that name, and wait until it answers.

        Raises:
            RuntimeFault: ``infra.unschedulable``, ``infra.timeout``, ``infra.actor_died``; what its start raised.
        """
        await self.create(kind, name, node_id=node_id, environment=environment)
        try:
            told = await self.peer(name).call("ping", timeout_s=START_BOUND_S, group="control")
        except KimiRayError:
            if kind in ("agents", "sessions"):
                await self.stop_host(name)  # nobody else knows of it
            raise
        return HostListing(name, kind, told.get("node_id"), told.get("pid"))

    async def create(
        self,
        kind: HostKind,
        name: str,
        *,
        node_id: str | None = None,
        environment: HostEnvironment | None = None,
    ) -> None:
        """Have Ray create a detached actor unless there is one of that name; does not wait for its process."""
        from kimi_ray.actors.shells import ACTORS, PENDING_CALLS

        spec = self.spec
        if environment is not None:
            spec = replace(spec, runtime_env=environment.runtime_env, environment=environment.digest)
        options = self._options(kind, node_id, spec.runtime_env)

        def create() -> Any:
            return (
                ACTORS[kind]
                .options(
                    name=name,
                    namespace=self.spec.namespace,
                    lifetime="detached",
                    get_if_exists=True,
                    max_pending_calls=PENDING_CALLS,
                    **options,
                )
                .remote(kind, name, spec)
            )

        self._handles[name] = await self._blocking(create, START_BOUND_S, name, "create")

    async def stop_host(self, name: str) -> None:
        """Kill an actor, for good. Idempotent."""
        try:
            handle = await self.handle(name)
        except RuntimeFault as error:
            if error.code == "infra.actor_died":
                return
            raise
        self.forget(name)
        await self._blocking(lambda: _ray().kill(handle, no_restart=True), LOOKUP_BOUND_S, name, "kill")

    async def list_hosts(self) -> list[HostListing]:
        """The actors of this runtime that exist by name."""
        return [host for host in await self.list_actors() if host.name.startswith(f"{self.home_id}/")]

    async def list_actors(self) -> list[HostListing]:
        """The actors of all runtimes in this namespace."""
        from ray.util import list_named_actors

        found = cast(
            "list[dict[str, str]]",
            await self._blocking(lambda: list_named_actors(all_namespaces=True), LOOKUP_BOUND_S, "Ray", "list"),
        )
        names = sorted(actor["name"] for actor in found if actor["namespace"] == self.spec.namespace)
        return [HostListing(name, kind) for name in names if (kind := kind_of(name)) is not None]

    async def nodes(self) -> list[NodeInfo]:
        """The machines, alive ones first."""
        rows = cast("list[dict[str, Any]]", await self._blocking(_ray().nodes, LOOKUP_BOUND_S, "Ray", "nodes"))
        leaving = await self._draining_nodes()
        found = [_node_info(row, leaving) for row in rows]
        return sorted(found, key=lambda node: not node.alive)

    async def keep_note(self, key: str, text: str) -> None:
        """Keep a short text of this runtime in the cluster's control store."""
        from ray.experimental import internal_kv

        def put() -> None:
            internal_kv._internal_kv_put(self._note_key(key), text.encode(), namespace=NOTES)  # pyright: ignore[reportPrivateUsage]

        await self._blocking(put, LOOKUP_BOUND_S, "Ray", "keep_note")

    async def read_note(self, key: str) -> str | None:
        """What was kept under ``key``, or None."""
        from ray.experimental import internal_kv

        def get() -> bytes | None:
            return internal_kv._internal_kv_get(self._note_key(key), namespace=NOTES)  # pyright: ignore[reportPrivateUsage]

        found = await self._blocking(get, LOOKUP_BOUND_S, "Ray", "read_note")
        return None if found is None else found.decode()

    def _note_key(self, key: str) -> bytes:
        return f"{self.spec.namespace}/{self.home_id}/{key}".encode()

    async def _draining_nodes(self) -> dict[str, int]:
        """The nodes that Ray is about to take away, with the deadlines (epoch, milliseconds; 0: none)."""
        from ray._private.state import state  # its public lists leave this out

        return await self._blocking(lambda: cast("Any", state).get_draining_nodes(), LOOKUP_BOUND_S, "Ray", "nodes")

    async def handle(self, name: str) -> Any:
        """The actor's handle.

        Raises:
            RuntimeFault: ``infra.actor_died`` when there is no actor of that name.
        """
        known = self._handles.get(name)
        if known is not None:
            return known
        try:
            handle = await self._blocking(
                lambda: _ray().get_actor(name, namespace=self.spec.namespace), LOOKUP_BOUND_S, name, "get_actor"
            )
        except ValueError:
            raise actor_died(name, "there is no actor of that name") from None
        self._handles[name] = handle
        return handle

    async def bare_calls(self, count: int) -> float:
        """Seconds for ``count`` empty calls to the registry's actor, 32 in flight: what calling alone costs."""
        name = registry_name(self.home_id)
        handle = await self.handle(name)
        began = time.perf_counter()
        left = count

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await call(handle.nothing.remote, LOOKUP_BOUND_S, target=name, method="nothing")

        await asyncio.gather(*(caller() for _ in range(32)))
        return time.perf_counter() - began

    def forget(self, name: str) -> None:
        """Look the handle up again next time."""
        self._handles.pop(name, None)

    def close(self) -> None:
        """Let go of the threads; calls that hang in them are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _blocking(self, work: Callable[[], Any], timeout_s: float, target: str, method: str) -> Any:
        return await in_thread(self._threads, work, timeout_s, target=target, method=method)

    def _options(self, kind: HostKind, node_id: str | None, runtime_env: dict[str, Any] | None) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0}
        if runtime_env is not None:
            options["runtime_env"] = runtime_env
        if kind == "store":
            options["resources"] = self.spec.storage
        elif kind == "registry":
            options["resources"] = {HEAD_RESOURCE: SHARE}
        else:
            asked = dict(self.spec.config.host_resources)
            for own in ("num_cpus", "num_gpus", "memory"):
                if own in asked:
                    options[own] = asked.pop(own)
            options["resources"] = asked
            if node_id is not None:
                from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return options


class _RayPeer:
    def __init__(self, cluster: RayCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def call(self, method: str, *args: Any, timeout_s: float, group: Group = "default") -> Any:
        handle = await self._cluster.handle(self._name)
        entry = getattr(handle, f"call_{self._group(method, group)}")
        try:
            reply = await call(lambda: entry.remote(method, args), timeout_s, target=self._name, method=method)
        except RuntimeFault:
            self._cluster.forget(self._name)
            raise
        return unwrap(reply)

    def _group(self, method: str, said: Group) -> Group:
        kind = kind_of(self._name)
        return said if kind is None else group_of(kind, method, said)


def _ray() -> Any:
    import ray

    return ray


def _node_info(row: dict[str, Any], leaving: dict[str, int]) -> NodeInfo:
    resources: dict[str, float] = row.get("Resources") or {}
    return NodeInfo(
        node_id=row["NodeID"],
        address=row["NodeManagerAddress"],
        cpus=resources.get("CPU", 0.0),
        is_head=HEAD_RESOURCE in resources,
        has_storage=STORAGE_RESOURCE in resources,
        alive=bool(row["Alive"]),
        draining=row["NodeID"] in leaving,
        drain_deadline=leaving.get(row["NodeID"], 0) / 1000 or None,
    )
