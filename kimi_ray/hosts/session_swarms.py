"""Beginning a swarm in a live session, for any of its agents, and telling the logs above how far it came."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import AgentError, KimiRayError, RunError
from kimi_ray.hosts.permission_calls import mode_of
from kimi_ray.hosts.specs import LogEntry
from kimi_ray.hosts.stored_agents import read_agent
from kimi_ray.hosts.stored_binding import node_of_directory
from kimi_ray.hosts.swarm_run import SwarmRun
from kimi_ray.hosts.swarm_services import SwarmServices
from kimi_ray.hosts.swarm_words import SwarmSpec
from kimi_ray.ids import MAIN
from kimi_ray.session import parent_of_log
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession


async def begin_swarm(
    live: LiveSession, spec: SwarmSpec, fenced: Callable[[KimiRayError], None], still_here: Callable[[], object]
) -> None:
    """See ``LiveSession.start_swarm``."""
    async with live.recovery.starting(spec.run_id):
        if not is_run_by(live, spec):
            await _begin(live, spec, fenced, still_here)


def is_run_by(live: LiveSession, spec: SwarmSpec) -> bool:
    """Whether a swarm has begun for the command that asks for it."""
    swarm = live.swarms.get(spec.run_id)
    return swarm is not None and swarm.command == spec.command


def taken_over(session_id: str, run_id: str) -> RunError:
    """What a command hears whose swarm another one goes on with."""
    return RunError(
        f"another command goes on with the run {run_id}",
        code="swarm.taken_over",
        hint="its rows are in the run directory of that command",
        details={"session_id": session_id, "run_id": run_id},
    )


async def _begin(
    live: LiveSession, spec: SwarmSpec, fenced: Callable[[KimiRayError], None], still_here: Callable[[], object]
) -> None:
    if spec.parent != MAIN:
        await live.agent_host(spec.parent, live.host_of(spec.parent), None)
        spec = replace(spec, depth=await _depth_of(live, spec.parent) + 1)
    spec = replace(spec, permission_mode=await mode_of(live, spec.parent), models=live.models_for(spec.profile))
    await live.recovery.remember_run(spec.run_id, spec.parent)
    handed = await _handed_over(live, spec)
    if not live.known_empty or live.recovery.has_begun(spec.run_id):
        spec = await live.recovery.swarm(spec, handed)
    await _free_places(live, spec, handed)
    spec = replace(spec, claim=live.spec.nonce, total_limits=await live.limits_left(spec.total_limits))
    still_here()
    live.recovery.begins(spec.run_id)
    log = live.log_of(spec.parent)

    async def flush_log() -> None:
        await live.tell_main()
        await log.flush()
        await tell_ancestors(live, spec.parent, "swarm ended")
        await live.recovery.forget_run(spec.run_id)

    async def position(stream: Stream) -> dict[str, int] | None:
        stored = await read_agent(live.services.store, stream)
        return stored.position if stored is not None else None

    services = SwarmServices(
        cluster=live.services.cluster,
        registry=live.services.registry,
        record=log.add,
        flush_log=flush_log,
        numbers=live.next_numbers,
        registered=live.register_agents,
        fenced=fenced,
        spent=lambda spent: live.tree.spend(spec.run_id, spent),
        position=position,
        node_of=partial(node_of_directory, live.services.store),
    )
    live.swarms[spec.run_id] = SwarmRun(spec, services)


async def _handed_over(live: LiveSession, spec: SwarmSpec) -> dict[str, str]:
    """Take a swarm over from the command that ran it until now; gives the agents that live on, with their hosts.

    Its driver may be gone without a word: what it has not acknowledged would come twice, and what it had and wants to
    run again would not come at all. So nothing of the swarm but its logs and its living agents is used again.
    """
    swarm = live.swarms.get(spec.run_id)
    if swarm is None:
        return {}
    handed = await swarm.hand_over(taken_over(live.id, spec.run_id))
    live.tree.settle(spec.run_id, swarm.spent_by_ended)
    # Recovery looks at the stored logs.
    await live.flush()
    live.recovery.living.update(handed)
    return handed


async def _free_places(live: LiveSession, spec: SwarmSpec, handed: dict[str, str]) -> None:
    """The places of those that were handed over and do not live on."""
    kept = {one.agent_id for one in spec.going_on.values() if one.ended is None}
    gone = Counter(host for agent_id, host in handed.items() if agent_id not in kept)
    await asyncio.gather(*(live.services.registry.released(host, count) for host, count in gone.items()))


async def tell_ancestors(live: LiveSession, agent_id: str, reason: str) -> None:
    """What an agent had below it has ended: each log above hears how far the one below it is by now.

    So a fork of main takes along what belongs to its children's children. An agent that cannot be brought to life
    for it is left with what was told before.
    """
    headers: dict[str, dict[str, Any]] = {}
    if agent_id != MAIN:
        headers = {log.stream.agent_id: log.header or {} for log in await live.services.store.list_logs(live.id)}
    while agent_id != MAIN:
        above = parent_of_log(headers.get(agent_id, {}))
        try:
            seq, epoch = await live.log_of(agent_id).flush()
            if above != MAIN:
                await live.agent_host(above, None, None)
            data = {"agent_id": agent_id, "seq": seq, "epoch": epoch, "reason": reason}
            live.log_of(above).add([LogEntry("subagent/suspended", data)])
            await live.log_of(above).flush()
        except AgentError as error:
            live.recovery.failures[agent_id] = error
            return
        agent_id = above


async def _depth_of(live: LiveSession, agent_id: str) -> int:
    for log in await live.services.store.list_logs(live.id):
        if log.stream.agent_id == agent_id and log.header is not None:
            return int(log.header.get("delegation_depth", 0))
    return 0
