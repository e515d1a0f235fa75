"""Built-in scripts: models made of a few lines, whose answers are computed from what the tools really returned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.llm.script import Step

_FILE = re.compile(r"(?<![\w/.-])(?:[\w.-]*/)*[\w-][\w.-]*\.[A-Za-z][A-Za-z0-9]{0,7}(?![\w/])")
_NUMBERED = re.compile(r"^\s*(\d+)(?:\t|→|: |\| ?)(.*)$")
_DEFINITION = re.compile(
    r"^\s*(?:pub |export |default |async |static |public |private |abstract )*"
    r"(?:def|class|fn|func|function|struct|enum|trait|interface|type|const|module|impl)\s+([A-Za-z_$][\w$]*)"
)
_HEADING = re.compile(r"^#{1,6}\s+(.+)$")
_WORDS_SHOWN = 12


def reviewer(request: ChatRequest) -> Step:
    """Reads the file that the prompt names and answers with one line about it.

    With a ``Read`` tool: reads the named file; if that fails, or no file is named, looks with ``Glob`` and reads the
    first hit; then says how many lines the file has and what it defines first. Without such tools it says how long
    the prompt is and how it begins.
    """
    prompt, exchanges = _since_prompt(request.messages)
    tools = {tool.name: tool for tool in request.tools}
    read, glob = tools.get("Read"), tools.get("Glob")
    named = _FILE.search(prompt)
    wanted = named.group() if named is not None else None
    if not exchanges:
        if read is not None and wanted is not None:
            return Step.call("Read", {_argument(read, ("path", "file_path", "file")): wanted})
        if glob is not None:
            return Step.call("Glob", {_argument(glob, ("pattern", "glob")): f"**/{wanted or '*'}"})
        return Step(text=_about_prompt(prompt))
    name, arguments, result, failed = exchanges[-1]
    if name == "Read" and not failed:
        return Step(text=_about_file(_path_in(arguments) or wanted or "the file", result))
    if name == "Read" and glob is not None and not any(call == "Glob" for call, *_ in exchanges):
        base = (wanted or "*").rsplit("/", 1)[-1]
        return Step.call("Glob", {_argument(glob, ("pattern", "glob")): f"**/{base}"})
    if name == "Glob" and not failed and read is not None:
        hit = next((line.strip() for line in result.splitlines() if _FILE.fullmatch(line.strip())), None)
        if hit is not None:
            return Step.call("Read", {_argument(read, ("path", "file_path", "file")): hit})
    first = result.strip().split("\n", 1)[0]
    return Step(text=f"{wanted or 'The prompt'}: nothing to review ({name} said: {first or 'nothing'})")


def echo(request: ChatRequest) -> Step:
    """Answers with the last prompt, word for word."""
    return Step(text=_since_prompt(request.messages)[0] or "(no prompt)")


def _since_prompt(messages: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str, str, bool]]]:
    """The last user prompt, and the tool exchanges since: name, raw arguments, result text, whether it failed."""
    calls: dict[str, tuple[str, str]] = {}
    results: list[tuple[str, str, bool]] = []
    for message in reversed(messages):
        for block in reversed(_blocks(message)):
            if block["type"] == "tool-call":
                calls[block["id"]] = (block["name"], block["arguments"])
            elif block["type"] == "tool-result":
                results.append((block["tool_call_id"], _text(block["content"]), bool(block.get("is_error"))))
        if message["role"] == "user" and not any(block["type"] == "tool-result" for block in _blocks(message)):
            exchanges = [(*calls.get(call, ("", "")), text, failed) for call, text, failed in reversed(results)]
            return _text(message["content"]), exchanges
    return "", []


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = cast("list[dict[str, Any]]", content)
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _argument(tool: ToolSpec, names: Sequence[str]) -> str:
    properties = tool.parameters.get("properties", {})
    return next((name for name in names if name in properties), names[0])


def _path_in(arguments: str) -> str | None:
    named = re.search(r'"(?:path|file_path|file)"\s*:\s*"([^"]*)"', arguments)
    return named.group(1) if named is not None else None


def _about_file(path: str, shown: str) -> str:
    lines = shown.splitlines()
    numbered = [match for line in lines if (match := _NUMBERED.match(line)) is not None]
    if numbered:
        count = int(numbered[-1].group(1))
        lines = [match.group(2) for match in numbered]
    else:
        count = len(lines)
    first = next((match for line in lines if (match := _DEFINITION.match(line)) is not None), None)
    heading = next((match for line in lines if (match := _HEADING.match(line)) is not None), None)
    if first is not None:
        what = f"first definition: {first.group().strip()}"
    elif heading is not None:
        what = f"begins with: {heading.group(1)}"
    else:
        what = "no definition"
    return f"{path}: {count} {'line' if count == 1 else 'lines'}, {what}"


def _about_prompt(prompt: str) -> str:
    words = prompt.split()
    shown = " ".join(words[:_WORDS_SHOWN]) + (" ..." if len(words) > _WORDS_SHOWN else "")
    return f"A prompt of {len(words)} {'word' if len(words) == 1 else 'words'}: {shown}"
