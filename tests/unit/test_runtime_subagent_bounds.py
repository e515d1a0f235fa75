"""What binds subagents: who may start whom, how deep, and the limits above them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import AgentError, Limits, Profile, Workdir
from kimi_ray.llm.script import Step
from tests.unit.runtime_fixtures import running
from tests.unit.subagent_stage import (
    ASKS,
    LONG,
    ask,
    begin,
    results,
    told,
)


async def test_the_allow_list_binds_the_model(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look", subagent_type="explore"), ask("look", subagent_type="nobody")]
        await (await session.main.submit("go")).result()
        refused, unknown = await results(session)
        assert refused.startswith(
            "subagent error: an agent of the profile asks may not start one of the profile explore"
        )
        assert unknown.startswith("subagent error: there is no profile 'nobody'")
        assert len(stage.requests) == 3 and await told(session) == []


async def test_an_agent_without_a_list_starts_nobody_and_a_star_is_anybody(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        none = Profile(name="none", tools=("Agent",))
        session = await begin(runtime, tmp_path, model, profile=none)
        stage.faults["go"] = [ask("look"), Step(text="ok")]
        await (await session.main.submit("go")).result()
        assert (await results(session))[0].endswith("(it may start none)")
        star = await begin(runtime, tmp_path, model, profile=Profile(name="star", tools=("Agent",), subagents=("*",)))
        stage.faults["go"] = [ask("look", subagent_type="bare"), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await star.main.submit("go")).result()
        assert "actual_subagent_type: bare\nstatus: completed" in (await results(star))[0]


async def test_depth_is_bound_and_stays_so_after_a_resume(tmp_path: Path) -> None:
    async with running(tmp_path, max_delegation_depth=2) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        child = await session.run_subagent("one", profile=ASKS)
        grandchild = await session.run_subagent("two", profile=ASKS, agent_id=child.agent_id)
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("three", agent_id=grandchild.agent_id)
        assert refused.value.code == "agent.depth_exceeded" and refused.value.details["depth"] == 3
        await session.close()
    async with running(tmp_path, max_delegation_depth=2) as (runtime, stage, model):
        session = await runtime.workspace(str(tmp_path / "work")).resume(session.id)
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("three", agent_id=grandchild.agent_id)
        assert refused.value.code == "agent.depth_exceeded"
        stage.faults["go on"] = [ask("deeper"), Step(text="ok")]
        handle = await session.agent(grandchild.agent_id).submit("go on")
        await handle.result()
        assert "max_delegation_depth" in (await results(session, grandchild.agent_id))[0]


async def test_the_limits_of_the_session_bind_its_tree(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, limits=Limits(max_steps=3))
        assert (await session.run_subagent("one")).status == "completed"
        assert (await session.run_subagent("two", resume="agent-1")).status == "completed"
        stage.faults["three"] = [Step.call("Glob", {"pattern": "*"}), Step(text="never")]
        result = await session.run_subagent("three")
        assert result.error is not None and result.error["code"] == "limit.max_steps"
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("four")
        assert refused.value.code == "limit.max_steps"
        assert len(stage.requests) == 3
        main = await (await session.main.submit("mine")).result()
        assert main.stop == "limit:max_steps" and len(stage.requests) == 3


async def test_children_side_by_side_do_not_each_use_what_is_left(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, limits=Limits(max_steps=40))
        for number in range(4):
            stage.faults[f"w{number}"] = [Step.call("Glob", {"pattern": "*"})] * 60
        await asyncio.gather(*(session.run_subagent(f"w{number}") for number in range(4)))
        assert len(stage.requests) < 100


async def test_a_model_may_name_configured_models_only(tmp_path: Path) -> None:
    models = {"other": {"provider": "scripted", "script": "kimi_ray_test_models:answer"}}
    async with running(tmp_path, models=models) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look", model="scripted:os:getcwd"), ask("look", model="other"), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        refused, done = await results(session)
        assert refused.startswith("subagent error: no model 'scripted:os:getcwd' is configured")
        assert "status: completed" in done
        assert [data["model"] for kind, data in await told(session) if kind == "subagent/spawned"] == ["other"]


ROLLOUT: dict[str, Any] = {"profile": ASKS, "tools": ["Agent"], "workdir": Workdir.none()}


async def test_a_rollouts_limits_bind_what_is_below_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["do a"] = [ask("part"), Step(text="never")]
        stage.faults["part"] = [Step.call("TodoList", {}), Step(text=LONG)]
        report = await session.swarm("do {{item}}", ["a"], **ROLLOUT, limits=Limits(max_steps=3))
        (row,) = report.rows
        assert (row.status, row.stop) == ("limit", "limit:max_steps")
        assert len(stage.requests) == 3


async def test_a_child_ends_when_a_limit_above_is_reached_in_its_middle(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["do a"] = [ask("part"), Step(text="never")]
        stage.faults["part"] = [Step.call("TodoList", {})] * 60
        report = await session.swarm("do {{item}}", ["a"], **ROLLOUT, limits=Limits(max_steps=6))
        assert report.rows[0].status == "limit"
        assert len(stage.requests) == 6
        assert "limit max_steps" in (await results(session, "agent-1"))[0]


async def test_the_limits_of_a_run_count_what_is_below_its_rollouts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        for item in ("a", "b", "c"):
            stage.faults[f"do {item}"] = [ask(f"part {item}"), Step(text="done")]
            stage.faults[f"part {item}"] = [Step(text=LONG)]
        report = await session.swarm(
            "do {{item}}", ["a", "b", "c"], **ROLLOUT, total_limits=Limits(max_steps=6), max_concurrency=1
        )
        assert [row.status for row in report.rows] == ["completed", "completed", "not_started"]
        assert len(stage.requests) == 6


async def test_the_session_counts_what_is_below_a_rollout_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, limits=Limits(max_steps=7))
        for item in ("a", "b"):
            stage.faults[f"do {item}"] = [ask(f"part {item}"), Step(text="done")]
            stage.faults[f"part {item}"] = [Step(text=LONG)]
        report = await session.swarm("do {{item}}", ["a", "b"], **ROLLOUT, max_concurrency=1)
        assert [row.status for row in report.rows] == ["completed", "completed"]
        assert (await (await session.main.submit("one more")).result()).state == "completed"
        assert (await (await session.main.submit("two more")).result()).stop == "limit:max_steps"
        assert len(stage.requests) == 7


async def test_a_profiles_limits_bind_the_children_of_its_agents(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        bound = ASKS.model_copy(update={"limits": Limits(max_steps=2)})
        stage.faults["go"] = [ask("part"), Step(text="never")]
        stage.faults["part"] = [Step(text=LONG)]
        result = await session.run_subagent("go", profile=bound)
        assert result.error is not None and result.error["code"] == "limit.max_steps"
        assert len(stage.requests) == 2
