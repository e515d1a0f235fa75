"""Gates: prompts that are blocked, before their turn and in the middle of one; what a handler does to a turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.loop import MAX_MENDS
from kimi_ray.agent.slots import PromptGate, RequestFailed, StepStarting, TurnStopping
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import AgentError
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe


def words(bench: AgentBench) -> list[tuple[str, str]]:
    """The user messages of the surface: source kind and text."""
    return [
        (message["source"]["kind"], message["content"][0]["text"])
        for message in bench.log.messages()
        if message["role"] == "user" and message["source"]["kind"] != "tool"
    ]


async def block_bad(gate: PromptGate) -> None:
    if "bad" in gate.text:
        gate.block("not that")


async def test_a_blocked_prompt_is_on_the_surface_behind_the_reason_and_begins_no_turn() -> None:
    bench = AgentBench(lambda _request: "ok")
    bench.slots.prompt.register("guard", block_bad)
    bench.submit("bad one", "good one")
    blocked, good = await bench.result("p0"), await bench.result("p1")
    assert blocked.result.state == "blocked"
    assert blocked.result.turn is None
    assert blocked.result.error is not None
    assert blocked.result.error["code"] == "prompt.blocked"
    assert "not that" in blocked.result.error["message"]
    with pytest.raises(AgentError) as raised:
        blocked.result.raise_for_state()
    assert raised.value.code == "prompt.blocked"
    assert good.result.state == "completed"
    assert bench.types == [
        "prompt/submitted",
        "prompt/submitted",
        "prompt/queued",
        "user/message",
        "user/message",
        "prompt/completed",
        "turn/start",
        "prompt/started",
        "step/start",
        "user/message",
        "request/header",
        "llm/response",
        "assistant/message",
        "step/end",
        "turn/end",
        "prompt/completed",
    ]
    assert words(bench) == [("gate", "not that"), ("user", "bad one"), ("user", "good one")]
    assert bench.of("user/message")[0]["source"] == {"kind": "gate", "blocked": True}


async def test_what_a_gate_adds_goes_before_the_prompt_and_takes_the_place_of_the_bare_reason() -> None:
    async def add(gate: PromptGate) -> None:
        gate.add(f"about {gate.text}", kind="hook_result")
        if "bad" in gate.text:
            gate.block("no")

    bench = AgentBench(lambda _request: "ok")
    bench.slots.prompt.register("adds", add)
    bench.submit("bad", "fine")
    await bench.result("p1")
    assert words(bench) == [
        ("hook_result", "about bad"),
        ("user", "bad"),
        ("hook_result", "about fine"),
        ("user", "fine"),
    ]
    assert [data["source"] for data in bench.of("user/message")] == [
        {"kind": "hook_result", "blocked": True},
        {"kind": "user"},
        {"kind": "hook_result"},
        {"kind": "user"},
    ]
    start = bench.types.index("step/start")
    assert bench.types[start + 1 : start + 3] == ["user/message", "user/message"], "both inside of the first step"


async def test_a_gate_sees_a_large_prompt_whole() -> None:
    seen: list[int] = []

    async def look(gate: PromptGate) -> None:
        seen.append(len(gate.text))
        gate.content[0]["text"] = "changed"

    bench = AgentBench(lambda request: str(len(request.messages[0]["content"][0]["text"])))
    bench.slots.prompt.register("looks", look)
    bench.submit("x" * 100_000)
    assert (await bench.result()).result.text == "100000"
    assert seen == [100_000]


async def test_a_gate_that_raises_fails_its_prompt_and_no_other() -> None:
    async def broken(gate: PromptGate) -> None:
        if "one" in gate.text:
            raise ValueError("out of order")

    bench = AgentBench(lambda _request: "ok")
    bench.slots.prompt.register("broken", broken)
    bench.submit("one", "two")
    failed = await bench.result("p0")
    assert failed.result.state == "failed"
    assert failed.result.error is not None
    assert "out of order" in failed.result.error["message"]
    assert (await bench.result("p1")).result.state == "completed"
    assert len(bench.of("turn/start")) == 1


async def test_what_a_gate_adds_must_be_json() -> None:
    async def odd(gate: PromptGate) -> None:
        gate.before.append({"content": [{"type": "text", "text": object()}], "source": {"kind": "odd"}})

    bench = AgentBench(lambda _request: "ok")
    bench.slots.prompt.register("odd", odd)
    bench.submit("one")
    failed = await bench.result("p0")
    assert failed.result.error is not None
    assert failed.result.error["code"] == "log.not_json"
    assert "turn/start" not in bench.types


class Held:
    """A prompt gate that a test holds closed."""

    def __init__(self, bench: AgentBench, *texts: str) -> None:
        self.texts = texts
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.cancelled = 0
        bench.slots.prompt.register("held", self)

    async def __call__(self, gate: PromptGate) -> None:
        if gate.text not in self.texts:
            return
        self.entered.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def until_entered(self) -> None:
        async with asyncio.timeout(5):
            await self.entered.wait()


@pytest.mark.parametrize("named", [True, False])
async def test_a_prompt_can_be_cancelled_at_its_gate_and_leaves_no_turn(named: bool) -> None:
    bench = AgentBench(lambda _request: "ok")
    held = Held(bench, "one")
    bench.submit("one")
    await held.until_entered()
    assert bench.agent.cancel("p0" if named else None, "user") == ["p0"]
    assert (await bench.result("p0")).result.state == "cancelled"
    assert held.cancelled == 1
    assert bench.types == ["prompt/submitted", "prompt/completed"], "no turn, so no reminder"
    bench.submit("two")
    assert (await bench.result("p1")).result.state == "completed"


async def test_an_agent_can_be_closed_while_a_gate_hangs() -> None:
    bench = AgentBench(lambda _request: "ok")
    held = Held(bench, "one")
    bench.submit("one", "two")
    await held.until_entered()
    async with asyncio.timeout(5):
        await bench.agent.close()
    states = {data["prompt_id"]: data["state"] for data in bench.of("prompt/completed")}
    assert states == {"p0": "cancelled", "p1": "cancelled"}
    assert "turn/start" not in bench.types


async def test_a_fenced_agent_writes_nothing_although_a_gate_hangs() -> None:
    bench = AgentBench(lambda _request: "ok")
    held = Held(bench, "one")
    bench.submit("one")
    await held.until_entered()
    bench.agent.fence()
    async with asyncio.timeout(5):
        await bench.agent.close()
    assert bench.types == ["prompt/submitted"]


async def test_nothing_joins_a_turn_whose_prompt_is_at_its_gate() -> None:
    bench = AgentBench(lambda _request: "ok")
    held = Held(bench, "one")
    bench.submit("one")
    await held.until_entered()
    bench.agent.submit((PromptSpec("p1", "two", steer_if_active=True),))
    with pytest.raises(AgentError) as refused:
        bench.agent.prompts.steer(["p1"])
    assert refused.value.code == "prompt.not_found"
    held.open.set()
    first, second = await bench.result("p0"), await bench.result("p1")
    assert (first.result.turn, second.result.turn) == (0, 1)
    assert "prompt/steered" not in bench.types


async def test_a_steered_prompt_passes_the_gate_and_a_blocked_one_does_not_end_the_turn() -> None:
    seen: list[tuple[str, bool]] = []

    async def look(gate: PromptGate) -> None:
        seen.append((gate.text, gate.steered))
        await block_bad(gate)

    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "done"], tools=(probe,))
    bench.slots.prompt.register("looks", look)
    bench.submit("one")
    await probe.started.wait()
    bench.agent.submit((PromptSpec("p1", "bad", steer_if_active=True),))
    bench.agent.submit((PromptSpec("p2", "good", steer_if_active=True),))
    probe.release.set()
    results = [(await bench.result(f"p{n}")).result for n in range(3)]
    assert [result.state for result in results] == ["completed", "blocked", "completed"]
    assert [result.turn for result in results] == [0, None, 0]
    assert seen == [("one", False), ("bad", True), ("good", True)]
    assert words(bench) == [("user", "one"), ("gate", "not that"), ("user", "bad"), ("user", "good")]
    assert bench.of("turn/end")[0]["reason"] == {"kind": "completed"}


async def test_a_blocked_steered_prompt_alone_does_not_keep_the_turn_alive() -> None:
    asked = 0

    def model(_request: Any) -> str:
        nonlocal asked
        asked += 1
        return "done"

    bench = AgentBench(model)
    bench.slots.prompt.register("guard", block_bad)

    async def steer(_event: StepStarting) -> None:
        bench.agent.submit((PromptSpec("p1", "bad", steer_if_active=True),))

    bench.slots.step.register("steer", steer)
    bench.submit("one")
    assert (await bench.result("p0")).result.steps == 1
    assert (await bench.result("p1")).result.state == "blocked"
    assert asked == 1


async def test_a_prompt_that_is_cancelled_while_it_is_at_the_gate_of_a_turn_does_not_join() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "done"], tools=(probe,))
    held = Held(bench, "two")
    bench.submit("one")
    await probe.started.wait()
    bench.agent.submit((PromptSpec("p1", "two", steer_if_active=True),))
    probe.release.set()
    await held.until_entered()
    assert bench.agent.cancel("p1", "user") == ["p1"]
    held.open.set()
    assert (await bench.result("p1")).result.state == "cancelled"
    assert (await bench.result("p0")).result.state == "completed"
    assert words(bench) == [("user", "one")]


async def test_a_turn_that_is_cancelled_at_a_joining_gate_lets_the_prompt_run_by_itself() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "done", "again"], tools=(probe,))
    held = Held(bench, "two")
    bench.submit("one")
    await probe.started.wait()
    bench.agent.submit((PromptSpec("p1", "two", steer_if_active=True),))
    probe.release.set()
    await held.until_entered()
    assert bench.agent.cancel("p0", "user") == ["p0"]
    held.open.set()
    assert (await bench.result("p0")).result.state == "cancelled"
    second = (await bench.result("p1")).result
    assert (second.state, second.turn) == ("completed", 1)


async def test_a_blocked_prompt_is_said_once_though_the_process_dies_in_between() -> None:
    bench = AgentBench(lambda _request: "ok")
    bench.slots.prompt.register("guard", block_bad)
    bench.submit("bad")
    await bench.result("p0")
    events = bench.events
    for cut in range(1, len(events) + 1):
        again = AgentBench(lambda _request: "ok", events=events[:cut])
        again.slots.prompt.register("guard", block_bad)
        again.agent.revive()
        async with asyncio.timeout(5):
            while again.agent.busy:
                await asyncio.sleep(0)
        assert [data["state"] for data in again.of("prompt/completed")] == ["blocked"], cut
        assert words(again).count(("user", "bad")) == 1, cut


# -- steps, requests, ends of turns --------------------------------------------------------------------------------


async def test_a_step_handler_may_put_a_message_before_the_request() -> None:
    seen: list[int] = []

    def model(request: Any) -> str:
        seen.append(len(request.messages))
        return "ok"

    bench = AgentBench(model)

    async def remind(event: StepStarting) -> None:
        said = {"id": f"m{event.step}", "role": "user", "content": [{"type": "text", "text": "mind"}]}
        bench.journal.append("user/message", {**said, "source": {"kind": "reminder"}}, surface="append")

    bench.slots.step.register("reminds", remind)
    bench.submit("one")
    await bench.result()
    assert seen == [2]


async def test_a_step_handler_that_raises_fails_the_turn_and_its_brackets_are_closed() -> None:
    async def broken(_event: StepStarting) -> None:
        raise KeyError("lost")

    bench = AgentBench(lambda _request: "ok")
    bench.slots.step.register("broken", broken)
    bench.submit("one")
    outcome = await bench.result()
    assert outcome.result.state == "failed"
    assert bench.types[-3:] == ["step/end", "turn/end", "prompt/completed"]
    assert "llm/response" not in bench.types


OVERFLOW = Step.error("context.overflow", 400)


async def test_an_overflow_is_routed_to_whoever_can_mend_it_and_the_request_is_made_from_the_new_surface() -> None:
    script = [OVERFLOW, OVERFLOW, "fine"]
    bench = AgentBench(lambda _request: script.pop(0))
    seen: list[tuple[int, int, str]] = []

    async def mend(event: RequestFailed) -> None:
        seen.append((event.turn, event.step, event.error.code))
        said = {"id": f"m{len(seen)}", "role": "user", "content": [{"type": "text", "text": "shorter"}]}
        bench.journal.append("user/message", {**said, "source": {"kind": "compaction"}}, surface="append")
        event.again()

    bench.slots.request_failed.register("mends", mend)
    bench.submit("one")
    outcome = await bench.result()
    assert outcome.result.text == "fine"
    assert outcome.result.steps == 1
    assert seen == [(0, 0, "context.overflow")] * 2
    assert [data["attempt"] for data in bench.of("llm/response")] == [1, 2, 3], "no two attempts of a step are the same"
    assert len(bench.of("step/start")) == 1


async def test_mending_is_bounded_and_the_last_error_is_the_turns() -> None:
    bench = AgentBench(lambda _request: OVERFLOW)
    asked = 0

    async def mend(event: RequestFailed) -> None:
        nonlocal asked
        asked += 1
        event.again()

    bench.slots.request_failed.register("mends", mend)
    bench.submit("one")
    outcome = await bench.result()
    assert asked == MAX_MENDS
    assert outcome.result.error is not None
    assert outcome.result.error["code"] == "context.overflow"
    assert outcome.result.error["details"]["attempts"] == MAX_MENDS + 1


async def test_a_request_that_nobody_mends_fails_with_its_own_error() -> None:
    async def look(_event: RequestFailed) -> None:
        return

    bench = AgentBench([Step.error("provider.server", 500, retry_after_ms=1)] * 2, model=_attempts(2))
    bench.slots.request_failed.register("looks", look)
    bench.submit("one")
    outcome = await bench.result()
    assert outcome.result.error is not None
    assert outcome.result.error["code"] == "provider.server"
    assert outcome.result.error["details"]["attempts"] == 2


async def test_cancelling_wins_over_mending() -> None:
    bench = AgentBench(lambda _request: OVERFLOW)
    entered = asyncio.Event()

    async def hang(event: RequestFailed) -> None:
        entered.set()
        await asyncio.Event().wait()
        event.again()

    bench.slots.request_failed.register("hangs", hang)
    bench.submit("one")
    async with asyncio.timeout(5):
        await entered.wait()
    bench.agent.cancel("p0", "user")
    assert (await bench.result()).result.state == "cancelled"
    assert len(bench.of("llm/response")) == 1


def _attempts(count: int) -> ModelSettings:
    return ModelSettings(provider="scripted", max_attempts=count)


async def test_a_turn_goes_on_once_for_whoever_does_not_want_it_to_end() -> None:
    asked: list[str] = []

    async def not_yet(event: TurnStopping) -> None:
        asked.append(event.text)
        event.go_on("and the tests?", kind="stop_hook")

    bench = AgentBench(["first", "second", "never"])
    bench.slots.turn_stopping.register("stop", not_yet)
    bench.submit("one")
    outcome = await bench.result()
    assert (outcome.result.text, outcome.result.steps) == ("second", 2)
    assert asked == ["first", "second"]
    assert words(bench) == [("user", "one"), ("stop_hook", "and the tests?")]


async def test_two_who_want_a_turn_to_go_on_are_both_heard() -> None:
    async def stop(event: TurnStopping) -> None:
        event.go_on("hook", kind="stop_hook")

    async def schema(event: TurnStopping) -> None:
        event.go_on("schema", kind="output_schema", times=2)

    bench = AgentBench(lambda _request: "ok")
    bench.slots.turn_stopping.register("stop", stop)
    bench.slots.turn_stopping.register("schema", schema)
    bench.submit("one")
    assert (await bench.result()).result.steps == 4
    assert words(bench)[1:] == [("stop_hook", "hook"), ("output_schema", "schema"), ("output_schema", "schema")]


@pytest.mark.parametrize("how", ["calls", "joined", "filtered"])
async def test_nobody_is_asked_whether_a_turn_may_end_that_does_not_end_by_itself(how: str) -> None:
    asked: list[str] = []

    async def stop(event: TurnStopping) -> None:
        asked.append(event.text)

    first = {"calls": Step.call("Probe", text="first"), "joined": "first", "filtered": Step("first", finish="filtered")}
    bench = AgentBench([first[how], "last"], tools=(Probe(),))
    bench.slots.turn_stopping.register("stop", stop)
    if how == "joined":

        async def steer(event: StepStarting) -> None:
            if event.step == 0:
                bench.agent.submit((PromptSpec("p1", "two", steer_if_active=True),))

        bench.slots.step.register("steer", steer)
    bench.submit("one")
    await bench.result()
    assert asked == ([] if how == "filtered" else ["last"])


async def test_a_prompt_that_is_steered_while_the_end_is_discussed_joins() -> None:
    bench = AgentBench(["first", "second"])

    async def steer(event: TurnStopping) -> None:
        if event.text == "first":
            bench.agent.submit((PromptSpec("p1", "two", steer_if_active=True),))

    bench.slots.turn_stopping.register("steer", steer)
    bench.submit("one")
    assert (await bench.result("p1")).result.turn == 0
    assert (await bench.result("p0")).result.text == "second"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("slot", ["prompt", "step", "tool", "turn_stopping"])
async def test_a_handler_may_cancel_what_it_is_asked_about_and_the_agent_lives_on(slot: str, waits: bool) -> None:
    script = [Step.call("Probe"), "done", "fine"]
    bench = AgentBench(lambda _request: script.pop(0), tools=(Probe(),))

    async def cancel(_event: Any) -> None:
        if bench.agent.cancel("p0", "parent") and waits:
            await asyncio.Event().wait()

    getattr(bench.slots, slot).register("cancels", cancel)
    bench.submit("one")
    assert (await bench.result("p0")).result.state == "cancelled"
    getattr(bench.slots, slot).remove("cancels")
    script[:] = ["fine"]
    bench.submit("two")
    assert (await bench.result("p1")).result.text == "fine"


async def test_a_model_may_cancel_its_own_turn_and_the_agent_lives_on() -> None:
    async def model(_request: Any) -> str:
        bench.agent.cancel("p0", "parent")
        return "too late"

    bench = AgentBench(model)
    bench.submit("one", "two")
    assert (await bench.result("p0")).result.state == "cancelled"
    assert (await bench.result("p1")).result.state == "completed"
