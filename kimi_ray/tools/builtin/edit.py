"""Edit: one piece of text in a file for another."""

from __future__ import annotations

from pydantic import Field

from kimi_ray.errors import ToolError
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

MAX_BYTES = 16 << 20
_SHOWN_LINES = 5


class EditArguments(Arguments):
    """What Edit takes."""

    path: str = Field(min_length=1, description="File to change, relative to the working directory")
    old_string: str = Field(min_length=1, description="Text to replace, exactly as it stands, without line numbers")
    new_string: str
    replace_all: bool = Field(default=False, description="Replace every occurrence")


class Edit(BuiltinTool[EditArguments]):
    """One piece of text for another.

    Errors: ``tool.no_match ambiguous_match no_change binary_file file_too_large``.
    """

    name = "Edit"
    description = (
        "Replace text in a file. old_string must occur exactly once (give more of its surroundings to make it so), "
        "unless replace_all is true."
    )
    writes = True

    def touches(self, arguments: EditArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.writes(arguments.path)

    async def call(self, arguments: EditArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        path = arguments.path
        data = await context.environment.read_bytes(path, limit=MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ToolError(
                f"{path} is larger than {MAX_BYTES >> 20} MiB",
                code="tool.file_too_large",
                hint="use a command such as sed",
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ToolError(
                f"{path} is not UTF-8 text (byte {error.start})",
                code="tool.binary_file",
                hint="Edit would destroy what it cannot decode; use a command",
            ) from error
        old, new = arguments.old_string, arguments.new_string
        if old == new:
            raise ToolError("old_string and new_string are the same", code="tool.no_change", hint="nothing to do")
        count = text.count(old)
        # the model was shown the lines without their endings
        if count == 0 and "\r\n" in text and "\r\n" not in old and "\n" in old:
            old, new = old.replace("\n", "\r\n"), _with_crlf(new)
            count = text.count(old)
        elif "\n" in new and "\n" not in old and "\r\n" in text and text.count("\n") == text.count("\r\n"):
            new = _with_crlf(new)
        if count == 0:
            raise ToolError(
                f"old_string does not occur in {path}", code="tool.no_match", hint=_why_not(text, arguments.old_string)
            )
        if count > 1 and not arguments.replace_all:
            lines = ", ".join(map(str, _lines_of(text, old)[:_SHOWN_LINES])) + (", ..." if count > _SHOWN_LINES else "")
            raise ToolError(
                f"old_string occurs {count} times in {path} (lines {lines})",
                code="tool.ambiguous_match",
                hint="give more of the text around the one you mean, or set replace_all",
                details={"path": path, "count": count},
            )
        size = len(data) + count * (len(new.encode()) - len(old.encode()))
        if size > max(MAX_BYTES, len(data)):
            raise ToolError(
                f"{path} would have {size} bytes then, more than {MAX_BYTES >> 20} MiB",
                code="tool.file_too_large",
                hint="replace fewer places, or use a command such as sed",
                details={"path": path, "bytes": size},
            )
        lines = _lines_of(text, old)
        await context.environment.write_bytes(path, text.replace(old, new).encode())
        where = f"line {lines[0]}" if count == 1 else f"{count} places, the first in line {lines[0]}"
        return ToolOutput(f"Changed {path} ({where})", meta={"path": path, "replaced": count})


def _with_crlf(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _lines_of(text: str, piece: str) -> list[int]:
    found: list[int] = []
    at = text.find(piece)
    line, counted = 1, 0
    while at >= 0 and len(found) <= _SHOWN_LINES:
        line += text.count("\n", counted, at)
        counted = at
        found.append(line)
        at = text.find(piece, at + len(piece))
    return found


def _why_not(text: str, piece: str) -> str:
    """The likeliest reason, as a hint."""
    first = next((line.strip() for line in piece.splitlines() if line.strip()), "")
    if piece.strip() and piece.strip() in text:
        return "it occurs with other white space at its ends"
    if "".join(piece.split()) and "".join(piece.split()) in "".join(text.split()):
        return "it occurs with other white space or indentation; read the file and copy the text exactly"
    if first and first in text:
        return f"its first line occurs in line {_lines_of(text, first)[0]}, what follows differs; read the file again"
    return "read the file again and copy the text exactly"
