"""The Feature: the servers of a session, and the source of their tools for its agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.config import RuntimeConfig
from kimi_ray.features.mcp.servers import McpServers
from kimi_ray.features.mcp.source import PREFIX, McpTools
from kimi_ray.scopes import Feature, LifecycleScope


class _Services(Provider):
    scope = LifecycleScope.SESSION

    @provide
    async def servers(self, config: RuntimeConfig) -> AsyncIterator[McpServers]:
        """The session's servers; they end with it."""
        servers = McpServers(config.mcp_servers)
        yield servers
        await servers.close()


class McpFeature(Feature):
    """Brings the tools of MCP servers."""

    name = "mcp"

    def services(self) -> Sequence[Provider]:
        """See ``Feature``."""
        return (_Services(),)

    def tool_sources(self) -> Sequence[type]:
        """See ``Feature``."""
        return (McpTools,)

    def tool_prefixes(self) -> Sequence[str]:
        """See ``Feature``."""
        return (PREFIX,)
