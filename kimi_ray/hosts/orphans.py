"""What a lost session host left behind: rollouts that run with nobody to wait for them, and attempts nobody counted.

Their swarms begin again with what has no row, so the orphans are stopped first, their turns closed in their logs, and
the attempts that the logs tell of are counted: no two attempts of a rollout have one number, or one seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.hosts.specs import Ack
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.runs.items import RolloutKey
from kimi_ray.store.seam import Stream

_ASK_S = 2.0


async def stop_orphans(cluster: Cluster, session_id: str, keep: Collection[str], within_s: float) -> None:
    """Close the agents of a session that live on some host, but for those named in ``keep``.

    Raises:
        KimiRayError: an agent could not be closed (``store.unavailable`` ...). Lost hosts hold nothing.
    """
    hosts = [host.name for host in await cluster.list_hosts() if host.kind == "agents"]
    await asyncio.gather(*(_stop_on(cluster, host, session_id, keep, within_s) for host in hosts))


async def find_agent(cluster: Cluster, stream: Stream) -> str | None:
    """A host on which an agent lives, or None."""
    hosts = [host.name for host in await cluster.list_hosts() if host.kind == "agents"]
    held = await asyncio.gather(*(_streams_on(cluster, host) for host in hosts))
    return next((host for host, streams in zip(hosts, held, strict=True) if stream in streams), None)


async def attempts_made(store: StoreCalls, session_id: str, run_id: str) -> dict[RolloutKey, int]:
    """The highest attempt of each rollout of a run that has a log in this session."""
    made: dict[RolloutKey, int] = {}
    for log in await store.list_logs(session_id):
        header = log.header or {}
        if header.get("run_id") == run_id and "item_id" in header:
            key = RolloutKey(str(header["item_id"]), int(header.get("repeat", 0)))
            made[key] = max(made.get(key, 0), int(header.get("attempt", 1)))
    return made


async def _streams_on(cluster: Cluster, host: str) -> list[Stream]:
    """The agents that live on a host; a lost one holds none."""
    try:
        told: dict[str, Any] = await cluster.peer(host).call("ping", timeout_s=_ASK_S, group="control")
    except KimiRayError as error:
        if not is_lost(error.code):
            raise
        return []
    return [Stream(*stream) for stream in told["streams"]]


async def _stop_on(cluster: Cluster, host: str, session_id: str, keep: Collection[str], within_s: float) -> None:
    streams = await _streams_on(cluster, host)
    orphans = [s for s in streams if s.session_id == session_id and s.agent_id not in keep]
    if not orphans:
        return
    try:
        acks: list[Ack] = await cluster.peer(host).call(
            "close_agents", orphans, False, timeout_s=within_s, group="store"
        )
    except KimiRayError as error:
        if not is_lost(error.code):
            raise
        return
    for ack in acks:
        if ack.error is not None and ack.error["code"] not in ("agent.not_found", "store.fenced"):
            raise error_from_data(ack.error)
