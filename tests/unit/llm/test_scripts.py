from __future__ import annotations

import json
from typing import Any

import pytest

from kimi_ray.llm import ChatRequest, Step, ToolSpec
from kimi_ray.llm.scripts import echo, reviewer

READ = ToolSpec("Read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
GLOB = ToolSpec("Glob", "", {"type": "object", "properties": {"pattern": {"type": "string"}}})


def conversation(prompt: str, files: dict[str, str], tools: tuple[ToolSpec, ...] = (READ, GLOB)) -> list[Step]:
    """Play the reviewer against a directory of ``files`` until it answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    steps: list[Step] = []
    while len(steps) < 8:
        step = reviewer(ChatRequest("m", None, messages, tools))
        steps.append(step)
        if not step.tool_calls:
            return steps
        call, call_id = step.tool_calls[0], f"c{len(steps)}"
        arguments = json.loads(call.arguments)
        if call.name == "Read":
            text = files.get(arguments["path"])
            failed = text is None
        else:
            pattern = arguments["pattern"].removeprefix("**/")
            text = "\n".join(name for name in files if pattern in ("*", name.rsplit("/", 1)[-1], name))
            failed = False
        block = {"type": "tool-call", "id": call_id, "name": call.name, "arguments": call.arguments}
        result = {"type": "tool-result", "tool_call_id": call_id, "is_error": failed,
                  "content": [{"type": "text", "text": text or "no such file"}]}  # fmt: skip
        messages += [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    raise AssertionError("the reviewer never answers")


def test_it_reads_the_named_file_and_says_what_is_in_it() -> None:
    steps = conversation(
        "Review src/app.py, please.", {"src/app.py": "     1\timport os\n     2\tdef main():\n     3\t"}
    )
    assert [step.tool_calls[0].name for step in steps[:-1]] == ["Read"]
    assert steps[-1].text == "src/app.py: 3 lines, first definition: def main"


def test_a_name_without_its_directory_is_looked_for() -> None:
    steps = conversation("Review app.py", {"deep/er/app.py": "class A:\n    def f(self): ...\n"})
    assert [step.tool_calls[0].name for step in steps[:-1]] == ["Read", "Glob", "Read"]
    assert steps[-1].text == "deep/er/app.py: 2 lines, first definition: class A"


def test_without_a_name_it_looks_around() -> None:
    steps = conversation("What is here?", {"README.md": "# The title\ntext"})
    assert steps[-1].text == "README.md: 2 lines, begins with: The title"


def test_nothing_found_ends_too() -> None:
    assert "nothing to review" in conversation("Review gone.py", {})[-1].text
    assert "nothing to review" in conversation("Review gone.py", {}, (READ,))[-1].text


def test_without_tools_it_speaks_of_the_prompt() -> None:
    assert conversation("one two three", {}, ())[-1].text == "A prompt of 3 words: one two three"


def test_a_second_prompt_begins_anew() -> None:
    done = conversation("Review a.py", {"a.py": "def x(): ..."})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Review a.py"}]},
        {"role": "assistant", "content": [{"type": "text", "text": done[-1].text}]},
        {"role": "user", "content": [{"type": "text", "text": "And b.rs"}]},
    ]
    step = reviewer(ChatRequest("m", None, messages, (READ,)))
    assert step.tool_calls[0].arguments == '{"path":"b.rs"}'
    assert echo(ChatRequest("m", None, messages)).text == "And b.rs"


@pytest.mark.parametrize("argument", ["path", "file_path", "file"])
def test_it_uses_the_name_that_the_tool_has(argument: str) -> None:
    tool = ToolSpec("Read", "", {"properties": {argument: {}}})
    step = reviewer(ChatRequest("m", None, [{"role": "user", "content": "see x/y.go"}], (tool,)))
    assert json.loads(step.tool_calls[0].arguments) == {argument: "x/y.go"}
