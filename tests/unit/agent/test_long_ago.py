"""An agent that lives long keeps the newest of what ended whole, and of the rest what it must know."""

from __future__ import annotations

import asyncio

import pytest

from kimi_ray.agent.fold import AgentFold
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import KimiRayError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe


def answers(request: ChatRequest) -> Step:
    return Step(f"answer {request.turn}")


def asks(_request: ChatRequest) -> Step:
    return Step(tool_calls=(ToolCall("Probe"),))


def short(bench: AgentBench, keep: int = 2) -> AgentFold:
    fold = bench.journal.fold
    fold.keep_turns = fold.keep_prompts = keep
    return fold


async def test_a_prompt_of_long_ago_is_known_by_its_id_and_runs_once() -> None:
    bench = AgentBench(answers)
    fold = short(bench)
    for n in range(6):
        bench.submit(f"text {n}")
        await bench.result(f"p{n}")
    assert set(fold.prompts) == {"p3", "p4", "p5"} and len(fold.ended) == 3 and len(fold.turns) == 2
    before = len(bench.events)
    bench.agent.submit((PromptSpec("p0", "text 0"), PromptSpec("p5", "text 5")))
    await asyncio.sleep(0)
    assert len(bench.events) == before and not bench.agent.busy
    for name in ("p0", "p5"):
        with pytest.raises(KimiRayError) as caught:
            bench.agent.submit((PromptSpec(name, "something else"),))
        assert caught.value.code == "prompt.id_conflict"
    status = bench.agent.status("p0")
    assert (status.state, status.turn) == ("completed", 0)
    assert not bench.agent.is_waiting("p0") and bench.agent.prompts.knows("p0")
    with pytest.raises(KimiRayError) as caught:
        bench.agent.outcome("p0")
    assert caught.value.code == "prompt.result_forgotten"
    assert caught.value.details == {"turn": 0, "kept": 2, "state": "completed"}
    with pytest.raises(KimiRayError) as caught:
        bench.agent.outcome("p99")
    assert caught.value.code == "prompt.not_found"


async def test_the_next_life_knows_it_too() -> None:
    bench = AgentBench(answers)
    for n in range(6):
        bench.submit(f"text {n}")
        await bench.result(f"p{n}")
    fold = AgentFold(keep_turns=2, keep_prompts=2)
    for event in bench.events:
        fold.apply(event)
    assert set(fold.prompts) == {"p3", "p4", "p5"}
    again = AgentBench(answers, events=bench.events)
    again.journal.fold.keep_prompts = 2
    again.submit("text 6")  # from here on it lets go
    await again.result("p6")
    before = len(again.events)
    again.agent.submit((PromptSpec("p1", "text 1"),))
    assert len(again.events) == before and again.agent.status("p1").state == "completed"


async def test_the_end_of_each_of_many_is_told_before_it_is_let_go() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench(asks, tools=(probe,))
    fold = short(bench)
    names = bench.submit(*(f"text {n}" for n in range(50)))
    await bench.until("tool/call")
    hit = bench.agent.cancel(None, "user")
    assert set(hit) == set(names)
    bench.agent.submit((PromptSpec("next", "a prompt that comes before those ends are durable"),))
    probe.release.set()
    for name in names:
        outcome = await bench.result(name)
        assert outcome.result.state == "cancelled"
    bench.agent.cancel(None, "user")
    await bench.result("next")
    bench.submit("the last")
    assert len(fold.prompts) <= 4 and not fold.held


async def test_a_continuation_of_long_ago_runs_once() -> None:
    bench = AgentBench(answers)
    short(bench)
    bench.submit("text")
    await bench.result("p0")
    for n in range(5):
        bench.agent.submit((PromptSpec(f"c{n}", continuation=True),))
        assert (await bench.result(f"c{n}")).result.turn == n + 1
    before = len(bench.events)
    bench.agent.submit((PromptSpec("c0", continuation=True),))
    await asyncio.sleep(0)
    assert len(bench.events) == before and bench.agent.status("c0").turn == 1
    with pytest.raises(KimiRayError, match="ran in turn 1"):
        bench.agent.outcome("c0")


async def test_a_call_id_of_long_ago_is_not_given_again() -> None:
    calls = [Step(tool_calls=(ToolCall("Probe", "{}", "same"),)), "fine"]
    bench = AgentBench([*calls, *calls, *calls], tools=(Probe(),))
    short(bench, 1)
    for n in range(3):
        bench.submit(f"text {n}")
        await bench.result(f"p{n}")
    asked = [event["call_id"] for event in bench.of("tool/call")]
    assert asked == ["same", "same__2", "same__3"]
