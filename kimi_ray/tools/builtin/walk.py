"""Walking a working directory: in name order, bounded, around what is seldom meant."""

from __future__ import annotations

import posixpath
import time
from collections.abc import AsyncIterator, Callable

from kimi_ray.errors import ToolError
from kimi_ray.tools.contract import DirectoryEntry, Environment

IGNORED = frozenset(
    {
        ".git", ".hg", ".svn", ".jj", "node_modules", "__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache",
        ".ruff_cache", ".pytest_cache", ".hypothesis", ".cache", ".idea", ".gradle", ".next", ".terraform",
    }
)  # fmt: skip
MAX_ENTRIES = 200_000
WALK_S = 20.0
"""Longest walk: one through thousands of nested directories would take hours."""


async def walk(
    environment: Environment,
    top: str,
    *,
    include_ignored: bool,
    enter: Callable[[str], bool] | None = None,
    max_entries: int = MAX_ENTRIES,
) -> AsyncIterator[tuple[str, DirectoryEntry]]:
    """Each entry below ``top`` with its path relative to ``top``, a directory before what is in it.

    Directories that tools and package managers fill are left out unless ``include_ignored``; one that may not be
    read is passed over. Listing goes a directory at a time, so that what is left out costs nothing.

    Args:
        enter: Whether to go into the directory of this path; None enters all.

    Raises:
        ToolError: ``tool.too_many_files`` after ``max_entries``.
        TimeoutError: It has taken ``WALK_S``, with what its caller did between.
    """
    seen = 0
    deadline = time.monotonic() + WALK_S
    pending: list[tuple[str, DirectoryEntry]] = []

    async def push(prefix: str) -> None:
        entries = await environment.list(posixpath.join(top, prefix), limit=max_entries + 1)
        pending.extend((prefix, entry) for entry in reversed(entries))

    await push("")  # what is wrong with the top is the caller's to hear
    while pending:
        prefix, entry = pending.pop()
        if entry.kind == "directory" and not include_ignored and entry.path in IGNORED:
            continue
        seen += 1
        if seen > max_entries:
            raise ToolError(
                f"more than {max_entries} files and directories below {top}",
                code="tool.too_many_files",
                hint="give a narrower path",
                details={"path": top},
            )
        if time.monotonic() > deadline:
            raise TimeoutError
        path = prefix + entry.path
        yield path, entry
        if entry.kind == "directory" and (enter is None or enter(path)):
            try:
                await push(f"{path}/")
            except ToolError as error:
                if error.code not in ("environment.permission", "environment.not_found", "environment.denied"):
                    raise
