"""How turns are cancelled, cut, filtered and tried again, and what of that the model and the log are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.specs import PromptSpec
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.models import ModelSettings, ResolvedModel
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.llm.scripted import ScriptedProvider
from kimi_ray.settings import Limits, Sampling
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

CHUNKS = ModelSettings(provider="scripted", record_chunks="all")


def kinds(bench: AgentBench) -> list[str]:
    return [message.get("source", {}).get("kind", "?") for message in bench.log.messages()]


async def streaming(step: Step | str) -> AgentBench:
    """An agent in the middle of an answer."""
    bench = AgentBench([step, "next", "last"], chunk_chars=4, tokens_per_s=2000, model=CHUNKS)
    bench.submit("one")
    await bench.until("assistant/chunk")
    return bench


async def test_a_user_who_cancels_leaves_text_thought_and_one_reminder_at_that_place() -> None:
    bench = await streaming(Step("spoken " * 10_000, reasoning="thought " * 3))
    await bench.until("assistant/chunk", count=10)
    assert bench.agent.cancel("p0", "user") == ["p0"]
    assert bench.agent.cancel("p0", "user") == ["p0"], "once more changes nothing"
    outcome = await bench.result()
    assert outcome.result.state == "cancelled"
    [message] = bench.of("assistant/message")
    blocks = message["message"]["content"]
    assert [block["type"] for block in blocks] == ["reasoning", "text"]
    assert message["interrupted"] is True
    assert bench.types[-4:] == ["step/end", "user/message", "turn/end", "prompt/completed"]
    assert bench.of("user/message")[-1]["source"] == {"kind": "interruption"}
    assert "<system-reminder>" in bench.of("user/message")[-1]["content"][0]["text"]
    bench.submit("two")
    assert (await bench.result("p1")).result.text == "next"
    assert kinds(bench) == ["user", "model", "interruption", "user", "model"]


async def test_only_space_is_dropped_and_an_unfinished_call_is_not_kept() -> None:
    step = Step("   \n " * 2000, tool_calls=(ToolCall("Probe", "{}", "c"),))
    bench = await streaming(step)
    bench.agent.cancel("p0", "user")
    await bench.result()
    assert "assistant/message" not in bench.types
    assert kinds(bench) == ["user", "interruption"]


@pytest.mark.parametrize("cause", ["closed", "rollout", "cancelled", "parent"])
async def test_a_program_that_cancels_leaves_no_reminder(cause: str) -> None:
    bench = await streaming("spoken " * 10_000)
    bench.agent.cancel("p0", cause)
    await bench.result()
    assert bench.of("turn/end")[0]["reason"] == {"kind": "cancelled", "cause": cause}
    assert "interruption" not in kinds(bench)


async def test_reminders_do_not_pile_up() -> None:
    async def model(_request: Any) -> str:
        await asyncio.Event().wait()
        return "never"

    bench = AgentBench(model)
    bench.submit("one")
    await bench.until("request/header")
    bench.agent.cancel(None, "user")
    await bench.result()
    for n in range(3):
        bench.agent.submit((PromptSpec(f"c{n}", continuation=True),))
        await bench.until("step/start", count=2 + n)
        bench.agent.cancel(None, "user")
        await bench.until("turn/end", count=2 + n)
    assert kinds(bench) == ["user", "interruption"]
    bench.submit("two")
    await bench.until("step/start", count=5)
    bench.agent.cancel(None, "user")
    await bench.result("p1")
    assert kinds(bench) == ["user", "interruption", "user", "interruption"]


async def test_a_cancel_while_a_retry_waits_ends_the_turn_at_once() -> None:
    bench = AgentBench([Step.error("provider.rate_limit", 429, retry_after_ms=60_000), "never"])
    bench.submit("one")
    await bench.until("llm/retry")
    bench.agent.cancel("p0", "user")
    assert (await bench.result(within_s=2)).result.state == "cancelled"
    assert len(bench.of("llm/response")) == len(bench.of("llm/retry")) == 1


async def test_a_prompt_that_comes_while_a_cancelled_turn_ends_runs_and_after_the_agents_end_none() -> None:
    bench = await streaming("spoken " * 10_000)
    bench.store.disk.clear()
    bench.agent.cancel("p0", "user")
    await bench.until("turn/end")
    bench.submit("two")  # the turn is over, the agent is not idle: its end is not durable yet
    bench.store.disk.set()
    assert (await bench.result("p1")).result.text == "next"
    await bench.agent.close()
    with pytest.raises(Exception, match="closed"):
        bench.submit("three")
    assert bench.types.count("turn/start") == 2


async def test_a_filtered_answer_fails_the_turn_and_what_came_of_it_is_kept() -> None:
    bench = AgentBench([Step("half of i", finish="filtered"), "next"])
    bench.submit("one", "two")
    outcome = (await bench.result()).result
    assert outcome.state == "failed"
    assert outcome.error is not None and outcome.error["code"] == "provider.filtered"
    [response] = bench.of("llm/response")[:1]
    assert response["finish_reason"] == "filtered" and response["error"]["code"] == "provider.filtered"
    message = bench.of("assistant/message")[0]
    assert message["interrupted"] is True and message["message"]["content"][0]["text"] == "half of i"
    step = bench.types.index("step/end")
    assert bench.types[step - 1 : step + 2] == ["assistant/message", "step/end", "turn/end"]
    assert bench.of("llm/retry") == []
    assert (await bench.result("p1")).result.state == "completed"


async def test_a_filtered_answer_with_calls_runs_none_of_them() -> None:
    probe = Probe()
    step = Step("text", tool_calls=(ToolCall("Probe", "{}", "c"),), finish="filtered")
    bench = AgentBench([step, "never"], tools=(probe,))
    bench.submit("one")
    assert (await bench.result()).result.state == "failed"
    assert not probe.calls
    assert bench.log.order.pending_calls == {}


async def test_an_answer_that_was_cut_completes_the_prompt_and_says_so() -> None:
    bench = AgentBench([Step("half of i", finish="max-tokens")])
    bench.submit("one")
    outcome = (await bench.result()).result
    assert (outcome.state, outcome.stop, outcome.text) == ("completed", "truncated", "half of i")
    assert bench.of("turn/end")[0]["reason"] == {"kind": "truncated"}


async def test_a_finish_that_speaks_of_calls_without_any_ends_the_turn() -> None:
    bench = AgentBench([Step("no call after all", finish="tool-calls"), "never"])
    bench.submit("one")
    assert (await bench.result()).result.steps == 1
    response = bench.of("llm/response")[0]
    assert (response["finish_reason"], response["raw_finish_reason"]) == ("stop", "tool-calls")


@pytest.mark.parametrize("empty", [Step(""), Step("  \n"), Step("", reasoning="only a thought")])
async def test_an_empty_answer_is_asked_for_again(empty: Step) -> None:
    model = ModelSettings(provider="scripted", max_attempts=3, retry_base_s=0.001)
    bench = AgentBench([empty, "said"], model=model)
    bench.submit("one")
    outcome = (await bench.result()).result
    assert (outcome.text, outcome.steps) == ("said", 1)
    assert [data.get("error", {}).get("code") for data in bench.of("llm/response")] == [
        "provider.empty_response",
        None,
    ]
    assert len(bench.of("assistant/message")) == 1, "nothing of the empty one is shown to the model"


async def test_every_step_has_its_own_attempts_and_its_one_number() -> None:
    fault = Step.error("provider.server", 500, retry_after_ms=1)
    model = ModelSettings(provider="scripted", max_attempts=2)
    script = [fault, Step.call("Probe"), fault, "done"]
    bench = AgentBench(lambda _request: script.pop(0), tools=(Probe(),), model=model)
    bench.submit("one")
    outcome = (await bench.result()).result
    assert (outcome.state, outcome.steps) == ("completed", 2)
    assert [(data["step"], data["attempt"]) for data in bench.of("llm/response")] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for name in ("step/start", "step/end"):
        assert [data["step"] for data in bench.of(name)] == [0, 1]


async def test_a_switch_of_the_model_takes_effect_in_the_next_turn() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "from the first"], tools=(probe,))
    other = ScriptedProvider(lambda _request: "from the second", name="other")
    settings = ModelSettings(provider="scripted")
    model = ResolvedModel(name="second", provider="scripted", model="second", settings=settings)
    bench.submit("one", "two")
    async with asyncio.timeout(5):
        await probe.started.wait()
    bench.agent.set_model(model, other)
    probe.release.set()
    assert (await bench.result("p0")).result.text == "from the first"
    assert (await bench.result("p1")).result.text == "from the second"
    headers = bench.of("request/header")
    assert [header["reason"] for header in headers] == ["initial", "change"]
    assert [event.type for event in bench.events].index("profile/model") < bench.types.index("turn/end")


async def test_what_a_prompt_asks_for_holds_for_its_turn_only() -> None:
    seen: list[float | None] = []

    def model(request: ChatRequest) -> str:
        seen.append(request.sampling.temperature)
        return "ok"

    bench = AgentBench(model, sampling=Sampling(temperature=0.5))
    bench.submit("one", sampling=Sampling(temperature=1.0))
    bench.submit("two")
    await bench.result("p1")
    assert seen == [1.0, 0.5]


async def test_call_ids_differ_over_the_whole_log_also_in_the_next_life() -> None:
    def script() -> list[Any]:
        return [Step(tool_calls=(ToolCall("Probe", "{}", "same"), ToolCall("Probe", "{}", "same"))), "done"]

    bench = AgentBench([*script(), *script()], tools=(Probe(),))
    bench.submit("one", "two")
    await bench.result("p1")
    again = AgentBench(script(), tools=(Probe(),), events=bench.events)
    steps = iter(script())
    again.agent.set_model(again.spec.model, ScriptedProvider(lambda _request: next(steps)))
    again.submit("three")
    await again.result("p2")
    ids = [data["call_id"] for data in again.of("tool/call")]
    assert ids == ["same", *(f"same__{n}" for n in range(2, 7))]
    answered = [data["message"]["source"]["call_id"] for data in again.of("tool/result")]
    assert answered == ids


async def test_an_agent_that_is_held_starts_nothing_and_what_waits_can_be_cancelled() -> None:
    bench = AgentBench(lambda _request: "ok")
    bench.agent.hold("a")
    bench.agent.hold("b")
    bench.submit("one", "two")
    bench.agent.release("a")
    for _ in range(10):
        await asyncio.sleep(0)
    assert "turn/start" not in bench.types
    assert bench.agent.cancel("p0", "user") == ["p0"]
    bench.agent.release("b")
    bench.agent.release("b")
    assert (await bench.result("p0")).result.state == "cancelled"
    assert (await bench.result("p1")).result.state == "completed"
    assert len(bench.of("turn/start")) == 1


async def test_a_continuation_is_cancelled_running_or_waiting_and_whoever_waits_for_it_hears_of_it() -> None:
    async def model(_request: Any) -> str:
        await asyncio.Event().wait()
        return "never"

    bench = AgentBench(model)
    bench.submit("one")
    for name in ("c0", "c1"):
        bench.agent.submit((PromptSpec(name, continuation=True),))
    await bench.until("request/header")
    assert bench.agent.cancel("c1", "user") == ["c1"]
    waiting = bench.agent.outcome("c1")
    assert waiting is not None and waiting.result.state == "cancelled" and waiting.result.turn is None
    assert bench.outcomes["c1"] == waiting
    assert bench.agent.cancel("p0", "user") == ["p0"]
    await bench.until("step/start", count=2)
    assert bench.agent.cancel("c0", "user") == ["c0"]
    async with asyncio.timeout(5):
        while (outcome := bench.agent.outcome("c0")) is None:
            await asyncio.sleep(0)
    assert (outcome.result.state, outcome.result.turn) == ("cancelled", 1)
    assert bench.types.count("turn/start") == 2


async def test_continuations_and_prompts_run_in_the_order_in_which_they_were_asked_for() -> None:
    bench = AgentBench(lambda _request: "ok")
    bench.submit("one", "two")
    bench.agent.submit((PromptSpec("c0", continuation=True),))
    bench.submit("three")
    await bench.result("p2")
    turns = [(data["prompts"], data.get("continuation")) for data in bench.of("turn/start")]
    assert turns == [(["p0"], None), (["p1"], None), ([], "user"), (["p2"], None)]


async def test_a_turn_that_would_be_continued_is_cancelled_with_all_that_had_joined_it() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), Step.call("Probe"), "never"], tools=(probe,))
    bench.submit("one", "two", on_interrupt="continue")
    async with asyncio.timeout(5):
        await probe.started.wait()
    bench.agent.prompts.steer(["p1"])
    probe.release.set()
    probe.release = asyncio.Event()
    await bench.until("tool/call", count=2)
    again = AgentBench(["never"], events=bench.events)
    again.agent.revive()
    assert again.agent.cancel("p1", "user") == ["p0", "p1"]
    assert (await again.result("p0")).result.state == "cancelled"
    assert (await again.result("p1")).result.state == "cancelled"
    assert again.types.count("turn/start") == 1
    probe.release.set()
    await bench.agent.close()


async def test_what_a_continuation_asks_for_holds_for_it_alone() -> None:
    seen: list[float | None] = []

    def model(request: ChatRequest) -> str:
        seen.append(request.sampling.temperature)
        return "ok"

    bench = AgentBench(model, sampling=Sampling(temperature=0.5))
    bench.submit("one")
    bench.agent.submit((PromptSpec("c0", continuation=True, sampling=Sampling(temperature=0.9)),))
    bench.agent.submit((PromptSpec("c1", continuation=True, limits=Limits(max_turns=1)),))
    bench.submit("two")
    await bench.result("p1")
    assert seen == [0.5, 0.9, 0.5]
    assert [data["reason"]["kind"] for data in bench.of("turn/end")] == ["completed", "completed", "limit", "completed"]


async def test_what_a_prompt_asks_for_holds_also_when_its_turn_is_continued_after_a_crash() -> None:
    first = AgentBench([Step.call("Probe"), "never"], tools=(Probe(),))
    first.submit("one", on_interrupt="continue", sampling=Sampling(temperature=1.0), limits=Limits(max_steps=2))
    await first.until("tool/result")
    events = first.events
    await first.agent.close()
    cut = next(n for n, event in enumerate(events) if event.type == "tool/result") + 1
    seen: list[float | None] = []

    def model(request: ChatRequest) -> Step:
        seen.append(request.sampling.temperature)
        return Step.call("Probe")

    again = AgentBench(model, tools=(Probe(),), events=events[:cut])
    again.agent.revive()
    assert (await again.result()).result.stop == "limit:max_steps"
    assert seen == [1.0]
