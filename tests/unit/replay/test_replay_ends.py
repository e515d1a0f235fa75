"""How a recording ends is told: a replay of one that has lost its end is not that of a whole one."""

from __future__ import annotations

import json
from pathlib import Path

from kimi_ray.config import load_config
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.replay import ReplayOptions, replay_session
from tests.unit.replay.recorded_sessions import Scenes, look, recorded, replayed
from tests.unit.replay.test_replay_damage import whole_log


async def test_every_cut_is_told_and_a_whole_log_is_complete(tmp_path: Path) -> None:
    async with recorded(tmp_path, Scenes().answer) as session:
        for text in ("one", "two"):
            await (await session.main.submit(text)).result(10)
    whole = await replayed(tmp_path)
    assert whole.ok and whole.unfinished == () and whole.agents[0].ends == "complete"
    source = await whole_log(tmp_path)
    lines = list(source.lines)
    types = [json.loads(line)["type"] for line in lines]
    last = {kind: len(types) - 1 - types[::-1].index(kind) for kind in set(types)}
    config = load_config(tmp_path / "home")
    expected = {
        "assistant/message": "unanswered",
        "llm/response": "unanswered",
        "step/start": "unanswered",
        "turn/start": "waiting",
        "turn/end": "open",
    }
    for kind, ends in expected.items():
        source.lines = lines[: last[kind]]
        report = await replay_session(source, "s1", options=ReplayOptions(own_tools=(look,)), config=config)
        [agent] = report.unfinished
        assert report.ok and agent.ends == ends and agent.ends_where, (kind, agent)
        if ends != "waiting":
            assert "turn 1" in agent.ends_where


async def test_a_live_session_that_waits_for_its_model_is_unanswered(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = ["wait"]
    async with recorded(tmp_path, scenes.answer) as session:
        prompt = await session.main.submit("go")
        await scenes.until_waiting()
        await session.main.flush()
        report = await replayed(tmp_path)
        assert report.ok and report.agents[0].ends == "unanswered"
        scenes.go_on.set()
        await prompt.result(10)
    assert (await replayed(tmp_path)).unfinished == ()


async def test_a_call_that_was_cancelled_is_so_again_beside_an_equal_one_that_was_not(tmp_path: Path) -> None:
    scenes = Scenes()
    two = (ToolCall("look", '{"what":"a"}'), ToolCall("look", '{"what":"a"}'))
    scenes.steps["go"] = [Step(tool_calls=two)]
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit("go")).result(10)
    source = await whole_log(tmp_path)
    events = [json.loads(line) for line in source.lines]
    last = max(at for at, event in enumerate(events) if event["type"] == "tool/result")
    cancelled = events[last]["data"]
    cancelled["error"] = {"code": "tool.cancelled", "message": "cancelled"}
    cancelled["message"]["content"][0]["content"] = [{"type": "text", "text": "cancelled while it ran"}]
    end = next(event for event in events if event["type"] == "step/end")
    over = next(event for event in reversed(events) if event["type"] == "turn/end")
    over["data"]["reason"] = {"kind": "cancelled", "cause": "shutdown"}
    events = [*events[: last + 1], end, over]
    for seq, event in enumerate(events):
        event["seq"] = seq
    source.lines = [json.dumps(event, separators=(",", ":")).encode() for event in events]
    config = load_config(tmp_path / "home")
    report = await replay_session(source, "s1", options=ReplayOptions(own_tools=(look,)), config=config)
    assert report.ok, report.divergence
    assert report.agents[0].ends == "complete"
