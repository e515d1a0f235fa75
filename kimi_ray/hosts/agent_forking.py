"""A new agent of a live session that begins with another's history (K 4.9).

The history is what the source has appended by then, whole turns or not: what is open in it is closed for the new agent
alone. The new agent works where the source works, with its profile; it is cold until somebody speaks to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import LogEntry
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

_CALL_S = 60.0
_TRIES = 4


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
    await _flushed(services, live, source, model)
    for log in await services.store.list_logs(live.id):
        if log.header is not None and log.header.get("fork_group") == nonce:
            return log.stream.agent_id
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
    epoch = await _write(services, LogCopy(source, planned.cut, header, planned.tail), target)
    spawned: dict[str, Any] = {
        "agent_id": target.agent_id,
        "profile": header.get("profile"),
        "seq": planned.cut + len(planned.tail),
        "epoch": epoch,
    }
    spawned |= {"labels": dict(labels) if labels else None, **(about or {})}
    entry = LogEntry("subagent/spawned", {key: value for key, value in spawned.items() if value is not None})
    await _recorded(services, live, source, entry)
    live.register_agents(
        [
            AgentEntry(
                target.agent_id,
                parent_agent_id=agent_id,
                labels=dict(header.get("labels") or {}),
                forked_from=agent_id,
            )
        ]
    )
    return target.agent_id


async def _flushed(services: HostServices, live: LiveSession, source: Stream, model: ResolvedModel | None) -> None:
    """The source alive, and all it has appended by now durable."""
    await _at_its_host(services, live, source, model, "flush", [source], group="store")


async def _recorded(services: HostServices, live: LiveSession, source: Stream, entry: LogEntry) -> None:
    await _at_its_host(services, live, source, None, "record", source, [entry], live.spec.nonce, group="control")
    await _at_its_host(services, live, source, None, "flush", [source], group="store")


async def _at_its_host(
    services: HostServices,
    live: LiveSession,
    source: Stream,
    model: ResolvedModel | None,
    method: str,
    *args: Any,
    group: Any,
) -> None:
    suspect: str | None = None
    for attempt in range(_TRIES):
        host = await live.agent_host(source.agent_id, suspect, model)
        try:
            await services.cluster.peer(host).call(method, *args, timeout_s=_CALL_S, group=group)
            return
        except KimiRayError as error:
            if attempt == _TRIES - 1 or not (is_lost(error.code) or error.code == "agent.not_found"):
                raise
            suspect = host


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
