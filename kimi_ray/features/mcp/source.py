"""The tools of MCP servers for one agent: those that its profile lists, by name or by pattern."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentAwake, AgentSlots
from kimi_ray.errors import ToolError
from kimi_ray.features.mcp.servers import McpServers, SharedServer
from kimi_ray.tools.contract import Accesses, Tool, ToolContext, ToolOutput

if TYPE_CHECKING:
    import mcp_types

PREFIX = "mcp__"

_MAX_NAME = 64
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_MAX_DESCRIPTION = 16_384


class McpTools:
    """Offers an agent the tools of MCP servers. A ``ToolSource``, in the Agent scope.

    Args:
        servers: The session's.
        journal: The agent's log: what is wrong with a server is a ``note/added`` in it.
        slots: When it can be told.
    """

    def __init__(self, servers: McpServers, journal: Journal, slots: AgentSlots) -> None:
        self._servers = servers
        self._journal = journal
        self._slots = slots
        self._told: dict[str, int] = {}
        self._waiting: list[str] = []

    @property
    def cwd(self) -> str | None:
        """The session's directory: servers start in it."""
        return self._journal.log.header.cwd

    async def tools(self, names: Sequence[str]) -> list[Tool]:
        """See ``ToolSource``: a server that cannot be reached offers what is named of it, and its patterns nothing.

        Raises:
            ToolError: ``tool.unknown`` for a tool of a server that the settings do not have.
            ConfigError: ``mcp.not_installed``.
        """
        wanted = [name for name in names if name.startswith(PREFIX)]
        if not wanted:
            return []
        for name in wanted:
            if "*" not in name and not any(name.startswith(_prefix(server)) for server in self._servers.names):
                raise ToolError(
                    f"there is no MCP server for the tool {name}",
                    code="tool.unknown",
                    hint=f"servers are {', '.join(self._servers.names) or 'none'}: [mcp_servers.X] in the settings",
                    details={"name": name, "servers": list(self._servers.names)},
                )
        asked = [server for server in self._servers.names if any(_may_mean(name, server) for name in wanted)]
        found = await asyncio.gather(*(self._of(self._servers.server(server), wanted) for server in asked))
        # Two servers may be called alike once odd letters are gone: the first has the name.
        return list({tool.name: tool for tools in reversed(found) for tool in reversed(tools)}.values())[::-1]

    async def _of(self, server: SharedServer, wanted: Sequence[str]) -> list[Tool]:
        explicit = [name for name in wanted if "*" not in name and name.startswith(_prefix(server.name))]
        try:
            listing = await server.tools(self.cwd)
        except ToolError as error:
            self._tell_later(server, error)
            listing = []
        offered = {name: tool for name, tool in named(server.name, listing).items() if _meant(name, wanted)}
        tools: list[Tool] = [cast("Tool", McpTool(name, tool, server, self)) for name, tool in offered.items()]
        # It may be there again when it is called: what the profile names is offered, and told of then.
        missing = [name for name in explicit if name not in offered]
        return tools + [cast("Tool", McpTool(name, None, server, self)) for name in missing]

    def tell(self, server: SharedServer, error: ToolError) -> None:
        """A server failed an agent's call: in the log, once for each of its deaths."""
        if error.code == "mcp.server_dead" and self._told.get(server.name) != server.deaths:
            self._told[server.name] = server.deaths
            self._journal.append("note/added", {"text": error.message, "by": "mcp"})

    def _tell_later(self, server: SharedServer, error: ToolError) -> None:
        """While an agent comes to life its log may not be written to."""
        self._told[server.name] = server.deaths
        self._waiting.append(f"{error.message}; its tools are left out")
        self._slots.awake.register("mcp", self._awake)

    async def _awake(self, _event: AgentAwake) -> None:
        while self._waiting:
            self._journal.append("note/added", {"text": self._waiting.pop(0), "by": "mcp"})


class McpTool:
    """A tool of a server, as the model sees it.

    Args:
        name: ``mcp__<server>__<tool>``.
        tool: What the server says of it; None: it could not be asked.
        server: The server.
        owner: Tells the log when the server fails.
    """

    def __init__(self, name: str, tool: mcp_types.Tool | None, server: SharedServer, owner: McpTools) -> None:
        self.name = name
        self.is_listed = tool is not None
        """Whether its server was there to say what it is."""
        self._remote = tool.name if tool is not None else name.removeprefix(_prefix(server.name))
        self._server = server
        self._owner = owner
        hints = tool.annotations if tool is not None else None
        self._reads_only = hints is not None and bool(hints.read_only_hint)
        about = (tool.description or "") if tool is not None else f"A tool of the MCP server {server.name}."
        self.description = about[:_MAX_DESCRIPTION]
        self.parameters: dict[str, Any] = _parameters(tool)

    @property
    def writes(self) -> bool:
        """Whether a call may change something, as far as its server says."""
        return not self._reads_only

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """Nothing for a tool that only reads, as its server says; else anything: such a call runs alone."""
        return Accesses.none() if self._reads_only else Accesses.all()

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``: the server itself checks them against its schema."""
        if arguments is None or arguments == "":
            return {}
        if not isinstance(arguments, dict):
            raise ToolError(
                f"the arguments of {self.name} must be one JSON object",
                code="tool.bad_arguments",
                details={"tool": self.name},
            )
        return cast("dict[str, Any]", arguments)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        from kimi_ray.features.mcp.content import output_of

        try:
            result = await self._server.call(self._remote, arguments, self._owner.cwd)
        except ToolError as error:
            self._owner.tell(self._server, error)
            raise
        return output_of(result)


def named(server: str, listing: Iterable[mcp_types.Tool]) -> dict[str, mcp_types.Tool]:
    """The tools of a server by the names that models call them by: letters that no model server takes become ``_``."""
    found: dict[str, mcp_types.Tool] = {}
    for tool in listing:
        name = _ODD.sub("_", f"{_prefix(server)}{tool.name}")
        if len(name) > _MAX_NAME or name in found:
            digest = hashlib.sha256(tool.name.encode()).hexdigest()[:8]
            name = f"{name[: _MAX_NAME - 9]}_{digest}"
        found[name] = tool
    return found


def _prefix(server: str) -> str:
    return f"{PREFIX}{_ODD.sub('_', server)}__"


def _may_mean(name: str, server: str) -> bool:
    """Whether a name or pattern may mean a tool of a server."""
    literal = name.partition("*")[0]
    prefix = _prefix(server)
    return literal.startswith(prefix) or ("*" in name and prefix.startswith(literal))


def _meant(name: str, wanted: Iterable[str]) -> bool:
    return any(fnmatchcase(name, one) if "*" in one else name == one for one in wanted)


def _parameters(tool: mcp_types.Tool | None) -> dict[str, Any]:
    schema: dict[str, Any] = dict(tool.input_schema) if tool is not None else {}
    return {"type": "object", "properties": {}, **schema}
