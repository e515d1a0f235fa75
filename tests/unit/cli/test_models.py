"""``models list`` and ``models check`` as commands."""

from __future__ import annotations

import http.server
import json
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli

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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
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
