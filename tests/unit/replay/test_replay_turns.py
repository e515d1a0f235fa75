"""What a turn may go through is replayed as it was, and every request of it rebuilt to the byte."""

from __future__ import annotations

from pathlib import Path

from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.settings import Limits, Sampling
from tests.unit.replay.recorded_sessions import (
    Scenes,
    assert_as_recorded,
    fail,
    look,
    recorded,
    scripted,
)


def calls(*names: str) -> Step:
    """An answer that calls tools, several of one name with one id each."""
    listed = tuple(ToolCall(name, '{"what": "x"}' if name == "look" else "{}", f"same-{name}") for name in names)
    return Step(text="let me see", reasoning="hm", tool_calls=listed)


async def test_tools_that_fail_are_unknown_or_asked_badly(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [
        calls("look", "fail", "look", "nothing_like_it"),
        Step(tool_calls=(ToolCall("look", "not json"), ToolCall("look", '{"what": 5}'), ToolCall("look", ""))),
        "done",
    ]
    async with recorded(tmp_path, scenes.answer, tools=(look, fail)) as session:
        await (await session.main.submit("go")).result(10)
    report = await assert_as_recorded(tmp_path, scenes)
    assert report.agents[0].tool_calls == 7


async def test_retries_inside_a_step_and_a_failure_for_good(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [
        Step.error("provider.overloaded", 529),
        Step.error("provider.connection", after_chunks=1, text="half of it"),
        Step(text=" "),
        calls("look"),
        Step.error("provider.server", 500),
        "done",
    ]
    scenes.steps["bad"] = [Step.error("provider.auth", 401)]
    scenes.steps["filtered"] = [Step(text="some of", finish="filtered")]
    models = {"m": {"provider": "scripted", "script": scripted(scenes.answer).partition(":")[2], "retry_base_s": 0.0}}
    async with recorded(tmp_path, scenes.answer, models=models) as session:
        await session.main.set_model("m")
        assert (await (await session.main.submit("go")).result(10)).text == "done"
        for prompt in ("bad", "filtered", "after"):
            await (await session.main.submit(prompt)).result(10)
    report = await assert_as_recorded(tmp_path, scenes)
    assert report.agents[0].requests == len(scenes.requests) == 9


async def test_a_turn_that_is_cancelled_while_the_model_speaks(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [calls("look"), "wait"]
    async with recorded(tmp_path, scenes.answer) as session:
        prompt = await session.main.submit("go")
        await scenes.until_waiting()
        await prompt.cancel()
        await prompt.result(10)
        await (await session.main.submit("after")).result(10)
    report = await assert_as_recorded(tmp_path, scenes)
    assert report.agents[0].turns == 2


async def test_prompts_that_join_a_turn_and_equal_prompts(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = ["wait", calls("look")]
    async with recorded(tmp_path, scenes.answer) as session:
        first = await session.main.submit("go")
        await scenes.until_waiting()
        joined = [await session.main.submit("same", steer_if_active=True) for _ in range(2)]
        queued = await session.main.submit("same")
        await session.main.steer([queued.id])
        scenes.go_on.set()
        for handle in (first, *joined, queued):
            await handle.result(10)
        for _ in range(2):
            await (await session.main.submit("go")).result(10)
    await assert_as_recorded(tmp_path, scenes)


async def test_a_step_that_alone_was_interrupted(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = ["wait"]
    async with recorded(tmp_path, scenes.answer) as session:
        first = await session.main.submit("go")
        await scenes.until_waiting()
        await session.main.submit("instead", steer_if_active=True)
        assert await session.main.cancel_step()
        await first.result(10)
    report = await assert_as_recorded(tmp_path, scenes)
    assert report.agents[0].requests == 2


async def test_long_prompts_long_results_and_long_answers_are_kept_by_reference(tmp_path: Path) -> None:
    scenes = Scenes()
    long = "wort " * 30_000
    scenes.steps[long] = [Step.call("look", {"what": "y" * 60_000}), Step.call("look", {"what": "z" * 40_000}), long]
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit(long)).result(10)
        await (await session.main.submit("short")).result(10)
    await assert_as_recorded(tmp_path, scenes)


async def test_a_checked_answer_with_corrections(tmp_path: Path) -> None:
    scenes = Scenes()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    scenes.steps["by tool"] = ["no", Step.call("final_answer", {"n": "x"}), Step.call("final_answer", {"n": 5})]
    scenes.steps["by text"] = ["{}", '{"n": 5}']
    scenes.steps["never"] = ["no"] * 9
    async with recorded(tmp_path, scenes.answer) as session:
        for prompt in ("by tool", "by text", "never", "plain"):
            await (await session.main.submit(prompt, output_schema=None if prompt == "plain" else schema)).result(10)
    await assert_as_recorded(tmp_path, scenes)


async def test_limits_sampling_models_and_continuations(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["limited"] = [calls("look"), calls("look"), calls("look")]
    scenes.steps["cut"] = [Step(text="to be contin", finish="max-tokens")]
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit("limited", limits=Limits(max_steps=2))).result(10)
        await (await session.main.submit("limited", limits=Limits(max_tool_calls=1))).result(10)
        await (await session.main.submit("warm", sampling=Sampling(temperature=1.0, stop=("x",)))).result(10)
        await session.main.set_model(scripted(scenes.answer, "other"))
        await (await session.main.submit("cut")).result(10)
        await (await session.main.continue_turn(sampling=Sampling(seed=5))).result(10)
    await assert_as_recorded(tmp_path, scenes)


async def test_a_session_without_a_prompt(tmp_path: Path) -> None:
    scenes = Scenes()
    async with recorded(tmp_path, scenes.answer) as session:
        await session.main.set_model(scripted(scenes.answer, "other"))
    report = await assert_as_recorded(tmp_path, scenes)
    assert report.agents[0].turns == report.requests == 0
