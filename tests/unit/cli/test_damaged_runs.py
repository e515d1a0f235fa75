"""A run directory that somebody edited, damaged or mixed up: refused by name, and the rows stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_ray.runs import read_rows
from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_bad_input import refused


@pytest.fixture
def run(cli: Cli, place: Path) -> Path:
    (place / "items.txt").write_text("one\ntwo\n")
    arguments = ("--in-process", "--model", "scripted", "--profile", "bare", "--items", "items.txt", "--out", "run")
    assert cli("swarm", "Say {{item}}", *arguments).code == 0
    return place / "run"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("run_id", None, "run.corrupt"),
        ("run_id", 5, "run.corrupt"),
        ("run_id", "another", "run.mismatch"),
        ("seed", None, "run.corrupt"),
        ("seed", {"value": "x", "sent": True}, "run.corrupt"),
        ("config", None, "run.corrupt"),
        ("prompt", None, "run.corrupt"),
        ("arguments", [], "run.corrupt"),
        ("v", 99, "run.version_unsupported"),
    ],
)
def test_an_edited_manifest(cli: Cli, run: Path, name: str, value: object, code: str) -> None:
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**manifest, name: value}))
    rows = (run / "results.jsonl").read_bytes()
    refused(cli("swarm", "--resume", "run"), code)
    assert (run / "results.jsonl").read_bytes() == rows


@pytest.mark.parametrize(
    ("name", "code"), [("run_id", "run.not_resumable"), ("seed", "run.corrupt"), ("config", "run.not_resumable")]
)
def test_a_manifest_with_something_missing(cli: Cli, run: Path, name: str, code: str) -> None:
    manifest = json.loads((run / "run.json").read_text())
    del manifest[name]
    (run / "run.json").write_text(json.dumps(manifest))
    refused(cli("swarm", "--resume", "run"), code)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"[1]", b"[" * 100_000, b'{"run_id": NaN}'])
def test_a_manifest_that_is_none(cli: Cli, run: Path, content: bytes) -> None:
    (run / "run.json").write_bytes(content)
    refused(cli("swarm", "--resume", "run"), "run.corrupt", "run.json")


def test_a_row_of_another_run_is_not_taken_for_one_of_this(cli: Cli, run: Path) -> None:
    results = run / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    lines[1]["run_id"] = "another"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(cli("swarm", "--resume", "run"), "run.mismatch", "another")
    results.write_text(json.dumps(lines[0]) + "\n")
    assert cli("swarm", "--resume", "run").code == 0
    assert len({row.key for row in read_rows(run)}) == 2


@pytest.mark.parametrize("flag", ["--out", "--resume"])
@pytest.mark.parametrize("name", ["", " ", "x" * 300])
def test_a_name_that_no_directory_has(cli: Cli, place: Path, flag: str, name: str) -> None:
    (place / "items.txt").write_text("one\n")
    given = ("Say {{item}}", "--in-process", "--model", "scripted", "--profile", "bare", "--items", "items.txt")
    result = cli("swarm", *(given if flag == "--out" else ()), flag, name)
    assert result.code == 2, result
    assert "Traceback" not in result.err and "hint: " in result.err
    assert [path.name for path in place.iterdir()] == ["items.txt"]
