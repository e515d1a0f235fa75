"""What a lost session host left behind: agents that live on their hosts, and rollouts with nobody to wait for them.

A session that comes back goes once over the hosts: all its living agents are put under its claim (so the old host, if
it was only thought dead, has no say any more) and stay as they are. Their swarms then begin again with what has no row:

- with ``on_interrupted="continue"`` a rollout goes on in its own log. A living agent is simply waited for, a cold one
  is brought to life, of one that has ended its log tells how: nothing runs twice.
- with ``restart``, and where a log was cancelled, the rollout begins again as a new attempt. What lives of it is
  closed first. A rollout function that still runs is waited for, one that was lost begins again: both whatever is said.
  Attempts that the logs tell of are counted: no two of a rollout have one number, or one seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.hosts.specs import Ack
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.hosts.stored_agents import StoredAgent, ended_outcome, read_agent
from kimi_ray.hosts.swarm_words import GoingOn, SwarmSpec
from kimi_ray.llm.models import cost_usd
from kimi_ray.runs.items import RolloutKey
from kimi_ray.store.seam import ListedLog, Stream

_ASK_S = 4.0
_ADOPT_S = 20.0
_READS_AT_ONCE = 16


async def adopt_living(cluster: Cluster, session_id: str, claim: str) -> dict[str, str]:
    """Put all living agents of a session under its claim; gives the host of each. Lost hosts hold none.

    Raises:
        SessionError: ``session.fenced`` when the claim is not in force any more.
    """
    hosts = [host.name for host in await cluster.list_hosts() if host.kind == "agents"]
    held = await asyncio.gather(*(_adopt_on(cluster, host, session_id, claim) for host in hosts))
    return {agent_id: host for host, agents in zip(hosts, held, strict=True) for agent_id in agents}


async def stop_orphans(cluster: Cluster, session_id: str, keep: Collection[str], within_s: float) -> None:
    """Close the agents of a session that live on some host, but for those named in ``keep``. For a holder of its claim.

    Raises:
        KimiRayError: an agent could not be closed (``store.unavailable`` ...). Lost hosts hold nothing.
    """
    living = await living_agents(cluster, session_id)
    await asyncio.gather(
        *(
            _stop_on(cluster, host, orphans, None, within_s)
            for host, streams in living.items()
            if (orphans := [stream for stream in streams if stream.agent_id not in keep])
        )
    )


async def living_agents(cluster: Cluster, session_id: str) -> dict[str, list[Stream]]:
    """The agents of a session that live anywhere, by host: also those of swarms, and those whose session is lost."""
    hosts = [host.name for host in await cluster.list_hosts() if host.kind == "agents"]
    held = await asyncio.gather(*(_streams_on(cluster, host) for host in hosts))
    of_session = ([stream for stream in streams if stream.session_id == session_id] for streams in held)
    return {host: streams for host, streams in zip(hosts, of_session, strict=True) if streams}


async def stop_agents(
    cluster: Cluster, session_id: str, where: Mapping[str, str], claim: str | None, within_s: float
) -> None:
    """Close agents of a session, each where it is known to live.

    Raises:
        KimiRayError: an agent could not be closed (``store.unavailable`` ...). Lost hosts hold nothing.
    """
    by_host: dict[str, list[Stream]] = {}
    for agent_id, host in where.items():
        by_host.setdefault(host, []).append(Stream(session_id, agent_id))
    await asyncio.gather(*(_stop_on(cluster, host, streams, claim, within_s) for host, streams in by_host.items()))


@dataclass(slots=True)
class RunSoFar:
    """What the logs of a session tell of a run."""

    made: dict[RolloutKey, int] = field(default_factory=dict[RolloutKey, int])
    """The highest attempt of each rollout."""
    newest: dict[RolloutKey, str] = field(default_factory=dict[RolloutKey, str])
    """The agent of that attempt."""
    agents: set[str] = field(default_factory=set[str])
    """All agents of the run."""


def run_so_far(logs: Collection[ListedLog], run_id: str) -> RunSoFar:
    """Which attempts of a run have logs."""
    found = RunSoFar()
    for log in logs:
        header = log.header or {}
        if header.get("run_id") != run_id or "item_id" not in header:
            continue
        key, number = RolloutKey(str(header["item_id"]), int(header.get("repeat", 0))), int(header.get("attempt", 1))
        found.agents.add(log.stream.agent_id)
        if number > found.made.get(key, 0):
            found.made[key], found.newest[key] = number, log.stream.agent_id
    return found


async def going_on(
    store: StoreCalls, spec: SwarmSpec, so_far: RunSoFar, living: Mapping[str, str]
) -> dict[RolloutKey, tuple[GoingOn, StoredAgent]]:
    """The rollouts of a swarm that go on in their own logs: those of whose newest attempt the driver has no row."""
    if spec.on_interrupted != "continue" and spec.rollout is None:
        return {}
    gate = asyncio.Semaphore(_READS_AT_ONCE)

    async def look(key: RolloutKey) -> tuple[RolloutKey, GoingOn, StoredAgent] | None:
        agent_id = so_far.newest[key]
        async with gate:
            stored = await read_agent(store, Stream(spec.session_id, agent_id))
        if stored is None:
            return None
        record = stored.first_prompt
        if record is not None and record.state == "cancelled":
            # Its session was closed under it.
            return None
        price = spec.model.settings.price
        cost = cost_usd(stored.fold.sums.usage(), price) if price is not None else None
        one = GoingOn(
            agent_id,
            so_far.made[key],
            record.prompt_id if record is not None else None,
            living.get(agent_id),
            ended_outcome(stored, Stream(spec.session_id, agent_id), cost),
        )
        return key, one, stored

    unseen = [key for key in spec.keys if so_far.made.get(key, 0) > spec.attempts_before.get(key, 0)]
    found = await asyncio.gather(*(look(key) for key in unseen))
    return {one[0]: (one[1], one[2]) for one in found if one is not None}


def continued(spec: SwarmSpec, so_far: RunSoFar, going: Mapping[RolloutKey, GoingOn]) -> SwarmSpec:
    """The swarm with the attempts that were made counted, and those that go on named."""
    before = dict(spec.attempts_before)
    for key, made in so_far.made.items():
        before[key] = max(made, before.get(key, 0))
    for key, one in going.items():
        before[key] = one.number - 1
    return replace(spec, attempts_before=before, going_on=dict(going))


async def _adopt_on(cluster: Cluster, host: str, session_id: str, claim: str) -> list[str]:
    peer = cluster.peer(host)
    try:
        # A host that is silent must not hold up the others for longer than this.
        await peer.call("ping", timeout_s=_ASK_S, group="control")
        return await peer.call("adopt", session_id, claim, timeout_s=_ADOPT_S)
    except KimiRayError as error:
        if not is_lost(error.code):
            raise
        return []


async def _streams_on(cluster: Cluster, host: str) -> list[Stream]:
    """The agents that live on a host; a lost one holds none."""
    try:
        told: dict[str, Any] = await cluster.peer(host).call("ping", timeout_s=_ASK_S, group="control")
    except KimiRayError as error:
        if not is_lost(error.code):
            raise
        return []
    return [Stream(*stream) for stream in told["streams"]]


async def _stop_on(cluster: Cluster, host: str, streams: list[Stream], claim: str | None, within_s: float) -> None:
    try:
        acks: list[Ack] = await cluster.peer(host).call(
            "close_agents", streams, False, claim, timeout_s=within_s, group="store"
        )
    except KimiRayError as error:
        if not is_lost(error.code):
            raise
        return
    for ack in acks:
        if ack.error is not None and ack.error["code"] not in ("agent.not_found", "store.fenced"):
            raise error_from_data(ack.error)
