"""``connect``: a driver joins the runtime of its home, or starts it. Also ``address="in-process"``, without Ray."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import to_json

from kimi_ray.actors.calls import call
from kimi_ray.actors.farewell import Farewell
from kimi_ray.actors.ray_cluster import SHARE, STORAGE_RESOURCE, RayCluster, RaySpec, config_for_actors
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, RuntimeFault, StoreError
from kimi_ray.hosts.connection import Connection, connect_in_process
from kimi_ray.hosts.driver_leases import program_versions
from kimi_ray.hosts.ports import HostEnvironment, NodeInfo, is_lost, registry_name, store_name
from kimi_ray.hosts.store_host import store_options

if TYPE_CHECKING:
    from kimi_ray.actors.ray_session import RaySession

BOOTSTRAP_BOUND_S = 90.0
JOIN_TRIES_BOUND_S = 60.0
PAUSE_S = 0.25


async def connect(config: RuntimeConfig, *, runtime_env: dict[str, Any] | None = None) -> Connection:
    """Join the runtime of ``config.home``, starting what is not there.

    Args:
        config: ``address`` None starts a local Ray (or uses the one this process has), ``in-process`` needs none.
        runtime_env: Ray's, passed through; never put a secret in it.

    Raises:
        RuntimeFault: ``runtime.*``, ``infra.*``.
        StoreError: ``store.no_storage_node``, or why the home cannot be used.
    """
    if config.address == "in-process":
        return await connect_in_process(config)
    from kimi_ray.actors.ray_session import close_session, open_session

    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, open_session, config, runtime_env)

    def let_go(opened: asyncio.Future[RaySession]) -> None:
        # A thread of its own: a program that is leaving has shut the loop's executor down.
        if not opened.cancelled() and opened.exception() is None:
            threading.Thread(target=close_session, args=(opened.result(),), name="kimi_ray.let_go").start()

    try:
        session = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(let_go)
        raise
    cluster: RayCluster | None = None
    farewell: Farewell | None = None

    async def end() -> None:
        if farewell is not None:
            farewell.cancel()
        if cluster is not None:
            cluster.close()
        await asyncio.to_thread(close_session, session)

    try:
        environment = _environment(runtime_env, applied=session.runtime_env_applied)
        spec = await _spec(config, None if session.runtime_env_applied else runtime_env)
        spec = replace(spec, environment=environment.digest)
        cluster = RayCluster(spec)
        connection = Connection(
            cluster,
            config,
            in_process=False,
            owns_runtime=session.started,
            log_path=session.log_path,
            environment=environment,
            bare_calls=cluster.bare_calls,
            end=end,
        )
        await _join(cluster, connection)
        farewell = Farewell(spec, str(connection.lease_id), ends_runtime=session.started)
    except BaseException:
        await end()
        raise
    return connection


async def _join(cluster: RayCluster, connection: Connection) -> None:
    """Get or create the registry and take the lease; a registry that is just ending is waited out."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + JOIN_TRIES_BOUND_S
    while True:
        try:
            await _create(cluster, checked=connection.config.address is not None)
            await cluster.start_host("registry", registry_name(cluster.home_id))
            await connection.greet()
            return
        except KimiRayError as error:
            passing = error.code == "runtime.ending" or (is_lost(error.code) and error.code != "infra.timeout")
            if not passing or loop.time() >= deadline:
                raise
        await asyncio.sleep(PAUSE_S)


async def _create(cluster: RayCluster, *, checked: bool) -> None:
    """For a runtime that is not there, create the stores beside the registry, which would only do so once it runs.

    ``checked``: first see that the cluster has this program; actors that cannot be imported restart for ever.
    """
    try:
        await cluster.handle(registry_name(cluster.home_id))
    except RuntimeFault as error:
        if error.code != "infra.actor_died":
            raise
        if checked:
            await check_program(cluster.spec.runtime_env)
        await cluster.create("registry", registry_name(cluster.home_id))
        for shard in range(cluster.spec.config.shards):
            await cluster.create("store", store_name(cluster.home_id, shard))


async def check_program(runtime_env: dict[str, Any] | None) -> None:
    """See that a worker of the cluster imports kimi_ray, in this version, on this Python.

    Raises:
        RuntimeFault: ``runtime.version_mismatch`` {versions}.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    if runtime_env is not None:
        options["runtime_env"] = runtime_env
    task = ray_remote(program_versions).options(**options)
    mine = program_versions()
    try:
        theirs = await call(task.remote, BOOTSTRAP_BOUND_S, target="the cluster", method="versions")
    except KimiRayError as error:
        if error.code != "internal":
            raise
        raise _other_program(mine, None, error) from error
    if theirs != mine:
        raise _other_program(mine, theirs, None)


def _other_program(mine: dict[str, str], theirs: dict[str, str] | None, cause: KimiRayError | None) -> RuntimeFault:
    what = f"has {theirs}" if theirs is not None else "cannot import kimi_ray"
    return RuntimeFault(
        f"the cluster {what}, this program is {mine}",
        code="runtime.version_mismatch",
        hint="install the same kimi-ray on all nodes, or give it in the runtime_env (py_modules or working_dir)",
        details={"mine": mine, "theirs": theirs, "cause": None if cause is None else cause.to_data()},
    )


async def _spec(config: RuntimeConfig, runtime_env: dict[str, Any] | None) -> RaySpec:
    """Where the store is, and by that which home it is."""
    probe = RayCluster(RaySpec("", config.namespace, config_for_actors(config)))
    try:
        nodes = [node for node in await probe.nodes() if node.alive]
        storage = storage_resource(config, nodes)
        if len(nodes) == 1 or config.home_shared:
            home_id = await asyncio.to_thread(home_id_here, config)
        else:
            home_id = await _home_id_there(config, storage, runtime_env)
    finally:
        probe.close()
    return RaySpec(home_id, config.namespace, config_for_actors(config), storage, runtime_env)


def storage_resource(config: RuntimeConfig, nodes: list[NodeInfo]) -> dict[str, float]:
    """The resource that pins the stores: never a node id, which a replaced node does not keep.

    Raises:
        StoreError: ``store.no_storage_node``.
    """
    if any(node.has_storage for node in nodes):
        return {STORAGE_RESOURCE: SHARE}
    if len(nodes) == 1:
        return {f"node:{nodes[0].address}": SHARE}
    if config.home_shared:
        return {}
    raise StoreError(
        f"the cluster has {len(nodes)} nodes and none says that it keeps the home {config.home}",
        code="store.no_storage_node",
        hint=f"start that node with `ray start --resources='{{\"{STORAGE_RESOURCE}\": 1}}'`, or set home_shared = true"
        " when the home is on a file system that all nodes see",
        details={"home": config.home, "nodes": [node.address for node in nodes]},
    )


def home_id_here(config: RuntimeConfig) -> str:
    """The id of the home on this machine; the home is created when there is none."""
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.identity import open_identity

    return open_identity(RealFs(), config.home, store_options(config)).home_id


async def _home_id_there(config: RuntimeConfig, storage: dict[str, float], runtime_env: dict[str, Any] | None) -> str:
    options: dict[str, Any] = {"num_cpus": 0, "resources": storage, "max_retries": 0}
    if runtime_env is not None:
        options["runtime_env"] = runtime_env
    task = ray_remote(_home_id_as_data).options(**options)
    kept = config_for_actors(config)
    answer = await call(lambda: task.remote(kept), BOOTSTRAP_BOUND_S, target="the storage node", method="home_id")
    if not isinstance(answer, str):
        raise KimiRayError.from_data(answer)
    return answer


def _home_id_as_data(config: RuntimeConfig) -> str | dict[str, Any]:
    try:
        return home_id_here(config)
    except KimiRayError as error:
        return error.with_details(host=os.uname().nodename).to_data()


def ray_remote(function: Any) -> Any:
    """The function as a remote one, without Ray's own half-known types."""
    import ray

    return cast("Any", ray).remote(function)


def _environment(runtime_env: dict[str, Any] | None, *, applied: bool) -> HostEnvironment:
    """What hosts are to run in, for those too that are started when this program is gone and another one is there.

    Once it is the job's, Ray has uploaded its directories: their addresses name their content.
    """
    if not runtime_env:
        return HostEnvironment()
    resolved = dict(runtime_env)
    if applied:
        import ray

        resolved = dict(cast("Any", ray).get_runtime_context().runtime_env)
    return HostEnvironment(hashlib.sha256(to_json(resolved, fallback=repr)).hexdigest()[:16], resolved)
