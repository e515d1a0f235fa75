"""Tools of MCP servers: ``mcp__<server>__<tool>``, for agents whose profile lists them, as a Feature.

A server of ``[mcp_servers.X]`` is started or reached once for each session on each agent host, at the first agent that
wants tools of it, and ends with the session there. One that is dead or hangs is told, in the agent's log and in the
result of a call, and never ends an agent. The protocol is spoken by the official ``mcp`` SDK, an extra
(``kimi-ray[mcp]``), which is imported only in ``connection``, ``stdio`` and ``content``.
"""

from kimi_ray.features.mcp.feature import McpFeature

__all__ = ["McpFeature"]
