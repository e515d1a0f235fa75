"""The calls by which users answer questions of agents and set their permission modes, on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.errors import KimiRayError
from kimi_ray.features.permissions import AgentPermissions, Answer, AnswerScope, Approval
from kimi_ray.hosts.host_scopes import HostScopes
from kimi_ray.hosts.ports import Cluster, Group, is_lost
from kimi_ray.settings import PermissionModeName
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession

_ASK_S = 10.0


class PermissionCalls:
    """What an ``AgentHost`` answers about permissions.

    Args:
        scopes: Where the agents' services are.
        agents: The agents that live there.
        agent: One of them; raises ``agent.not_found``.
    """

    PORT: ClassVar[dict[str, Group]] = {
        "decide": "control",
        "set_permission_mode": "control",
        "permission_mode": "control",
        "approvals": "control",
    }

    def __init__(
        self, scopes: HostScopes, agents: Mapping[Stream, LiveAgent], agent: Callable[[Stream], LiveAgent]
    ) -> None:
        self._scopes = scopes
        self._agents = agents
        self._agent = agent

    async def decide(
        self, stream: Stream, call_id: str, decision: Answer, scope: AnswerScope, feedback: str | None
    ) -> None:
        """Answer the question about a call; durable when it returns.

        Raises:
            ToolError: ``tool.not_asked``.
            AgentError: ``agent.not_found``.
        """
        agent = self._agent(stream)
        (await self._scopes.service(agent.stream, AgentPermissions)).answer(call_id, decision, scope, feedback)
        await agent.journal.flush()

    async def set_permission_mode(self, stream: Stream, mode: PermissionModeName) -> None:
        """Another mode from the next call on; durable when it returns."""
        agent = self._agent(stream)
        (await self._scopes.service(agent.stream, AgentPermissions)).set_mode(mode)
        await agent.journal.flush()

    async def permission_mode(self, stream: Stream) -> PermissionModeName | None:
        """The mode that was set for an agent, None when it has the configured one: what its children begin with."""
        return self._agent(stream).journal.fold.permission_mode

    async def approvals(self, session_id: str) -> list[Approval]:
        """The calls of a session's agents on this host that wait for an answer."""
        found: list[Approval] = []
        for stream in [stream for stream in self._agents if stream.session_id == session_id]:
            try:
                found.extend((await self._scopes.service(stream, AgentPermissions)).questions)
            except KimiRayError as error:
                if error.code != "agent.not_found":
                    raise
        return found


async def mode_of(live: LiveSession, agent_id: str) -> PermissionModeName | None:
    """The mode that was set for an agent of a session, brought to life for it; None: the configured one counts.

    Raises:
        KimiRayError: it cannot be reached, or not be brought to life.
    """
    stream = Stream(live.id, agent_id)
    return await live.call_agent(agent_id, "permission_mode", stream, group="control", timeout_s=_ASK_S)


async def approvals_of(cluster: Cluster, session_id: str) -> list[Approval]:
    """The calls of a session's agents, wherever they live, that wait for an answer: the oldest first."""
    hosts = [host.name for host in await cluster.list_hosts() if host.kind == "agents"]

    async def ask(host: str) -> list[Approval]:
        try:
            return await cluster.peer(host).call("approvals", session_id, timeout_s=_ASK_S, group="control")
        except KimiRayError as error:
            if is_lost(error.code):
                return []  # whoever waited there waits no more
            raise

    found: list[list[Any]] = await asyncio.gather(*(ask(host) for host in hosts))
    return sorted((one for some in found for one in some), key=lambda one: (one.asked_at, one.agent_id, one.call_id))
