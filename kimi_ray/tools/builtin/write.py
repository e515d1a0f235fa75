"""Write: a whole file, or more at its end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments


class WriteArguments(Arguments):
    """What Write takes."""

    path: str = Field(min_length=1, description="File to write, relative to the working directory")
    content: str
    mode: Literal["overwrite", "append"] = "overwrite"


class Write(BuiltinTool[WriteArguments]):
    """A whole file, or more at its end."""

    name = "Write"
    description = (
        "Write a text file: replace it as a whole, or append to it. Directories on the way are made. To change part "
        "of a file use Edit."
    )
    writes = True

    def touches(self, arguments: WriteArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.writes(arguments.path)

    async def call(self, arguments: WriteArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        data = arguments.content.encode()
        append = arguments.mode == "append"
        before = await context.environment.stat(arguments.path)
        await context.environment.write_bytes(arguments.path, data, append=append)
        done = "Appended to" if append and before else "Replaced" if before else "Created"
        return ToolOutput(f"{done} {arguments.path} ({len(data)} bytes)", meta={"path": arguments.path})
