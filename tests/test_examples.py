"""Every example runs as it stands, offline, and does what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(example: str, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_review_swarm(tmp_path: Path) -> None:
    folder = tmp_path / "some sources"
    (folder / "deep").mkdir(parents=True)
    (folder / "one.py").write_text("import os\n\n\ndef first():\n    pass\n")
    (folder / "deep" / "two.py").write_text("class Second:\n    x = 1\n")
    out = run("review_swarm.py", str(folder), "--out", "a run", cwd=tmp_path)
    assert "one.py: 5 lines, first definition: def first" in out
    assert "deep/two.py: 2 lines, first definition: class Second" in out
    assert "2 of 2 completed" in out
    rows = [json.loads(line) for line in (tmp_path / "a run" / "results.jsonl").read_text().splitlines()]
    assert {row["item_id"] for row in rows} == {"one.py", "deep/two.py"}
    assert all(row["tool_calls"] == 1 for row in rows)


def test_own_tool(tmp_path: Path) -> None:
    out = run("own_tool.py", cwd=tmp_path)
    lines = (EXAMPLES / "own_tool.py").read_bytes().count(b"\n")
    assert out.startswith(f"own_tool.py has {lines} lines.\n")
    assert 'measure {"path":"own_tool.py","unit":"lines"}' in out


def test_model_swarm(tmp_path: Path) -> None:
    out = run("model_swarm.py", cwd=tmp_path).splitlines()
    assert [line for line in out if line.startswith("<summary>")] == [
        "<summary>completed: 2, failed: 1</summary>",
        "<summary>completed: 1</summary>",
    ]
    assert [line for line in out if 'mode="resume"' in line] == [
        '<subagent mode="resume" agent_id="agent-3" item="Atlantis" outcome="completed">It is a legend.</subagent>'
    ]
    assert out[-1] == "All are answered."


def test_custom_rollout(tmp_path: Path) -> None:
    out = run("custom_rollout.py", cwd=tmp_path)
    assert out.splitlines() == [
        "2 + 3: completed, {'value': 5, 'tries': 1}, scores {'right': 1.0, 'tries': 1}",
        "20 + 22: completed, {'value': None, 'tries': 3}, scores {'right': 0.0}",
        "7 + 8: completed, {'value': 15, 'tries': 2}, scores {'right': 1.0, 'tries': 2}",
    ]


def test_own_feature(tmp_path: Path) -> None:
    out = run("own_feature.py", cwd=tmp_path)
    assert out.splitlines() == ["sold 2 apple, 3 left", "The shop does not sell what it does not have."]


def test_edit_and_test(tmp_path: Path) -> None:
    out = run("edit_and_test.py", cwd=tmp_path)
    assert "exit code 1" in out
    assert "exit code 0" in out
    assert out.index("exit code 1") < out.index("Edit") < out.index("exit code 0")
    assert "the original is as it was: True" in out


def test_run_picture(tmp_path: Path) -> None:
    out = run("run_picture.py", "--out", "a run.svg", cwd=tmp_path).splitlines()
    counts = [line.split()[:3] for line in out[1:3]]
    assert counts == [["look_up", "ok", "14"], ["look_up", "error", "2"]]
    assert out[-1] == "8 rollouts, 24 model calls: a run.svg"
    picture = ElementTree.parse(tmp_path / "a run.svg").getroot()
    bars = [bar for bar in picture if bar.tag.endswith("rect") and len(bar)]
    assert len(bars) == 24 + 16 and {bar[0].text.split(",")[0] for bar in bars if bar[0].text} == {"model", "look_up"}
    assert {"#4c78a8", "#54a24b", "#f58518"} == {bar.get("fill") for bar in bars}
    labels = [text.text for text in picture if text.tag.endswith("text")]
    assert "xylem (completed)" in labels


def test_run_picture_of_no_run_and_of_one_rollout(tmp_path: Path) -> None:
    script = "import pathlib, run_picture\nrun_picture.asyncio.run(run_picture.make_run(pathlib.Path('.')))\n"
    (tmp_path / "make.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}", "KIMI_RAY_HOME": str(tmp_path / "no")}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    done = python(str(EXAMPLES / "run_picture.py"), "runs/zz")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("runs/zz cannot be read: ") and done.stderr.count("\n") == 1
    assert python("make.py").returncode == 0
    results = tmp_path / "run" / "results.jsonl"
    results.write_text(results.read_text().splitlines(keepends=True)[0])
    assert run("run_picture.py", "run", cwd=tmp_path).splitlines()[-1].startswith("1 rollout, ")


def test_all_examples_are_run_here() -> None:
    text = Path(__file__).read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in text]
    assert missing == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120
