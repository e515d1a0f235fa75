"""The tools of a replayed agent: those of today under recorded names, and what stands for them when they do not run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from dishka import AsyncContainer

from kimi_ray.errors import KimiRayError, ToolError
from kimi_ray.hosts.features import Features
from kimi_ray.tools.contract import Accesses, Tool, ToolContext, ToolOutput, ToolSource
from kimi_ray.tools.registry import FINAL_ANSWER, builtin_tools

NEVER_RUN: Final = frozenset({"Agent", "AgentSwarm", "TaskList", "TaskOutput", "TaskStop", "WaitFor"})
"""Tools whose results are always the recorded ones: what they start, or ask of, is not there in a replay. The agents
that they started are replayed from their own logs."""

NOT_STARTED: Final = frozenset({"tool.not_started", "tool.cancelled", "tool.denied", "store.fenced"})
"""Codes of results that somebody other than the tool gave: they are as they were recorded."""

Run = Callable[[Tool, dict[str, Any], ToolContext], Awaitable[ToolOutput]]


class ReplayedTool:
    """A tool of today whose calls the replay decides about."""

    def __init__(self, tool: Tool, run: Run) -> None:
        self.name = tool.name
        self.description = tool.description
        self.parameters = tool.parameters
        self.writes = tool.writes
        self.is_absent = isinstance(tool, AbsentTool)
        """Nothing of it is of today: its form is the recorded one."""
        self._tool = tool
        self._run = run

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        return self._tool.accesses(arguments)

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``."""
        return self._tool.check(arguments)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        return await self._run(self._tool, arguments, context)


class AbsentTool:
    """Stands for a tool that this program does not have: as it was recorded, and taking whatever it is given.

    Args:
        name: Its name.
        spec: What the recorded requests say of it, where they do.
    """

    writes = False

    def __init__(self, name: str, spec: Mapping[str, Any] | None = None) -> None:
        said = spec or {}
        self.name = name
        self.description = str(said.get("description", ""))
        self.parameters: dict[str, Any] = dict(said.get("parameters") or {"type": "object"})

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        return Accesses.none()

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``."""
        return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {"arguments": arguments}

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        raise ToolError(
            f"the tool {self.name} is not here: its results can only be the recorded ones",
            code="tool.unknown",
            details={"tool": self.name},
        )


async def tools_of_today(
    names: Iterable[str],
    recorded: Mapping[str, Mapping[str, Any]],
    features: Features,
    container: AsyncContainer,
    own: Sequence[Tool],
    run: Run,
    *,
    ask_servers: bool = False,
) -> list[ReplayedTool]:
    """The tools of these names, in this order: the user's, a Feature's, a built-in one, one that a Feature asks a
    server for, else an ``AbsentTool``.

    Args:
        names: As they were offered.
        recorded: What the recorded requests say of each.
        features: Whose tools there are.
        container: Where they are built: the agent's scope.
        own: The user's.
        run: Decides about each call.
        ask_servers: Start, or reach, the servers (MCP) that have some of them.
    """
    users = {tool.name: tool for tool in own}
    builtin = builtin_tools()
    found: list[ReplayedTool] = []
    for name in dict.fromkeys(names):
        if name == FINAL_ANSWER:
            continue
        tool = users.get(name)
        if tool is None and name in features.tools:
            try:
                tool = cast("Tool", await container.get(features.tools[name]))
            except KimiRayError:
                tool = None  # it needs what a replay has not: its results are the recorded ones anyway
        if tool is None:
            tool = builtin.get(name)
        if tool is None and ask_servers:
            tool = await _of_a_server(name, features, container)
        found.append(ReplayedTool(tool if tool is not None else AbsentTool(name, recorded.get(name)), run))
    return found


async def _of_a_server(name: str, features: Features, container: AsyncContainer) -> Tool | None:
    """The tool of that name that a server offers now; None: no settings name such a server, or it is not there."""
    for feature in features:
        for service in feature.tool_sources():
            try:
                offered = await cast("ToolSource", await container.get(service)).tools([name])
            except KimiRayError:
                continue  # its results are the recorded ones, and the report says which tools those were
            for tool in offered:
                if tool.name == name and getattr(tool, "is_listed", True):
                    return tool
    return None
