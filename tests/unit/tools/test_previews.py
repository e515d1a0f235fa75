"""Previews of long results: both ends, whole characters, exact numbers; and the whole by its path."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ToolError
from kimi_ray.tools import LocalEnvironment, ToolContext, ToolOutput
from kimi_ray.tools.builtin import Bash, Edit, Glob, Grep, Read, Write
from kimi_ray.tools.contract import KnowsFiles, StartsCommands
from kimi_ray.tools.previews import MAX_SHOWN_CHARS, PREVIEW_CHARS, KeptResults, preview, whole_text

LONG = "x" * (MAX_SHOWN_CHARS + 1)


def block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_what_is_shown_by_its_preview() -> None:
    assert whole_text(ToolOutput(LONG)) == LONG
    assert whole_text(ToolOutput(LONG[1:])) is None
    assert whole_text(ToolOutput(LONG, bounded=True)) is None
    assert whole_text(ToolOutput([block(LONG), block("more")])) == f"{LONG}\nmore"
    assert whole_text(ToolOutput([block("a"), block("b")])) is None
    assert whole_text(ToolOutput([block(LONG), {"type": "image", "data": ""}])) is None
    assert whole_text(ToolOutput([])) is None
    assert whole_text(ToolOutput(LONG + "\ud800")) == LONG + "?"  # what a log can hold


def test_a_preview_says_what_and_where() -> None:
    text = "".join(f"{number:05} some line\n" for number in range(10_000))
    shown = preview(text, tool="Bash", call_id="call_7", readable=True)
    head, *_, tail = lines = shown.splitlines()
    assert head == (
        "[Bash returned 160000 characters in 10000 lines, of which the beginning and the end are shown; the whole is "
        "result:call_7: Read it in parts (line_offset, n_lines), or Grep it]"
    )
    assert lines[1] == "00000 some line" and tail == "09999 some line"
    assert all(len(line) == 15 for line in lines if "some line" in line)  # no line is torn
    assert "result:" not in preview(text, tool="Bash", call_id="call_7", readable=False)


@given(
    st.lists(st.sampled_from(["a", "é", "€", "😀", "\n", "e\u0301", "\r\n", " "]), min_size=1, max_size=30),
    st.integers(MAX_SHOWN_CHARS + 1, MAX_SHOWN_CHARS + 5000),
)
def test_nothing_is_counted_wrong(parts: list[str], size: int) -> None:
    unit = "".join(parts)
    text = (unit * (size // len(unit) + 1))[:size]
    shown = preview(text, tool="t", call_id="c", readable=False)
    assert shown == preview(text, tool="t", call_id="c", readable=False)
    _, rest = shown.split("]\n", 1)
    head, rest = rest.split("\n[... ", 1)
    left_out, tail = rest.split(" characters left out here ...]\n", 1)
    assert text.startswith(head) and text.endswith(tail)
    assert len(head) + len(tail) + int(left_out) == len(text)
    assert PREVIEW_CHARS // 2 < len(head) + len(tail) <= PREVIEW_CHARS
    shown.encode()


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    async def find(call_id: str) -> bytes | None:
        return "".join(f"line {n} é\n" for n in range(50_000)).encode() if call_id == "call_1" else None

    kept = KeptResults(LocalEnvironment(tmp_path), find)
    return ToolContext(kept, "session_1", "main", "call_2", asyncio.Event())  # type: ignore[arg-type]


async def test_the_whole_is_a_file_to_read_and_grep(context: ToolContext) -> None:
    output = await Read().run({"path": "result:call_1", "line_offset": 40_001, "n_lines": 2}, context)
    assert str(output.content).startswith(" 40001\tline 40000 é\n 40002\tline 40001 é\n[lines 40001-40002; ")
    output = await Read().run({"path": "result:call_1", "line_offset": -1}, context)
    assert str(output.content).startswith(" 50000\tline 49999 é")
    arguments = {"path": "result:call_1", "pattern": "line 4999[0-9]", "output_mode": "count_matches"}
    assert (await Grep().run(arguments, context)).content == "result:call_1:10"
    output = await Read().run({"path": "result:call_9"}, context)
    assert output.error_code == "environment.not_found"


async def test_all_else_is_the_environments(context: ToolContext, tmp_path: Path) -> None:
    environment = context.environment
    assert isinstance(environment, StartsCommands) and isinstance(environment, KnowsFiles)
    for name in ("start", "names_of"):  # as Python 3.12 and later look for the methods of a protocol
        assert inspect.getattr_static(environment, name) is not None
    assert environment.root == str(tmp_path)
    await Write().run({"path": "a.txt", "content": "one"}, context)
    await Edit().run({"path": "a.txt", "old_string": "one", "new_string": "two"}, context)
    assert (await Read().run({"path": "a.txt"}, context)).content == "     1\ttwo"
    assert (await Glob().run({"pattern": "*"}, context)).content == "a.txt"
    assert (await Bash().run({"command": "cat a.txt"}, context)).content == "two"
    # a result cannot be changed, and a file of such a name is a file
    await Write().run({"path": "result:call_1", "content": "mine"}, context)
    assert (tmp_path / "result:call_1").read_text() == "mine"
    assert await environment.read_bytes("result:call_1", limit=6) == b"line 0"
    await environment.write_bytes("result:own", b"file")
    assert await environment.read_bytes("result:own") == b"file"
    with pytest.raises(ToolError):
        await environment.read_bytes("../out")
    await environment.close()
