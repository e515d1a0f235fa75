"""Rollout functions and MCP servers on real actors: code by value and by name, a killed host, servers that end too."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.actors import down
from kimi_ray.config import RuntimeConfig
from tests.actors.test_processes import ROOT

DRIVER = """
import asyncio, importlib, json, os, signal, sys, time
from kimi_ray import KimiRayError, Runtime, Workdir
from tests.actors.fault_models import ECHO

settings = json.loads(sys.argv[1])
FACTOR = 3  # a global of __main__: it goes along by value

def marked(name):
    path = os.path.join(settings["home"], "marks", name)
    there = os.path.exists(path)
    open(path, "a").close()
    return there

async def rollout(ctx):
    ctx.score("attempt", ctx.attempt)
    if ctx.item == "poison" and not marked("killed"):
        await ctx.agent.ask("before the end")
        os.kill(os.getpid(), signal.SIGKILL)
    said = await ctx.agent.ask(f"hello {ctx.item}")
    return {"pid": os.getpid(), "text": said.text, "factor": FACTOR, "attempt": ctx.attempt}

def blocking(ctx):
    time.sleep(0.05)
    return ctx.run(ctx.agent.ask("plain")).text

async def main():
    told = {"driver": os.getpid()}
    os.makedirs(os.path.join(settings["home"], "marks"))
    async with Runtime.connect(config=settings) as runtime:
        session = await runtime.workspace(settings["home"]).create_session(model=ECHO, profile="bare")
        report = await session.swarm(None, ["a", "poison", "b"], rollout=rollout, profile="bare", seed=1)
        told["rows"] = [row.model_dump(mode="json") for row in report.rows]
        report = await session.swarm(None, ["a"], rollout=blocking, profile="bare")
        told["plain"] = report.rows[0].model_dump(mode="json")
        sys.path.insert(0, os.path.join(settings["home"], "only here"))
        try:
            await session.swarm(None, ["a"], rollout="only_in_the_driver:rollout", profile="bare")
        except KimiRayError as error:
            told["refused"] = error.to_data()
        helper = await runtime.workspace(settings["home"]).create_session(
            model="scripted:tests.actors.test_rollouts_on_ray:asks", profile="bare", tools=["mcp__t__*"]
        )
        result = await (await helper.main.submit("who")).result(60)
        told["server"] = result.text
    print(json.dumps(told), flush=True)

asyncio.run(main())
"""


def asks(request: Any) -> Any:
    """A model that asks the server who it is."""
    from kimi_ray.llm import Step

    last = request.messages[-1]["content"][0]
    if last["type"] == "tool-result":
        return last["content"][0]["text"]
    return Step.call("mcp__t__whoami", {})


@pytest.fixture
def settings(config: RuntimeConfig, local_ray: str) -> Iterator[dict[str, Any]]:
    names = ("home", "namespace", "hosts_per_node", "close_timeout_s", "claim_timeout_s")
    Path(config.home).mkdir(parents=True)
    server = [sys.executable, str(ROOT / "tests" / "fixtures" / "mcp_server.py")]
    yield {name: getattr(config, name) for name in names} | {
        "address": local_ray,
        "mcp_servers": {"t": {"command": server}},
    }
    down(config)


async def test_rollout_functions_and_servers(settings: dict[str, Any]) -> None:
    only = Path(settings["home"], "only here")
    only.mkdir()
    (only / "only_in_the_driver.py").write_text("async def rollout(ctx):\n    return 1\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, json.dumps(settings),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(110):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    rows = {row["item"]: row for row in told["rows"]}
    assert [row["status"] for row in rows.values()] == ["completed"] * 3, rows
    poison = rows["poison"]
    assert poison["attempt"] == 2 and poison["output"]["attempt"] == 2 and poison["scores"] == {"attempt": 2}
    assert [one["status"] for one in poison["attempts"]] == ["failed", "completed"]
    assert poison["attempts"][0]["error"]["code"] == "turn.interrupted"
    assert all(row["output"]["factor"] == 3 and row["output"]["pid"] != told["driver"] for row in rows.values())
    assert told["plain"]["status"] == "completed" and told["plain"]["output"] == told["plain"]["text"] != ""
    assert told["refused"]["code"] == "tool.not_importable" and "only_in_the_driver" in told["refused"]["message"]
    pid, cwd = told["server"].split()[:2]
    assert cwd == settings["home"]
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.05)
