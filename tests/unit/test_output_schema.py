"""Checked answers: the tool, the text, the corrections and their bound, through the public API in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from kimi_ray.agent.final_answer import MAX_CORRECTIONS, FinalAnswer
from kimi_ray.agent.rollout import RolloutContext
from kimi_ray.errors import ConfigError, ToolError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.settings import Limits
from kimi_ray.tools.output_schema import load_schema, problems_of, schema_of
from tests.unit.runtime_fixtures import MODULE, cluster_of, hosts_of, running

BARE = {"profile": "bare"}


class Verdict(BaseModel):
    label: Literal["yes", "no"]
    score: float = 0.0


GOOD = {"label": "yes", "score": 1.0}


def plays(*steps: Step | str) -> list[ChatRequest]:
    """The scripted model plays these, one after the other; gives the requests that it gets."""
    waiting, requests = list(steps), list[ChatRequest]()

    def answer(request: ChatRequest) -> Step | str:
        requests.append(request)
        return waiting.pop(0)

    sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
    return requests


async def _swarm(tmp_path: Path, *steps: Step | str, schema: Any = Verdict, **options: Any) -> tuple[Any, Any, Any]:
    tmp_path.mkdir(exist_ok=True)
    async with running(tmp_path) as (runtime, _stage, model):
        requests = plays(*steps)
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        report = await session.swarm("judge {{item}}", ["a"], output_schema=schema, **{**BARE, **options})
        (row,) = report.rows
        events = [event async for event in session.agent(row.agent_id).events()]
        return row, requests, events


async def test_a_turn_without_a_schema_says_nothing_of_the_tool(tmp_path: Path) -> None:
    _, requests, events = await _swarm(tmp_path, Step.call("nope"), "done", schema=None)
    [result] = [event.data["message"] for event in events if event.type == "tool/result"]
    assert not requests[0].tools
    assert result["content"][0]["content"][0]["text"] == "there is no tool 'nope'; the tools are: none"


async def test_a_call_of_the_tool_ends_the_turn(tmp_path: Path) -> None:
    row, requests, events = await _swarm(tmp_path, Step.call("final_answer", GOOD))
    assert (row.status, row.output, row.steps, row.tool_calls) == ("completed", GOOD, 1, 1), row.error
    (request,) = requests
    assert [tool.name for tool in request.tools] == ["final_answer"]
    assert request.tools[0].parameters == schema_of(Verdict)
    header = next(event.data["header"] for event in events if event.type == "request/header")
    assert "final_answer" in json.dumps(header["tools"])
    recorded = next(event.data for event in events if event.type == "output/recorded")
    assert recorded["value"] == GOOD and recorded["by"] == "tool"
    submitted = next(event.data for event in events if event.type == "prompt/submitted")
    assert submitted["output_schema"] == schema_of(Verdict)
    results = [event for event in events if event.type == "tool/result"]
    assert len(results) == 1 and not results[0].data["message"]["content"][0].get("is_error")


@pytest.mark.parametrize("text", ['{"label": "no"}', '```json\n{"label": "no"}\n```', ' \n{"label": "no"}\n '])
async def test_a_text_that_is_the_answer_is_taken(tmp_path: Path, text: str) -> None:
    row, requests, events = await _swarm(tmp_path, text)
    assert (row.status, row.output, row.text) == ("completed", {"label": "no"}, text)
    assert len(requests) == 1
    assert next(event.data["by"] for event in events if event.type == "output/recorded") == "text"


async def test_what_does_not_fit_goes_back_with_the_reasons(tmp_path: Path) -> None:
    row, requests, events = await _swarm(
        tmp_path,
        "I think yes.",
        Step.call("final_answer", {"label": "maybe"}),
        Step.call("final_answer", GOOD),
    )
    assert (row.status, row.output, row.steps) == ("completed", GOOD, 3), row.error
    told = requests[1].messages[-1]
    assert told["source"] == {"kind": "output_schema"} and "final_answer" in told["content"][0]["text"]
    refused = requests[2].messages[-1]["content"][0]
    assert refused["is_error"] and "'maybe'" in refused["content"][0]["text"]
    assert sum(event.type == "output/recorded" for event in events) == 1


@pytest.mark.parametrize("bad", ["still not", Step.call("final_answer", {"label": 3})], ids=["text", "call"])
async def test_corrections_are_bounded(tmp_path: Path, bad: Step | str) -> None:
    row, requests, _ = await _swarm(tmp_path, *[bad] * 20)
    assert row.status == "failed" and row.output is None
    assert row.error.code == "output.invalid" and row.error.error_class == "model_output"
    assert len(requests) == MAX_CORRECTIONS + 1


async def test_a_cut_answer_is_no_answer(tmp_path: Path) -> None:
    cut = Step(text='{"label": "y', finish="max-tokens")
    row, requests, _ = await _swarm(tmp_path, cut, '{"label": "yes"}')
    assert (row.status, row.output, len(requests)) == ("completed", {"label": "yes"}, 2)
    row, requests, _ = await _swarm(tmp_path / "again", *[cut] * 20)
    assert row.error.code == "output.invalid" and len(requests) == MAX_CORRECTIONS + 1


async def test_limits_end_the_corrections_too(tmp_path: Path) -> None:
    row, requests, _ = await _swarm(tmp_path, *["no"] * 9, limits=Limits(max_steps=2))
    assert (row.status, row.stop, row.output, len(requests)) == ("limit", "limit:max_steps", None, 2)


async def test_other_tools_run_before_and_beside_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "x.txt").write_text("content")
    read = Step.call("Read", {"file_path": "x.txt"})
    row, requests, events = await _swarm(
        tmp_path, read, Step.call("final_answer", GOOD), profile="explore", tools=["Read"]
    )
    assert (row.output, row.tool_calls, len(requests)) == (GOOD, 2, 2), row.error
    assert [tool.name for tool in requests[0].tools] == ["Read", "final_answer"]
    calls = sum(event.type == "tool/call" for event in events)
    assert calls == sum(event.type == "tool/result" for event in events) == 2


@pytest.mark.parametrize(
    ("schema", "step", "value"),
    [
        (list[int], Step.call("final_answer", {"answer": [1, 2]}), [1, 2]),
        (list[Verdict], '[{"label": "yes"}]', [{"label": "yes"}]),
        (list[Verdict], Step.call("final_answer", {"answer": [{"label": "no"}]}), [{"label": "no"}]),
        (int, "42", 42),
        (str, "plain words", "plain words"),
        ({"type": "string", "pattern": "^[0-9]+$"}, "42", "42"),
        ({"enum": ["a", "b"]}, '"a"', "a"),
    ],
)
async def test_schemas_that_are_no_objects(tmp_path: Path, schema: Any, step: Any, value: Any) -> None:
    row, requests, _ = await _swarm(tmp_path, step, schema=schema)
    assert (row.status, row.output) == ("completed", value), row.error
    assert requests[0].tools[0].parameters["type"] == "object"
    json.dumps(requests[0].tools[0].parameters)


async def test_a_rollout_function_asks_for_forms_and_keeps_its_own(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        first = await ctx.agent.ask("judge", output_schema=Verdict)
        second = await ctx.agent.ask("and in words")
        third = await ctx.agent.ask("count", output_schema={"type": "integer"})
        assert second.output is None
        return [first.output["label"], second.text, third.output] if ctx.item == "a" else "wrong"

    row, requests, _ = await _swarm(
        tmp_path, Step.call("final_answer", GOOD), "words", "7", schema=list[Any], rollout=rollout
    )
    assert (row.status, row.output) == ("completed", ["yes", "words", 7]), row.error
    assert [len(request.tools) for request in requests] == [1, 0, 1]
    row, _, _ = await _swarm(
        tmp_path / "2", Step.call("final_answer", GOOD), "words", "7", schema={"type": "integer"}, rollout=rollout
    )
    assert row.status == "failed" and row.error.code == "swarm.bad_output"


async def test_the_tool_is_not_there_for_prompts_without_a_schema(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        requests = plays(Step.call("final_answer", GOOD), "done")
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        report = await session.swarm("judge {{item}}", ["a"], **BARE)
        assert report.rows[0].text == "done" and report.rows[0].output is None
        assert not requests[0].tools
        answered = requests[1].messages[-1]["content"][0]
        assert answered["is_error"] and "no tool" in answered["content"][0]["text"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "nonsense"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "x": object()},
        {"type": "string", "description": "x" * 70_000},
        Verdict(label="yes"),
        object(),
    ],
)
async def test_a_schema_that_cannot_be_used_is_refused_before_the_start(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        schema_of(wrong)
    assert caught.value.code == "output.bad_schema"


def test_a_value_that_is_nested_too_deeply_for_a_schema_of_trees_does_not_fit() -> None:
    tree: dict[str, Any] = {"type": "object", "properties": {"below": {"$ref": "#"}}, "additionalProperties": False}
    value: dict[str, Any] = {}
    for _ in range(20):
        value = {"below": value}
    assert problems_of(schema_of(tree), value) == []
    for _ in range(500):
        value = {"below": value}
    assert problems_of(schema_of(tree), value) == ["it is nested too deeply to be looked at"]


def test_a_schema_is_found_by_name() -> None:
    assert load_schema(f"{__name__}:Verdict") == schema_of(Verdict)
    for wrong in ("json:nothing", "no_such_module_x:Y", "json"):
        with pytest.raises(ConfigError):
            load_schema(wrong)


def test_problems_name_their_places() -> None:
    schema = schema_of(list[Verdict])
    (problem,) = problems_of(schema, [GOOD, {"label": "x" * 5000}])
    assert "[1].label" in problem and len(problem) < 500
    assert len(problems_of({"type": "array", "items": {"type": "integer"}}, ["x"] * 50)) <= 9


def test_json_that_no_log_holds_is_no_answer() -> None:
    class Nowhere:
        def append(self, *_args: Any, **_kw: Any) -> None:
            raise AssertionError("nothing is to be recorded")

    from kimi_ray.agent.fold import PromptRecord
    from kimi_ray.agent.slots import AgentSlots

    final = FinalAnswer(Nowhere(), AgentSlots())  # type: ignore[arg-type]
    (spec,) = final.begin([PromptRecord("p", [], output_schema={"type": "object"})])
    assert spec.name == "final_answer"
    for bad in ({"x": float("nan")}, {"x": 2**70}, "text", None, []):
        with pytest.raises(ToolError):
            final.check(bad)


async def test_one_prompt_of_an_agent_may_ask_for_a_form(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        requests = plays("not yet", Step.call("final_answer", GOOD), "plain", "no", "no", "no", "no")
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        first = await (await session.main.submit("judge", output_schema=Verdict)).result(10)
        assert (first.state, first.output, first.steps) == ("completed", GOOD, 2)
        second = await (await session.main.submit("and then?")).result(10)
        assert (second.output, second.text, requests[2].tools) == (None, "plain", ())
        third = await (await session.main.submit("judge", output_schema=Verdict)).result(10)
        assert third.state == "failed" and third.error is not None and third.error["code"] == "output.invalid"
        with pytest.raises(ConfigError):
            session.main.submit("x", output_schema=Verdict, steer_if_active=True)
        with pytest.raises(ConfigError):
            session.main.submit("x", output_schema={"type": 3})
        headers = [e.data["header"] async for e in session.main.events() if e.type == "request/header"]
        assert ["tools" in header for header in headers] == [True, False, True]


async def test_a_turn_that_goes_on_after_a_lost_host_still_asks_for_the_form(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("judge {{item}}", ["a"], output_schema=Verdict, **BARE)
        await stage.until_running(1)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        requests = plays("not in the form", Step.call("final_answer", GOOD))
        stage.gate.set()
        (row,) = (await handle.result(30)).rows
        assert (row.status, row.output, row.attempt) == ("completed", GOOD, 1), row.error
        assert [tool.name for tool in requests[0].tools] == ["final_answer"]


async def test_the_form_can_be_given_in_every_permission_mode(tmp_path: Path) -> None:
    async with running(tmp_path, permission_mode="manual", permission_wait_s=0.1) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        plays(Step.call("final_answer", GOOD))
        (row,) = (await session.swarm("judge {{item}}", ["a"], output_schema=Verdict, **BARE)).rows
        assert row.output == GOOD, row.error


async def test_the_name_of_the_tool_is_taken(tmp_path: Path) -> None:
    async def final_answer(text: str) -> str:
        """Somebody's own."""
        return text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(ToolError) as caught:
            await session.swarm("judge {{item}}", ["a"], tools=[final_answer], **BARE)
        assert caught.value.code == "tool.duplicate"
