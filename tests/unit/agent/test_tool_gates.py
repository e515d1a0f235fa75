"""Tool calls and those who have a say in them: before a call starts, and when it has its output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.slots import ToolDone, ToolGate
from kimi_ray.errors import ToolError
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.tools import ToolOutput
from kimi_ray.tools.contract import Accesses, ToolContext
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe


def calls(*ids: str, name: str = "Probe") -> Step:
    return Step(tool_calls=tuple(ToolCall(name, f'{{"n": "{call_id}"}}', call_id) for call_id in ids))


def results(bench: AgentBench) -> list[tuple[str, str, str | None]]:
    """Of every result: call id, text, error code."""
    return [
        (
            data["message"]["source"]["call_id"],
            data["message"]["content"][0]["content"][0]["text"],
            (data.get("error") or {}).get("code"),
        )
        for data in bench.of("tool/result")
    ]


async def test_a_vetoed_call_has_its_call_and_its_error_result_and_the_turn_goes_on() -> None:
    probe = Probe()
    bench = AgentBench([calls("a", "b", "c"), "done"], tools=(probe,))
    seen: list[tuple[str, dict[str, Any], int, int, int]] = []

    async def deny(gate: ToolGate) -> None:
        seen.append((gate.call_id, gate.arguments, gate.turn, gate.step, gate.batch))
        if gate.call_id == "b":
            gate.deny("not b", by="rule")

    bench.slots.tool.register("deny", deny)
    bench.submit("go")
    assert (await bench.result()).result.text == "done"
    assert results(bench) == [("a", "seen", None), ("b", "not b", "tool.denied"), ("c", "seen", None)]
    assert bench.of("tool/result")[1]["meta"] == {"by": "rule"}
    told = {data["call_id"]: data.get("refused") for data in bench.of("tool/call")}
    assert told == {"a": None, "b": "tool.denied", "c": None}
    assert seen == [(n, {"n": n}, 0, 0, 3) for n in "abc"]
    assert [call["n"] for call in probe.calls] == ["a", "c"]


async def test_no_call_starts_before_all_have_passed_their_gates() -> None:
    probe = Probe()
    bench = AgentBench([calls("a", "b"), "done"], tools=(probe,))
    entered, opened = asyncio.Event(), asyncio.Event()

    async def slow(gate: ToolGate) -> None:
        if gate.call_id == "b":
            entered.set()
            await opened.wait()

    bench.slots.tool.register("slow", slow)
    bench.submit("go")
    async with asyncio.timeout(5):
        await entered.wait()
    assert "tool/call" not in bench.types, "after a crash here nothing of unknown outcome must be found"
    opened.set()
    await bench.result()
    assert len(probe.calls) == 2


async def test_a_cancel_at_a_gate_answers_every_call_and_starts_none() -> None:
    probe = Probe()
    bench = AgentBench([calls("a", "b"), "never"], tools=(probe,))
    entered = asyncio.Event()

    async def hang(_gate: ToolGate) -> None:
        entered.set()
        await asyncio.Event().wait()

    bench.slots.tool.register("hang", hang)
    bench.submit("go")
    async with asyncio.timeout(5):
        await entered.wait()
        bench.agent.cancel("p0", "user")
        assert (await bench.result()).result.state == "cancelled"
    assert [(call_id, code) for call_id, _, code in results(bench)] == [
        ("a", "tool.not_started"),
        ("b", "tool.not_started"),
    ]
    assert not probe.calls and "tool/call" not in bench.types


async def test_a_gate_that_raises_costs_its_call_only() -> None:
    probe = Probe()

    async def broken(gate: ToolGate) -> None:
        if gate.call_id == "a":
            raise RuntimeError("gate is out of order")
        if gate.call_id == "b":
            raise ToolError("no", code="tool.denied", hint="ask somebody")

    bench = AgentBench([calls("a", "b", "c"), "done"], tools=(probe,))
    bench.slots.tool.register("broken", broken)
    bench.submit("go")
    assert (await bench.result()).result.state == "completed"
    (a, text, code), (b, denied, denied_code), (c, _, fine) = results(bench)
    assert (a, code, b, denied_code, c, fine) == ("a", "tool.user_code", "b", "tool.denied", "c", None)
    assert "gate is out of order" in text
    assert denied == "no\nHint: ask somebody"
    assert len(probe.calls) == 1


async def test_the_first_decision_stands() -> None:
    bench = AgentBench([calls("a"), "done"], tools=(Probe(),))

    async def allow(gate: ToolGate) -> None:
        gate.allow()

    async def deny(gate: ToolGate) -> None:
        gate.deny("too late")

    bench.slots.tool.register("allow", allow)
    bench.slots.tool.register("deny", deny)
    bench.submit("go")
    await bench.result()
    assert results(bench) == [("a", "seen", None)]


async def test_gates_are_asked_of_sound_calls_only_and_ends_of_all() -> None:
    asked: list[str] = []
    done: list[tuple[str, bool, dict[str, Any]]] = []
    broken = Step(
        tool_calls=(
            ToolCall("Nope", '{"x": 1}', "unknown"),
            ToolCall("Probe", "[1]", "bad"),
            ToolCall("Probe", "{}", "denied"),
            ToolCall("Probe", "{}", "fine"),
        )
    )
    bench = AgentBench([broken, "done"], tools=(Probe(),))

    async def gate(event: ToolGate) -> None:
        asked.append(event.call_id)
        if event.call_id == "denied":
            event.deny("no")

    async def end(event: ToolDone) -> None:
        done.append((event.call_id, event.executed, event.arguments))

    bench.slots.tool.register("gate", gate)
    bench.slots.tool_done.register("end", end)
    bench.submit("go")
    await bench.result()
    assert asked == ["denied", "fine"]
    assert sorted(done) == [
        ("bad", False, {}),
        ("denied", False, {}),
        ("fine", True, {}),
        ("unknown", False, {"x": 1}),
    ]


async def test_an_output_can_be_replaced_and_one_who_raises_there_makes_an_error_of_it() -> None:
    bench = AgentBench([calls("a", "b"), "done"], tools=(Probe(),))

    async def end(event: ToolDone) -> None:
        if event.call_id == "b":
            raise ValueError("cannot read that")
        event.output = ToolOutput(f"{event.output.content}, and more", meta={"grown": True})

    bench.slots.tool_done.register("end", end)
    bench.submit("go")
    await bench.result()
    first, second = results(bench)
    assert first == ("a", "seen, and more", None)
    assert bench.of("tool/result")[0]["meta"] == {"grown": True}
    assert second[0] == "b" and second[2] == "tool.user_code" and "cannot read that" in second[1]


async def test_a_stopped_turn_ends_behind_its_step_and_steered_prompts_run_by_themselves() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([calls("a", "b"), "second turn"], tools=(probe,))

    async def stop(event: ToolDone) -> None:
        event.stop_turn = event.call_id == "a"

    async def never(_event: object) -> None:
        raise AssertionError("a turn that was stopped is not asked whether it wants to go on")

    bench.slots.tool_done.register("stop", stop)
    bench.submit("one", "two")
    await probe.started.wait()
    bench.agent.prompts.steer(["p1"])
    bench.slots.turn_stopping.register("never", never)
    probe.release.set()
    first = (await bench.result("p0")).result
    bench.slots.turn_stopping.remove("never")
    second = (await bench.result("p1")).result
    assert (first.state, first.steps, first.tool_calls) == ("completed", 1, 2)
    assert (second.state, second.turn, second.text) == ("completed", 1, "second turn")
    assert bench.of("prompt/queued")[-1] == {"prompt_id": "p1", "queue_length": 1}


@pytest.mark.parametrize("where", ["tool", "handler"])
async def test_a_call_that_is_cancelled_while_somebody_looks_at_its_output_keeps_the_output(where: str) -> None:
    probe = Probe()
    bench = AgentBench([calls("a"), "never"], tools=(probe,))
    entered = asyncio.Event()

    async def hang(_event: ToolDone) -> None:
        entered.set()
        await asyncio.Event().wait()

    if where == "handler":
        bench.slots.tool_done.register("hang", hang)
    else:
        probe.release.clear()
        entered = probe.started
    bench.submit("go")
    async with asyncio.timeout(10):
        await entered.wait()
        bench.agent.cancel("p0", "user")
        await bench.result()
    [(_, text, code)] = results(bench)
    assert (text, code) == ("seen", None) if where == "handler" else code == "tool.cancelled"


async def test_results_are_in_the_models_order_however_the_calls_end() -> None:
    started: list[str] = []
    ends: dict[str, asyncio.Event] = {n: asyncio.Event() for n in "abcd"}

    class Slow(Probe):
        async def run(self, arguments: dict[str, object], context: Any) -> ToolOutput:
            n = str(arguments["n"])
            started.append(n)
            await ends[n].wait()
            return ToolOutput(n)

    bench = AgentBench([calls("a", "b", "c", "d"), "done"], tools=(Slow(),))
    bench.submit("go")
    async with asyncio.timeout(5):
        await bench.until("tool/call", count=4)
        for n in "dcb":
            ends[n].set()
            for _ in range(5):
                await asyncio.sleep(0)
        assert started == ["a", "b", "c", "d"], "independent calls run side by side"
        assert "tool/result" not in bench.types
        ends["a"].set()
        await bench.result()
    assert [call_id for call_id, _, _ in results(bench)] == ["a", "b", "c", "d"]
    for result in bench.events:
        if result.type == "tool/result":
            [source] = result.sources or ()
            assert bench.events[source].type == "tool/call"


async def test_a_cancelled_batch_drains_what_runs_and_starts_nothing_more() -> None:
    class Alone(Probe):
        def accesses(self, arguments: dict[str, object]) -> Accesses:
            return Accesses.all()

    probe = Alone()
    probe.release.clear()
    bench = AgentBench([calls("a", "b", "c"), "never"], tools=(probe,))
    bench.submit("go")
    async with asyncio.timeout(5):
        await probe.started.wait()
        bench.agent.cancel("p0", "user")
        probe.release.set()
        await bench.result()
    assert [(call_id, code) for call_id, _, code in results(bench)] == [
        ("a", None),
        ("b", "tool.not_started"),
        ("c", "tool.not_started"),
    ]
    assert [data["call_id"] for data in bench.of("tool/call")] == ["a"]


async def test_behind_a_call_that_ends_them_the_calls_of_an_answer_are_told_so_and_the_turn_goes_on() -> None:
    class Moves(Probe):
        name = "Moves"

        def accesses(self, arguments: dict[str, object]) -> Accesses:
            return Accesses.all()

        async def run(self, arguments: dict[str, object], context: ToolContext) -> ToolOutput:
            return ToolOutput("moved", stop_batch=True)

    probe = Probe()
    step = Step(tool_calls=(ToolCall("Probe", "{}", "a"), ToolCall("Moves", "{}", "b"), ToolCall("Probe", "{}", "c")))
    bench = AgentBench([step, "done"], tools=(probe, Moves()))
    bench.submit("go")
    assert (await bench.result()).result.text == "done"
    assert [(call_id, code) for call_id, _, code in results(bench)] == [
        ("a", None),
        ("b", None),
        ("c", "tool.not_started"),
    ]
    assert len(probe.calls) == 1 and [data["call_id"] for data in bench.of("tool/call")] == ["a", "b"]
