"""Sessions are recorded in process, and replayed against the code of today."""

from __future__ import annotations

from pathlib import Path

from kimi_ray.llm.script import Step
from tests.unit.replay.recorded_sessions import Facts, recorded, replayed

ONE_CALL = [Step.call("look", {"what": "it"}), "done", "again"]


async def test_a_session_is_replayed_without_its_model_and_its_tools(tmp_path: Path) -> None:
    async with recorded(tmp_path, ONE_CALL) as session:
        await (await session.main.submit("go")).result(10)
        await (await session.main.submit("more")).result(10)
    report = await replayed(tmp_path)
    [main] = report.agents
    assert report.ok, report
    assert (main.turns, main.requests, main.recorded_requests, main.tool_calls, main.tools_run) == (2, 3, 3, 1, 0)
    assert Facts.asked == 1


async def test_a_tool_that_answers_otherwise_is_named(tmp_path: Path) -> None:
    async with recorded(tmp_path, ONE_CALL) as session:
        await (await session.main.submit("go")).result(10)
    assert (await replayed(tmp_path, tools="real")).ok
    Facts.value = "forty-three"
    report = await replayed(tmp_path, tools="real")
    found = report.divergence
    assert found is not None and not report.ok
    assert (found.kind, found.request, found.turn, found.step) == ("request", 1, 0, 1)
    assert found.field == "messages[2].content[0].content[0].text"
    assert (found.recorded, found.replayed) == ("it is forty-two", "it is forty-three")
    assert (await replayed(tmp_path)).ok
