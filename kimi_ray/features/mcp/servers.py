"""The MCP servers of one session on one host: each started or reached once, and again when it has died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import ConfigError, ToolError
from kimi_ray.settings import McpServer

if TYPE_CHECKING:
    import mcp_types

    from kimi_ray.features.mcp.connection import Connection

BACKOFF_S = 0.5
BACKOFF_MAX_S = 30.0
"""A server that cannot be reached is tried again at the next call, but not sooner than after 0.5, 1, 2 ... 30 s."""
LISTING_S = 10.0
"""How old a server's list of tools may be for an agent that begins, seconds; it is asked anew at once where the server
tells of a change."""


class McpServers:
    """All servers of the settings, none of them started yet. A service of the Session scope.

    Args:
        settings: By name.
    """

    def __init__(self, settings: Mapping[str, McpServer]) -> None:
        self._servers = {name: SharedServer(name, one) for name, one in settings.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The servers that there are."""
        return tuple(self._servers)

    def server(self, name: str) -> SharedServer:
        """A server."""
        return self._servers[name]

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))


class SharedServer:
    """One server, shared by the agents of a session.

    Args:
        name: Its name in the settings.
        settings: How it is started or reached.
    """

    def __init__(self, name: str, settings: McpServer) -> None:
        self.name = name
        self.settings = settings
        self.deaths = 0
        """How often it was found dead: agents tell each of them once."""
        self._connection: Connection | None = None
        self._listing: list[mcp_types.Tool] | None = None
        self._listed = 0.0
        self._connecting = asyncio.Lock()
        self._failures = 0
        self._next_try = 0.0
        self._last_error: ToolError | None = None
        self._closed = False

    async def tools(self, cwd: str | None) -> list[mcp_types.Tool]:
        """What it offers now.

        Raises:
            ToolError: ``mcp.server_dead``, ``mcp.timeout``, ``mcp.call_failed``, ``mcp.bad_result``.
            ConfigError: ``mcp.not_installed``.
        """
        if self._last_error is not None and time.monotonic() < self._next_try:
            raise self._last_error  # an agent that begins does not wait for one that has just failed
        connection = await self._connected(cwd)
        if self._listing is None or connection.stale or time.monotonic() - self._listed > LISTING_S:
            try:
                listing = await connection.list_tools()
            except ToolError as error:
                self._died(error)
                raise
            self._listed = time.monotonic()
            allowed = self.settings.tools
            self._listing = [tool for tool in listing if allowed is None or tool.name in allowed]
        return self._listing

    async def call(self, tool: str, arguments: dict[str, Any], cwd: str | None) -> mcp_types.CallToolResult:
        """Call a tool; a server that has died since is started again, once.

        Raises:
            ToolError: ``mcp.*``.
        """
        connection = await self._connected(cwd)
        try:
            result = await connection.call(tool, arguments)
        except ToolError as error:
            self._died(error)
            raise
        self._failures = 0
        return result

    async def close(self) -> None:
        """End it."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self, cwd: str | None) -> Connection:
        failures = self._failures
        async with self._connecting:
            self._check_open()
            connection = self._connection
            if connection is not None and connection.alive and (not connection.doubtful or await connection.answers()):
                return connection
            if connection is not None:
                self._connection = self._listing = None
                await connection.close()
            if self._failures > failures and self._last_error is not None:
                raise self._last_error  # somebody tried while this call waited
            return await self._connect(cwd)

    async def _connect(self, cwd: str | None) -> Connection:
        make = connection_type()
        wait_s = self._next_try - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        self._check_open()  # the session may have ended since: nobody would end what is started now
        # Known before it is open: whoever closes this server meanwhile closes it too.
        made = self._connection = make(self.name, self.settings, cwd)
        self._listing = None
        try:
            await made.open()
        except ToolError as error:
            self._died(error)
            raise
        self._last_error = None
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise ToolError(f"the session of the MCP server {self.name} has ended", code="mcp.server_dead")

    def _died(self, error: ToolError) -> None:
        if error.code != "mcp.server_dead":
            return
        self.deaths += 1
        self._last_error = error
        self._next_try = time.monotonic() + min(BACKOFF_MAX_S, BACKOFF_S * 2**self._failures)
        self._failures += 1


def connection_type() -> type[Connection]:
    """The class that speaks the protocol, if its library is there.

    Raises:
        ConfigError: ``mcp.not_installed``.
    """
    try:
        from kimi_ray.features.mcp.connection import Connection
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "anyio", "httpx2"):
            raise
        raise ConfigError(
            "MCP servers need the library mcp, which is not installed here",
            code="mcp.not_installed",
            hint='pip install "kimi-ray[mcp]", on every node',
            details={"missing": error.name},
        ) from None
    return Connection
