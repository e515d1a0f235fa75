"""Trees of agents are replayed each from its own log: subagents, swarms, background tasks, forks."""

from __future__ import annotations

from pathlib import Path

from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.replay import rebuild_session
from kimi_ray.settings import Workdir
from tests.unit.replay.recorded_sessions import (
    Scenes,
    assert_as_recorded,
    look,
    recorded,
    recorded_in,
    replayed,
    source_of,
)


def ask(*prompts: str, **more: object) -> Step:
    """An answer that starts subagents, side by side."""
    named = [{"prompt": prompt, "description": "a part of it", **more} for prompt in prompts]
    return Step(tool_calls=tuple(ToolCall("Agent", Step.call("Agent", one).tool_calls[0].arguments) for one in named))


async def test_subagents_side_by_side_resumed_and_in_the_background(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [
        ask("first part", "second part", subagent_type="coder"),
        ask("and more", resume="agent-1"),
        ask("behind", run_in_background=True),
        Step.call("WaitFor", {"task_ids": []}),
        "all done",
    ]
    scenes.steps["first part"] = [Step.call("Glob", {"pattern": "*"}), "the first " * 40]
    async with recorded(tmp_path, scenes.answer, tools=(), profile="agent") as session:
        await (await session.main.submit("go")).result(20)
        await (await session.main.submit("later")).result(20)
    report = await assert_as_recorded(tmp_path)
    assert [agent.agent_id for agent in report.agents] == ["main", "agent-1", "agent-2", "agent-3"]
    assert report.requests == len(scenes.requests)
    rebuilt = await rebuild_session(source_of(tmp_path), "s1")
    for agent in rebuilt.agents.values():
        made = [one.messages for one in scenes.requests if one.agent_id == agent.id]
        assert [one.request.messages async for one in agent.requests()] == made


async def test_the_divergence_of_a_child_is_named_where_it_is(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [ask("count", subagent_type="coder"), "done"]
    scenes.steps["count"] = [Step.call("Glob", {"pattern": "*"}), "one " * 90]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "one.txt").write_text("1")
    place = Workdir.shared(str(tmp_path / "work"))
    async with recorded(tmp_path, scenes.answer, tools=(), profile="agent", workdir=place) as session:
        await (await session.main.submit("go")).result(20)
    report = await replayed(tmp_path, tools="real", workdir=place)
    assert report.ok and [agent.tools_run for agent in report.agents] == [0, 1]
    (tmp_path / "work" / "two.txt").write_text("2")
    report = await replayed(tmp_path, tools="real", workdir=place)
    found = report.divergence
    assert found is not None and (found.agent_id, found.request) == ("agent-1", 1)
    assert report.agents[0].divergence is None
    assert (await replayed(tmp_path, agent_id="main", tools="real")).ok


async def test_a_swarm(tmp_path: Path) -> None:
    scenes = Scenes()
    async with recorded(tmp_path, scenes.answer) as session:
        for n in range(5):
            scenes.steps[f"item {n}"] = [Step.call("look", {"what": f"{n}"}), f"seen {n}"]
        report = await session.swarm("item {{item}}", [str(n) for n in range(5)], profile="bare", tools=[look])
        assert [row.status for row in report.rows] == ["completed"] * 5
    told = await assert_as_recorded(tmp_path, None)
    assert len(told.agents) == 6 and told.requests == len(scenes.requests) == 10


async def test_forks_and_forks_of_agents(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("look", {"what": "a"}), Step.call("look", {"what": "b"}), "done"]
    async with recorded_in(tmp_path, scenes.answer) as (workspace, session):
        await (await session.main.submit("go")).result(10)
        await (await session.main.submit("more")).result(10)
        beside = await session.fork_agent()
        await (await beside.submit("beside")).result(10)
        for n, at in enumerate((None, "0.0", "0.1", "0", "^1", "1")):
            fork = await workspace.fork("s1", at=at, new_session_id=f"fork-{n}", tools=[look])
            await (await fork.main.continue_turn()).result(10)
            await (await fork.main.submit("on its own")).result(10)
    report = await assert_as_recorded(tmp_path)
    assert [agent.requests for agent in report.agents] == [4, 1]
    whole = await rebuild_session(source_of(tmp_path), "s1", whole=True)
    assert len([one async for one in whole.agent("agent-1").requests()]) == 5
    for n in range(6):
        fork = await assert_as_recorded(tmp_path, scenes, f"fork-{n}")
        assert fork.agents[0].requests >= 2
