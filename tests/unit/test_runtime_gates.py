"""Gates and the guard against repeated calls through the public API: in sessions, and in rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_ray import Profile, Workdir
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.runtime import Runtime
from kimi_ray.tools import tool
from tests.unit.agent.conversations import SETTINGS
from tests.unit.runtime_fixtures import FAST

_HERE = "tests.unit.test_runtime_gates"
_PROFILE = Profile(name="player", system_prompt="You play a part.")
_CONFIG: dict[str, Any] = {**FAST, "features": SETTINGS["features"]}
looked: list[str] = []


def twice(request: ChatRequest) -> Step:
    """Two equal calls in one answer, then the end."""
    if request.messages[-1]["content"][0]["type"] == "tool-result":
        return Step("done")
    return Step(tool_calls=(ToolCall("note", '{"what": "a"}', "x"), ToolCall("note", '{"what": "a"}', "y")))


@tool
async def note(what: str) -> str:
    """Note something.

    Args:
        what: What.
    """
    looked.append(what)
    return f"noted {what}"


async def metas(session: Any, agent_id: str) -> list[Any]:
    """The meta of each tool result of an agent."""
    events = session.agent(agent_id).events()
    return [event.data.get("meta") async for event in events if event.type == "tool/result"]


async def test_a_rollout_whose_prompt_is_blocked_is_a_row_of_its_own_and_harms_no_other(tmp_path: Path) -> None:
    async with Runtime.connect(tmp_path / "home", "in-process", config=_CONFIG) as runtime:
        session = await runtime.workspace(tmp_path).create_session(model=f"scripted:{_HERE}:twice", profile="bare")
        report = await session.swarm(
            "{{item}}",
            ["something forbidden", "fine"],
            profile=_PROFILE,
            tools=[note],
            workdir=Workdir.none(),
            out=tmp_path / "run",
        )
        rows = {row.item_id: row for row in report.rows}
        blocked, fine = (row for _, row in sorted(rows.items(), key=lambda pair: pair[1].status == "completed"))
        assert fine.status == "completed"
        assert blocked.status != "completed" and blocked.error is not None
        assert "forbidden here" in str(blocked.error)


async def test_the_guard_acts_in_a_session_and_not_in_its_rollouts(tmp_path: Path) -> None:
    looked.clear()
    async with Runtime.connect(tmp_path / "home", "in-process", config=_CONFIG) as runtime:
        session = await runtime.workspace(tmp_path).create_session(
            model=f"scripted:{_HERE}:twice", profile=_PROFILE, tools=[note], workdir=Workdir.none()
        )
        await (await session.main.submit("go")).result(20)
        assert looked == ["a"]
        assert await metas(session, "main") == [None, {"same_as": "x"}]
        report = await session.swarm(
            "{{item}}", ["one"], profile=_PROFILE, tools=[note], workdir=Workdir.none(), out=tmp_path / "run"
        )
        assert looked == ["a"] * 3
        [row] = report.rows
        assert await metas(session, row.agent_id) == [None, None]
