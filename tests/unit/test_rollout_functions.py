"""Rollout functions through the public API, everything in this process: what they are given, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.rollout import RolloutContext
from kimi_ray.errors import RunError, ToolError
from kimi_ray.llm.script import Step
from kimi_ray.settings import Item, Workdir
from tests.unit.rollout_stage import BARE, Verdict, begin, events_of, stage_module
from tests.unit.runtime_fixtures import running


async def test_a_function_asks_scores_and_returns(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        first = await ctx.agent.ask(f"draft {ctx.item['word']}")
        second = await ctx.agent.ask(f"mend {first.text}")
        ctx.score("steps", 2)
        ctx.score("exact", 0.5)
        ctx.score("exact", 1.0)
        ctx.note("went well")
        assert len(await ctx.agent.messages()) == 4
        assert (ctx.prompt, ctx.repeat, ctx.attempt, ctx.tags["n"]) == (f"do {ctx.item['word']}", 0, 1, "x")
        return Verdict(good=True, why=second.text)

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        items = [Item(id=word, data={"word": word}, tags={"n": "x"}) for word in ("a", "b")]
        report = await session.swarm("do {{word}}", items, rollout=rollout, seed=4, **BARE)
        for row in report.rows:
            assert row.status == "completed" and row.error is None, row.error
            assert row.output == {"good": True, "why": f"did mend did draft {row.item_id}"}
            assert row.text == f"did mend did draft {row.item_id}"
            assert row.scores == {"steps": 2, "exact": 1.0}
            assert (row.turns, row.steps) == (2, 2) and row.usage.output > 0
        assert len(stage.requests) == 4
        events = await events_of(session, report.rows[0].agent_id)
        kinds = [event.type for event in events]
        submitted = [event.data for event in events if event.type == "prompt/submitted"]
        assert submitted[0]["source"]["kind"] == "rollout" and "rollout" in submitted[0]["source"]["function"]
        root = submitted[0]["prompt_id"]
        assert [data["source"] for data in submitted[1:]] == [{"kind": "rollout", "prompt_id": root}] * 2
        ends = {event.data["prompt_id"]: event.data["state"] for event in events if event.type == "prompt/completed"}
        assert ends == {data["prompt_id"]: "completed" for data in submitted}
        assert kinds.index("output/recorded") < len(kinds) - 1 and kinds[-1] == "prompt/completed"
        assert Counter(kinds)["turn/start"] == Counter(kinds)["turn/end"] == 2
        assert events[-1].seq == report.rows[0].last_seq


async def test_the_generator_and_the_seed_are_those_of_the_attempt(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        return {"draw": ctx.rng.random(), "seed": ctx.seed}

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        runs = [await session.swarm(None, ["a", "b"], rollout=rollout, repeats=2, seed=5, **BARE) for _ in range(2)]
        draws = [[row.output["draw"] for row in report.rows] for report in runs]
        assert draws[0] == draws[1] and len(set(draws[0])) == 4
        assert [row.output["seed"] for row in runs[0].rows] == [row.seed for row in runs[0].rows]
        assert not stage.requests and runs[0].rows[0].text == ""


async def test_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    seen: list[str] = []

    def rollout(ctx: RolloutContext) -> str:
        seen.append(threading.current_thread().name)
        ctx.score("in_thread", True)
        ctx.note("from a thread")
        return ctx.run(ctx.agent.ask(f"hello {ctx.item}")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        report = await session.swarm(None, ["a"], rollout=rollout, **BARE)
        (row,) = report.rows
        assert (row.status, row.output, row.text) == ("completed", "did hello a", "did hello a"), row.error
        assert row.scores == {"in_thread": True}
        assert seen[0].startswith("rollout ")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"text": {"a": 1}}, "request.bad_argument"),
        ({"text": None}, "request.bad_argument"),
        ({"text": " "}, "prompt.empty"),
        ({"text": "x", "limits": {"max_steps": 2}}, "request.bad_argument"),
        ({"text": "x", "sampling": {"temperature": 0}}, "request.bad_argument"),
    ],
)
async def test_what_cannot_be_asked_is_told_by_its_code(tmp_path: Path, said: dict[str, Any], code: str) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.agent.ask(**said)

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.status == "failed" and row.error is not None and row.error.code == code, row.error
        assert not stage.requests


async def test_asks_may_run_beside_each_other_and_be_given_up(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        both = await asyncio.gather(ctx.agent.ask("one"), ctx.agent.ask("two"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ctx.agent.ask("hang")
        last = await ctx.agent.ask("three")
        return [result.text for result in (*both, last)]

    async with running(tmp_path) as (runtime, stage, model):
        answer = stage.answer

        async def answers(request: Any) -> Step:
            if stage.prompt(request) == "hang":
                await asyncio.sleep(60)
            return await answer(request)

        stage_module(stage, answers)
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.output == ["did one", "did two", "did three"], row.error


async def test_tools_and_the_environment_are_the_profiles(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.environment.write_bytes("seen.txt", b"by the function")
        result = await ctx.agent.ask("read it")
        return [result.text, result.tool_calls]

    async with running(tmp_path) as (runtime, stage, model):
        stage.faults = {"read it": [Step.call("Read", {"file_path": "seen.txt"})]}
        session = await begin(runtime, tmp_path, model)
        (tmp_path / "from").mkdir()
        (row,) = (
            await session.swarm(
                None, ["a"], rollout=rollout, profile="explore", workdir=Workdir.copy(str(tmp_path / "from"))
            )
        ).rows
        assert row.output == ["did read it", 1] and row.tool_calls == 1, row.error


async def test_what_cannot_be_a_rollout_is_refused_before_the_start(tmp_path: Path) -> None:
    async def two(_a: Any, _b: Any) -> None: ...

    async def generator(_ctx: Any) -> Any:
        yield 1

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        for wrong in (two, generator, 7):
            with pytest.raises(RunError) as caught:
                await session.start_swarm(None, ["a"], rollout=wrong, **BARE)
            assert caught.value.code == "swarm.bad_rollout"
        for missing in ("no_such_module_here:f", "json:nothing", "json"):
            with pytest.raises(ToolError) as refused:
                await session.start_swarm(None, ["a"], rollout=missing, **BARE)
            assert refused.value.code == "tool.not_importable"
        with pytest.raises(RunError) as caught:
            await session.start_swarm(None, ["a"], **BARE)
        assert caught.value.code == "swarm.no_prompt"


async def test_an_agent_that_ran_a_function_can_be_spoken_to_afterwards(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        return (await ctx.agent.ask("first")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        agent = session.agent(row.agent_id)
        assert (await (await agent.submit("second")).result(10)).text == "did second"


async def test_a_turn_without_a_message_and_a_continued_conversation(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.agent.ask("one")
        again = await ctx.agent.continue_turn()
        return [again.text, again.state, len(await ctx.agent.messages())]

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.output == ["did one", "completed", 3], row.error


async def test_prompts_of_others_run_beside_the_function(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.agent.ask("mine")
        asked.set()
        while len(await ctx.agent.messages()) < 4:
            await asyncio.sleep(0.005)
        return (await ctx.agent.ask("mine again")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await session.start_swarm(None, ["a"], rollout=rollout, **BARE)
        async with asyncio.timeout(20):
            await asked.wait()
            agent_id = next(one["agent_id"] for one in await session.agents() if one["agent_id"] != "main")
            other = await (await session.agent(agent_id).submit("from outside")).result(10)
        assert other.text == "did from outside"
        (row,) = (await handle.result(20)).rows
        assert (row.output, row.turns) == ("did mine again", 3)


async def test_a_gate_that_blocks_what_is_asked_is_told_to_the_function(tmp_path: Path) -> None:
    hook = {"event": "UserPromptSubmit", "command": "grep -q forbidden && { echo not that >&2; exit 2; } || exit 0"}

    async def rollout(ctx: RolloutContext) -> Any:
        first = await ctx.agent.ask("forbidden", check=False)
        second = await ctx.agent.ask("allowed")
        return [first.state, second.text]

    async with running(tmp_path, hooks=[hook]) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.output == ["blocked", "did allowed"], row.error
