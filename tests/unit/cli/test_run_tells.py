"""What ``run`` says on stderr of calls that went wrong, of questions, notes and turns that were ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.cli.event_lines import event_line
from kimi_ray.events import make_event, parse_event
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from tests.unit.cli.conftest import Cli

HERE = "scripted:tests.unit.cli.test_run_tells"
_SECRET = ToolCall("Read", '{"path":".env"}', "a")
_MISSING = ToolCall("Read", '{"path":"nothing"}', "b")


def asks_in_vain(request: ChatRequest) -> Step | str:
    answers = sum(message["role"] == "assistant" for message in request.messages)
    return [Step(tool_calls=(_SECRET, _MISSING)), Step(tool_calls=(_MISSING,)), "done"][answers]


def repeats(_request: ChatRequest) -> Step:
    return Step.call("Read", {"path": "nothing"})


def talks(request: ChatRequest) -> Step | str:
    if request.purpose == "compaction":
        return Step("half of", finish="max-tokens") if "badly" in str(request.messages) else "## Request\n- talk"
    call = ToolCall("Read", '{"path":"nothing"}', f"c{request.step}")
    return Step("word " * 400, tool_calls=(call,)) if request.step < 4 else "done"


@pytest.fixture
def settings(home: Path) -> None:
    home.mkdir()
    lines = ["permission_wait_s = 0.05", "[mcp_servers.clock]", 'command = ["there-is-no-such-server"]']
    (home / "config.toml").write_text("\n".join(lines))


@pytest.mark.usefixtures("settings")
def test_denials_failures_questions_and_notes(cli: Cli, place: Path) -> None:
    (place / ".env").write_text("KEY=1")
    ended = cli("run", "go", "--model", f"{HERE}:asks_in_vain", "--permission-mode", "manual")
    assert (ended.code, ended.out) == (0, "done\n")
    note, *lines = ended.err.splitlines()[:-2]
    assert note.startswith("  note: the MCP server clock could not be reached")
    assert lines[:3] == [
        "  waiting 0.05 s for an answer: Read .env",
        '  Read {"path":".env"}',
        '  Read {"path":"nothing"}',
    ]
    assert lines[3].startswith("    Read denied: This call needs somebody's agreement")
    assert lines[4].startswith("    Read failed: ") and lines[4].endswith("nothing does not exist")
    assert lines[5] == '  Read {"path":"nothing"}'
    assert lines[6].startswith("    failed: ") and lines[6].endswith("nothing does not exist")
    assert len(lines) == 7


@pytest.mark.usefixtures("settings")
def test_with_json_there_is_one_document_and_nothing_beside_it(cli: Cli) -> None:
    ended = cli("run", "go", "--model", f"{HERE}:asks_in_vain", "--permission-mode", "manual", "--json")
    assert (ended.document["text"], ended.err) == ("done", "")


def test_a_turn_that_repeated_calls_ended_says_so(cli: Cli) -> None:
    ended = cli("run", "go", "--model", f"{HERE}:repeats")
    assert ended.code == 0
    assert "the turn was ended: the same tool call was made again and again\nrepeated: 12 steps" in ended.err
    assert "turn 0 completed (repeated)" in cli("sessions", "tail", "@last", "--type", "turn/end").out
    (turn,) = cli("sessions", "show", "@last", "--turns", "--json").document["agents"][0]["turn_list"]
    assert turn["reason"] == "repeated"


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ({"$blob": "sha256:x", "bytes": 9}, "initial: model m"),
        ([{"name": "Read"}], "initial: model m, 1 tool"),
        (None, "initial: model m, 0 tools"),
    ],
)
def test_the_number_of_tools_is_told_where_it_is_known(tools: object, told: str) -> None:
    data = {"header": {"model": "m", "tools": tools}, "reason": "initial"}
    line = json.dumps({"seq": 0, "time": 0, "type": "request/header", "data": data})
    assert event_line(parse_event(line.encode())).endswith(told)


def test_the_end_of_a_hook_is_told_before_its_command() -> None:
    data = {"event": "PreToolUse", "blocked": True, "exit_code": 2, "message": "no", "command": "x" * 300}
    line = json.dumps({"seq": 0, "time": 0, "type": "hook/result", "data": data})
    assert "PreToolUse, blocked, exit 2, said: no; command=xxx" in event_line(parse_event(line.encode()))


def test_a_call_that_is_refused_is_not_shown_as_one_that_runs() -> None:
    call: dict[str, Any] = {"turn": 0, "step": 0, "call_id": "a", "name": "Bash", "arguments": '{"command": "rm"}'}
    refused = event_line(make_event(3, 0, "tool/call", {**call, "refused": "tool.denied"}))
    assert refused.endswith('tool/call           refused, tool.denied: Bash({"command": "rm"})')
    assert event_line(make_event(3, 0, "tool/call", call)).endswith('tool/call           Bash({"command": "rm"})')
    block = {"type": "tool-result", "tool_call_id": "a", "content": [{"type": "text", "text": "no"}], "is_error": True}
    message = {"id": "m", "role": "tool", "content": [block], "source": {"kind": "tool", "call_id": "a"}}
    for code, told in (
        ("tool.denied", "refused: no"),
        ("tool.not_started", "refused: no"),
        ("tool.failed", "failed: no"),
    ):
        data = {"turn": 0, "step": 0, "message": message, "error": {"code": code}}
        assert event_line(make_event(4, 0, "tool/result", data)).endswith(told)


@pytest.mark.parametrize(("prompt", "told"), [("go", "  compacted "), ("go badly", "  not compacted: ")])
def test_a_compaction_is_told_and_what_its_summary_took(cli: Cli, home: Path, prompt: str, told: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(
        f"""[models.small]
provider = "scripted"
script = "{HERE.removeprefix("scripted:")}:talks"
max_context_tokens = 6000
[models.small.compaction]
threshold_ratio = 0.3
retain_tokens = 100
user_tokens = 10
"""
    )
    ended = cli("run", prompt, "--model", "small", "--profile", "bare", "--tools", "Read")
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("  compacting the conversation, about "))
    assert "(pressure)" in lines[at] and any(line.startswith("  " + told) for line in lines[at:]), ended.err
    assert any("tokens in, " in line and " out for summaries)" in line for line in lines), ended.err
    if "badly" in prompt:
        assert "summary_tokens in [models.X.compaction]" in ended.err or "threshold_ratio" in ended.err
    assert cli("run", prompt, "--model", "small", "--profile", "bare", "--tools", "Read", "--json").err == ""
