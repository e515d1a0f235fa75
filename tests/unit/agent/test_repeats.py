"""The guard against repeated calls: shared results, reminders, the end of the turn; and that the log tells of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.repeats import STOP_AT, RepeatedCalls
from kimi_ray.agent.slots import ToolGate
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.runs import status_of
from kimi_ray.session import turn_reason
from kimi_ray.tools.contract import Accesses
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe
from tests.unit.runtime_fixtures import running


def same(*ids: str, arguments: str = '{"a": 1, "b": 2}') -> Step:
    return Step(tool_calls=tuple(ToolCall("Probe", arguments, call_id) for call_id in ids))


def guarded(script: Any, probe: Any) -> AgentBench:
    bench = AgentBench(script, tools=(probe,))
    RepeatedCalls(bench.slots)
    return bench


def told(bench: AgentBench) -> list[tuple[str, Any]]:
    """Of each result its call and its meta."""
    return [(data["message"]["source"]["call_id"], data.get("meta")) for data in bench.of("tool/result")]


def texts(bench: AgentBench) -> list[str]:
    return [data["message"]["content"][0]["content"][0]["text"] for data in bench.of("tool/result")]


async def test_equal_calls_of_one_answer_run_once_and_each_has_its_call_and_result() -> None:
    probe = Probe()
    answer = Step(
        tool_calls=(
            ToolCall("Probe", '{"a": 1, "b": 2}', "x"),
            ToolCall("Probe", '{"a": 2}', "y"),
            ToolCall("Probe", '{ "b":2, "a":1 }', "z"),
        )
    )
    bench = guarded([answer, "done"], probe)
    bench.submit("go")
    assert (await bench.result()).result.tool_calls == 3
    assert len(probe.calls) == 2
    assert [data["call_id"] for data in bench.of("tool/call")] == ["x", "y", "z"]
    assert told(bench) == [("x", None), ("y", None), ("z", {"same_as": "x"})]
    assert texts(bench) == ["seen"] * 3


async def test_more_equal_calls_than_may_run_at_a_time_do_not_wait_for_ever() -> None:
    class Alone(Probe):
        def accesses(self, arguments: dict[str, object]) -> Accesses:
            return Accesses.all() if arguments else Accesses.none()

    probe = Alone()
    first = ToolCall("Probe", '{"other": 1}', "first")
    answer = Step(tool_calls=(first, *(ToolCall("Probe", '{"a": 1}', f"c{n}") for n in range(30))))
    bench = guarded([answer, "done"], probe)
    bench.submit("go")
    async with asyncio.timeout(5):
        await bench.result()
    assert len(probe.calls) == 2
    assert len(bench.of("tool/result")) == 31


async def test_a_shared_call_that_is_cancelled_gives_all_of_them_a_result() -> None:
    probe = Probe()
    probe.release.clear()
    bench = guarded([same("a", "b", "c"), "never"], probe)
    bench.submit("go")
    async with asyncio.timeout(10):
        await probe.started.wait()
        bench.agent.cancel("p0", "user")
        await bench.result()
    assert sorted(call_id for call_id, _ in told(bench)) == ["a", "b", "c"]
    assert bench.log.order.open_turn is None


async def test_a_shared_refusal_is_shared_too() -> None:
    bench = guarded([same("a", "b"), "done"], Probe())
    asked: list[str] = []

    async def deny(gate: ToolGate) -> None:
        asked.append(gate.call_id)
        gate.deny("no")

    bench.slots.tool.register("deny", deny)
    bench.submit("go")
    await bench.result()
    assert asked == ["a"], "one question for both"
    assert texts(bench) == ["no", "no"]


async def test_a_call_repeated_step_after_step_is_reminded_of_and_ends_the_turn() -> None:
    probe = Probe()
    steps = [same(f"c{n}") for n in range(20)]
    bench = guarded([*steps, "never"], probe)
    bench.submit("go")
    outcome = (await bench.result()).result
    assert (outcome.state, outcome.stop, outcome.steps) == ("completed", "repeated", STOP_AT)
    assert bench.of("turn/end")[0]["reason"] == {"kind": "completed", "cause": "repeated"}
    assert turn_reason(outcome.stop) == status_of("repeated") == "completed"
    acted = {n + 1: meta["repeated"] for n, (_, meta) in enumerate(told(bench)) if meta}
    assert acted == {3: {"times": 3}, 5: {"times": 5}, 8: {"times": 8}, 12: {"times": 12, "stopped": True}}
    for n, text in enumerate(texts(bench), start=1):
        assert text.startswith("seen")
        assert ("system-reminder" in text) == (n in acted)


@pytest.mark.parametrize("between", ["text", "other"])
async def test_a_streak_ends_with_a_step_without_the_call_and_with_the_turn(between: str) -> None:
    pause: list[Any] = ["stop here"] if between == "text" else [same("x", arguments='{"a": 3}')]
    bench = guarded([same("a"), same("b"), *pause, same("c"), same("d"), "done"], Probe())
    bench.submit("go", *(["again"] if between == "text" else []))
    await bench.result("p1" if between == "text" else "p0")
    assert [meta for _, meta in told(bench) if meta] == []


async def test_a_call_that_is_refused_each_time_is_a_repetition_and_different_mistakes_are_not() -> None:
    steps = [same(f"c{n}", arguments="[]") for n in range(20)]
    bench = guarded([*steps], Probe())
    bench.submit("go")
    assert (await bench.result()).result.steps == STOP_AT
    varied = [same(f"c{n}", arguments=f"[{n}]") for n in range(20)]
    bench = guarded([*varied, "done"], Probe())
    bench.submit("go")
    assert (await bench.result()).result.steps == 21


async def test_without_the_guard_nothing_is_shared_or_stopped() -> None:
    probe = Probe()
    bench = AgentBench([*(same(f"a{n}", f"b{n}") for n in range(20)), "done"], tools=(probe,))
    bench.submit("go")
    assert (await bench.result()).result.steps == 21
    assert len(probe.calls) == 40
    assert all(meta is None for _, meta in told(bench))


@pytest.mark.parametrize("guard", [True, False])
async def test_the_guard_can_be_switched_off(tmp_path: Path, guard: bool) -> None:
    async with running(tmp_path, repeat_guard=guard) as (runtime, stage, model):
        looks = Step(tool_calls=(ToolCall("Glob", '{"pattern": "*"}'),) * 2)
        stage.faults["go"] = [looks] * 3
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="explore")
        assert (await (await session.main.submit("go")).result(20)).steps == 4
        metas = [event.data.get("meta") or {} async for event in session.main.events() if event.type == "tool/result"]
        assert len(metas) == 6
        assert ["same_as" in meta for meta in metas] == [False, guard] * 3
        assert any("repeated" in meta for meta in metas) is guard
