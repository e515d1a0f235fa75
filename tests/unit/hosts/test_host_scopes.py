"""Containers of an agent host come and go with its agents."""

from __future__ import annotations

import asyncio

from dishka import make_async_container

from kimi_ray.hosts.agent_services import SessionServices, SessionView
from kimi_ray.hosts.host_scopes import HostScopes
from kimi_ray.scopes import LifecycleScope
from kimi_ray.store.seam import Stream


def scopes() -> HostScopes:
    return HostScopes(make_async_container(SessionServices(), scopes=LifecycleScope))  # type: ignore[arg-type]


async def test_a_session_has_one_scope_from_its_first_agent_to_its_last() -> None:
    host = scopes()
    streams = [Stream("s1", "main"), Stream("s1", "agent-1"), Stream("s2", "main")]
    inside = await asyncio.gather(*(host.enter(stream, {}) for stream in streams))
    assert await inside[0].get(SessionView) is await inside[1].get(SessionView)
    assert (await inside[2].get(SessionView)).session_id == "s2" and host.sessions == 2
    await host.leave(streams[0])
    await host.leave(streams[0])
    assert host.sessions == 2
    await asyncio.gather(host.leave(streams[1]), host.leave(streams[2]))
    assert host.sessions == 0
    await host.enter(streams[0], {})
    await host.close()
    assert host.sessions == 0
