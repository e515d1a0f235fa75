"""Seeing that the user's tools can be imported where agents live, before a swarm starts agents that need them."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.hosts.steady_calls import RegistryCalls
from kimi_ray.store.seam import Stream
from kimi_ray.tools.carried import fingerprint_of
from kimi_ray.tools.contract import Tool

CHECK_S = 60.0


async def check_tools(
    cluster: Cluster, registry: RegistryCalls, stream: Stream, tools: Sequence[Tool], node_id: str | None
) -> None:
    """Import the tools on a host of their own fingerprint. Does nothing without tools of the user's.

    A host that is lost meanwhile is no answer: the agents themselves tell then.

    Raises:
        ToolError: ``tool.not_importable`` {tool, node_id}.
    """
    fingerprint = fingerprint_of(tools)
    if not fingerprint:
        return
    (host,) = await registry.place_agents([PlaceAgent(stream, None, node_id, fingerprint)])
    try:
        await cluster.peer(host).call("check_tools", tuple(tools), timeout_s=CHECK_S, group="control")
    except KimiRayError as error:
        if not is_lost(error.code):
            raise
        await registry.report_lost(host)
    finally:
        await registry.released(host, 1)
