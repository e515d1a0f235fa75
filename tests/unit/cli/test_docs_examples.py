"""What models.md, rollouts.md and mcp.md of ``docs`` tell a new user to write and type works as it stands there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kimi_ray.llm import ChatRequest, Step
from kimi_ray.runs import read_rows
from tests.unit.cli.conftest import Cli

DOCS = Path(__file__).parents[3] / "docs"
MODEL = "scripted:tests.unit.cli.test_docs_examples:answer"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def answer(request: ChatRequest) -> Step | str:
    """Calls the one tool that it has, then says what it gave."""
    last = request.messages[-1]["content"][0]
    if last["type"] == "tool-result":
        return f"it is {last['content'][0]['text']}"
    tools = [tool.name for tool in request.tools]
    if "mcp__clock__now" in tools:
        return Step.call("mcp__clock__now", {})
    if tools == ["final_answer"]:
        return Step.call("final_answer", {"label": "bug", "why": "it says so"})
    return "42"


@pytest.fixture
def importable(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("solve", "judge", "mymodel", "unguarded"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(place))
    return place


def test_the_first_rollout_function(cli: Cli, importable: Path) -> None:
    code = blocks("rollouts.md", "python")[0]
    assert code.startswith("# solve.py")
    (importable / "solve.py").write_text(code)
    items = [{"id": 1, "question": "6 * 7?", "answer": "42"}, {"id": 2, "question": "?", "answer": "0"}]
    (importable / "questions.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (command,) = [line for line in blocks("rollouts.md", "sh")[0].splitlines() if "solve:rollout" in line]
    assert command == (
        "kimi-ray swarm 'Solve: {{question}}' --items questions.jsonl --id-column id --rollout solve:rollout"
        " --max-steps 20"
    )
    said = (
        "swarm",
        "Solve: {{question}}",
        "--items",
        "questions.jsonl",
        "--id-column",
        "id",
        "--rollout",
        "solve:rollout",
        "--max-steps",
        "20",
    )
    result = cli(*said, "--out", "run", "--model", MODEL, "--in-process", "--profile", "bare")
    assert result.code == 0, result.err
    rows = read_rows("run")
    assert [row.scores for row in rows] == [{"exact": 1.0}, {"exact": 0.0}]
    assert rows[0].output == {"first": "42", "last": "42"}


def test_the_checked_answer(cli: Cli, importable: Path) -> None:
    model = next(code for code in blocks("rollouts.md", "python") if "class Verdict" in code)
    definition = model[: model.index("report =")]
    (importable / "judge.py").write_text(f"from typing import Literal\n{definition}")
    (importable / "files.txt").write_text("one.py\n")
    said = ("swarm", "Judge {{item}}", "--items", "files.txt", "--output-schema", "judge:Verdict", "--out", "run")
    result = cli(*said, "--model", MODEL, "--in-process", "--profile", "bare")
    assert result.code == 0, result.err
    assert read_rows("run")[0].output == {"label": "bug", "why": "it says so"}


def test_the_scripted_models(cli: Cli, importable: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "models.md").read_text()
    code = next(code for code in blocks("models.md", "python") if "mymodel.py" in code)
    table = next(text for text in blocks("models.md", "toml") if "models.lister" in text)
    (importable / "mymodel.py").write_text(code)
    home.mkdir(parents=True)
    (home / "config.toml").write_text(table)
    assert "kimi-ray run 'How many?' --model scripted:mymodel:counter\n" in page
    counted = cli("run", "How many?", "--model", "scripted:mymodel:counter", "--address", "in-process")
    assert (counted.code, counted.out.strip()) == (0, "Python files: 1"), counted.err
    assert """In a table it is `script =\n"mymodel:counter"`""" in page
    with (home / "config.toml").open("a") as config:
        config.write('[models.counting]\nprovider = "scripted"\nscript = "mymodel:counter"\n')
    bare_path = [entry for entry in sys.path if entry not in ("", str(importable))]
    for command in (("run", "How many?", "--address", "in-process"), ("models", "check")):
        monkeypatch.setattr(sys, "path", bare_path.copy())  # a console script has no current directory in it
        monkeypatch.delitem(sys.modules, "mymodel", raising=False)
        named = cli(*command, *(("--model",) if command[0] == "run" else ()), "counting")
        assert named.code == 0, named.err
    assert "kimi-ray run 'What is here?' --model lister\n" in page
    listed = cli("run", "What is here?", "--model", "lister", "--address", "in-process", "--json")
    assert listed.code == 0 and listed.document["text"] == "Done.", listed.err
    assert "mymodel.py" in cli("sessions", "tail", listed.document["session_id"], "--json").out
    (importable / "unguarded.py").write_text("import asyncio\nasync def main(): ...\nasyncio.run(main())\n")
    unguarded = cli("run", "x", "--model", "scripted:unguarded:f", "--address", "in-process")
    assert "the module unguarded" in unguarded.err and "__main__" in unguarded.err, unguarded.err


def test_every_key_of_a_step_is_told() -> None:
    from kimi_ray.llm.script import _StepForm  # pyright: ignore[reportPrivateUsage]

    section = (DOCS / "models.md").read_text().partition("## A scripted model")[2].partition("\n## ")[0]
    assert [name for name in _StepForm.model_fields if f"`{name}`" not in section] == []


def test_the_clock_server(cli: Cli, importable: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = next(code for code in blocks("mcp.md", "python") if "clock_server.py" in code)
    table = next(text for text in blocks("mcp.md", "toml") if "mcp_servers.clock" in text)
    assert 'command = ["{python}", "clock_server.py"]' in table
    (importable / "clock_server.py").write_text(server)
    home.mkdir(parents=True)
    (home / "config.toml").write_text(table)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no python there has the SDK
    result = cli("run", "What time is it?", "--tools", "mcp__clock__now", "--model", MODEL, "--address", "in-process")
    assert result.code == 0, result.err
    assert re.search(r"it is \d{4}-\d\d-\d\dT", result.out), result.out + result.err


def test_every_key_of_a_server_is_told() -> None:
    from kimi_ray.settings import McpServer

    page = (DOCS / "mcp.md").read_text()
    assert [name for name in McpServer.model_fields if f"| `{name}` |" not in page] == []


def test_everything_that_a_rollout_is_given_is_told() -> None:
    from kimi_ray.agent.rollout import RolloutAgent, RolloutContext

    page = (DOCS / "rollouts.md").read_text()
    given = [name for name in RolloutContext.__slots__ if not name.startswith("_")]
    methods = [name for kind in (RolloutContext, RolloutAgent) for name in vars(kind) if not name.startswith("_")]
    assert [name for name in {*given, *methods} if f"`{name}" not in page] == []
