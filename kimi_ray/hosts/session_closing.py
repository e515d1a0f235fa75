"""Ending a live session: its swarms and agents stop, all of it is durable, the claim is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kimi_ray.errors import KimiRayError, SessionError, error_from_data
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import Ack
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession
    from kimi_ray.hosts.session_log import SessionLog


async def close_session(live: LiveSession, logs: Sequence[SessionLog], *, force: bool) -> None:
    """See ``LiveSession.close``; ``logs`` are its pens."""
    results: list[Any] = []
    results += await asyncio.gather(live.subagents.close(), return_exceptions=True)
    results += await asyncio.gather(*(swarm.close() for swarm in live.swarms.values()), return_exceptions=True)
    results += await asyncio.gather(live.recovery.finish(), return_exceptions=True)
    results += await asyncio.gather(*(log.close() for log in logs), return_exceptions=True)
    # From here on whoever wants an agent is refused: it would live on with nobody who knows of it.
    await live.arrivals.stop()
    by_host: dict[str, list[Stream]] = {}
    for agent in live.agents.values():
        by_host.setdefault(agent.host, []).append(agent.spec.stream)
    results += await asyncio.gather(
        *(close_agents(live, host, streams, force) for host, streams in by_host.items()), return_exceptions=True
    )
    if not force:
        _raise_first(live, results)  # the claim is kept with what is not durable: closing again goes on
    results += await asyncio.gather(live.recovery.forget_all(), return_exceptions=True)
    results += await asyncio.gather(live.document.close(), return_exceptions=True)
    results += await asyncio.gather(live.services.store.close_session(live.id, live.spec.nonce), return_exceptions=True)
    results += await asyncio.gather(
        live.services.registry.forget_session(live.id, live.services.name), return_exceptions=True
    )
    if not force:
        _raise_first(live, results)


async def close_agents(live: LiveSession, host: str, streams: list[Stream], force: bool) -> None:
    """Close agents of a session on their host.

    Raises:
        SessionError: ``session.close_failed`` {streams, first}.
        KimiRayError: the host cannot be reached, and is not known to be dead.
    """
    services = live.services
    bound_s = services.config.close_timeout_s + 5.0
    try:
        acks: list[Ack] = await services.cluster.peer(host).call(
            "close_agents", streams, force, live.spec.nonce, timeout_s=bound_s, group="store"
        )
    except KimiRayError as error:
        if not is_lost(error.code) or not await services.registry.report_lost(host):
            raise
        # The host is dead, so nobody writes these logs; what was acknowledged is in the store.
        return
    await services.registry.released(host, len(streams))
    failures = [ack for ack in acks if ack.error is not None and ack.error["code"] != "agent.not_found"]
    if failures:
        first = error_from_data(cast("dict[str, Any]", failures[0].error))
        raise SessionError(
            f"{len(failures)} agents of {live.id} could not be closed: {first}",
            code="session.close_failed",
            hint="close again, or close with force to drop what is not durable",
            details={"streams": [str(ack.stream) for ack in failures], "first": first.to_data()},
        )


def _raise_first(live: LiveSession, results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            live.arrivals.go_on()  # the session stays live
            raise result
