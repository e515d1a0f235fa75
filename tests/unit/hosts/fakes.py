"""Cores without agents, sessions or files: enough to place, count, kill and recover."""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import RuntimeFault, ToolError
from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.hosts.ports import Cluster, Group, HostKind, HostListing, NodeInfo
from kimi_ray.hosts.registry import Registry


class FakeCore:
    """Answers pings; can hang, fail, call others; remembers whether it was closed."""

    PORT: ClassVar[dict[str, Group]] = {
        "echo": "default",
        "fail": "default",
        "crash": "default",
        "hang": "wait",
        "work": "default",
        "append": "store",
        "relay": "default",
    }
    made: ClassVar[dict[str, FakeCore]] = {}

    def __init__(self, name: str, cluster: Cluster, config: RuntimeConfig) -> None:
        self.name, self.cluster, self.config = name, cluster, config
        self.kind = name.rsplit("/", 1)[-1].split("-", 1)[0]
        self.closed = False
        self.agents = 0
        self.sessions: list[str] = []
        self.silent = asyncio.Event()
        self.rows: list[Any] = []
        self.background: asyncio.Task[None] | None = None
        FakeCore.made[name] = self

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    async def ping(self) -> dict[str, Any]:
        if self.silent.is_set():
            await asyncio.Event().wait()
        return {
            "kind": self.kind,
            "agents": self.agents,
            "sessions": self.sessions,
            "node_id": self.cluster.node_id,
            "pid": os.getpid(),
        }

    async def echo(self, value: Any) -> Any:
        return value

    async def fail(self) -> None:
        raise ToolError("the hammer broke", code="tool.broken", hint="buy one", details={"n": [1]}, retryable=True)

    async def crash(self) -> None:
        raise ZeroDivisionError("deep inside")

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def append(self, row: Any) -> int:
        self.rows.append(row)
        return len(self.rows)

    async def relay(self, to: str, value: Any) -> Any:
        return await self.cluster.peer(to).call("append", value, timeout_s=5, group="store")

    async def work(self, store: str) -> None:
        """Start a task, and from it another, that keep writing."""

        async def write() -> None:
            while True:
                await self.cluster.peer(store).call("append", self.name, timeout_s=5, group="store")
                await asyncio.sleep(0)

        async def begin() -> None:
            self.inner = asyncio.create_task(write())
            await self.inner

        self.background = asyncio.create_task(begin())


class Nodes(LocalCluster):
    """A local cluster that claims to have several nodes, counts starts and can delay or refuse them."""

    def __init__(self, home_id: str, config: RuntimeConfig, nodes: list[NodeInfo]) -> None:
        kinds: tuple[HostKind, ...] = ("agents", "sessions", "store")
        factories: dict[HostKind, Any] = dict.fromkeys(kinds, FakeCore)
        factories["registry"] = Registry
        super().__init__(home_id, config, factories=factories)
        self.known = nodes
        self.open = asyncio.Event()
        self.open.set()
        self.store_open = asyncio.Event()
        self.store_open.set()
        self.started: list[HostListing] = []
        self.refuse: set[str] = set()

    async def nodes(self) -> list[NodeInfo]:
        return self.known

    async def start_host(
        self, kind: HostKind, name: str, *, node_id: str | None = None, dedicated: bool = False
    ) -> HostListing:
        if kind in ("agents", "sessions"):
            await self.open.wait()
        if kind == "store":
            await self.store_open.wait()
        if node_id in self.refuse:
            raise RuntimeFault(f"node {node_id} is full", code="infra.unschedulable")
        listing = await super().start_host(kind, name, dedicated=dedicated)
        listing = HostListing(name, kind, node_id, listing.pid)
        self._held[name].listing = listing
        self.started.append(listing)
        return listing

    def on(self, kind: str) -> list[HostListing]:
        return [host for host in self.started if host.kind == kind]


def node(name: str, cpus: float = 2, *, head: bool = False, alive: bool = True) -> NodeInfo:
    return NodeInfo(name, f"10.0.0.{len(name)}", cpus, is_head=head, has_storage=head, alive=alive)


async def until(condition: Any, within_s: float = 5.0) -> None:
    """Wait until ``condition()`` is true."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
