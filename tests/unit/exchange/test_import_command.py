"""``kimi-ray import dsh``: one document, exit codes, tables, and nothing but reading in a dry run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.cli.app import run_command
from tests.unit.exchange.conftest import FIXTURES
from tests.unit.exchange.dsh_writer import Log, batched, compressed, crashed, header, plain, put

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KIMI_RAY_DURABILITY", "none")

    def command(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return command


def test_a_dry_run_is_one_document(run: Run, tmp_path: Path) -> None:
    code, out, err = run("import", "dsh", FIXTURES / "jsonl-none-crash-kill-after-flush", "--dry-run", "--json")
    assert (code, err) == (0, "") and out.count("\n") == 1
    assert json.loads(out) == {
        "sessions": [
            {
                "id": "crash",
                "header": header("crash"),
                "stored": 57,
                "after_repair": 61,
                "repairs": ["tool/result", "tool/result", "step/end", "turn/end"],
                "error": None,
            }
        ]
    }
    assert not (tmp_path / "home").exists()


def test_a_dry_run_of_refused_sessions(run: Run) -> None:
    code, out, _ = run("import", "dsh", FIXTURES / "jsonl-none-future-version", "--dry-run", "--json")
    (session,) = json.loads(out)["sessions"]
    assert code == 0 and session["error"]["class"] == "unsupported" and session["stored"] is None
    assert session["header"]["version"] == 1 and session["repairs"] == []
    code, out, _ = run("import", "dsh", FIXTURES / "jsonl-none-empty", "--dry-run")
    assert code == 0 and "corrupt: empty or header-less session log" in out


def test_an_import_as_a_document(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    put(root, header("good"), plain(header("good"), crashed()))
    put(root, header("bad"), compressed(header("bad"), batched(crashed()))[:50])
    code, out, err = run("import", "dsh", root, "--json")
    assert code == 1 and err == ""
    document = json.loads(out)
    bad, good = sorted(document["sessions"], key=lambda one: one["id"])
    assert document["home"] == str(tmp_path / "home")
    assert (bad["outcome"], bad["imported"], bad["error"]["class"]) == ("refused", None, "corrupt")
    assert good["outcome"] == "imported" and good["error"] is None
    events = len(crashed()) + 4
    assert good["imported"] == {"session_id": "good", "agent_id": "main", "events": events, "conversions": {}}
    code, out, _ = run("sessions", "list", "--json")
    assert code == 0 and [one["session_id"] for one in json.loads(out)["sessions"]] == ["good"]


def test_an_import_for_people(run: Run, tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.add("x/new", {"half": "\ud83d\x1b[31m"}, ignorable=True)
    log.end()
    put(tmp_path / "root", header("one"), plain(header("one"), log.events))
    code, out, err = run("import", "dsh", tmp_path / "root")
    assert code == 0 and "imported" in out and "1 lone_surrogate" in out and "1 imported" in err
    code, out, err = run("import", "dsh", tmp_path / "root")
    assert code == 0 and "unchanged" in out
    for arguments in (("show", "one"), ("tail", "one"), ("tail", "one", "--full"), ("show", "one", "--json")):
        code, out, err = run("sessions", *arguments)
        assert code == 0 and "\x1b" not in out, (arguments, err)
    assert json.loads(out)["agents"][0]["turns"] == 1


def test_another_session_of_the_same_id_is_told_from_a_changed_one(run: Run, tmp_path: Path) -> None:
    first = put(tmp_path / "one", header("same"), plain(header("same"), crashed()))
    file = put(tmp_path / "two", header("same"), plain(header("same"), crashed()[:20]))
    long = header("x" * 200)
    put(tmp_path / "two", long, plain(long, crashed()))
    assert run("import", "dsh", tmp_path / "one")[0] == 0
    _, out, _ = run("import", "dsh", tmp_path / "two")
    assert "changed" in out and f"came from {tmp_path}/one/" in out and "--home OTHER" in out
    assert "x" * 100 not in out, "an id may be of any length, a column may not"
    assert run("import", "dsh", file, "--home", tmp_path / "other")[0] == 0
    first.write_bytes(file.read_bytes())
    _, out, _ = run("import", "dsh", tmp_path / "one")
    assert "the source has changed since it was imported" in out


def test_what_is_shown_of_every_fixture(run: Run) -> None:
    for root in ("jsonl-none-full", "sqlite-crash-kill-after-flush"):
        assert run("import", "dsh", FIXTURES / root)[0] == 0
    for session, turns in (("full", 2), ("child", 1), ("crash", 2)):  # of a fork, what it did itself
        code, out, _ = run("sessions", "show", session, "--json")
        (agent,) = json.loads(out)["agents"]
        assert code == 0 and agent["turns"] == turns
        assert agent["state"] == ("interrupted" if session == "crash" else "completed")
        code, out, _ = run("sessions", "tail", session, "-n", "100", "--json")
        assert code == 0 and [json.loads(line)["seq"] for line in out.splitlines()] == list(range(agent["events"]))


@pytest.mark.parametrize(("path", "code"), [("none", "import.not_found"), ("", "import.nothing_found")])
def test_nothing_to_import(run: Run, tmp_path: Path, path: str, code: str) -> None:
    (tmp_path / "empty").mkdir()
    place = tmp_path / "empty" / path
    for flags in ((), ("--dry-run",)):
        exit_code, out, _ = run("import", "dsh", place, "--json", *flags)
        assert exit_code == 2 and json.loads(out)["error"]["code"] == code


def test_ids_that_no_terminal_and_no_document_can_hold(run: Run, tmp_path: Path) -> None:
    head = header("a\ud800\x1b")
    data = plain(head, crashed())
    file = tmp_path / "log.jsonl"
    file.write_bytes(data)
    code, out, _ = run("import", "dsh", file, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["sessions"][0]["id"] == "a\ufffd\x1b"
    for flags in (("--dry-run",), ()):
        code, out, err = run("import", "dsh", file, *flags)
        assert code == 0 and "\x1b" not in out + err


def test_times_that_no_calendar_has(run: Run, tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.user("hello")
    log.end()
    for event, time in zip(log.events, (2**53 - 1, -(2**53) + 1, 2**53 - 1), strict=True):
        event["time"] = time
    head = header("far", createdAt=2**53 - 1)
    put(tmp_path / "root", head, plain(head, log.events))
    assert run("import", "dsh", tmp_path / "root")[0] == 0
    for arguments in (("list",), ("show", "far"), ("tail", "far")):
        code, out, err = run("sessions", *arguments)
        assert code == 0 and "Traceback" not in err, (arguments, err)
    assert "hello" in out and "-90071992547" in out


def test_usage(run: Run) -> None:
    assert run("import")[0] == 2
    code, out, _ = run("import", "--help")
    assert code == 0 and "dsh" in out
    document: dict[str, Any] = json.loads(run("import", "other", "--json")[1])
    assert document["error"]["code"] == "request.bad_usage"
