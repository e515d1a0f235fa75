"""What a session lends its swarms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Cluster
from kimi_ray.hosts.specs import LogEntry
from kimi_ray.hosts.steady_calls import RegistryCalls
from kimi_ray.runs.schedule import LimitHit, Spent
from kimi_ray.session import AgentEntry
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream


def _unbounded(_spent: Spent) -> LimitHit | None:
    return None


async def _nowhere(_stream: Stream) -> Mapping[str, int] | None:
    return None


async def _anywhere(_stream: Stream, _workdir: Workdir | None) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class SwarmServices:
    """What the session lends its swarm.

    Attributes:
        record: Write events into the log of the agent that the swarm belongs to, soon and in order.
        flush_log: The same, durable when it returns.
        numbers: So many agent numbers that nobody else gets.
        registered: Agents exist.
        fenced: The session turned out to live on another host.
        spent: The swarm has used so much by now; gives the limit of the session's tree that is reached with it.
        position: Where a stored log stands, ``{seq, epoch}``; None when there is none.
        node_of: The node on which a stored agent's own directory is; None when it has none, or nobody knows.
    """

    cluster: Cluster
    registry: RegistryCalls
    record: Callable[[list[LogEntry]], None]
    flush_log: Callable[[], Awaitable[Any]]
    numbers: Callable[[int], Awaitable[Sequence[int]]]
    registered: Callable[[list[AgentEntry]], None]
    fenced: Callable[[KimiRayError], None]
    spent: Callable[[Spent], LimitHit | None] = _unbounded
    position: Callable[[Stream], Awaitable[Mapping[str, int] | None]] = _nowhere
    node_of: Callable[[Stream, Workdir | None], Awaitable[str | None]] = _anywhere
