"""``models list`` and ``models check`` as commands."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli

KNOWN = threading.Event()
"""A question was asked that gets no answer."""

CONFIG = """
default_model = "near"
[models.near]
base_url = "http://127.0.0.1:9/v1"
[models.far]
model = "vendor/far"
base_url = "https://models.example.com/v1"
api_key_env = "FAR_KEY"
[models.flaky]
provider = "chaos"
inner = "near"
[models.lost]
provider = "chaos"
inner = "nobody"
"""


@pytest.fixture
def configured(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text(CONFIG)


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._say({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 2048}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] == "stuck" and "tools" in body:
            KNOWN.set()
            self.server.stopping.wait(30)  # type: ignore[attr-defined]
        if body["model"] == "bad":
            self._say({"error": {"message": "who are you?"}}, 401)
            return
        message = {"role": "assistant", "content": "hello \x1b[31m there"}
        self._say({"id": "r", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _say(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    stopping = threading.Event()
    server.stopping = stopping  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    stopping.set()
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("configured")
def test_list_shows_every_table_and_what_it_lacks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli("models", "list", "--json")
    assert found.code == 0
    assert found.document["default"] == "near"
    rows = {row["name"]: row for row in found.document["models"]}
    assert list(rows) == ["far", "flaky", "lost", "near"]
    assert rows["near"]["is_default"]
    assert rows["far"]["error"]["code"] == "model.no_api_key"
    assert rows["lost"]["error"]["code"] == "model.not_configured"
    assert (rows["flaky"]["provider"], rows["flaky"]["base_urls"]) == ("chaos", ["http://127.0.0.1:9/v1"])
    monkeypatch.setenv("FAR_KEY", "sk-very-secret-1")
    told = cli("models", "list")
    assert "vendor/far" in told.out
    assert "FAR_KEY is set" in told.out
    assert "sk-very" not in told.out


def test_list_of_nothing_says_how_to_make_one(cli: Cli) -> None:
    found = cli("models", "list")
    assert (found.code, found.out) == (0, "")
    assert "[models.X]" in found.err


def test_check_prints_a_table_to_paste(cli: Cli, url: str) -> None:
    found = cli("models", "check", "tiny", "--base-url", url)
    assert found.code == 0, found.err
    assert "\x1b" not in found.out
    pasted = tomllib.loads(found.out.partition("For config.toml:")[2])
    assert pasted == {"models": {"tiny": {"base_url": url, "max_context_tokens": 2048}}}
    document = cli("models", "check", "tiny", "--base-url", url, "--json").document
    assert document["works"] is True
    assert tomllib.loads(document["table"]) == {"models": {"tiny": document["settings"]}}


def test_check_of_a_model_that_does_not_answer_is_exit_1_with_a_hint(cli: Cli, url: str) -> None:
    found = cli("models", "check", "bad", "--base-url", url)
    assert found.code == 1
    assert "401" in found.out
    assert "hint:" in found.out
    assert cli("models", "check", "bad", "--base-url", url, "--json").code == 1


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_check_tells_each_answer_as_it_is_known_and_an_interrupted_one_what_it_knows(
    place: Path, url: str, json_flag: tuple[str, ...]
) -> None:
    KNOWN.clear()
    command = [sys.executable, "-m", "kimi_ray.cli", "models", "check", "stuck", "--base-url", url, *json_flag]

    def hear_ctrl_c() -> None:  # what a shell starts with `&` is deaf to it, and so is what that starts
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        command, cwd=place, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    too_long = threading.Timer(30, process.kill)
    too_long.start()
    out, err = "", ""
    try:
        if json_flag:
            assert KNOWN.wait(30)
        else:
            while not err.endswith("asking: tools, 7 left\n"):
                err += (line := process.stderr.readline())
                assert line, err
            for _ in range(4):  # the head, the list, the chat, the stream: before any further answer
                out += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        more, rest = process.communicate(timeout=20)
    finally:
        too_long.cancel()
        process.kill()
    out, err = out + more, err + rest
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if json_flag:
        document = json.loads(out)
        assert document["error"]["code"] == "interrupted"
        assert [one["name"] for one in document["findings"]] == ["model list", "chat", "stream"]
    else:
        assert [line.split("  ")[0] for line in out.splitlines()] == ["question", "model list", "chat", "stream"]
        assert "interrupted while asking: tools, 7 not asked" in err


def test_check_of_models_without_a_server(cli: Cli) -> None:
    found = cli("models", "check", "chaos")
    assert found.err.startswith("asking chaos, which spoils the answers of scripted\n")
    assert [line.split()[0] for line in found.out.splitlines()[:3]] == ["question", "chat", "stream"]
    rows = {one["name"]: one for one in cli("models", "check", "scripted", "--json").document["findings"]}
    assert rows["chat"]["verdict"] == "yes" and "Say hello" in rows["chat"]["told"]
    assert "asking scripted, a script without a server\n" in cli("models", "check", "scripted").err


def test_check_of_a_model_that_nobody_knows_is_bad_usage(cli: Cli) -> None:
    found = cli("models", "check", "nobody", "--json")
    assert found.code == 2
    assert found.document["error"]["code"] == "model.not_configured"


def test_a_chaos_table_is_a_model_for_a_run(cli: Cli, home: Path) -> None:
    home.mkdir()
    table = '[models.storm]\nprovider = "chaos"\nretry_base_s = 0.01\n[models.storm.chaos]\nserver_error = 0.5\n'
    (home / "config.toml").write_text(table)
    found = cli("run", "hello", "--model", "storm", "--json")
    assert found.code == 0, (found.out, found.err)
    (home / "config.toml").write_text(table.replace("0.5", "1.5"))
    found = cli("run", "hello", "--model", "storm", "--json")
    assert (found.code, found.document["error"]["code"]) == (2, "config.invalid")
