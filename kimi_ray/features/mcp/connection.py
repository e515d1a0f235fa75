"""One life of the connection to a server. What the SDK opens must be closed by the task that opened it, so each
connection has a task of its own; calls are made from the tasks of their agents.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any, cast

import anyio
import httpx2
import mcp_types
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import ToolError
from kimi_ray.features.mcp.stdio import NO_MESSAGE, SupervisedStdio, usable_directory
from kimi_ray.settings import McpServer
from kimi_ray.tools.results import storable
from kimi_ray.version import __version__

PYTHON = "{python}"
"""As a word of a command: the interpreter of this host."""
MAX_TOOLS = 1000
"""Of one server."""
PING_S = 5.0
CLOSE_S = 10.0
"""What the end of a connection may take; then its task is cancelled."""

_SHOWN = 1000
_LOST = (mcp_types.CONNECTION_CLOSED,)


class Connection:
    """A connection to one server.

    Args:
        name: The server's name in the settings.
        settings: How it is started or reached.
        cwd: Its working directory, if that is there.
    """

    def __init__(self, name: str, settings: McpServer, cwd: str | None) -> None:
        self.name = name
        self._settings = settings
        self._cwd = cwd
        self._stdio: SupervisedStdio | None = None
        self._client: Client | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self.stale = False
        """Whether the server said that its tools have changed."""
        self.doubtful = False
        """Whether a call timed out: the next one asks first whether anybody is there."""

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._client is not None and not self._stop.is_set()

    async def open(self) -> None:
        """Start or reach the server.

        Raises:
            ToolError: ``mcp.server_dead`` with what it said last.
        """
        self._task = asyncio.get_running_loop().create_task(self._own(), name=f"mcp {self.name}")
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await self._ready.wait()
        except TimeoutError:
            await self.close()
            raise self.dead(f"did not answer within {self._settings.connect_timeout_s:g} s") from None
        except BaseException:
            await self.close()
            raise
        if not self.alive:
            await self.close()
            raise self.dead(f"could not be reached: {_reason(self._failure)}")

    async def close(self) -> None:
        """End it, the server of a command included. Idempotent."""
        self._stop.set()
        task = self._task
        if task is None:
            return
        if not self._ready.is_set():
            task.cancel()  # it waits for the server, and hears of nothing else
        await asyncio.wait([task], timeout=CLOSE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_S)

    async def list_tools(self) -> list[mcp_types.Tool]:
        """All tools of the server.

        Raises:
            ToolError: ``mcp.server_dead``, ``mcp.timeout``, ``mcp.call_failed``.
        """
        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        self.stale = False
        while True:
            page: mcp_types.ListToolsResult = await self._bounded(
                self._open_client().list_tools(cursor=cursor), self._settings.connect_timeout_s, "tools/list"
            )
            tools.extend(page.tools)
            if page.next_cursor is None or len(tools) > MAX_TOOLS:
                return tools[:MAX_TOOLS]
            cursor = page.next_cursor

    async def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool.

        Raises:
            ToolError: ``mcp.server_dead``, ``mcp.timeout``, ``mcp.call_failed``, ``mcp.bad_result``.
        """
        return await self._bounded(
            self._open_client().call_tool(tool, arguments), self._settings.call_timeout_s, f"the tool {tool}"
        )

    async def answers(self) -> bool:
        """Whether the server answers within ``PING_S``. The list of tools is asked for: every version has it."""
        try:
            await self._bounded(self._open_client().list_tools(), PING_S, "tools/list")
        except ToolError as error:
            return error.code == "mcp.call_failed"
        self.doubtful = False
        return True

    def dead(self, why: str) -> ToolError:
        """Why nothing can be had of the server, with its last words."""
        words = self._stdio.last_words() if self._stdio is not None else ""
        text = f"the MCP server {self.name} {why}"
        return ToolError(
            f"{text}; {words}" if words else text,
            code="mcp.server_dead",
            hint="it is started again at the next call",
            details={"server": self.name, "reason": why},
            retryable=True,
        )

    def _open_client(self) -> Client:
        client = self._client
        if client is None or self._stop.is_set():
            raise self.dead("has ended")
        return client

    async def _bounded(self, work: Any, within_s: float, what: str) -> Any:
        try:
            async with asyncio.timeout(within_s):
                return await work
        except TimeoutError:
            self.doubtful = True
            raise ToolError(
                f"the MCP server {self.name} did not answer {what} within {within_s:g} s",
                code="mcp.timeout",
                hint="whether the call took effect is unknown",
                details={"server": self.name, "within_s": within_s},
            ) from None
        except MCPError as error:
            if error.code in _LOST:
                self._stop.set()
                raise self.dead(f"ended during {what}; whether it took effect is unknown") from None
            if error.code == NO_MESSAGE:
                raise self._no_result(what, error.message) from None
            raise ToolError(
                storable(f"the MCP server {self.name} refused {what}: {error.message[:_SHOWN]}"),
                code="mcp.call_failed",
                details={"server": self.name, "code": error.code},
            ) from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            self._stop.set()
            raise self.dead(f"ended during {what}; whether it took effect is unknown") from None
        except (ValidationError, RuntimeError, ValueError) as error:
            raise self._no_result(what, _reason(error)) from None

    def _no_result(self, what: str, why: str) -> ToolError:
        return ToolError(
            f"the MCP server {self.name} answered {what} with what is no result: {why}",
            code="mcp.bad_result",
            details={"server": self.name},
        )

    async def _own(self) -> None:
        """Enter what the SDK opens, keep it until the end, and leave it."""
        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = Client(
                    transport,
                    client_info=mcp_types.Implementation(name="kimi-ray", version=__version__),
                    message_handler=self._heard,
                    cache=None,
                )
                self._client = await stack.enter_async_context(client)
                listening = asyncio.create_task(self._listen(self._client))
                try:
                    self._ready.set()
                    await self._stop.wait()
                finally:
                    listening.cancel()
                    await asyncio.wait([listening])
        except BaseException as error:
            if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                raise
            self._failure = error
        finally:
            self._client = None
            self._stop.set()
            self._ready.set()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        settings = self._settings
        if settings.command is not None:
            self._stdio = SupervisedStdio(
                [sys.executable if word == PYTHON else word for word in settings.command],
                settings.env,
                usable_directory(self._cwd),
                on_end=self._stop.set,
            )
            return self._stdio
        timeout = httpx2.Timeout(settings.connect_timeout_s, read=settings.call_timeout_s)
        client = httpx2.AsyncClient(headers=dict(settings.headers), timeout=timeout)
        await stack.enter_async_context(client)
        return streamable_http_client(str(settings.url), http_client=client)

    async def _heard(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self.stale = True

    async def _listen(self, client: Client) -> None:
        """Hear of changes where the protocol wants that asked for; servers that have none are listed as they are."""
        with suppress(Exception):
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self.stale = True


def _reason(error: BaseException | None) -> str:
    """The innermost of what was raised together, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if error is None:
        return "it ended"
    if isinstance(error, ToolError):
        return error.message
    return storable(f"{type(error).__name__}: {error}"[:_SHOWN]) if str(error) else type(error).__name__
