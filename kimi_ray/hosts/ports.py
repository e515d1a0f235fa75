"""The ports between actors: how one host reaches another, whatever carries the call.

A *core* is a plain async class (``AgentHost``, ``SessionHost``, ``Registry``, ``StoreHost``). It runs inside a Ray
actor or, with ``address="in-process"``, in the caller's own loop; it never knows which. It reaches others through
``Peer`` and starts them through ``Cluster``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Group = Literal["default", "wait", "store", "control"]
"""A call's concurrency group: ``wait`` for long polls, ``store`` for durability, ``control`` for cancel and ping."""

HostKind = Literal["agents", "sessions", "store", "registry"]


class Peer(Protocol):
    """Another core, by name."""

    @property
    def name(self) -> str:
        """The actor's name: ``<home_id>/agents-<ulid>`` and the like."""
        ...

    async def call(self, method: str, *args: Any, timeout_s: float, group: Group = "default") -> Any:
        """Call ``method`` of the core and give back what it returned.

        Raises:
            KimiRayError: what the method raised, as it was raised; or ``infra.actor_died``,
                ``infra.actor_unavailable``, ``infra.timeout``, ``infra.unschedulable``, ``infra.pending_limit``,
                ``infra.object_store_full``, ``runtime.auth``.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A machine of the cluster."""

    node_id: str
    address: str
    cpus: float
    is_head: bool
    has_storage: bool
    alive: bool = True
    draining: bool = False
    """Whether the cluster itself is about to take the node away."""
    drain_deadline: float | None = None
    """When it is taken away (epoch, seconds); None: not said."""


@dataclass(frozen=True, slots=True)
class HostListing:
    """A host that exists by name."""

    name: str
    kind: HostKind
    node_id: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class HostEnvironment:
    """What a driver's code needs around it: Ray's ``runtime_env``, resolved, and a digest that names it."""

    digest: str = ""
    runtime_env: dict[str, Any] | None = field(default=None, repr=False)


class Cluster(Protocol):
    """The place a core runs in: Ray, or one process."""

    @property
    def home_id(self) -> str:
        """The runtime's id: prefix of every name."""
        ...

    @property
    def node_id(self) -> str:
        """The node on which the caller runs."""
        ...

    def peer(self, name: str) -> Peer:
        """The core of that name; it need not exist yet, the first call finds out."""
        ...

    async def start_host(
        self,
        kind: HostKind,
        name: str,
        *,
        node_id: str | None = None,
        dedicated: bool = False,
        environment: HostEnvironment | None = None,
    ) -> HostListing:
        """Start a host and wait until it answers. ``environment`` None: that of the caller.

        Raises:
            RuntimeFault: ``infra.unschedulable``, ``infra.timeout``.
        """
        ...

    async def stop_host(self, name: str) -> None:
        """End a host now. Idempotent."""
        ...

    async def list_hosts(self) -> list[HostListing]:
        """All hosts of this runtime that exist by name."""
        ...

    async def nodes(self) -> list[NodeInfo]:
        """The machines, alive ones first."""
        ...

    async def keep_note(self, key: str, text: str) -> None:
        """Keep a short text of this runtime for as long as the cluster lives, whoever dies."""
        ...

    async def read_note(self, key: str) -> str | None:
        """What was kept under ``key``, or None."""
        ...


def registry_name(home_id: str) -> str:
    """The registry's actor name."""
    return f"{home_id}/registry"


def store_name(home_id: str, shard: int) -> str:
    """The actor name of a store shard."""
    return f"{home_id}/store-{shard}"


def is_lost(code: str) -> bool:
    """Whether an error code means that the callee is gone or cannot be reached now."""
    return code in ("infra.actor_died", "infra.actor_unavailable", "infra.timeout", "infra.unschedulable")
