"""Read: a window of a text file, with line numbers."""

from __future__ import annotations

from pydantic import Field, field_validator

from kimi_ray.errors import ToolError
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, Environment, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

MAX_LINES = 1000
MAX_LINE_CHARS = 2000
MAX_BYTES = 100 << 10
_CHUNK = 1 << 18
_KEPT_LINE = MAX_LINE_CHARS * 8
"""Bytes kept of a line in a large file: more of it is never shown."""
_MAX_SCAN = 256 << 20
"""A file is scanned for its line numbers up to here; a window behind it is refused."""


class ReadArguments(Arguments):
    """What Read takes."""

    path: str = Field(min_length=1, description="File to read, relative to the working directory")
    line_offset: int | None = Field(
        default=None, description="First line, from 1; negative counts from the end (-20: the last 20 lines)"
    )
    n_lines: int | None = Field(default=None, ge=1, description=f"How many lines, at most {MAX_LINES}")

    @field_validator("line_offset")
    @classmethod
    def _in_range(cls, value: int | None) -> int | None:
        if value is not None and (value == 0 or value < -MAX_LINES):
            raise ValueError(f"must be at least 1, or between -{MAX_LINES} and -1 to count from the end")
        return value


def is_binary(data: bytes) -> bool:
    """Whether bytes from a file's start are not text: they hold a NUL."""
    return b"\0" in data


class Read(BuiltinTool[ReadArguments]):
    """A window of a text file, with line numbers; ``tool.binary_file``, ``tool.file_too_large``."""

    name = "Read"
    description = (
        f"Read a text file, with line numbers. At most {MAX_LINES} lines, {MAX_LINE_CHARS} characters a line and "
        f"{MAX_BYTES >> 10} KiB at once; use line_offset and n_lines to read on."
    )

    def touches(self, arguments: ReadArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.reads(arguments.path)

    async def call(self, arguments: ReadArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        first = arguments.line_offset or 1
        wanted = min(arguments.n_lines or MAX_LINES, MAX_LINES)
        lines, start, total = await _window(context.environment, arguments.path, first, wanted)
        notes: list[str] = []
        shown: list[str] = []
        size = 0
        cut_lines = 0
        for number, raw in enumerate(lines, start):
            text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            if len(text) > MAX_LINE_CHARS:
                cut_lines += 1
                text = f"{text[:MAX_LINE_CHARS]}[... {len(text) - MAX_LINE_CHARS} characters cut]"
            line = f"{number:6}\t{text}"
            size += len(line.encode()) + 1
            if size > MAX_BYTES and shown:
                notes.append(f"cut at {MAX_BYTES >> 10} KiB before line {number}")
                break
            shown.append(line)
        end = start + len(shown) - 1
        if not shown:
            notes.append("the file is empty" if total == 0 else f"no line at {first}; the file has {total} lines")
        elif total is None:
            notes.append(f"lines {start}-{end}; there are more, read on with line_offset={end + 1}")
        elif end < total or start > 1:
            on = f", read on with line_offset={end + 1}" if end < total else ""
            notes.append(f"lines {start}-{end} of {total}{on}")
        if cut_lines:
            notes.append(f"{cut_lines} lines longer than {MAX_LINE_CHARS} characters were cut")
        if notes:
            shown.append(f"[{'; '.join(notes)}]")
        meta = {"path": arguments.path, "first_line": start, "last_line": end}
        return ToolOutput("\n".join(shown), meta=meta, bounded=True)


async def _window(environment: Environment, path: str, first: int, wanted: int) -> tuple[list[bytes], int, int | None]:
    """The lines from ``first``, the number of the first of them, and how many the file has (None: not counted)."""
    head = await environment.read_bytes(path, limit=_CHUNK)
    if is_binary(head):
        raise ToolError(
            f"{path} is a binary file",
            code="tool.binary_file",
            hint="Read shows text only; use a command that understands the format",
            details={"path": path},
        )
    if len(head) < _CHUNK:
        whole = _split(head)
        start = first if first > 0 else max(len(whole) + first + 1, 1)
        return whole[start - 1 : start - 1 + wanted], start, len(whole)
    return await _window_of_large(environment, path, head, first, wanted)


def _split(data: bytes) -> list[bytes]:
    # only a line feed ends a line: bytes.splitlines would also split at a lone carriage return
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return lines + ([parts[-1]] if parts[-1] else [])


async def _window_of_large(
    environment: Environment, path: str, chunk: bytes, first: int, wanted: int
) -> tuple[list[bytes], int, int | None]:
    """Scan in chunks, keeping only the window: from the start until it is full, or the last lines."""
    kept: list[bytes] = []
    number = 0  # complete lines seen
    kept_bytes = 0
    rest = b""
    offset = 0
    while chunk:
        offset += len(chunk)
        lines = _split(rest + chunk)
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        rest = rest[:_KEPT_LINE]  # perhaps a line without end
        for line in lines:
            number += 1
            if first < 0:
                kept.append(line[:_KEPT_LINE])
                if len(kept) > 2 * -first:
                    del kept[:first]
            elif number >= first and len(kept) < wanted and kept_bytes <= MAX_BYTES:
                kept.append(line[:_KEPT_LINE])
                kept_bytes += min(len(line), MAX_LINE_CHARS)
        if first > 0 and (len(kept) >= wanted or kept_bytes > MAX_BYTES):
            return kept, first, None
        if offset > _MAX_SCAN:
            raise ToolError(
                f"{path} has more than {_MAX_SCAN >> 20} MiB before line {first}",
                code="tool.file_too_large",
                hint="use Grep, or a command such as tail or sed",
                details={"path": path},
            )
        chunk = await environment.read_bytes(path, offset=offset, limit=_CHUNK)
    if rest:
        number += 1
        if first < 0 or (number >= first and len(kept) < wanted):
            kept.append(rest)
    if first < 0:
        kept = kept[first:]
        return kept[:wanted], number - len(kept) + 1, number
    return kept, first, number
