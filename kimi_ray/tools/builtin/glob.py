"""Glob: files by the pattern of their path, in name order."""

from __future__ import annotations

import posixpath

from pydantic import Field

from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.builtin.patterns import PathPattern
from kimi_ray.tools.builtin.walk import IGNORED, WALK_S, walk
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

MAX_MATCHES = 100


class GlobArguments(Arguments):
    """What Glob takes."""

    pattern: str = Field(min_length=1, description="Such as src/**/*.py or *.{json,toml}")
    path: str = Field(default=".", min_length=1, description="Directory to search")
    include_ignored: bool = Field(default=False, description="Search .git, node_modules and the like too")


class Glob(BuiltinTool[GlobArguments]):
    """Files by their path; ``tool.bad_pattern``, ``tool.too_many_files``, ``tool.timeout``."""

    name = "Glob"
    description = (
        f"Find files by a path pattern (** for any directories), at most {MAX_MATCHES}, in name order. Directories "
        "such as .git and node_modules are searched only when the pattern names them or include_ignored is true."
    )

    def touches(self, arguments: GlobArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.reads(arguments.path)

    async def call(self, arguments: GlobArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        pattern = PathPattern(arguments.pattern)
        found: list[str] = []
        more = False
        named = arguments.include_ignored or bool(pattern.names & IGNORED)
        late = False
        try:
            async for path, entry in walk(
                context.environment, arguments.path, include_ignored=named, enter=pattern.may_hold
            ):
                if entry.kind == "file" and pattern.matches(path):
                    if len(found) == MAX_MATCHES:
                        more = True
                        break
                    found.append(posixpath.normpath(posixpath.join(arguments.path, path)))
        except TimeoutError:
            late = True
        if late:
            text = "\n".join([*found, f"[stopped after {WALK_S:g} s: narrow the pattern or the path]"])
        elif not found:
            hint = "" if "**" in arguments.pattern else f"; **/{arguments.pattern} would search all directories"
            text = f"[no file matches {arguments.pattern} in {arguments.path}{hint}]"
        else:
            text = "\n".join(found)
            if more:
                text += f"\n[there are more than {MAX_MATCHES}: narrow the pattern or the path]"
        return ToolOutput(
            text,
            is_error=late,
            error_code="tool.timeout" if late else None,
            meta={"matches": len(found), "more": more or late},
        )
