"""The model's own swarm: the ``AgentSwarm`` tool, and how it starts many subagents without flooding a provider.

What may enter: the tool, its arguments and result, the rules of launching and the scheduler that follows them. What may
not: how a subagent lives (``kimi_ray.agent.subagents`` is the port to it), and swarms that a program starts, which have
none of these habits (``session.swarm``).
"""

from __future__ import annotations

from collections.abc import Sequence

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.features.swarm.launch_plan import LaunchPlan
from kimi_ray.features.swarm.scheduler import (
    Attempt,
    Clock,
    Launcher,
    MonotonicClock,
    SwarmScheduler,
    SwarmTask,
    TaskResult,
)
from kimi_ray.features.swarm.tool import NAME, AgentSwarm, OneSwarmAtATime
from kimi_ray.scopes import Feature, LifecycleScope

__all__ = [
    "AgentSwarm",
    "AgentSwarmFeature",
    "Attempt",
    "Clock",
    "LaunchPlan",
    "Launcher",
    "MonotonicClock",
    "OneSwarmAtATime",
    "SwarmScheduler",
    "SwarmTask",
    "TaskResult",
]


class _Services(Provider):
    scope = LifecycleScope.AGENT
    tool = provide(AgentSwarm)
    rule = provide(OneSwarmAtATime)


class AgentSwarmFeature(Feature):
    """The ``AgentSwarm`` tool."""

    name = "agent_swarm"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        return (_Services(),)

    def on_agent(self) -> Sequence[type]:
        """See ``Feature.on_agent``."""
        return (OneSwarmAtATime,)

    def tools(self) -> dict[str, type]:
        """See ``Feature.tools``."""
        return {NAME: AgentSwarm}
