"""A session brought back by a command, with what its log cannot hold: the user's own tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.errors import ConfigError, ToolError

if TYPE_CHECKING:
    from kimi_ray.session_handle import Session
    from kimi_ray.workspace_handle import Workspace

OwnTools = Annotated[
    list[str] | None,
    typer.Option("--tools", metavar="NAMES", help="Your own that it was made with: package.module:function,..."),
]


async def resume_session(workspace: Workspace, session_id: str, model: Any, tools: Sequence[str] | None) -> Session:
    """As ``Workspace.resume``, but that what is to be done about a missing tool is said in words of the command line.

    Raises:
        ConfigError: ``request.conflict`` for a tool that is not the user's own: a session keeps those that it has.
        KimiRayError: as ``Workspace.resume``.
    """
    others = [name for name in tools or () if ":" not in name]
    if others or (tools is not None and not tools):
        raise ConfigError(
            f"a session keeps the tools that it was made with: --tools {','.join(others) or 'none'} changes nothing",
            code="request.conflict",
            hint="name only those of your own among them, package.module:function",
            details={"tools": others},
        )
    try:
        return await workspace.resume(session_id, model=model, tools=tools)
    except ToolError as error:
        if error.code != "tool.unknown":
            raise
        raise ToolError(
            error.message,
            code=error.code,
            hint="a tool of your own is not in the log: name it again with --tools package.module:function",
            details=error.details,
        ) from None
