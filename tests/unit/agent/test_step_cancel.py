"""A step that alone is interrupted: what was said is kept, calls are answered, and the turn goes on with what waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.slots import PromptGate, StepStarting, ToolGate, TurnStopping
from kimi_ray.agent.turn_signal import StepStopped, TurnSignal, TurnStopped
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step
from kimi_ray.settings import Limits
from kimi_ray.tools import ToolOutput
from kimi_ray.tools.contract import ToolContext
from kimi_ray.tools.scheduling import run_calls
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe
from tests.unit.runtime_fixtures import running

RECORDED = ModelSettings(provider="scripted", record_chunks="all", retry_base_s=30.0)
LONG = "word " * 5000


class Patient(Probe):
    """A tool that looks at nothing but whether it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[asyncio.Event] = []

    async def run(self, arguments: dict[str, object], context: ToolContext) -> ToolOutput:
        self.events.append(context.cancelled)
        self.started.set()
        if len(self.events) == 1:
            await context.cancelled.wait()
        return ToolOutput("stopped early" if context.cancelled.is_set() else "in time")


def slow(script: list[Any], **options: Any) -> AgentBench:
    return AgentBench(script, chunk_chars=5, tokens_per_s=500, model=RECORDED, **options)


async def ended(bench: AgentBench) -> list[dict[str, Any]]:
    """The ends of steps, once the agent is idle and whole."""
    assert bench.log.order.open_turn is None and not bench.log.order.pending_calls
    await bench.agent.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return bench.of("step/end")


async def test_in_the_stream_the_text_is_kept_and_steered_prompts_are_said_at_once() -> None:
    bench = slow([LONG, "the second answer"])
    bench.submit("one", "two", "three")
    await bench.until("assistant/chunk", count=3)
    bench.agent.prompts.steer(["p2"])
    assert bench.agent.cancel_step()
    first, joined, alone = [await bench.result(f"p{n}") for n in range(3)]
    assert (first.result.state, joined.result.turn, alone.result.turn) == ("completed", 1, 0)
    assert first.result.text == alone.result.text == "the second answer" and first.result.steps == 2
    kept = bench.of("assistant/message")[0]
    assert kept["interrupted"] is True and kept["message"]["content"][0]["text"].startswith("word ")
    assert "interruption" not in [message["source"]["kind"] for message in bench.of("user/message")]
    assert [end.get("interrupted") for end in await ended(bench)] == [True, None, None]


async def test_in_tools_each_call_has_its_result_and_later_steps_are_not_stopped() -> None:
    tool = Patient()
    bench = AgentBench([Step.call("Probe", {"a": 1}), Step.call("Probe", {"a": 2}), "done"], tools=(tool,))
    bench.submit("one")
    await tool.started.wait()
    bench.submit("two", steer_if_active=True)
    assert bench.agent.cancel_step() and bench.agent.cancel_step(), "asked twice, it is one interruption"
    assert (await bench.result()).result.text == "done"
    said = [result["message"]["content"][0]["content"][0]["text"] for result in bench.of("tool/result")]
    assert said == ["stopped early", "in time"]
    assert [event.is_set() for event in tool.events] == [True, False]
    assert [end.get("interrupted") for end in await ended(bench)] == [True, None, None]


async def test_a_tool_that_does_not_listen_is_left_behind_after_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe()
    probe.release.clear()
    monkeypatch.setitem(run_calls.__kwdefaults__, "grace_s", 0.05)
    bench = AgentBench([Step.call("Probe"), "done"], tools=(probe,))
    bench.submit("one")
    await probe.started.wait()
    bench.submit("two", steer_if_active=True)
    assert bench.agent.cancel_step()
    assert (await bench.result("p1")).result.text == "done"
    [result] = bench.of("tool/result")
    assert result["error"]["code"] == "tool.cancelled"
    await ended(bench)


async def test_with_nothing_that_waits_the_turn_is_over_and_completed() -> None:
    bench = slow([LONG, "next"])
    bench.submit("one")
    await bench.until("assistant/chunk", count=3)
    assert bench.agent.cancel_step()
    outcome = await bench.result()
    assert (outcome.result.state, outcome.result.stop) == ("completed", "completed")
    assert outcome.result.text.startswith("word ")
    bench.submit("two")
    assert (await bench.result("p1")).result.text == "next"
    assert [end.get("interrupted") for end in await ended(bench)] == [True, None]


async def test_a_note_in_the_inbox_keeps_the_turn_alive() -> None:
    bench = slow([LONG, "heard"])
    bench.submit("one")
    await bench.until("assistant/chunk")
    bench.inbox.put("n", "something happened", {"kind": "task"})
    assert bench.agent.cancel_step()
    assert (await bench.result()).result.text == "heard"
    assert len(bench.of("turn/start")) == 1
    await ended(bench)


async def test_whoever_does_not_want_the_turn_to_end_is_asked_and_hears_of_no_answer() -> None:
    bench = slow([LONG, "more"])
    texts: list[str] = []

    async def stopping(event: TurnStopping) -> None:
        texts.append(event.text)
        event.go_on("not yet", kind="stop_hook")

    bench.slots.turn_stopping.register("test", stopping)
    bench.submit("one")
    await bench.until("assistant/chunk")
    assert bench.agent.cancel_step()
    assert (await bench.result()).result.text == "more"
    assert texts == ["", "more"]
    await ended(bench)


async def test_where_no_step_runs_nothing_is_interrupted() -> None:
    bench = AgentBench(["hello", "again"])
    assert not bench.agent.cancel_step()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def gate(asked: PromptGate) -> None:
        entered.set()
        await leave.wait()

    bench.slots.prompt.register("test", gate)
    bench.submit("one")
    await entered.wait()
    assert not bench.agent.cancel_step()
    leave.set()
    assert (await bench.result()).result.text == "hello"
    assert not bench.agent.cancel_step()
    assert [end.get("interrupted") for end in await ended(bench)] == [None]


@pytest.mark.parametrize("slot", ["step", "tool"])
async def test_a_handler_that_hangs_is_interrupted_and_calls_it_was_asked_about_do_not_start(slot: str) -> None:
    probe = Probe()
    bench = AgentBench([Step.call("Probe"), "done"] if slot == "tool" else ["done"], tools=(probe,))
    entered = asyncio.Event()

    async def hang(_event: object) -> None:
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()

    getattr(bench.slots, slot).register("test", hang)
    bench.submit("one")
    await entered.wait()
    bench.submit("two", steer_if_active=True)
    assert bench.agent.cancel_step()
    assert (await bench.result("p1")).result.text == "done"
    if slot == "tool":
        [result] = bench.of("tool/result")
        assert result["error"]["code"] == "tool.not_started" and probe.calls == [] and not bench.of("tool/call")
    assert (await ended(bench))[0]["interrupted"] is True


async def test_waiting_for_another_attempt_is_interrupted() -> None:
    bench = slow([Step.error("provider.server", 500), "done"])
    bench.submit("one")
    await bench.until("llm/retry")
    bench.submit("two", steer_if_active=True)
    assert bench.agent.cancel_step()
    assert (await bench.result()).result.text == "done"
    assert [(answer["step"], answer["attempt"]) for answer in bench.of("llm/response")] == [(0, 1), (1, 1)]
    await ended(bench)


async def test_the_end_of_the_turn_wins_over_that_of_the_step() -> None:
    bench = slow([LONG])
    bench.submit("one")
    await bench.until("assistant/chunk")
    bench.submit("two", steer_if_active=True)
    assert bench.agent.cancel_step()
    bench.agent.cancel("p0", "user")
    assert not bench.agent.cancel_step()
    assert (await bench.result()).result.state == "cancelled"
    bench.agent.cancel(None, "user")
    assert "interrupted" not in bench.of("step/end")[0]
    await bench.agent.close()


async def test_a_handler_may_interrupt_its_own_step_and_the_next_one_is_not_interrupted() -> None:
    bench = AgentBench(["one", "two"])

    async def step(event: StepStarting) -> None:
        if event.step == 0:
            bench.submit("two", steer_if_active=True)
            assert bench.agent.cancel_step()  # and returns without waiting for anything

    bench.slots.step.register("test", step)
    bench.submit("one")
    assert (await bench.result()).result.text == "one"
    assert [end.get("interrupted") for end in await ended(bench)] == [True, None]


async def test_steps_that_were_interrupted_count_against_the_limits() -> None:
    bench = slow([LONG, LONG], limits=Limits(max_steps_per_turn=1))
    bench.submit("one")
    await bench.until("assistant/chunk")
    bench.submit("two", steer_if_active=True)
    assert bench.agent.cancel_step()
    outcome = await bench.result()
    assert outcome.result.stop == "limit:max_steps_per_turn"
    await bench.agent.close()


async def test_a_cancel_that_somebody_swallows_leaves_the_task_as_it_was() -> None:
    signal, inside = TurnSignal(), asyncio.Event()

    async def turn() -> list[object]:
        seen: list[object] = []
        for _ in range(2):
            try:
                with signal.interruptible():
                    try:
                        inside.set()
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        seen.append("swallowed")
                seen.append("left")
                with signal.interruptible():
                    pass
            except TurnStopped as error:
                seen.append(type(error))
            task = asyncio.current_task()
            assert task is not None
            seen.append(task.cancelling())
            signal.step_ended()
        return seen

    task = asyncio.ensure_future(turn())
    for stop in (signal.stop_step, lambda: signal.stop("user")):
        await inside.wait()
        inside.clear()
        assert stop()
    assert await task == ["swallowed", "left", StepStopped, 0, "swallowed", "left", TurnStopped, 0]


async def test_a_gate_is_asked_again_in_the_next_step() -> None:
    probe, asked = Probe(), list[str]()
    bench = AgentBench([Step.call("Probe"), Step.call("Probe"), "done"], tools=(probe,))
    entered = asyncio.Event()

    async def gate(event: ToolGate) -> None:
        asked.append(event.call_id)
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()

    bench.slots.tool.register("test", gate)
    bench.submit("one")
    await entered.wait()
    bench.submit("two", steer_if_active=True)
    bench.agent.cancel_step()
    assert (await bench.result()).result.text == "done"
    assert len(asked) == 2 and len(probe.calls) == 1
    await ended(bench)


async def test_a_bound_of_steps_holds_for_each_turn_by_itself() -> None:
    probe = Probe()
    calls = [Step.call("Probe", {"n": n}) for n in range(2)]
    bench = AgentBench([*calls, calls[0], "done"], tools=(probe,), limits=Limits(max_steps_per_turn=2))
    bench.submit("one")
    first = (await bench.result()).result
    assert (first.state, first.stop, first.steps) == ("failed", "limit:max_steps_per_turn", 2)
    assert first.error is not None and first.error["code"] == "limit.max_steps_per_turn"
    assert first.error["details"] == {"name": "max_steps_per_turn", "value": 2, "used": 2, "scope": "agent"}
    bench.submit("two")
    assert (await bench.result("p1")).result.state == "completed"
    await ended(bench)
    assert all(type(end["duration_ms"]) is int and end["duration_ms"] >= 0 for end in bench.of("turn/end"))


async def test_a_prompt_that_a_limit_keeps_from_joining_runs_by_itself() -> None:
    probe = Probe()
    probe.release.clear()
    limits = Limits(max_steps_per_turn=1)
    bench = AgentBench([Step.call("Probe"), "by itself"], tools=(probe,), limits=limits)
    bench.submit("one")
    await probe.started.wait()
    bench.submit("two", steer_if_active=True)
    probe.release.set()
    first, second = [(await bench.result(prompt_id)).result for prompt_id in ("p0", "p1")]
    assert (first.state, first.stop) == ("failed", "limit:max_steps_per_turn")
    assert (second.state, second.turn, second.text) == ("completed", 1, "by itself")
    await bench.agent.close()


async def test_an_answer_that_must_fit_a_schema_is_asked_for_again_and_not_taken_from_half_a_step(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        prompt = await session.main.submit("judge it", output_schema={"type": "string"})
        await stage.until_running(1)
        assert await session.main.cancel_step() is True
        stage.gate.set()
        result = await prompt.result(10)
        assert (result.state, result.steps) == ("completed", 2)
        assert isinstance(result.output, str) and result.output.startswith("did ")
        assert await session.main.cancel_step() is False
