"""Making all of a live session durable, wherever its agents are and whatever became of their hosts.

An agent that lives nowhere has nothing left to make durable. Its host let go of it when the store had all of its log;
or the host is lost, and what was acknowledged is in the store. It comes back from there when somebody needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.session_log import SessionLog
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession

_FLUSH_S = 60.0


async def flush_session(live: LiveSession, logs: Collection[SessionLog]) -> None:
    """What the session has to say is in its agents' logs, and all of these and its document are durable.

    Args:
        live: The session.
        logs: Its pens.

    Raises:
        KimiRayError: the first failure, after all were asked.
    """
    results = await asyncio.gather(*(log.flush() for log in logs), return_exceptions=True)
    by_host: dict[str, list[Stream]] = {}
    for agent in live.agents.values():
        by_host.setdefault(agent.host, []).append(agent.spec.stream)
    for swarm in live.swarms.values():
        for host, streams in swarm.living().items():
            by_host.setdefault(host, []).extend(streams)
    results += await asyncio.gather(
        *(_flush_on(live, host, streams) for host, streams in by_host.items()),
        live.document.flush(),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _flush_on(live: LiveSession, host: str, streams: list[Stream]) -> None:
    try:
        await live.services.cluster.peer(host).call("flush", streams, timeout_s=_FLUSH_S, group="store")
    except KimiRayError as error:
        if error.code == "agent.not_found":
            if len(streams) > 1:  # one that was let go of kept the others from being flushed
                await asyncio.gather(*(_flush_on(live, host, [stream]) for stream in streams))
        elif not is_lost(error.code) or not await live.services.registry.report_lost(host):
            raise
