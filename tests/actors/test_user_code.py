"""The user's code on warm hosts: who changed a tool gets the new one, and what cannot be imported is named."""

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
from tests.actors.faults import read_session
from tests.actors.test_processes import ROOT

TOOL = """
from kimi_ray import tool
from my_words import WORD

@tool
async def look(what: str) -> str:
    '''Look at something.'''
    return f"{WORD} {what}"
"""
DRIVER = """
import asyncio, importlib, json, sys
from kimi_ray import KimiRayError, Profile, Runtime, Workdir
from tests.actors.fault_models import ONE_TOOL

settings, module = json.loads(sys.argv[1]), importlib.import_module(sys.argv[2])
PROFILE = Profile(name="looker", system_prompt="You look at things.")

async def main():
    told = {}
    async with Runtime.connect(config=settings) as runtime:
        try:
            session = await runtime.workspace(settings["home"]).create_session(
                model=ONE_TOOL, profile=PROFILE, tools=[module.look], workdir=Workdir.none()
            )
            await (await session.main.submit("this")).result(30)
            told["session"] = session.id
        except KimiRayError as error:
            told["main_error"] = error.to_data()
        plain = await runtime.workspace(settings["home"]).create_session(model=ONE_TOOL, profile="bare")
        try:
            report = await plain.swarm(
                "{{item}}", ["one", "two"], profile=PROFILE, model=ONE_TOOL, tools=[module.look],
                workdir=Workdir.none(),
            )
            told["swarm"] = plain.id
            told["totals"] = report.totals
        except KimiRayError as error:
            told["swarm_error"] = error.to_data()
        status = await runtime.connection.registry.call("status", timeout_s=10)
        told["hosts"] = status["hosts"]
        told["registry"] = (await runtime.connection.registry.call("ping", timeout_s=10))["pid"]
    print(json.dumps(told), flush=True)

asyncio.run(main())
"""


async def drive(settings: dict[str, Any], module: str, *paths: Path) -> dict[str, Any]:
    path = os.pathsep.join(str(one) for one in (*paths, ROOT))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, json.dumps(settings), module,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=paths[0],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(90):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.fixture
def settings(config: RuntimeConfig, local_ray: str) -> Iterator[dict[str, Any]]:
    names = ("home", "namespace", "hosts_per_node", "close_timeout_s", "claim_timeout_s")
    Path(config.home).mkdir(parents=True)
    yield {name: getattr(config, name) for name in names} | {"address": local_ray}
    down(config)


async def _said(settings: dict[str, Any], session_id: str) -> list[str]:
    """What the tools of a session's agents answered."""
    logs = await read_session(settings["home"], session_id)
    return [repr(event.data) for events in logs.values() for event in events if event.type == "tool/result"]


@pytest.mark.long
async def test_a_tool_that_was_changed_between_two_programs_runs_as_it_is_now(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "my_tool.py").write_text(TOOL)
    (code / "my_words.py").write_text("WORD = 'old'\n")
    first = await drive(settings, "my_tool", code)
    again = await drive(settings, "my_tool", code)
    (code / "my_words.py").write_text("WORD = 'new'\n")
    changed = await drive(settings, "my_tool", code)
    assert [first["registry"]] * 2 == [again["registry"], changed["registry"]], "one runtime served them all"
    for told, word in ((first, "old"), (again, "old"), (changed, "new")):
        assert told.get("totals", {}).get("completed") == 2, told
        said = await _said(settings, told["session"]) + await _said(settings, told["swarm"])
        assert len(said) == 3 and all(word in text for text in said), (word, said)
    codes = [{host["fingerprint"] for host in told["hosts"]} - {""} for told in (first, again, changed)]
    assert codes[0] == codes[1] and len(codes[0]) == 1
    assert len(codes[2]) == 1 and codes[2] != codes[0], "the idle host of the old code made room"

    other = tmp_path / "other"
    other.mkdir()
    (other / "only_here.py").write_text(TOOL.replace("from my_words import WORD", "WORD = 'here'"))
    refused = await drive(settings, "only_here", other)
    for error in (refused["main_error"], refused["swarm_error"]):
        assert error["code"] == "tool.not_importable"
        assert "look" in error["message"] and "only_here" in error["message"]
        assert error["details"]["tool"] == "look"
        assert error["details"]["node_id"] == refused["hosts"][0]["node_id"]
        assert error["details"]["node_id"] in error["message"]
