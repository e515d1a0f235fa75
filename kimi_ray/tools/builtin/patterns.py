"""Path patterns: ``*``, ``?``, ``[...]`` within a name, ``**`` for any directories, ``{a,b}`` for alternatives.

Matching never backtracks over a name (``fnmatch`` translates into atomic groups), so no pattern can hang.
"""

from __future__ import annotations

import fnmatch
import re

from kimi_ray.errors import ToolError

_MAX_ALTERNATIVES = 64
_MAX_LENGTH = 1000

_Parts = tuple["re.Pattern[str] | None", ...]
"""One matcher a name; None stands for ``**``: any number of directories, also none."""


class PathPattern:
    """One pattern, matched against paths relative to where the search starts.

    Raises:
        ToolError: ``tool.bad_pattern``.
    """

    __slots__ = ("_alternatives", "names")

    def __init__(self, pattern: str, *, anywhere: bool = False) -> None:
        """``anywhere``: a pattern without a slash matches a name in any directory."""
        if not pattern or len(pattern) > _MAX_LENGTH:
            raise _bad(pattern, "it is empty" if not pattern else f"it has more than {_MAX_LENGTH} characters")
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise _bad(pattern, "it must stay below the directory searched", "name that directory in `path`")
        if anywhere and "/" not in pattern:
            pattern = f"**/{pattern}"
        expanded = _expand(pattern)
        self.names = frozenset(part for one in expanded for part in one.split("/"))
        """The literal parts: what the pattern names on purpose."""
        self._alternatives = [_parts(one) for one in expanded]

    def matches(self, path: str) -> bool:
        """Whether the path matches as a whole."""
        names = path.split("/")
        return any(len(parts) in _walk(parts, names) for parts in self._alternatives)

    def may_hold(self, directory: str) -> bool:
        """Whether a path below this directory may match."""
        names = directory.split("/")
        return any(min(_walk(parts, names), default=len(parts)) < len(parts) for parts in self._alternatives)


def _parts(pattern: str) -> _Parts:
    parts: list[re.Pattern[str] | None] = []
    for part in pattern.split("/"):
        if part in ("", "."):
            continue
        if part == "**":
            if not parts or parts[-1] is not None:
                parts.append(None)
        else:
            parts.append(re.compile(fnmatch.translate(part)))
    return tuple(parts)


def _walk(parts: _Parts, names: list[str]) -> set[int]:
    """How far into ``parts`` these names can lead: all positions, by simulation."""

    def with_skips(positions: set[int]) -> set[int]:
        # ``**`` may stand for nothing, but a trailing one wants at least one name
        found = set(positions)
        for position in positions:
            while position < len(parts) - 1 and parts[position] is None:
                position += 1  # noqa: PLW2901  follows one chain
                found.add(position)
        return found

    positions = with_skips({0})
    for name in names:
        following: set[int] = set()
        for position in positions:
            if position == len(parts):
                continue
            part = parts[position]
            if part is None:
                following.add(position)
                if position == len(parts) - 1:
                    following.add(position + 1)
            elif part.match(name):
                following.add(position + 1)
        positions = with_skips(following)
    return positions


def _expand(pattern: str) -> list[str]:
    """Brace alternatives written out; an unmatched or single brace is literal."""
    done: list[str] = []
    pending = [pattern]
    while pending:
        if len(pending) + len(done) > _MAX_ALTERNATIVES:
            raise _bad(pattern, f"its braces give more than {_MAX_ALTERNATIVES} alternatives")
        one = pending.pop()
        found = re.search(r"\{([^{}]*,[^{}]*)\}", one)
        if found is None:
            done.append(one)
        else:
            pending += [one[: found.start()] + choice + one[found.end() :] for choice in found.group(1).split(",")]
    return done


def _bad(pattern: str, why: str, hint: str | None = None) -> ToolError:
    return ToolError(
        f"the pattern {pattern[:80]!r} cannot be used: {why}",
        code="tool.bad_pattern",
        hint=hint or "change the pattern",
    )
