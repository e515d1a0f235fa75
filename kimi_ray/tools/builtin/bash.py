"""Bash: one shell command, to its end."""

from __future__ import annotations

from pydantic import Field

from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

DEFAULT_TIMEOUT_S = 60
MAX_TIMEOUT_S = 300
MAX_OUTPUT_BYTES = 1 << 20
"""Kept of a command's output: its first and its last half. What is long is shown to the model by its preview."""


class BashArguments(Arguments):
    """What Bash takes."""

    command: str = Field(min_length=1, description="The command")
    cwd: str | None = Field(default=None, description="Directory to start in, relative to the working directory")
    timeout: float = Field(
        default=DEFAULT_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S, description=f"Seconds, at most {MAX_TIMEOUT_S}"
    )
    description: str | None = Field(default=None, description="What the command is for, in a few words")


class Bash(BuiltinTool[BashArguments]):
    """One shell command; ``tool.exit_code``, ``tool.timeout``."""

    name = "Bash"
    description = (
        "Run a shell command (bash, or sh where there is none) in the working directory and return its output (stdout "
        "and stderr together) and exit code. It gets no input, and what it leaves running in the background is ended "
        "with it. Prefer Read, Grep, Glob, Write and Edit for files."
    )
    writes = True

    def touches(self, arguments: BashArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.all()

    async def call(self, arguments: BashArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        result = await context.environment.exec(
            arguments.command, cwd=arguments.cwd, timeout_s=arguments.timeout, max_output_bytes=MAX_OUTPUT_BYTES
        )
        meta = {"duration_ms": result.duration_ms, "truncated_bytes": result.truncated_bytes}
        text = result.output.rstrip("\n")
        if result.timed_out:
            note = f"[timed out after {arguments.timeout:g} s and was killed]"
            return ToolOutput(
                f"{text}\n{note}" if text else note,
                is_error=True,
                error_code="tool.timeout",
                exit_code=result.exit_code,
                meta=meta,
            )
        if result.exit_code != 0:
            note = f"[exit code {result.exit_code}]"
            return ToolOutput(
                f"{text}\n{note}" if text else note,
                is_error=True,
                error_code="tool.exit_code",
                exit_code=result.exit_code,
                meta=meta,
            )
        return ToolOutput(text or "[no output]", exit_code=0, meta=meta)
