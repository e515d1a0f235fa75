"""Before a bench measures agents, the runtime has all its agent hosts, and each has run something.

Agents stay where they were placed: sessions that are made while the second host is still starting all live in the
first, and the bench would measure how fast a host starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kimi_ray.bench.host_logs import CALL_BOUND_S
from kimi_ray.hosts.pool import HostPool
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session

WARM_UP_SESSIONS = 4
POOL_BOUND_S = 60.0
"""Longest wait for the hosts of a large cluster; a report tells how many there were."""
_LOOK_S = 0.05


async def sessions_on_every_host(runtime: Runtime, create: Callable[[], Awaitable[Session]]) -> list[Session]:
    """New sessions, until every host of the pool that is full has the agent of one; at least four.

    Args:
        runtime: Whose agent hosts.
        create: Makes a session. Its agent goes to the host that has fewest.
    """
    made = [await create()]
    cluster = runtime.connection.cluster
    nodes = await cluster.nodes()
    size = HostPool("agents", cluster, runtime.config, lambda: nodes, _as_they_are).size()
    deadline = time.monotonic() + POOL_BOUND_S
    while len(made) < WARM_UP_SESSIONS + size and time.monotonic() < deadline:
        loads = await agents_by_host(runtime)
        if 0 in loads:
            made.append(await create())
        elif len(loads) < size:
            await asyncio.sleep(_LOOK_S)
        else:
            break
    return made + [await create() for _ in range(WARM_UP_SESSIONS - len(made))]


async def agents_by_host(runtime: Runtime) -> list[int]:
    """How many agents each host has, most first."""
    status = await runtime.connection.registry.call("status", timeout_s=CALL_BOUND_S, group="control")
    return sorted((host["load"] for host in status["hosts"] if host["kind"] == "agents"), reverse=True)


async def _as_they_are() -> None:
    """No node comes or goes in a bench."""
