"""What a model sees of a result that is too long for it: the beginning, the end, and where the whole is.

Pure: the same text gives the same preview, so a request can be made again from the log, which has both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.tools.contract import Environment, FileStat, ToolOutput
from kimi_ray.tools.results import storable

MAX_SHOWN_CHARS = 50_000
"""A longer result is shown by its preview."""
PREVIEW_CHARS = 4_000
"""Of the result, in its preview: one half from the beginning, one from the end."""
RESULT_PREFIX = "result:"
"""Read and Grep take ``result:<call id>`` for a path: the whole of an earlier result."""
_OPTIONAL = ("start", "names_of")
"""What an environment may have besides: ``StartsCommands``, ``KnowsFiles``."""


def whole_text(output: ToolOutput) -> str | None:
    """The text of a result that is to be shown by its preview, or None for one that is shown as it is.

    Shown as they are: short ones, those of tools that bound them themselves, and those that are not all text.
    """
    if output.bounded:
        return None
    content = output.content
    if isinstance(content, str):
        return storable(content) if len(content) > MAX_SHOWN_CHARS else None
    if not content or any(block.get("type") != "text" for block in content):
        return None
    text = "\n".join(str(block["text"]) for block in content)
    return storable(text) if len(text) > MAX_SHOWN_CHARS else None


def preview(text: str, *, tool: str, call_id: str, readable: bool) -> str:
    """The preview of a long text.

    Args:
        text: The whole; it is cut between code points, and at a line's end where one is near.
        tool: The tool's name.
        call_id: The id of the call.
        readable: Whether the agent can read the whole by its path.
    """
    half = PREVIEW_CHARS // 2
    head, tail = text[:half], text[-half:]
    cut = head.rfind("\n", half * 3 // 4)
    if cut > 0:
        head = head[:cut]
    cut = tail.find("\n", 0, half // 4)
    if cut >= 0:
        tail = tail[cut + 1 :]
    left_out = len(text) - len(head) - len(tail)
    path = f"{RESULT_PREFIX}{call_id}"
    if readable:
        way_on = f"the whole is {path}: Read it in parts (line_offset, n_lines), or Grep it"
    else:
        way_on = "the whole is in the log; ask for less to see more of it"
    lines = text.count("\n") + (not text.endswith("\n"))
    return (
        f"[{tool} returned {len(text)} characters in {lines} lines, of which the beginning and the end are shown; "
        f"{way_on}]\n{head}\n[... {left_out} characters left out here ...]\n{tail}"
    )


class KeptResults:
    """An environment in which earlier long results can be read as files, by ``result:<call id>``.

    Args:
        environment: Everything else is its.
        find: The whole text of a result by call id, or None.
    """

    def __init__(self, environment: Environment, find: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._environment = environment
        self._find = find
        for name in _OPTIONAL:
            # Since Python 3.12 a protocol is looked for among an object's own attributes, not by ``__getattr__``.
            if hasattr(environment, name):
                setattr(self, name, getattr(environment, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See ``Environment.read_bytes``."""
        whole = await self._whole(path)
        if whole is None:
            return await self._environment.read_bytes(path, offset=offset, limit=limit)
        return whole[offset : None if limit is None else offset + limit]

    async def stat(self, path: str) -> FileStat | None:
        """See ``Environment.stat``."""
        whole = await self._whole(path)
        return await self._environment.stat(path) if whole is None else FileStat("file", len(whole))

    async def _whole(self, path: str) -> bytes | None:
        if not path.startswith(RESULT_PREFIX):
            return None
        return await self._find(path.removeprefix(RESULT_PREFIX))
