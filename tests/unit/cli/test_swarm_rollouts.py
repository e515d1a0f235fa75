"""``swarm --rollout`` and ``--output-schema``: begun, recorded, gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.runs import read_manifest, read_rows
from tests.unit.cli.conftest import Cli

MODULE = """
from kimi_ray import RolloutContext
from pydantic import BaseModel
import os

class Verdict(BaseModel):
    label: str

async def rollout(ctx: RolloutContext):
    if ctx.item == "b" and not os.path.exists("well"):
        raise ValueError("not well")
    result = await ctx.agent.ask(ctx.prompt)
    ctx.score("length", len(result.text))
    return Verdict(label=result.text)

def model(request):
    return "said " + request.messages[-1]["content"][0]["text"]

def judge(request):
    return '{"label": "x", "secret": 1}' if request.tools else "none"
"""


@pytest.fixture
def module(place: Path) -> str:
    name = f"kr_rollouts_{abs(hash(str(place))) % 10**8}"
    (place / f"{name}.py").write_text(MODULE)
    (place / "items.txt").write_text("a\nb\n")
    return name


def test_a_rollout_from_the_command_line_and_its_resume(cli: Cli, place: Path, module: str) -> None:
    said = ("swarm", "--items", "items.txt", "--rollout", f"{module}:rollout", "--output-schema", f"{module}:Verdict")
    more = ("--model", f"scripted:{module}:model", "--in-process", "--profile", "bare", "--out", "run")
    plan = cli(*said, *more, "--dry-run", "--json").document
    assert plan["rollout"] == f"{module}:rollout" and plan["requests_at_most"] is None and not Path("run").exists()
    result = cli(*said, *more, "--json")
    assert result.code == 1, result.err
    rows = {row.item: row for row in read_rows("run")}
    assert rows["a"].output == {"label": "said a"} and rows["a"].scores == {"length": 6}
    assert rows["b"].error is not None and rows["b"].error.error_class == "user_code"
    manifest = read_manifest("run")
    assert manifest["rollout"] == manifest["arguments"]["rollout"] == f"{module}:rollout"
    assert manifest["output_schema"]["properties"]["label"]
    Path("well").touch()
    assert cli("swarm", "--resume", "run", "--retry", "user_code", "--in-process", "--json").code == 0
    assert [row.output for row in read_rows("run")] == [{"label": "said a"}, {"label": "said b"}]


def test_a_schema_from_a_file(cli: Cli, place: Path, module: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"label": {"type": "string"}, "secret": {"type": "integer"}},
        "required": ["label", "secret"],
    }
    Path("schema.json").write_text(json.dumps(schema))
    said = ("swarm", "judge {{item}}", "--items", "items.txt", "--output-schema", "schema.json", "--out", "run")
    result = cli(*said, "--model", f"scripted:{module}:judge", "--in-process", "--profile", "bare", "--json")
    assert result.code == 0, result.err
    assert [row.output for row in read_rows("run")] == [{"label": "x", "secret": 1}] * 2
    assert read_manifest("run")["output_schema"] == schema
    Path("schema.json").unlink()
    assert cli("swarm", "--resume", "run", "--in-process", "--json").code == 0


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--output-schema", "missing.json"), "request.unreadable_file"),
        (("--output-schema", "items.txt"), "output.bad_schema"),
        (("--output-schema", "no_such_module_q:Model"), "output.bad_schema"),
        (("--rollout", "no_such_module_q:f"), "tool.not_importable"),
        (("--rollout", "json:dumps:x"), "tool.not_importable"),
    ],
)
def test_what_cannot_be_used_is_told_before_the_start(
    cli: Cli, place: Path, module: str, flags: tuple[str, ...], code: str
) -> None:
    result = cli(
        "swarm", "{{item}}", "--items", "items.txt", *flags, "--model", f"scripted:{module}:model", "--in-process"
    )
    assert result.code == 2 and code in result.err, result.err


def test_a_failed_function_is_told_by_sessions_show(cli: Cli, place: Path, module: str) -> None:
    said = ("swarm", "--items", "items.txt", "--rollout", f"{module}:rollout", "--out", "run", "--in-process")
    cli(*said, "--model", f"scripted:{module}:model", "--profile", "bare")
    rows = {row.item: row for row in read_rows("run")}
    shown = cli("sessions", "show", rows["b"].session_id, "--json").document
    states = {agent["agent_id"]: agent["state"] for agent in shown["agents"]}
    assert (states[rows["a"].agent_id], states[rows["b"].agent_id]) == ("completed", "failed")
    assert rows["b"].error is not None and rows["b"].error.origin == "rollout"


def test_columns_without_an_id_are_known_by_what_they_hold_and_a_traceback_is_in_the_whole_log(
    cli: Cli, place: Path, module: str
) -> None:
    long = {"n": 3, "text": "word " * 40}
    Path("items.jsonl").write_text('{"n": 1}\n' + json.dumps(long) + "\n")
    Path(f"{module}.py").write_text(f"{MODULE}\nasync def fails(ctx):\n    raise KeyError('no such column')\n")
    said = ("swarm", "--items", "items.jsonl", "--rollout", f"{module}:fails", "--in-process", "--out", "run")
    result = cli(*said, "--model", "scripted", "--profile", "bare")
    assert result.code == 1
    assert '\n{"n":1}  ' in result.out and '\n{"n":3,"text":"word word word w…  ' in result.out
    assert result.err.startswith("2 rollouts of 2 items, run directory run\n")
    whole = cli("sessions", "tail", 'run:{"n":1}', "--type", "prompt/completed", "--full").out
    assert "raise KeyError('no such column')" in whole and whole.rstrip().endswith("KeyError: 'no such column'")
    cli(*said[:-1], "other", "--id-column", "n", "--limit", "1", "--model", "scripted", "--profile", "bare")
    assert [row.item_id for row in read_rows("other")] == ["1"]
    assert cli("sessions", "tail", "other:1", "--type", "prompt/completed").code == 0


def test_one_is_told_as_one(cli: Cli, place: Path, module: str) -> None:
    Path("items.txt").write_text("a\n")
    model = ("--model", "scripted", "--profile", "bare", "--in-process")
    result = cli("swarm", "{{item}}", "--items", "items.txt", "--out", "run", *model)
    assert result.err.startswith("1 rollout of 1 item, run directory run\n")
    assert "1 rollout: 1 completed" in result.out and "A prompt of 1 word: a" in result.out
