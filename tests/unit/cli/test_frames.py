"""``frames``, and ``sessions export`` in the formats of others: from a scripted run through the command to files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.unit.cli.conftest import Cli


@pytest.fixture
def run(cli: Cli, place: Path) -> str:
    (place / "notes.txt").write_text("some words\n")
    (place / "items.txt").write_text("notes.txt\nno such file 🦆\n")
    (place / "models.py").write_text(
        "from kimi_ray.llm.script import Step\n\n\n"
        "def reader(request):\n"
        "    if request.step == 0:\n"
        "        path = request.messages[-1]['content'][0]['text'].removeprefix('Look at ')\n"
        "        return Step.call('Read', {'path': path})\n"
        "    return Step(text='done')\n"
    )
    done = cli("swarm", "Look at {{item}}", "--items", "items.txt", "--model", "scripted:models:reader",
               "--profile", "explore", "--max-steps", 4, "--in-process", "--out", "a run", "--json")  # fmt: skip
    assert done.code == 0, done.err
    return "a run"


def test_a_scripted_run_to_parquet_and_back(cli: Cli, place: Path, run: str) -> None:
    told = cli("frames", run, "--out", "the frames", "--json")
    assert told.code == 0
    assert told.document["rows"] == {"rows": 2, "steps": 4, "model_calls": 4, "tool_calls": 2, "messages": 8}
    assert told.document["ok"] and told.document["logs"] == 2 and told.document["problems"] == []
    rows = {row["agent_id"]: row for row in pq.read_table("the frames/rows.parquet").to_pylist()}
    calls = pq.read_table("the frames/tool_calls.parquet").to_pylist()
    assert {json.loads(rows[call["agent_id"]]["item"]): call["status"] for call in calls} == {
        "notes.txt": "ok",
        "no such file 🦆": "error",
    }
    assert all(call["name"] == "Read" and call["run_id"] == rows[call["agent_id"]]["run_id"] for call in calls)
    assert all(call["item_id"] == rows[call["agent_id"]]["item_id"] for call in calls)
    (good,) = [call for call in calls if call["status"] == "ok"]
    assert "some words" in good["result"] and json.loads(good["arguments"]) == {"path": "notes.txt"}


def test_what_may_be_named(cli: Cli, place: Path, run: str) -> None:
    run_id = json.loads((place / run / "run.json").read_text())["run_id"]
    counts = {}
    for source in (run, run_id, "@last", f"{run}:notes.txt", f"{run}/agent-2"):
        done = cli("frames", source, "--out", "out", "--only", "rows, steps", "--force", "--json")
        assert done.code == 0, done.err
        counts[source] = tuple(done.document["rows"].values())
    assert list(counts.values()) == [(2, 4), (2, 4), (3, 4), (1, 2), (1, 2)]
    shown = cli("frames", run, run_id, "--out", "out 2")
    assert shown.code == 0 and "out 2/steps.parquet: 4 rows" in shown.out and "2 logs" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        ("nobody", "--out", "x"),
        ("@last", "--out", "x", "--only", "rowz"),
        ("@last", "--out", "x", "--only", ","),
        ("@last", "--out", "taken"),
        ("@last", "--out", "items.txt/x"),
        (".", "--out", "x"),
        ("@last",),
    ],
)
def test_refusals(cli: Cli, place: Path, run: str, words: tuple[str, ...]) -> None:
    (place / "taken").mkdir()
    (place / "taken" / "steps.parquet").write_text("")
    result = cli("frames", *words)
    assert result.code == 2 and "code:" in result.err and "hint:" in result.err, result
    assert not (place / "x").exists()


def test_damage_is_exit_code_one_and_the_rest_is_there(cli: Cli, home: Path, place: Path, run: str) -> None:
    (log,) = [path for path in home.rglob("*") if path.is_file() and path.parent.name == "agent-1"]
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 0x55
    log.write_bytes(bytes(raw))
    result = cli("frames", run, "--out", "out")
    assert result.code == 1 and "store.corrupt" in result.err and "agent-1" in result.err
    assert pq.read_table("out/rows.parquet").num_rows == 2
    assert set(pq.read_table("out/steps.parquet").column("agent_id").to_pylist()) >= {"agent-2"}


def test_exports_of_a_run(cli: Cli, place: Path, run: str) -> None:
    run_id = json.loads((place / run / "run.json").read_text())["run_id"]
    for form in ("openai", "sharegpt", "atif"):
        done = cli("sessions", "export", run, "--format", form, "--json")
        assert done.code == 0, done.err
        assert done.document["out"] == f"{run_id}.{form}.jsonl" and done.document["conversations"] == 2
        lines = [json.loads(line) for line in Path(done.document["out"]).read_bytes().splitlines()]
        facts = [line.get("metadata") or line["extra"] for line in lines]
        assert [one["item"] for one in facts] == ["notes.txt", "no such file 🦆"]
        assert [one["status"] for one in facts] == ["completed", "completed"]
        if form == "atif":
            assert [len(line["steps"][2]["tool_calls"]) for line in lines] == [1, 1]
            if find_spec("atif"):
                from atif import Trajectory

                assert [len(Trajectory.model_validate(line).steps) for line in lines] == [4, 4]
        again = cli("sessions", "export", run_id, "--format", form, "--out", "-")
        assert again.code == 0 and len(again.out.splitlines()) == 2
    one = cli("sessions", "export", f"{run}:notes.txt", "--format", "openai")
    assert one.code == 0 and "1 conversation in " in one.out
    assert cli("sessions", "export", f"{run}:notes.txt", "--format", "openai").code == 2  # it is there
    whole = cli("sessions", "export", "@last", "--format", "atif", "--out", "s.jsonl", "--json")
    (session,) = [json.loads(line) for line in (place / "s.jsonl").read_bytes().splitlines()]
    assert whole.code == 0 and len(session["subagent_trajectories"]) == 2


@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        ("runs/nope", "run.not_found", "there is no run directory runs/nope, and no session 'runs'"),
        ("session_nope/agent-1", "session.not_found", "there is no session 'session_nope'"),
    ],
)
def test_a_directory_that_is_not_there_is_called_one(cli: Cli, run: str, source: str, code: str, told: str) -> None:
    error = cli("frames", source, "--out", "frames", "--json").document["error"]
    assert error["code"] == code and error["message"].startswith(told)


def test_a_call_that_was_refused_says_so_by_its_code(cli: Cli, place: Path) -> None:
    (place / ".env").write_text("KEY=1")
    (place / "prying.py").write_text(
        "from kimi_ray.llm.script import Step\n\n\n"
        "def model(request):\n"
        "    if request.step:\n"
        "        return 'done'\n"
        "    return Step.call('Read', {'path': '.env'})\n"
    )
    options = ("--model", "scripted:prying:model", "--profile", "explore", "--permission-mode", "manual")
    (place.parent / "a home").mkdir()
    (place.parent / "a home" / "config.toml").write_text("permission_wait_s = 0.05")
    assert cli("run", "go", *options).code == 0
    assert cli("frames", "@last", "--out", "frames").code == 0
    (call,) = pq.read_table("frames/tool_calls.parquet").to_pylist()
    assert (call["status"], call["error_code"]) == ("error", "tool.denied")
    assert call["call_seq"] is not None and call["started"] is not None
    assert pq.read_table("frames/rows.parquet").to_pylist()[0]["tool_calls"] == 1
