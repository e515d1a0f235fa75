"""A key goes to the model's server, and nowhere else: not to the disk, the terminal, or Ray."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.actors.test_processes import ROOT

PROGRAM = """
import asyncio, json, os, signal, sys
from pathlib import Path
import ray
from kimi_ray import Limits, Profile, Runtime

home, url, run, shown = sys.argv[1:]
models = {
    "m": {"base_url": url, "max_attempts": 2, "extra_headers": {"x-team": os.environ.pop("TEAM_SECRET")}},
    # Only children speak to this one, which their callers bring to life with what came along for it.
    "n": {"base_url": url, "max_attempts": 2, "api_key_env": "OTHER_KEY", "extra_headers": {"x-team": "other"}},
}
CALLER = Profile(name="caller", system_prompt="You ask.", tools=("Agent",), subagents=("bare",))
PROFILE = Profile(name="p", system_prompt="You answer.", tools=())

def show_all_that_ray_knows():
    # What Ray's state API shows, from where it has it.
    gcs = ray._private.state.state._connect_and_get_accessor()
    parts = [*gcs.get_actor_table(None, None), *gcs.get_task_events(), *gcs.get_job_table(), *gcs.get_worker_table()]
    parts += [str(node).encode() for node in gcs.get_node_table()]
    client = ray._private.worker.global_worker.gcs_client
    for space in (None, b"fun", b"serve", b"dashboard", b"session", b"cluster", b"job"):
        for key in client.internal_kv_keys(b"", space):
            parts += [key, client.internal_kv_get(key, space) or b""]
    Path(shown).write_bytes(b" ".join(parts))

async def main():
    async with Runtime.connect(home, config={"models": models, "default_model": "m", "hosts_per_node": 1}) as runtime:
        session = await runtime.workspace(".").create_session(profile="bare", system_prompt="You answer.")
        items = ["fine", "no entry", "broken", "cut"] + [f"n{n}" for n in range(8)]
        report = await session.swarm("say {{item}}", items, profile=PROFILE, out=run)
        print(report, runtime.config, runtime.resolve_model("m"), session.main, sep="\\n")
        result = await (await session.main.submit("no entry")).result(30)
        print(result)
        asking = await runtime.workspace(".").create_session(profile=CALLER)
        print(await (await asking.main.submit("hand on")).result(30))
        print(repr(runtime.models.reachable()), asking._link.spec, sep="\\n")
        told = await runtime.connection.registry.call("status", timeout_s=10)
        for host in told["hosts"]:
            if host["kind"] == "agents":
                os.kill(host["pid"], signal.SIGKILL)
        again = await session.swarm("say {{item}}", ["fine", "cut"], profile=PROFILE)
        print(await (await asking.main.submit("hand on")).result(60))
        handed = [e.data async for e in asking.main.events() if e.type in ("subagent/completed", "subagent/failed")]
        for host in (await runtime.connection.registry.call("status", timeout_s=10))["hosts"]:
            print(await runtime.connection.cluster.peer(host["name"]).call("ping", timeout_s=10, group="control"))
        print(again, await session.metadata(), told, sep="\\n")
        show_all_that_ray_knows()
        print(json.dumps({
            "totals": report.totals,
            "codes": sorted({row.error.code for row in report.rows if row.error}),
            "again": again.totals,
            "handed": [data.get("status", "failed") for data in handed],
            "session_dir": ray._private.worker.global_worker.node.get_session_dir_path(),
        }))

asyncio.run(main())
"""


class Server(ThreadingHTTPServer):
    """Speaks Chat Completions; errors repeat the key that they were sent, as some servers do."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.keys: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = str(asked["messages"][-1]["content"])
        sent = f"{self.headers['authorization']} {self.headers['x-team']}"
        self.server.keys.add(sent)
        if text == "hand on":
            calls = [
                {"index": n, "id": f"c{n}", "type": "function", "function": {"name": "Agent", "arguments": json.dumps(
                    {"prompt": prompt, "description": "a task", "subagent_type": "bare", "model": "n"}
                )}}
                for n, prompt in enumerate(["no entry", "what a child can do at length " * 10])
            ]  # fmt: skip
            self._answer(({"role": "assistant", "tool_calls": calls}, None), ({}, "tool_calls"))
        elif "no entry" in text:
            self._send(401, {"error": {"message": f"Incorrect API key provided: {sent}", "code": sent}})
        elif "broken" in text:
            self._send(500, {"error": {"message": f"while serving {sent}"}, "headers": dict(self.headers)})
        elif "cut" in text:
            self._start(200, "text/event-stream")
            self.wfile.write(f"data: {{broken {sent}\n\n".encode())
        else:
            self._answer(({"role": "assistant", "content": "did it " * 40}, None), ({}, "stop"))

    def _answer(self, *deltas: tuple[dict[str, Any], str | None]) -> None:
        self._start(200, "text/event-stream")
        for delta, finish in deltas:
            chunk = {
                "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m",
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            }  # fmt: skip
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, body: Any) -> None:
        self._start(status, "application/json")
        self.wfile.write(json.dumps(body).encode())

    def _start(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def holding(root: Path, needles: list[bytes]) -> list[str]:
    """The files below ``root`` that hold one of the needles."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                found += [str(path) for needle in needles if needle in data]
    return found


def test_the_key_is_nowhere(server: Server, tmp_path: Path) -> None:
    # Neither looks like a key: no pattern would find it.
    key, team = f"quiet.{secrets.token_hex(12)}", f"team {secrets.token_hex(12)}"
    other = f"calm.{secrets.token_hex(12)}"
    shown = tmp_path / "shown"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "home", f"http://127.0.0.1:{server.server_port}/v1",
         tmp_path / "run", shown],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=110, check=False,
        env={**environment, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": key, "TEAM_SECRET": team, "OTHER_KEY": other},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout.splitlines()[-1])
    assert server.keys == {f"Bearer {key} {team}", f"Bearer {other} other"}
    assert sorted(told["handed"]) == ["completed", "completed", "failed", "failed"]
    assert told["totals"]["completed"] == 9 and told["totals"]["failed"] == 3, told
    assert told["again"]["completed"] == 1
    needles = [key.encode(), team.encode(), team.split()[1].encode(), other.encode()]
    ray_dir = Path(told["session_dir"])
    assert len(list(ray_dir.glob("logs/*"))) > 5
    assert (tmp_path / "run" / "run.json").exists() and shown.stat().st_size > 2000
    assert b"PersistenceActor" in shown.read_bytes()
    for needle in needles:
        for text in (done.stdout, done.stderr):
            at = text.find(needle)
            assert at < 0, text[max(0, at - 300) : at + 80]
    assert holding(tmp_path, needles) == []
    assert holding(ray_dir, needles) == []
