"""An agent that comes back goes on where its log ends: numbers, history, what waits."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.agent.slots import PromptGate, ToolGate
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.settings import Limits
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe


async def test_history_and_numbers_go_on_and_no_seq_comes_twice() -> None:
    first = AgentBench([Step.call("Probe"), "one"], tools=(Probe(),), system="be brief")
    first.submit("first")
    await first.result()
    seen: list[list[str]] = []

    def model(request: ChatRequest) -> str:
        seen.append([message["role"] for message in request.messages])
        return "two"

    second = AgentBench(model, tools=(Probe(),), events=first.events, system="be brief")
    second.agent.revive()
    second.submit("second")
    outcome = (await second.result("p1")).result
    assert (outcome.turn, outcome.text) == (1, "two")
    assert seen == [["user", "assistant", "user", "assistant", "user"]]
    assert [event.seq for event in second.events] == list(range(len(second.events)))
    assert [data["turn"] for data in second.of("turn/start")] == [0, 1]
    assert len(second.of("request/header")) == 1, "the header is what it was"
    assert (await second.result("p1")).totals.turns == 2


async def test_what_waited_runs_in_its_order_before_what_comes_new() -> None:
    first = AgentBench(lambda _request: "ok")
    first.agent.hold("test")
    first.submit("a", "b", "c")
    second = AgentBench(lambda _request: "ok", events=first.events)
    second.agent.revive()
    second.agent.submit((PromptSpec("p3", "d"),))
    await second.result("p3")
    said = [message["content"][0]["text"] for message in second.log.messages() if message["role"] == "user"]
    assert said == ["a", "b", "c", "d"]


async def test_a_gate_that_was_asked_when_the_process_died_is_asked_again() -> None:
    first = AgentBench(lambda _request: "ok")
    entered = asyncio.Event()

    async def hang(_gate: PromptGate) -> None:
        entered.set()
        await asyncio.Event().wait()

    first.slots.prompt.register("gate", hang)
    first.submit("one")
    async with asyncio.timeout(5):
        await entered.wait()
    asked: list[str] = []

    async def look(gate: PromptGate) -> None:
        asked.append(gate.text)

    second = AgentBench(lambda _request: "ok", events=first.events)
    second.slots.prompt.register("gate", look)
    second.agent.revive()
    assert (await second.result()).result.state == "completed"
    assert asked == ["one"]
    await first.agent.close()


async def test_a_call_whose_gate_was_open_when_the_process_died_was_not_started() -> None:
    first = AgentBench([Step.call("Probe"), "never"], tools=(Probe(),))
    entered = asyncio.Event()

    async def hang(_gate: ToolGate) -> None:
        entered.set()
        await asyncio.Event().wait()

    first.slots.tool.register("gate", hang)
    first.submit("one")
    async with asyncio.timeout(5):
        await entered.wait()
    second = AgentBench(["never"], tools=(Probe(),), events=first.events)
    second.agent.revive()
    await second.result()
    [result] = second.of("tool/result")
    assert result["error"]["code"] == "tool.not_started"
    await first.agent.close()


async def test_waiting_at_a_gate_is_no_working_time() -> None:
    bench = AgentBench([Step.call("Probe"), "done"], tools=(Probe(),), limits=Limits(working_time_s=0.2))

    async def slow(_gate: Any) -> None:
        await asyncio.sleep(0.3)

    bench.slots.tool.register("slow", slow)
    bench.slots.prompt.register("slow", slow)
    bench.submit("one")
    outcome = await bench.result()
    assert outcome.result.state == "completed"
    assert outcome.totals.tools_ms < 200
