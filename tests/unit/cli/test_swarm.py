"""``swarm``: rows, the final document, resume, dry runs, interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kimi_ray.cli.swarm_arguments import SwarmArguments
from kimi_ray.cli.swarm_course import Interrupts, run_swarm
from kimi_ray.cli.swarm_plan import make_work
from kimi_ray.llm import ChatRequest, Step
from kimi_ray.runs import read_attempts, read_manifest, read_rows
from tests.unit.cli.conftest import Cli

ROOT = Path(__file__).parents[3]
HERE = "scripted:tests.unit.cli.test_swarm"
BARE = ("--in-process", "--profile", "bare")


def shaky(request: ChatRequest) -> Step:
    """Refuses what says `bad` until there is a file named `well`."""
    text = request.messages[-1]["content"][0]["text"]
    if "bad" in text and not os.path.exists(os.environ.get("KIMI_RAY_TEST_WELL", "well")):
        return Step.error("context.overflow", 400)
    return Step(text=f"fine: {text}")


async def slow(request: ChatRequest) -> Step:
    """Takes a while, and longer for what says `long`."""
    text = request.messages[-1]["content"][0]["text"]
    await asyncio.sleep(30 if "long" in text else 0.3)
    return Step(text=f"done: {text}")


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def items(place: Path) -> Path:
    path = place / "items.txt"
    path.write_text("".join(f"good {number}\n" for number in range(4)) + "bad 4\n")
    return path


def test_rows_and_final_document(cli: Cli, items: Path, place: Path, home: Path) -> None:
    result = cli(
        "swarm", "Say {{item}}", *BARE, "--items", items, "--model", f"{HERE}:shaky", "--out", "run",
        "--tag", "who=me", "--json", "--repeats", 2, "--seed", 7,
    )  # fmt: skip
    assert result.code == 1
    document = result.document
    assert document["totals"] == {"completed": 8, "limit": 0, "failed": 2, "cancelled": 0, "not_started": 0}
    assert document["ok"] is False
    assert document["interrupted"] is False
    assert document["rollouts"] == 10
    assert document["kept"] == 0
    assert document["home"] == str(home)
    assert document["run_dir"] == str(place / "run")
    assert document["usage"]["output"] > 0
    rows = read_rows(place / "run")
    assert len({row.key for row in rows}) == 10
    assert len({row.seed for row in rows}) == 10
    assert all(row.tags == {"who": "me"} for row in rows)
    assert {row.error.code for row in rows if row.error} == {"context.overflow"}
    assert "bad 4" not in result.out
    assert "failed: context.overflow" in result.err
    manifest = read_manifest(place / "run")
    assert manifest["run_id"] == document["run_id"]
    assert manifest["arguments"]["items"] == str(items)
    assert manifest["seed"] == {"value": 7, "sent": True}


def test_resume_does_what_is_missing(cli: Cli, items: Path, place: Path) -> None:
    arguments = ("swarm", "Say {{item}}", *BARE, "--items", "items.txt", "--model", f"{HERE}:shaky", "--out", "run")
    assert cli(*arguments).code == 1
    seeds = {row.key: row.seed for row in read_rows(place / "run")}
    # A failure of class model_output is not run again by itself: nothing is to be done, and the end is the same.
    again = cli("swarm", "--resume", "run", "--json")
    assert again.code == 1
    assert again.document["kept"] == 5
    (place / "well").touch()
    mended = cli("swarm", "--resume", "run", "--retry", "model_output", "--json")
    rows = read_rows(place / "run")
    assert mended.code == 0, mended
    assert mended.document["kept"] == 4
    assert len(rows) == len({row.key for row in rows}) == 5
    assert [row.attempt for row in rows if row.text == "fine: Say bad 4"] == [2]
    assert all(row.seed == seeds[row.key] for row in rows if row.attempt == 1)
    assert len(read_attempts(place / "run")) == 6


def test_resume_from_another_directory(
    cli: Cli, items: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("swarm", "Say {{item}}", *BARE, "--items", "items.txt", "--model", f"{HERE}:shaky", "--out", "run")
    assert cli(*arguments).code == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path / "another home"))
    (place / "well").touch()
    monkeypatch.setenv("KIMI_RAY_TEST_WELL", str(place / "well"))
    result = cli("swarm", "--resume", place / "run", "--retry", "model_output", "--json")
    assert result.document["kept"] == 4
    assert result.document["home"] == str(tmp_path / "a home")
    assert not (tmp_path / "another home").exists()


def test_default_run_directory_and_table(cli: Cli, place: Path) -> None:
    (place / "items.csv").write_text("id,word\na,one\nb,two\n")
    result = cli("swarm", "Say {{word}}", *BARE, "--items", "items.csv", "--id-column", "id", "--model", "scripted")
    assert result.code == 0, result
    (run,) = (place / "runs").iterdir()
    assert run.name.endswith("-say")
    assert {row["item_id"] for row in rows_of(run)} == {"a", "b"}
    assert "2 rollouts: 2 completed" in result.out
    assert str(run) in result.out
    assert "2/2 done" in result.err


def test_two_commands_in_one_second(items: Path, place: Path) -> None:
    """The same prompt at the same time gives the same default name: the second to come takes another."""
    said = SwarmArguments(
        prompt="Say {{item}}", items=str(items), model="scripted", profile="bare", address="in-process"
    )
    first, second = (make_work(said, out=None, resume=None) for _ in range(2))
    while first.out != second.out:
        first, second = (make_work(said, out=None, resume=None) for _ in range(2))

    async def both() -> None:
        ended = await asyncio.gather(*(run_swarm(w, quiet=True, interrupts=Interrupts()) for w in (first, second)))
        assert len({one.report.run_dir for one in ended}) == 2
        assert all(one.report.ok for one in ended)

    asyncio.run(both())
    assert len(list((place / "runs").iterdir())) == 2


def test_prompt_from_a_file(cli: Cli, items: Path, place: Path) -> None:
    (place / "prompt.md").write_text("Please say {{item}}\n")
    result = cli("swarm", "@prompt.md", *BARE, "--items", items, "--model", f"{HERE}:shaky", "--limit", 1, "--out", "r")
    assert result.code == 0
    assert rows_of(place / "r")[0]["text"] == "fine: Please say good 0"


def test_selection(cli: Cli, items: Path, place: Path) -> None:
    result = cli(
        "swarm", "{{item}}", *BARE, "--items", items, "--model", f"{HERE}:shaky", "--out", "run",
        "--filter", "item!=bad 4", "--shuffle", 3, "--limit", 2,
    )  # fmt: skip
    assert result.code == 0
    assert len(rows_of(place / "run")) == 2


def test_dry_run_starts_nothing(cli: Cli, items: Path, place: Path, home: Path) -> None:
    result = cli("swarm", "Say {{item}}", *BARE, "--items", items, "--model", "scripted", "--repeats", 3, "--dry-run")
    assert result.code == 0
    assert "Say good 0" in result.out
    assert "requests_at_least  15" in result.out
    document = cli("swarm", "Say {{item}}", "--items", items, "--model", "scripted", "--dry-run", "--json").document
    assert document["rollouts"] == 5
    assert document["tools"] == ["Read", "Glob", "Grep"]
    assert [one["prompt"] for one in document["prompts"]] == ["Say good 0", "Say good 1", "Say good 2"]
    assert sorted(os.listdir(place)) == ["items.txt"]
    assert not home.exists()


class Server:
    """A model server: `models` and `chat` are what it answers to the two addresses, status and body."""

    def __init__(self) -> None:
        self.models: tuple[int, dict[str, Any]] = (200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
        self.chat = 200
        self.seen: list[tuple[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.seen.append((self.path, self.headers.get("authorization", "")))
                self.reply(outer.models[0], json.dumps(outer.models[1]), "application/json")

            def do_POST(self) -> None:
                outer.seen.append((self.path, self.headers.get("authorization", "")))
                self.rfile.read(int(self.headers["content-length"]))
                delta = {"id": "r", "model": "m-1", "choices": [{"index": 0, "delta": {"content": "yes"}}]}
                last = {"id": "r", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
                usage = {"id": "r", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
                body = "".join(f"data: {json.dumps(part)}\n\n" for part in (delta, last, usage)) + "data: [DONE]\n\n"
                if outer.chat != 200:
                    body = json.dumps({"error": {"message": "no"}})
                self.reply(outer.chat, body, "text/event-stream" if outer.chat == 200 else "application/json")

            def reply(self, status: int, body: str, kind: str) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def requests(self) -> int:
        return sum(path.endswith("/chat/completions") for path, _ in self.seen)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_real_server_and_the_key_is_nowhere(
    cli: Cli, items: Path, place: Path, home: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-test-0123456789")
    arguments = ("swarm", "{{item}}", *BARE, "--items", items, "--model", "m", "--base-url", server.url, "--out", "run")
    result = cli(*arguments)
    assert result.code == 0, result
    assert server.requests() == 5  # 5 items that need one sentence are exactly 5 requests
    assert all(sent == "Bearer key-of-the-test-0123456789" for _, sent in server.seen)
    rows = read_rows(place / "run")
    assert [(row.text, row.usage.input, row.usage.output, row.model.served) for row in rows] == [
        ("yes", 3, 1, "m-1")
    ] * 5
    assert read_manifest(place / "run")["served_models"] == ["m"]
    texts = [path.read_bytes() for top in (place, home) for path in top.rglob("*") if path.is_file()]
    assert len(texts) > 10
    assert all(b"key-of-the-test" not in text for text in texts)
    assert "key-of-the-test" not in result.out + result.err


def test_nobody_at_the_address(cli: Cli, items: Path, place: Path, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    for command in (("swarm", "{{item}}", *BARE, "--items", items), ("run", "hello", "--profile", "bare")):
        result = cli(*command, "--model", "m", "--base-url", url)
        assert result.code == 1
        assert "code: provider.connection\n" in result.err
        assert "hint: " in result.err
        assert url in result.err
    assert sorted(os.listdir(place)) == ["items.txt"]
    assert not (home / "sessions").exists()


def test_a_wrong_key(cli: Cli, items: Path, place: Path, home: Path, server: Server) -> None:
    server.models = (401, {"error": {"message": "who are you?"}})
    result = cli("swarm", "{{item}}", *BARE, "--items", items, "--model", "m", "--base-url", server.url)
    assert result.code == 1
    assert "code: provider.auth\n" in result.err
    assert "hint: " in result.err
    assert server.requests() == 0
    assert sorted(os.listdir(place)) == ["items.txt"]
    assert not (home / "sessions").exists()


def test_a_wrong_key_that_only_requests_tell(cli: Cli, items: Path, place: Path, server: Server) -> None:
    """A server without a list of models is no reason to stop; what its answers say is in the rows."""
    server.models, server.chat = (404, {}), 401
    result = cli("swarm", "{{item}}", *BARE, "--items", items, "--model", "m", "--base-url", server.url, "--out", "run")
    assert result.code == 1
    rows = read_rows(place / "run")
    assert {(row.error.code, row.error.error_class) for row in rows if row.error} == {("provider.auth", "auth")}
    assert server.requests() == 5
    assert read_manifest(place / "run")["served_models"] is None


def started(place: Path, items: str, *arguments: str) -> subprocess.Popen[str]:
    (place / "items.txt").write_text(items)
    command = [sys.executable, "-m", "kimi_ray.cli", "swarm", "{{item}}", *BARE, "--items", "items.txt"]
    command += ["--model", f"{HERE}:slow", "--out", "run", "--json", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until_rows(place: Path, count: int) -> None:
    ends = time.monotonic() + 30
    path = place / "run" / "results.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < ends, "no row came"
        time.sleep(0.05)


def test_one_interrupt_lets_running_rollouts_end(place: Path) -> None:
    process = started(place, "".join(f"short {n}\n" for n in range(40)), "--max-concurrency", "2")
    try:
        until_rows(place, 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"] is True
    assert document["totals"]["cancelled"] == document["totals"]["failed"] == 0
    assert 1 <= document["totals"]["completed"] < 40
    assert document["totals"]["completed"] + document["totals"]["not_started"] == 40
    assert len(rows_of(place / "run")) == 40
    assert "nothing new starts" in err


def test_two_interrupts_leave_at_once(place: Path) -> None:
    process = started(place, "short\nlong 1\nlong 2\nnever\n", "--max-concurrency", "2")
    try:
        until_rows(place, 1)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals of one kind at once are one
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert time.monotonic() - began < 12
    assert [row["text"] for row in rows_of(place / "run") if row["status"] == "completed"] == ["done: short"]
