"""Bad input: a code, a hint, exit 2, and nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli, Result

SWARM = ("swarm", "Say {{item}}", "--in-process", "--model", "scripted", "--profile", "bare")


def refused(result: Result, code: str, *said: str) -> None:
    """Exit 2, an error on stderr with its code and a hint, no traceback, nothing on stdout."""
    assert result.code == 2, result
    assert result.out == ""
    assert f"code: {code}\n" in result.err, result.err
    assert "hint: " in result.err
    assert "Traceback" not in result.err
    for text in said:
        assert text in result.err, result.err


@pytest.fixture
def items(place: Path) -> Path:
    path = place / "items.jsonl"
    path.write_text("".join(json.dumps({"name": f"n{number}"}) + "\n" for number in range(3)))
    return path


def nothing_left(place: Path, home: Path, *expected: str) -> None:
    assert sorted(os.listdir(place)) == sorted(expected)
    assert not (home / "sessions").exists()


def test_missing_items_file(cli: Cli, place: Path, home: Path) -> None:
    refused(cli(*SWARM, "--items", "nowhere.jsonl"), "items.not_found", "nowhere.jsonl")
    nothing_left(place, home)


def test_empty_items_file(cli: Cli, place: Path, home: Path) -> None:
    (place / "items.txt").write_text("\n \n")
    refused(cli(*SWARM, "--items", "items.txt"), "items.empty")
    nothing_left(place, home, "items.txt")


def test_bad_json_in_line_7(cli: Cli, place: Path, home: Path) -> None:
    lines = ['{"item": 1}'] * 6 + ['{"item": }'] + ['{"item": 2}']
    (place / "items.jsonl").write_text("\n".join(lines))
    refused(cli(*SWARM, "--items", "items.jsonl"), "items.bad_json", "items.jsonl line 7")
    nothing_left(place, home, "items.jsonl")


def test_no_placeholder(cli: Cli, items: Path, place: Path, home: Path) -> None:
    result = cli("swarm", "Say hello", "--in-process", "--model", "scripted", "--items", items)
    refused(result, "swarm.no_placeholder")
    nothing_left(place, home, "items.jsonl")


def test_unknown_column(cli: Cli, items: Path, place: Path, home: Path) -> None:
    result = cli("swarm", "Say {{nme}}", "--in-process", "--model", "scripted", "--items", items)
    refused(result, "items.unknown_column", "nme", "its columns are name")
    nothing_left(place, home, "items.jsonl")


def test_equal_explicit_ids(cli: Cli, place: Path, home: Path) -> None:
    (place / "items.csv").write_text("id,text\na,1\nb,2\na,3\n")
    result = cli(
        "swarm", "{{text}}", "--in-process", "--model", "scripted", "--items", "items.csv", "--id-column", "id"
    )
    refused(result, "items.duplicate_id", "'a'")
    nothing_left(place, home, "items.csv")


def test_unknown_model(cli: Cli, items: Path, place: Path, home: Path) -> None:
    result = cli("swarm", "{{name}}", "--in-process", "--items", items, "--model", "gpt-nowhere")
    refused(result, "model.not_configured", "gpt-nowhere", "--base-url")
    nothing_left(place, home, "items.jsonl")


def test_no_model_at_all(cli: Cli, items: Path) -> None:
    refused(cli("swarm", "{{name}}", "--in-process", "--items", items), "model.not_configured")


def test_home_below_a_regular_file(cli: Cli, items: Path, place: Path) -> None:
    (place / "file").write_text("")
    result = cli(*SWARM, "--items", items, "--home", place / "file" / "home")
    refused(result, "store.home_not_writable", "file")
    assert sorted(os.listdir(place)) == ["file", "items.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_home_not_writable(cli: Cli, items: Path, place: Path) -> None:
    locked = place / "locked"
    locked.mkdir(mode=0o500)
    refused(cli(*SWARM, "--items", items, "--home", locked / "home"), "store.home_not_writable")


def test_existing_run_directory(cli: Cli, items: Path, place: Path) -> None:
    assert cli(*SWARM, "--items", items, "--out", "run").code == 0
    before = (place / "run" / "results.jsonl").read_bytes()
    refused(cli(*SWARM, "--items", items, "--out", "run"), "run.exists", "--resume")
    assert (place / "run" / "results.jsonl").read_bytes() == before


def test_changed_items_on_resume(cli: Cli, items: Path, place: Path) -> None:
    assert cli(*SWARM, "--items", items, "--out", "run").code == 0
    before = (place / "run" / "results.jsonl").read_bytes()
    items.write_text(items.read_text() + '{"name": "one more"}\n')
    refused(cli("swarm", "--resume", "run"), "run.mismatch", "items")
    assert (place / "run" / "results.jsonl").read_bytes() == before


def test_changed_prompt_on_resume(cli: Cli, items: Path) -> None:
    assert cli(*SWARM, "--items", items, "--out", "run").code == 0
    refused(cli("swarm", "Shout {{item}}", "--resume", "run"), "run.mismatch", "prompt")


def test_resume_of_nothing(cli: Cli, place: Path) -> None:
    refused(cli("swarm", "--resume", "nowhere"), "run.not_found")
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--repeats", "0"), "swarm.bad_repeats"),
        (("--max-concurrency", "0"), "swarm.bad_concurrency"),
        (("--limit", "0"), "items.bad_limit"),
        (("--filter", "name"), "items.bad_filter"),
        (("--fail-on", "many"), "swarm.bad_fail_on"),
        (("--tag", "alone"), "swarm.bad_tag"),
        (("--time-s", "-1"), "request.out_of_range"),
        (("--time-s", "nan"), "request.out_of_range"),
        (("--total-time-s", "inf"), "request.out_of_range"),
        (("--temperature", "nan"), "request.out_of_range"),
        (("--repeats", "1000000000"), "swarm.too_many"),
        (("--namespace", ""), "config.invalid"),
        (("--temperature", "-1"), "request.out_of_range"),
        (("--total-cost-usd", "5"), "limit.needs_price"),
        (("--on-interrupted", "maybe"), "request.bad_usage"),
        (("--isolation", "total"), "request.bad_usage"),
        (("--profile", "exploer"), "profile.unknown"),
        (("--tools", "Raed"), "tool.unknown"),
        (("--tools", "no.such.module:tool"), "tool.not_importable"),
        (("--workdir", "somewhere"), "workdir.invalid"),
        (("--workdir", "copy:/no/such/dir"), "workdir.not_found"),
        (("--workdir", "git:repo@main"), "workdir.not_found"),
        (("--address", "127.0.0.1:1"), "request.conflict"),
        (("--resume", "x", "--out", "y"), "request.conflict"),
        (("--retry", "tool"), "request.conflict"),
        (("--system-prompt", "@nowhere.txt"), "request.unreadable_file"),
    ],
)
def test_values_that_cannot_be(
    cli: Cli, items: Path, place: Path, home: Path, arguments: tuple[str, ...], code: str
) -> None:
    refused(cli(*SWARM, "--items", items, *arguments), code)
    nothing_left(place, home, "items.jsonl")


def test_shared_writes(cli: Cli, items: Path, place: Path, home: Path) -> None:
    arguments = ("swarm", "{{name}}", "--in-process", "--model", "scripted", "--items", items, "--tools", "Read,Write")
    refused(cli(*arguments), "swarm.shared_writes", "--allow-shared-writes")
    nothing_left(place, home, "items.jsonl")


def test_wrong_flag(cli: Cli) -> None:
    refused(cli("swarm", "--itmes", "x"), "request.bad_usage", "kimi-ray swarm --help")


def test_errors_as_json(cli: Cli) -> None:
    result = cli(*SWARM, "--items", "nowhere.jsonl", "--json")
    assert result.code == 2
    assert result.err == ""
    error = result.document["error"]
    assert error["code"] == "items.not_found"
    assert error["hint"]
    assert error["details"]["file"].endswith("nowhere.jsonl")


def test_usage_errors_as_json(cli: Cli) -> None:
    result = cli("sessions", "list", "--limit", "many", "--json")
    assert result.code == 2
    assert result.document["error"]["code"] == "request.bad_usage"


def test_a_file_as_run_directory(cli: Cli, items: Path, place: Path, home: Path) -> None:
    (place / "run").write_text("mine")
    refused(cli(*SWARM, "--items", items, "--out", "run"), "run.not_writable")
    assert (place / "run").read_text() == "mine"
    nothing_left(place, home, "items.jsonl", "run")


def test_prompt_missing(cli: Cli, items: Path) -> None:
    refused(cli("swarm", "--in-process", "--model", "scripted", "--items", items), "request.bad_usage", "no prompt")
    refused(cli("swarm", "{{item}}", "--in-process", "--model", "scripted"), "request.bad_usage", "no items")
    refused(cli("swarm", "@nowhere.md", "--items", items), "request.unreadable_file", "nowhere.md")
