"""What each node of a cluster runs: versions, asked by a small task on every one. For ``doctor``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from kimi_ray.actors.calls import call
from kimi_ray.actors.ray_cluster import RayCluster, RaySpec, config_for_actors
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError

_NODE_BOUND_S = 60.0


def node_facts(config: RuntimeConfig) -> list[dict[str, Any]]:
    """Every living node with what it runs: ``{node_id, address, is_head, has_storage, draining, versions,
    host}``.

    A node that does not answer has ``error`` instead of ``versions``.

    Raises:
        RuntimeFault: ``runtime.unreachable``, ``runtime.auth``, ``runtime.version_mismatch``.
    """
    from kimi_ray.actors.ray_session import close_session, open_session

    session = open_session(config, None)
    try:
        return asyncio.run(_all_nodes(config))
    finally:
        close_session(session)


async def _all_nodes(config: RuntimeConfig) -> list[dict[str, Any]]:
    cluster = RayCluster(RaySpec("", config.namespace, config_for_actors(config)))
    try:
        nodes = [node for node in await cluster.nodes() if node.alive]
        told = await asyncio.gather(*(_ask(node.node_id) for node in nodes))
    finally:
        cluster.close()
    return [
        {
            "node_id": node.node_id,
            "address": node.address,
            "is_head": node.is_head,
            "has_storage": node.has_storage,
            "draining": node.draining,
            **facts,
        }
        for node, facts in zip(nodes, told, strict=True)
    ]


async def _ask(node_id: str) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    remote: Any = ray.remote(_facts)
    task: Any = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=where)
    try:
        return await call(task.remote, _NODE_BOUND_S, target=f"node {node_id}", method="versions")
    except KimiRayError as error:
        return {"error": error.to_data()}


def _facts() -> dict[str, Any]:
    import ray

    from kimi_ray.hosts.driver_leases import program_versions

    return {"host": os.uname().nodename, "versions": {**program_versions(), "ray": ray.__version__}}
