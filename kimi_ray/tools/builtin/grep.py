"""Grep: lines, files or counts by a regular expression."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from kimi_ray.errors import ToolError
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.builtin.file_types import patterns_of
from kimi_ray.tools.builtin.patterns import PathPattern
from kimi_ray.tools.builtin.read import is_binary
from kimi_ray.tools.builtin.walk import walk
from kimi_ray.tools.contract import Accesses, Environment, ToolContext, ToolOutput
from kimi_ray.tools.matcher import Matcher
from kimi_ray.tools.matching import Spans
from kimi_ray.tools.schema import Arguments

TIME_S = 20.0
MAX_FILE_BYTES = 16 << 20
MAX_LINE_CHARS = 500
MAX_OUTPUT_CHARS = 100_000
_SNIFF = 8192


class GrepArguments(Arguments):
    """What Grep takes."""

    pattern: str = Field(min_length=1, description="Regular expression (Python syntax)")
    path: str = Field(default=".", min_length=1, description="File or directory to search")
    glob: str | None = Field(default=None, min_length=1, description="Only files like this, e.g. *.py or src/**/*.ts")
    file_type: str | None = Field(default=None, alias="type", description="Only files of this type: py, js, rust, ...")
    output_mode: Literal["content", "files_with_matches", "count_matches"] = "files_with_matches"
    ignore_case: bool = Field(default=False, alias="-i", description="Ignore case")
    line_numbers: bool = Field(default=True, alias="-n", description="Line numbers (content)")
    after: int | None = Field(default=None, ge=0, le=100, alias="-A", description="Lines after a match (content)")
    before: int | None = Field(default=None, ge=0, le=100, alias="-B", description="Lines before a match (content)")
    context: int | None = Field(default=None, ge=0, le=100, alias="-C", description="Lines around a match (content)")
    head_limit: int = Field(default=250, ge=1, le=5000, description="Most lines or files to return")
    offset: int = Field(default=0, ge=0, description="Lines or files to pass over first")
    multiline: bool = Field(default=False, description="Let a match span lines; a dot matches a line's end too")
    include_ignored: bool = Field(default=False, description="Search .git, node_modules and the like too")


@dataclass(slots=True)
class _Found:
    """The entries to return: those behind ``offset``, up to ``limit``."""

    offset: int
    limit: int
    seen: int = 0
    chars: int = 0
    more: bool = False
    entries: list[str] = field(default_factory=list[str])

    def add(self, entry: str) -> bool:
        """Take an entry; False when it is one too many."""
        self.seen += 1
        if self.seen <= self.offset:
            return True
        if len(self.entries) >= self.limit or self.chars + len(entry) > MAX_OUTPUT_CHARS:
            self.more = True
            return False
        self.entries.append(entry)
        self.chars += len(entry) + 1
        return True


class Grep(BuiltinTool[GrepArguments]):
    """Lines, files or counts by a regular expression.

    Errors: ``tool.bad_pattern timeout too_many_files``.
    """

    name = "Grep"
    description = (
        "Search file contents by a regular expression. Returns the files with matches, or with output_mode the "
        "matching lines (content) or the number of matches of each file (count_matches), in name order. Binary files, "
        "and directories such as .git and node_modules, are passed over."
    )

    def touches(self, arguments: GrepArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.reads(arguments.path)

    async def call(self, arguments: GrepArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        try:
            matcher = Matcher(
                arguments.pattern,
                ignore_case=arguments.ignore_case,
                multiline=arguments.multiline,
                within_s=TIME_S,
            )
        except ValueError as error:
            raise ToolError(
                f"the pattern is no regular expression: {error}",
                code="tool.bad_pattern",
                hint="escape what is meant literally, e.g. \\( \\[ \\{ \\.",
            ) from error
        only = [PathPattern(arguments.glob, anywhere=True)] if arguments.glob is not None else []
        if arguments.file_type is not None:
            names = ",".join(patterns_of(arguments.file_type))
            only.append(PathPattern(f"{{{names}}}" if "," in names else names, anywhere=True))
        found = _Found(arguments.offset, arguments.head_limit)
        notes: list[str] = []
        files = large = 0
        late: str | None = None
        path = arguments.path
        try:
            async for path, size in _files(context.environment, arguments, only):
                if size > MAX_FILE_BYTES:
                    large += 1
                    continue
                await asyncio.sleep(0)  # a small file may be read and matched without a pause for anybody else
                data = await _content(context.environment, path)
                if data is None:
                    continue
                files += 1
                spans = await matcher.spans(data)
                if spans and not _report(arguments, found, path, data, spans):
                    break
        except TimeoutError:
            late = f"stopped after {TIME_S:g} s in {path}; narrow the path, or use a simpler pattern"
            notes.append(late)
        finally:
            await matcher.close()
        if found.more:
            notes.append(f"there is more, read on with offset={arguments.offset + len(found.entries)}")
        if large:
            notes.append(f"{large} files larger than {MAX_FILE_BYTES >> 20} MiB were passed over")
        if not found.entries and late is None:
            notes.insert(0, f"no match in {files} files" if found.seen == 0 else f"only {found.seen} entries")
        text = "\n".join([*found.entries, *(f"[{note}]" for note in notes)])
        return ToolOutput(
            text,
            is_error=late is not None,
            error_code="tool.timeout" if late is not None else None,
            meta={"files_searched": files, "entries": len(found.entries), "more": found.more},
            bounded=True,
        )


async def _files(
    environment: Environment, arguments: GrepArguments, only: list[PathPattern]
) -> AsyncIterator[tuple[str, int]]:
    top = arguments.path
    status = await environment.stat(top)
    if status is None:
        raise ToolError(f"{top} does not exist", code="environment.not_found", details={"path": top})
    if status.kind != "directory":
        yield top, status.size
        return

    def enter(directory: str) -> bool:
        return all(pattern.may_hold(directory) for pattern in only)

    async for path, entry in walk(environment, top, include_ignored=arguments.include_ignored, enter=enter):
        if entry.kind == "file" and all(pattern.matches(path) for pattern in only):
            yield posixpath.normpath(posixpath.join(top, path)), entry.size


async def _content(environment: Environment, path: str) -> bytes | None:
    """The bytes of a text file; None for one that is binary, gone, or may not be read."""
    try:
        data = await environment.read_bytes(path, limit=MAX_FILE_BYTES)
    except ToolError as error:
        if error.code in ("environment.no_workdir", "environment.closed"):
            raise
        return None
    return None if is_binary(data[:_SNIFF]) else data


def _report(arguments: GrepArguments, found: _Found, path: str, data: bytes, spans: Spans) -> bool:
    if arguments.output_mode == "files_with_matches":
        return found.add(path)
    if arguments.output_mode == "count_matches":
        return found.add(f"{path}:{len(spans)}")
    return all(found.add(line) for line in _lines(arguments, path, data, spans))


def _lines(arguments: GrepArguments, path: str, data: bytes, spans: Spans) -> Iterator[str]:
    around = arguments.context or 0
    before = arguments.before if arguments.before is not None else around
    after = arguments.after if arguments.after is not None else around
    lines = data.decode("utf-8", errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    matching: set[int] = set()
    shown: set[int] = set()
    for first, last in spans:
        matching.update(range(first, last + 1))
        shown.update(range(max(first - before, 1), min(last + after, len(lines)) + 1))
    previous = 0
    for number in sorted(shown):
        if (before or after) and previous and number > previous + 1:
            yield "--"
        previous = number
        text = lines[number - 1].rstrip("\r") if number <= len(lines) else ""
        if len(text) > MAX_LINE_CHARS:
            text = f"{text[:MAX_LINE_CHARS]}[... {len(text) - MAX_LINE_CHARS} characters cut]"
        sign = ":" if number in matching else "-"
        yield f"{path}{sign}{number}{sign}{text}" if arguments.line_numbers else f"{path}{sign}{text}"
