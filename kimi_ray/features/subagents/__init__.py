"""The ``Agent`` tool: a model hands a task to a subagent, and waits for its answer or goes on meanwhile. A Feature.

What may enter: the tool, its arguments and the texts that the model reads. What may not: how a subagent lives
(``kimi_ray.agent.subagents`` is the port to it), and many of them at once under one call (``features.swarm``).
"""

from __future__ import annotations

from collections.abc import Sequence

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.features.subagents.tool import NAME, AgentTool
from kimi_ray.scopes import Feature, LifecycleScope


class _Services(Provider):
    scope = LifecycleScope.AGENT
    tool = provide(AgentTool)


class SubagentsFeature(Feature):
    """The ``Agent`` tool."""

    name = "subagents"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        return (_Services(),)

    def tools(self) -> dict[str, type]:
        """See ``Feature.tools``."""
        return {NAME: AgentTool}


__all__ = ["AgentTool", "SubagentsFeature"]
