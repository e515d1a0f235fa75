"""A new agent of a live session that begins with another's history (K 4.9).

The history is what the source has appended by then, whole turns or not: what is open in it is closed for the new agent
alone. The new agent works where the source works, with its profile; it is cold until somebody speaks to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import error_from_data
from kimi_ray.hosts.specs import LogEntry
from kimi_ray.hosts.stored_agents import read_agent, read_children
from kimi_ray.ids import new_ulid
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.log import epoch_ms
from kimi_ray.session import AgentEntry
from kimi_ray.session.fork_plan import plan_agent_fork
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Batch, LogCopy, Stream, WriterGrant
from kimi_ray.store.sharding import shard_of

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import HostServices, LiveSession


async def fork_agent(
    services: HostServices,
    live: LiveSession,
    agent_id: str,
    nonce: str,
    model: ResolvedModel | None,
    *,
    labels: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> str:
    """Make the agent; gives its id. The same nonce again is the same agent.

    Args:
        services: The session host's.
        live: The session.
        agent_id: Whose history.
        nonce: Names this fork; kept in the new log's header as its ``fork_group``.
        model: How to reach the source's model, when the session does not know it and the source is cold.
        labels: Of the new agent; None: those of the source.
        about: Further fields of ``subagent/spawned``.

    Raises:
        AgentError: ``agent.not_found``; ``agent.model_needed`` {model}.
        KimiRayError: why it cannot be copied.
    """
    source = Stream(live.id, agent_id)
    await live.call_agent(agent_id, "flush", [source], group="store", model=model)  # alive, and all of it durable
    made = await _made_before(services, live, nonce)
    if made is None:
        copy, epoch = await _make(services, live, source, nonce, labels)
        header, position = copy.header, {"seq": copy.cut + len(copy.tail), "epoch": epoch}
    else:
        header, position = made
    forked = str(header["agent_id"])
    # The pen loses nothing and says nothing twice, whatever becomes of the source's host.
    log = live.log_of(agent_id)
    await log.flush()
    if made is None or forked not in (await read_children(services.store, source)).spawned:
        spawned: dict[str, Any] = {"agent_id": forked, "profile": header.get("profile"), **position}
        spawned |= {"labels": dict(labels) if labels else None, **(about or {})}
        log.add([LogEntry("subagent/spawned", {key: value for key, value in spawned.items() if value is not None})])
        await log.flush()
    live.register_agents(
        [
            AgentEntry(
                forked,
                parent_agent_id=agent_id,
                labels=dict(header.get("labels") or {}),
                forked_from=agent_id,
            )
        ]
    )
    return forked


async def _made_before(
    services: HostServices, live: LiveSession, nonce: str
) -> tuple[dict[str, Any], dict[str, int]] | None:
    """The agent that was made for the same call: the header of its log, and where that stands."""
    for log in await services.store.list_logs(live.id):
        if log.header is not None and log.header.get("fork_group") == nonce:
            stored = await read_agent(services.store, log.stream)
            return log.header, {} if stored is None else stored.position
    return None


async def _make(
    services: HostServices, live: LiveSession, source: Stream, nonce: str, labels: Mapping[str, str] | None
) -> tuple[LogCopy, int]:
    """The new agent's log, stored; with the epoch in which its last event was written."""
    (number,) = await live.next_numbers(1)
    target = Stream(live.id, f"agent-{number}")
    planned = await plan_agent_fork(services.store, source, agent_id=target.agent_id, now=epoch_ms())
    header: dict[str, Any] = {**planned.header, "fork_group": nonce}
    if header.get("bind") is not None:
        place = beside(header["bind"].get("workdir") or {})
        if place.kind != "none":
            header["bind"] = {**header["bind"], "workdir": place.said()}
    if labels is not None:
        header["labels"] = dict(labels)
    copy = LogCopy(source, planned.cut, header, planned.tail)
    return copy, await _write(services, copy, target)


async def _write(services: HostServices, copy: LogCopy, target: Stream) -> int:
    """The new log, durable and granted to nobody; gives the epoch in which its last event was written."""
    store, nonce = services.store, new_ulid()
    shard = shard_of(target.session_id, services.config.shards)
    grant: WriterGrant = await store.fork(copy.source, copy.cut, copy.header, nonce)
    batch = Batch(
        target,
        grant.epoch,
        nonce,
        copy.cut,
        b"".join(line + b"\n" for line in copy.tail),
        tuple(len(line) + 1 for line in copy.tail),
        (1,) * len(copy.tail),
        closing=True,
    )
    result = await store.append(batch)
    if result.error is not None:
        raise error_from_data(result.error)
    for refused in await store.close_writers(shard, [(target, grant.epoch, nonce)]):
        if refused is not None:
            raise error_from_data(refused)
    return grant.epoch


def beside(bound: Mapping[str, Any]) -> Workdir:
    """An agent's bound directory for another one, as a shared one: it is not the other's to remove."""
    place = bound.get("prepared") or bound.get("path")
    if bound.get("kind") in (None, "none") or not place:
        return Workdir.none()
    return Workdir.shared(str(place), writes=True)
