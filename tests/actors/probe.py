"""A core for tests and the actor around it: hangs, fails, crashes, counts."""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

import ray

from kimi_ray.actors.ray_cluster import RayCluster
from kimi_ray.actors.shells import DEFAULT_CALLS, GROUPS, _Shell
from kimi_ray.errors import ProviderError
from kimi_ray.hosts.ports import Group, Peer


class Probe:
    PORT: ClassVar[dict[str, Group]] = {
        "echo": "default",
        "hang": "wait",
        "fail": "default",
        "crash": "default",
        "size": "store",
        "add": "store",
        "rows": "default",
        "unpicklable": "default",
        "where": "control",
        "relay": "default",
    }

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.loops: set[int] = set()
        self.kept: list[Any] = []
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(0.05)

    async def close(self) -> None:
        pass

    async def ping(self) -> dict[str, Any]:
        self.loops.add(id(asyncio.get_running_loop()))
        return {"kind": "probe", "pid": os.getpid(), "node_id": self.cluster.node_id, "starts": self.starts}

    async def echo(self, value: Any) -> Any:
        self.loops.add(id(asyncio.get_running_loop()))
        return value

    async def hang(self) -> None:
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.Event().wait()

    async def fail(self) -> None:
        raise ProviderError(
            "the model is asleep",
            code="provider.overloaded",
            hint="sing",
            details={"status": 529, "retry_after_ms": 250},
            retryable=True,
        )

    async def crash(self) -> None:
        raise LookupError("deep inside")

    async def size(self, blob: bytes) -> int:
        return len(blob)

    async def add(self, rows: list[Any]) -> int:
        self.kept.extend(rows)
        return len(self.kept)

    async def rows(self) -> list[Any]:
        return self.kept

    async def unpicklable(self) -> Any:
        return (n for n in range(3))

    async def where(self) -> int:
        self.loops.add(id(asyncio.get_running_loop()))
        return len(self.loops)

    async def relay(self, to: str, method: str) -> Any:
        return await self.cluster.peer(to).call(method, timeout_s=10)


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=DEFAULT_CALLS, concurrency_groups=GROUPS)
class ProbeActor(_Shell):
    def _build(self, cluster: Any) -> Any:
        return Probe(cluster)


def start_probe(cluster: RayCluster, name: str) -> Peer:
    """A probe under that name, ready to be called."""
    full = f"{cluster.home_id}/{name}"
    ProbeActor.options(
        name=full, namespace=cluster.spec.namespace, lifetime="detached", num_cpus=0, get_if_exists=True
    ).remote("agents", full, cluster.spec)
    return cluster.peer(full)
