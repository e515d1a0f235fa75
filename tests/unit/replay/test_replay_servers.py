"""Tools of MCP servers in a replay: run with ``tools="real"`` where the settings name their servers, else told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kimi_ray.config import load_config
from kimi_ray.llm.script import Step
from kimi_ray.replay import ReplayOptions, ReplayReport, replay_session
from kimi_ray.settings import McpServer
from tests.unit.replay.recorded_sessions import Scenes, recorded, source_of

SERVER = Path(__file__).parents[2] / "fixtures" / "mcp_server.py"


def _server(*kind: str) -> McpServer:
    return McpServer(command=(sys.executable, str(SERVER), *kind), connect_timeout_s=20.0)


async def _replay(tmp_path: Path, servers: dict[str, McpServer], mode: Any) -> ReplayReport:
    config = load_config(tmp_path / "home").model_copy(update={"mcp_servers": servers})
    return await replay_session(source_of(tmp_path), "s1", options=ReplayOptions(tools=mode), config=config)


async def _record(tmp_path: Path, *calls: Step) -> None:
    scenes = Scenes()
    scenes.steps["go"] = list(calls)
    tools: Any = ["mcp__t__add", "mcp__t__whoami"]
    async with recorded(tmp_path, scenes.answer, tools=tools, mcp_servers={"t": _server()}) as session:
        await (await session.main.submit("go")).result(30)


async def test_calls_are_made_again_where_the_settings_name_the_server(tmp_path: Path) -> None:
    await _record(tmp_path, Step.call("mcp__t__add", {"a": 1, "b": 2}))
    report = await _replay(tmp_path, {"t": _server()}, "real")
    assert report.ok, report.divergence
    assert report.agents[0].tools_run == 1 and report.agents[0].tools_absent == ()
    assert (await _replay(tmp_path, {"t": _server("dies")}, "recorded")).ok, "no server is started"


async def test_another_answer_of_the_server_is_named(tmp_path: Path) -> None:
    await _record(tmp_path, Step.call("mcp__t__whoami"))
    found = (await _replay(tmp_path, {"t": _server()}, "real")).divergence
    assert found is not None and found.request == 1 and "the result of mcp__t__whoami" in found.what


async def test_a_server_that_is_not_there_is_told_and_its_results_are_the_recorded_ones(tmp_path: Path) -> None:
    await _record(tmp_path, Step.call("mcp__t__add", {"a": 1, "b": 2}))
    for servers in ({}, {"t": _server("dies")}):
        report = await _replay(tmp_path, servers, "real")
        assert report.ok, report.divergence
        assert report.agents[0].tools_absent == ("mcp__t__add", "mcp__t__whoami") and report.agents[0].tools_run == 0
