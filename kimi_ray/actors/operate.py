"""``status``, ``down``, ``drain`` and ``host_logs``: looking at a runtime, emptying a node, ending it, without joining
it; for commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.actors.calls import call
from kimi_ray.actors.ray_cluster import RayCluster, RaySpec, config_for_actors
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import ConfigError, KimiRayError, RuntimeFault
from kimi_ray.hosts.pool import named_node
from kimi_ray.hosts.ports import registry_name

HERE = "here"
"""The node on which the caller runs."""

CALL_BOUND_S = 10.0
TAIL_BYTES = 64 << 10


def status(config: RuntimeConfig) -> dict[str, Any]:
    """The runtimes in the namespace of a cluster: ``{address, namespace, runtimes: [...]}``.

    A runtime is what its registry tells, with ``actors`` (all that exist by name); one whose registry does not answer
    has ``error`` instead, and its actors are orphans. Without a cluster there is no runtime to see: a local Ray ends
    with its driver.

    Raises:
        RuntimeFault: ``runtime.unreachable``, ``runtime.auth``.
    """
    return _with_cluster(config, _status)


def down(config: RuntimeConfig, all: bool = False) -> dict[str, Any]:
    """End the runtime of ``config.home``, or with ``all`` every one in the namespace.

    Gives ``{ended: [home ids], failed: {home id: error}}``.
    Hosts flush and stop, then the stores, then the registry; what does not answer is killed.

    Raises:
        RuntimeFault: ``runtime.unreachable``, ``runtime.auth``.
        StoreError: the home cannot be read (without ``all``).
    """
    return _with_cluster(config, lambda cluster: _down(cluster, config, all))


def host_logs(config: RuntimeConfig, host: str, *, max_bytes: int = TAIL_BYTES) -> dict[str, Any]:
    """The ends of an actor's own log files: ``{host, files: {name: text}}``.

    Args:
        host: The actor's name or a unique end of it.
        max_bytes: How much of each file, from its end.

    Raises:
        ConfigError: ``request.unknown_host`` {hosts}.
        RuntimeFault: ``infra.*``, ``runtime.unreachable``, ``runtime.auth``.
    """
    return _with_cluster(config, lambda cluster: _host_logs(cluster, host, max_bytes))


def drain(
    config: RuntimeConfig, node: str, *, deadline_s: float, force: bool = False, undo: bool = False
) -> dict[str, Any]:
    """Empty a node of what all runtimes of the namespace have there (``Registry.drain_node``), or with ``undo`` let it
    take work again.

    Gives ``{node_id, done, drained: [report of a runtime], failed: {home id: error}}``.

    Args:
        node: A node's id, a unique beginning of it, its address, or ``here`` for the one that this program runs on.
        deadline_s: After so long what still runs is told, or with ``force`` cancelled, seconds.

    Raises:
        RuntimeFault: ``infra.unknown_node`` {nodes}, ``runtime.unreachable``, ``runtime.auth``.
    """
    return _with_cluster(config, lambda cluster: _drain(cluster, config, node, deadline_s, force, undo))


def _with_cluster(config: RuntimeConfig, work: Callable[[RayCluster], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    from kimi_ray.actors.ray_session import close_session, is_running, open_session

    if config.address in (None, "in-process") and not is_running():
        return _nothing(config)
    session = open_session(config, None)
    try:

        async def run() -> dict[str, Any]:
            cluster = RayCluster(RaySpec("", config.namespace, config_for_actors(config)))
            try:
                return {"address": session.address, "namespace": config.namespace, **await work(cluster)}
            finally:
                cluster.close()

        return asyncio.run(run())
    finally:
        close_session(session)


def _nothing(config: RuntimeConfig) -> dict[str, Any]:
    nothing: dict[str, Any] = {"runtimes": [], "ended": [], "failed": {}, "node_id": None, "done": True, "drained": []}
    return {"address": None, "namespace": config.namespace, **nothing}


async def _status(cluster: RayCluster) -> dict[str, Any]:
    return {"runtimes": [await _told(cluster, *runtime) for runtime in await _runtimes(cluster)]}


async def _runtimes(cluster: RayCluster) -> list[tuple[str, list[str]]]:
    """Each runtime's id with the names of its actors."""
    found: dict[str, list[str]] = {}
    for actor in await cluster.list_actors():
        found.setdefault(actor.name.rsplit("/", 1)[0], []).append(actor.name)
    return list(found.items())


async def _told(cluster: RayCluster, home_id: str, actors: list[str]) -> dict[str, Any]:
    try:
        told = await cluster.peer(registry_name(home_id)).call("status", timeout_s=CALL_BOUND_S, group="control")
    except KimiRayError as error:
        told = {"home_id": home_id, "error": error.to_data()}
    return {**told, "actors": actors}


async def _down(cluster: RayCluster, config: RuntimeConfig, everything: bool) -> dict[str, Any]:
    mine = None if everything else await asyncio.to_thread(_home_id_if_here, config)
    ended: list[str] = []
    failed: dict[str, Any] = {}
    for home_id, actors in await _runtimes(cluster):
        told = await _told(cluster, home_id, actors)
        if not everything and home_id != mine and told.get("home") != config.home:
            continue
        if "error" not in told:
            try:
                registry = cluster.peer(registry_name(home_id))
                failures = await registry.call("shutdown", timeout_s=4 * config.close_timeout_s)
            except KimiRayError as error:
                failed[home_id] = error.to_data()
            else:
                if failures:
                    failed[home_id] = _not_all_closed(home_id, failures).to_data()
        await _kill_rest(cluster, home_id)
        ended.append(home_id)
    return {"ended": ended, "failed": failed}


def _not_all_closed(home_id: str, failures: list[dict[str, Any]]) -> RuntimeFault:
    return RuntimeFault(
        f"{len(failures)} actors of {home_id} could not be closed as they should: {failures[0]['message']}",
        code="runtime.close_failed",
        hint="what was not durable is lost; the errors name the streams",
        details={"errors": failures},
    )


async def _kill_rest(cluster: RayCluster, home_id: str) -> None:
    """What still exists by name; the registry first, or it would start hosts again."""
    for _ in range(3):
        left = [actor for actor in await cluster.list_actors() if actor.name.startswith(f"{home_id}/")]
        for actor in sorted(left, key=lambda actor: actor.kind != "registry"):
            await cluster.stop_host(actor.name)
        if not left:
            return
        await asyncio.sleep(0.2)


async def _drain(
    cluster: RayCluster, config: RuntimeConfig, node: str, deadline_s: float, force: bool, undo: bool
) -> dict[str, Any]:
    found = named_node(await cluster.nodes(), cluster.node_id if node == HERE else node)
    bound_s = deadline_s + 2 * config.close_timeout_s + CALL_BOUND_S
    reports: list[dict[str, Any]] = []
    failed: dict[str, Any] = {}

    async def drain_one(home_id: str) -> None:
        registry = cluster.peer(registry_name(home_id))
        try:
            if undo:
                await registry.call("undrain_node", found.node_id, timeout_s=CALL_BOUND_S)
            else:
                report = await registry.call("drain_node", found.node_id, deadline_s, force, timeout_s=bound_s)
                reports.append({"home_id": home_id, **report})
        except KimiRayError as error:
            failed[home_id] = error.to_data()

    await asyncio.gather(*(drain_one(home_id) for home_id, _ in await _runtimes(cluster)))
    done = not failed and all(report["done"] for report in reports)
    return {"node_id": found.node_id, "done": done, "drained": reports, "failed": failed}


async def _host_logs(cluster: RayCluster, host: str, max_bytes: int) -> dict[str, Any]:
    names = [actor.name for actor in await cluster.list_actors()]
    matches = [name for name in names if name == host or name.endswith(host)]
    if len(matches) != 1:
        raise ConfigError(
            f"{host!r} names {len(matches) or 'no'} actors",
            code="request.unknown_host",
            hint="kimi-ray status lists the actors; give a name or a unique end of it",
            details={"hosts": matches or names},
        )
    name = matches[0]
    handle = await cluster.handle(name)
    files = await call(lambda: handle.tail_log.remote(max_bytes), CALL_BOUND_S, target=name, method="tail_log")
    return {"host": name, "files": files}


def _home_id_if_here(config: RuntimeConfig) -> str | None:
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.identity import read_identity

    identity = read_identity(RealFs(), config.home)
    return None if identity is None else identity.home_id
