"""``run``: one agent. ``doctor``: what is in the way. ``demo`` in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_ray.cli.app import run_command
from kimi_ray.runs import read_rows
from tests.unit.cli.conftest import Cli

ROOT = Path(__file__).parents[3]
BARE = ("--model", "scripted", "--profile", "bare")


def test_answer_on_stdout_and_the_rest_on_stderr(cli: Cli, place: Path) -> None:
    (place / "notes.md").write_text("# Notes\n\ntext\n")
    result = cli("run", "Review notes.md", "--model", "scripted")
    assert result.code == 0
    assert result.out == "notes.md: 3 lines, begins with: Notes\n"
    assert 'Read {"path":"notes.md"}' in result.err
    assert "session session_" in result.err


def test_run_as_json(cli: Cli, place: Path, home: Path) -> None:
    document = cli("run", "hello there", *BARE, "--json", "--title", "T", "--tag", "a=b").document
    assert document["state"] == document["stop"] == "completed"
    assert document["text"] == "A prompt of 2 words: hello there"
    assert document["home"] == str(home)
    assert Path(document["log"]).read_bytes().startswith(b'{"type":"log"')
    (listed,) = cli("sessions", "list", "--json").document["sessions"]
    assert listed["session_id"] == document["session_id"]
    assert listed["title"] == "T"
    assert listed["tags"] == {"a": "b"}


def test_a_session_goes_on(cli: Cli) -> None:
    first = cli("run", "one", *BARE, "--json").document
    second = cli("run", "two", "--session", "@last", "--json").document
    assert second["session_id"] == first["session_id"]
    assert (first["turn"], second["turn"]) == (0, 1)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--profile", "explore"),
        ("--system-prompt", "Be brief."),
        ("--workdir", "none"),
        ("--title", "T"),
        ("--tag", "a=b"),
    ],
)
def test_what_a_session_was_made_with_cannot_be_said_again(cli: Cli, flag: str, value: str) -> None:
    cli("run", "one", *BARE)
    refused = cli("run", "two", "--session", "@last", flag, value)
    assert refused.code == 2
    assert refused.err.startswith(f"error: {flag} cannot be said of a session that exists\ncode: request.conflict\n")


def test_interrupted(cli: Cli, place: Path, home: Path) -> None:
    """Ctrl-C cancels the prompt; the log says so, and the session can go on."""
    command = [sys.executable, "-m", "kimi_ray.cli", "run", "a long one", "--profile", "bare"]
    command += ["--model", "scripted:tests.unit.cli.test_swarm:slow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def hear_ctrl_c() -> None:  # what a shell starts with `&` is deaf to it, and so is what that starts
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        command, cwd=place, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    )
    try:
        ends = time.monotonic() + 30
        while not any("step/start" in path.read_text() for path in home.rglob("wire.jsonl")):
            assert time.monotonic() < ends, "it never began"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    (session,) = cli("sessions", "show", "@last", "--json").document["agents"]
    assert session["state"] == "cancelled"
    assert cli("run", "hello", "--session", "@last", "--model", "scripted", "--json").document["turn"] == 1


def test_limits_and_failures_are_exit_1(cli: Cli, place: Path) -> None:
    (place / "notes.md").write_text("text\n")
    limited = cli("run", "Review notes.md", "--model", "scripted", "--max-steps", 1)
    assert limited.code == 1
    assert "limit:max_steps" in limited.err
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (place / "config.toml").write_text(f'[models.away]\nbase_url = "http://127.0.0.1:{port}/v1"\nmax_attempts = 1\n')
    failed = cli("run", "hello", "--model", "away", "--json", "--home", place)
    assert failed.code == 1
    assert failed.document["error"]["code"] == "provider.connection"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "x"), "model.not_configured"),
        (("run", " ", *BARE), "prompt.empty"),
        (("run", "x", "--model", "scripted", "--session", "@last"), "store.not_found"),
        (("run", "x", "--model", "scripted", "--profile", "nobody"), "profile.unknown"),
        (("run", "x", *BARE, "--tools", "Nothing"), "tool.unknown"),
        (("run", "x", *BARE, "--workdir", "copy:/no/such"), "workdir.not_found"),
        (("run", "x", *BARE, "--max-steps", "0"), "request.out_of_range"),
        (("run", "x", *BARE, "--max-cost-usd", "1"), "limit.needs_price"),
        (("run", "@nowhere", *BARE), "request.unreadable_file"),
    ],
)
def test_bad_input_of_run(cli: Cli, place: Path, home: Path, arguments: tuple[str, ...], code: str) -> None:
    result = cli(*arguments)
    assert result.code == 2, result
    assert f"code: {code}\n" in result.err
    assert "hint: " in result.err
    assert os.listdir(place) == []
    assert not (home / "sessions").exists()


def test_demo_in_this_process(cli: Cli, home: Path, place: Path) -> None:
    for _ in range(2):
        document = cli("demo", "--in-process", "--json").document
        assert document["totals"]["completed"] == document["rollouts"] == 24
        rows = read_rows(document["run_dir"])
        assert all(row.tool_calls == 1 and row.text and row.item["file"] in row.text for row in rows)
    told = cli("demo", "--in-process", "--agents", 20)
    assert told.code == 0
    assert "20 rollouts: 20 completed" in told.out
    assert "results.jsonl" in told.out
    # The commands that it suggests are commands.
    suggested = [line.split() for line in told.out.splitlines() if " sessions tail " in line]
    words = suggested[0]
    assert run_command(words[words.index("sessions") :]) == 0
    assert os.listdir(place) == []


def test_doctor_says_how_to_mend(cli: Cli, place: Path, home: Path) -> None:
    result = cli("doctor", "--model", "scripted", "--json")
    assert result.code == 0
    found = {one["check"]: one for one in result.document["checks"]}
    assert {"python", "ray", "home", "file system", "disk", "open files", "model"} <= set(found)
    assert not home.exists()
    (place / "file").write_text("")
    broken = cli("doctor", "--home", place / "file" / "home", "--model", "nothing")
    assert broken.code == 1
    lines = broken.out.splitlines()
    failed = [at for at, line in enumerate(lines) if line.startswith("FAIL")]
    assert len(failed) == 2
    assert all("->" in lines[at + 1] for at in failed)


def test_doctor_shows_what_applies_to_agents_and_no_secret(cli: Cli, home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("""
permission_mode = "auto"
features = ["package.module:Weather"]
[[hooks]]
event = "PreToolUse"
matcher = "Bash"
command = "TOKEN=hidden-1 ./check.sh --key hidden-2"
env = { KEY = "hidden-3" }
[[hooks]]
event = "Stop"
matcher = "("
command = "notify"
[[permissions]]
tool = "Bash(rm *)"
decision = "deny"
[[permissions]]
tool = "Read"
decision = "ask"
[mcp_servers.search]
url = "https://hidden-4.example.com/mcp"
headers = { Authorization = "hidden-5" }
""")
    told = cli("doctor")
    lines = [" ".join(line.split()) for line in told.out.splitlines()]
    assert "OK hook PreToolUse (Bash): ./check.sh ..." in lines
    assert any(line.startswith("WARN hook Stop ((): notify (the matcher '('") for line in lines)
    assert "OK permissions mode auto; deny Bash(rm *); ask Read (auto: only the rules that deny count)" in lines
    assert any("MCP servers search" in line for line in lines)
    assert any(line.startswith("FAIL features the feature package.module:Weather cannot be") for line in lines)
    (home / "config.toml").write_text(
        (home / "config.toml").read_text().replace("package.module:Weather", "kimi_ray.features.todo:TodoFeature")
    )
    found = cli("doctor", "--json")
    settings = found.document["settings"]
    assert [(one["event"], one["matcher"]) for one in settings["hooks"]] == [("PreToolUse", "Bash"), ("Stop", "(")]
    assert settings["permissions"][0] == {"tool": "Bash(rm *)", "decision": "deny"}
    assert (settings["permission_mode"], settings["mcp_servers"]) == ("auto", ["search"])
    assert "hidden" not in told.out + told.err + found.out + found.err


def test_doctor_tells_an_mcp_server_without_its_program_and_a_model_of_the_users(cli: Cli, home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text("""
[models.lister]
provider = "scripted"
script = ["Done."]
[mcp_servers.bad]
command = ["there-is-no-such-program", "hidden-1"]
[mcp_servers.clock]
command = ["{python}", "clock.py"]
""")
    told = cli("doctor", "--model", "lister", "--json")
    checks = told.document["checks"]
    (bad,) = [one for one in checks if one["check"] == "MCP server"]
    assert bad["status"] == "WARN" and "bad: there is no program 'there-is-no-such-program'" in bad["detail"]
    assert "hidden" not in told.out
    (model,) = [one for one in checks if one["check"] == "model"]
    assert model["detail"] == "lister is a scripted model of the settings"
    (model,) = [
        one for one in cli("doctor", "--model", "scripted", "--json").document["checks"] if one["check"] == "model"
    ]
    assert model["detail"] == "scripted is built in"


def test_doctor_finds_and_removes_locks_of_the_dead(cli: Cli, home: Path) -> None:
    assert cli("run", "x", *BARE).code == 0
    stale = home / "writers" / "01ARZ3NDEKTSV4RRFFQ69G5FAV.lock"
    stale.write_text(json.dumps({"pid": 1, "host": "gone", "boot": ""}))
    found = {one["check"]: one for one in cli("doctor", "--json").document["checks"]}
    assert found["locks"]["status"] == "WARN"
    assert "--fix" in found["locks"]["fix"]
    assert stale.exists()
    assert cli("doctor", "--fix").code == 0
    assert not stale.exists()


def test_doctor_reaches_for_the_model(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = cli("doctor", "--model", "m", "--base-url", f"http://127.0.0.1:{port}/v1", "--json")
    assert result.code == 1
    model = next(one for one in result.document["checks"] if one["check"] == "model")
    assert model["status"] == "FAIL"
    assert "provider.connection" in model["detail"]


def test_commands_of_a_cluster_without_one(place: Path) -> None:
    """In processes of their own: this one may have a Ray, which they would look at."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kimi_ray.cli", *arguments],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert "no cluster" in command("status").stdout
    told = json.loads(command("status", "--json").stdout)
    assert told == {"address": None, "namespace": "kimi_ray", "runtimes": []}
    assert "no cluster" in command("down").stdout
    unreachable = command("status", "--address", "127.0.0.1:9")
    assert unreachable.returncode == 1
    assert "code: runtime.unreachable" in unreachable.stderr


def test_version_and_help(cli: Cli) -> None:
    version = cli("--version")
    assert version.code == 0
    assert version.out.startswith("kimi-ray ")
    assert cli().code == 2
    for command in (
        ("demo",), ("run",), ("swarm",), ("sessions", "list"), ("sessions", "show"), ("sessions", "tail"),
        ("doctor",), ("status",), ("down",), ("logs",), ("bench", "turns"),
    ):  # fmt: skip
        helped = cli(*command, "--help")
        assert helped.code == 0
        assert "--json" in helped.out, command
