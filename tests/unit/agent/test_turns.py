"""Turns of one agent: their events, their ends, what a crash leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.llm.models import ModelSettings, Price
from kimi_ray.llm.script import Step
from kimi_ray.settings import Limits, Sampling, Usage
from kimi_ray.tools import ToolOutput
from kimi_ray.tools.contract import Accesses, ToolContext
from tests.unit.agent.bench import AgentBench


class Probe:
    """A tool whose calls the test holds open, fails, or lets through."""

    name = "Probe"
    description = "probe"
    writes = False

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {"type": "object", "properties": {}}
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.calls: list[dict[str, object]] = []
        self.error: Exception | None = None
        self.content: object = "seen"
        self.durable_at_start: int | None = None

    def accesses(self, arguments: dict[str, object]) -> Accesses:
        return Accesses.none()

    def check(self, arguments: object) -> dict[str, object]:
        if not isinstance(arguments, dict):
            from kimi_ray.errors import ToolError

            raise ToolError(f"arguments must be an object, not {arguments!r}", code="tool.bad_arguments")
        return arguments

    async def run(self, arguments: dict[str, object], context: ToolContext) -> ToolOutput:
        self.calls.append(arguments)
        self.started.set()
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return ToolOutput(self.content)  # type: ignore[arg-type]


async def test_a_turn_without_tools_has_these_events_in_this_order() -> None:
    bench = AgentBench(["hello"])
    bench.submit("hi")
    outcome = await bench.result()
    assert bench.types == [
        "prompt/submitted",
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
    assert outcome.result.state == "completed"
    assert outcome.result.text == "hello"
    assert outcome.result.turn == 0
    assert outcome.seq == len(bench.events)
    assert bench.store.durable_seq == len(bench.store.lines)
    assert outcome.totals.usage.output > 0


async def test_a_tool_call_is_durable_before_its_body_runs() -> None:
    probe = Probe()
    bench = AgentBench([Step.call("Probe", {"a": 1}), "done"], tools=(probe,))
    probe.release.clear()
    bench.submit("go")
    async with asyncio.timeout(5):
        await probe.started.wait()
    stored = bench.types[: bench.store.durable_seq]
    assert stored[-1] == "tool/call"
    probe.release.set()
    outcome = await bench.result()
    assert outcome.result.steps == 2
    assert outcome.result.tool_calls == 1
    [result] = bench.of("tool/result")
    assert result["message"]["content"][0]["content"] == [{"type": "text", "text": "seen"}]
    assert "error" not in result


async def test_the_second_turn_repeats_no_header_and_keeps_the_history() -> None:
    seen: list[int] = []

    def model(request: object) -> str:
        seen.append(len(request.messages))  # type: ignore[attr-defined]
        return "ok"

    bench = AgentBench(model, system="be brief")
    bench.submit("one", "two")
    await bench.result("p1")
    assert seen == [1, 3]
    assert len(bench.of("request/header")) == 1
    assert bench.of("request/header")[0]["header"]["system"] == "be brief"
    assert [data["queue_length"] for data in bench.of("prompt/queued")] == [2]


@pytest.mark.parametrize(
    ("content", "code"),
    [({"a": float("nan")}, "tool.bad_result"), ([{"type": "text", "text": b"x"}], "tool.bad_result")],
)
async def test_a_result_that_json_cannot_hold_is_an_error_result(content: object, code: str) -> None:
    probe = Probe()
    probe.content = content
    bench = AgentBench([Step.call("Probe"), "done"], tools=(probe,))
    bench.submit("go")
    assert (await bench.result()).result.state == "completed"
    [result] = bench.of("tool/result")
    assert result["error"]["code"] == code
    assert result["message"]["content"][0]["is_error"] is True


async def test_a_tool_that_raises_is_an_error_result_and_the_turn_goes_on() -> None:
    probe = Probe()
    probe.error = ValueError("no such luck")
    bench = AgentBench([Step.call("Probe"), "done"], tools=(probe,))
    bench.submit("go")
    assert (await bench.result()).result.text == "done"
    [result] = bench.of("tool/result")
    assert result["error"]["code"] == "tool.user_code"
    assert "no such luck" in result["message"]["content"][0]["content"][0]["text"]


@pytest.mark.parametrize("arguments", ["{not json", '"text"', "[1]"])
async def test_broken_arguments_go_back_to_the_model(arguments: str) -> None:
    bench = AgentBench([Step.call("Probe", arguments), "done"], tools=(Probe(),))
    bench.submit("go")
    assert (await bench.result()).result.text == "done"
    assert bench.of("tool/result")[0]["error"]["code"] == "tool.bad_arguments"
    assert bench.of("tool/call")[0]["arguments"] == arguments


async def test_an_unknown_tool_is_an_error_result_that_names_the_known_ones() -> None:
    bench = AgentBench([Step.call("Nope"), "done"], tools=(Probe(),))
    bench.submit("go")
    await bench.result()
    [result] = bench.of("tool/result")
    assert result["error"]["code"] == "tool.unknown"
    text = result["message"]["content"][0]["content"][0]["text"]
    assert text == "there is no tool 'Nope'; the tools are: Probe"


async def test_equal_call_ids_are_made_different() -> None:
    from kimi_ray.llm.script import ToolCall

    twice = Step(tool_calls=(ToolCall("Probe", "{}", "same"), ToolCall("Probe", "{}", "same")))
    bench = AgentBench([twice, Step(tool_calls=(ToolCall("Probe", "{}", "same"),)), "done"], tools=(Probe(),))
    bench.submit("go")
    assert (await bench.result()).result.tool_calls == 3
    assert [data["call_id"] for data in bench.of("tool/call")] == ["same", "same__2", "same__3"]


async def test_a_failing_model_is_asked_again_and_every_attempt_is_in_the_log() -> None:
    bench = AgentBench([Step.error("provider.rate_limit", 429, retry_after_ms=1), "fine"])
    bench.submit("hi")
    outcome = await bench.result()
    assert outcome.result.text == "fine"
    first, second = bench.of("llm/response")
    assert first["attempt"] == 1 and first["error"]["code"] == "provider.rate_limit" and first["http_status"] == 429
    assert second["attempt"] == 2 and "error" not in second
    [retry] = bench.of("llm/retry")
    assert retry["delay_ms"] == 1
    assert bench.of("step/start") == [{"turn": 0, "step": 0}]
    assert outcome.totals.retries == 1


async def test_an_error_that_retrying_cannot_mend_fails_the_turn_at_once() -> None:
    bench = AgentBench([Step.error("provider.auth", 401), "never"])
    bench.submit("hi")
    outcome = await bench.result()
    assert outcome.result.state == "failed"
    assert outcome.result.error is not None and outcome.result.error["code"] == "provider.auth"
    assert bench.of("turn/end")[0]["reason"]["kind"] == "failed"
    assert bench.of("llm/retry") == []


async def test_attempts_are_bounded() -> None:
    model = ModelSettings(provider="scripted", max_attempts=2)
    bench = AgentBench([Step.error("provider.server", 500, retry_after_ms=1)] * 3, model=model)
    bench.submit("hi")
    outcome = await bench.result()
    assert outcome.result.error is not None and outcome.result.error["details"]["attempts"] == 2
    assert len(bench.of("llm/response")) == 2


async def test_a_cancel_in_the_stream_keeps_the_text_so_far() -> None:
    recorded = ModelSettings(provider="scripted", record_chunks="all")
    bench = AgentBench(["word " * 5000], chunk_chars=5, tokens_per_s=500, model=recorded)
    bench.submit("hi")
    await bench.until("assistant/chunk", count=3)
    assert bench.agent.cancel("p0", "user") == ["p0"]
    outcome = await bench.result()
    assert outcome.result.state == "cancelled"
    [message] = bench.of("assistant/message")
    assert message["interrupted"] is True
    assert message["message"]["content"][0]["text"].startswith("word ")
    assert bench.of("turn/end")[0]["reason"] == {"kind": "cancelled", "cause": "user"}
    assert bench.log.order.open_turn is None


async def test_a_cancel_in_a_tool_gives_every_call_its_result() -> None:
    from kimi_ray.llm.script import ToolCall

    probe = Probe()
    probe.release.clear()
    calls = Step(tool_calls=tuple(ToolCall("Probe", "{}", f"c{n}") for n in range(12)))
    bench = AgentBench([calls, "never"], tools=(probe,))
    bench.submit("go", "next")
    async with asyncio.timeout(5):
        await probe.started.wait()
    assert bench.agent.cancel("p0", "user") == ["p0"]
    probe.release.set()
    assert (await bench.result("p0")).result.state == "cancelled"
    ids = [data["message"]["source"]["call_id"] for data in bench.of("tool/result")]
    assert ids == [f"c{n}" for n in range(12)]
    assert (await bench.result("p1")).result.text == "never"


async def test_cancelling_all_takes_the_queued_ones_first() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "x"], tools=(probe,))
    bench.submit("a", "b", "c")
    async with asyncio.timeout(5):
        await probe.started.wait()
    assert bench.agent.cancel(None, "user") == ["p1", "p2", "p0"]
    probe.release.set()
    await bench.result("p0")
    assert [data["prompt_id"] for data in bench.of("prompt/completed")] == ["p1", "p2", "p0"]


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(max_steps=1), "max_steps"),
        (Limits(max_tool_calls=0), "max_tool_calls"),
        (Limits(max_output_tokens=1), "max_output_tokens"),
        (Limits(max_total_tokens=1), "max_total_tokens"),
        (Limits(max_cost_usd=1e-9), "max_cost_usd"),
    ],
)
async def test_limits_end_the_turn_and_name_themselves(limits: Limits, name: str) -> None:
    bench = AgentBench(
        [Step.call("Probe"), Step.call("Probe"), "done"],
        tools=(Probe(),),
        limits=limits,
        price=Price(input=1.0, output=1.0),
    )
    bench.submit("go")
    outcome = await bench.result()
    assert outcome.result.state == "failed"
    assert outcome.result.stop == f"limit:{name}"
    assert outcome.result.error is not None and outcome.result.error["code"] == f"limit.{name}"
    assert outcome.result.steps <= 2
    calls = [data["call_id"] for data in bench.of("tool/call")]
    answered = [data["message"]["source"]["call_id"] for data in bench.of("tool/result")]
    assert set(calls) <= set(answered)


@pytest.mark.parametrize("limits", [Limits(time_s=0.05), Limits(working_time_s=0.05)])
async def test_time_limits_interrupt_a_model_that_never_ends(limits: Limits) -> None:
    async def model(request: object) -> str:
        await asyncio.Event().wait()
        return "never"

    bench = AgentBench(model, limits=limits)
    bench.submit("go")
    outcome = await bench.result(within_s=5)
    assert outcome.result.stop in ("limit:time_s", "limit:working_time_s")


async def test_max_turns_counts_turns_of_the_agent() -> None:
    bench = AgentBench(lambda _request: "ok", limits=Limits(max_turns=1))
    bench.submit("a", "b")
    assert (await bench.result("p0")).result.state == "completed"
    assert (await bench.result("p1")).result.stop == "limit:max_turns"


async def test_a_store_that_is_away_fails_the_turn_and_loses_nothing() -> None:
    bench = AgentBench(["hello"])
    bench.store.error = StoreError("the store is away", code="store.unavailable", retryable=True)
    bench.submit("hi")
    outcome = await bench.result()
    assert outcome.result.state == "failed"
    assert outcome.result.error is not None and outcome.result.error["code"] == "store.unavailable"
    assert bench.types[-1] == "prompt/completed"
    assert "llm/response" not in bench.types, "no request may leave before its record is durable"


async def test_a_fenced_agent_writes_nothing_more_and_starts_nothing() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "never"], tools=(probe,))
    bench.submit("go")
    async with asyncio.timeout(5):
        await probe.started.wait()
    before = len(bench.store.lines)
    bench.agent.fence()
    await bench.agent.close()
    assert len(bench.store.lines) == before
    with pytest.raises(KimiRayError) as refused:
        bench.submit("more")
    assert refused.value.code == "agent.closed"


async def test_steering_joins_the_running_turn() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "both"], tools=(probe,))
    bench.submit("one")
    async with asyncio.timeout(5):
        await probe.started.wait()
    bench.agent.submit((PromptSpec("p1", "two", steer_if_active=True),))
    probe.release.set()
    first, second = await bench.result("p0"), await bench.result("p1")
    assert first.result.turn == second.result.turn == 0
    assert [data["turn"] for data in bench.of("turn/start")] == [0]
    assert bench.of("prompt/steered")[0]["prompt_ids"] == ["p1"]


async def test_a_prompt_sent_twice_is_accepted_once() -> None:
    bench = AgentBench(lambda _request: "ok")
    spec = PromptSpec("p0", "hi")
    bench.agent.submit((spec,))
    bench.agent.submit((spec,))
    await bench.result("p0")
    assert len(bench.of("prompt/submitted")) == 1
    bench.agent.submit((PromptSpec("q", "first"),))
    with pytest.raises(KimiRayError) as refused:
        bench.agent.submit((PromptSpec("q", "other"),))
    assert refused.value.code == "prompt.id_conflict"


async def test_an_empty_prompt_is_refused_and_leaves_no_event() -> None:
    bench = AgentBench(["x"])
    with pytest.raises(KimiRayError) as refused:
        bench.submit("  \n")
    assert refused.value.code == "prompt.empty"
    assert bench.types == []


async def test_large_texts_travel_as_blobs_and_reach_the_model_whole() -> None:
    text = "ä" * 3_000_000
    got: list[str] = []

    def model(request: object) -> str:
        got.append(request.messages[0]["content"][0]["text"])  # type: ignore[attr-defined]
        return "ok"

    bench = AgentBench(model)
    bench.submit(text)
    await bench.result()
    assert got == [text]
    assert len(b"".join(bench.store.lines)) < 10_000
    [blob] = bench.store.blobs.values()
    assert blob.decode() == text


async def test_large_texts_leave_memory_and_are_read_again() -> None:
    text = "x" * 100_000
    seen: list[int] = []

    def model(request: Any) -> str:
        seen.append(len(request.messages[0]["content"][0]["text"]))
        return "ok"

    bench = AgentBench(model)
    bench.submit(text)
    await bench.result("p0")
    assert not bench.journal._blobs  # pyright: ignore[reportPrivateUsage]
    [message, _answer] = await bench.journal.resolve(bench.log.messages())
    assert message["content"][0]["text"] == text
    bench.submit("again")
    await bench.result("p1")
    assert seen == [100_000, 100_000]


async def test_a_seed_that_is_only_recorded_is_not_sent() -> None:
    seen: list[int | None] = []

    def model(request: object) -> str:
        seen.append(request.sampling.seed)  # type: ignore[attr-defined]
        return "ok"

    bench = AgentBench(model, sampling=Sampling(seed=7))
    bench.submit("hi")
    await bench.result()
    assert seen == [7]


async def test_continue_turn_runs_without_a_message() -> None:
    counts: list[int] = []

    def model(request: object) -> str:
        counts.append(len(request.messages))  # type: ignore[attr-defined]
        return "ok"

    bench = AgentBench(model)
    bench.submit("hi")
    await bench.result()
    bench.agent.submit((PromptSpec("c0", continuation=True),))
    async with asyncio.timeout(5):
        while (outcome := bench.agent.outcome("c0")) is None:
            await bench.until("turn/end", count=2)
            await asyncio.sleep(0)
    assert outcome.result.state == "completed"
    assert counts == [1, 2]
    assert bench.of("turn/start")[1] == {"turn": 1, "prompts": [], "continuation": "user"}


async def test_a_continuation_of_long_ago_is_forgotten_and_not_said_to_have_failed() -> None:
    bench = AgentBench(["a", "b", "c"])
    bench.journal.fold.keep_turns = 1
    bench.submit("one")
    await bench.result()
    bench.agent.submit((PromptSpec("c0", continuation=True),))
    assert (await bench.result("c0")).result.state == "completed"
    bench.submit("two")
    await bench.result("p1")
    with pytest.raises(KimiRayError) as caught:
        bench.agent.outcome("c0")
    assert caught.value.code == "prompt.result_forgotten" and caught.value.details["turn"] == 1


@pytest.mark.parametrize("how", ["completed", "cancelled"])
async def test_no_end_is_told_before_it_is_durable(how: str) -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "done", "two"], tools=(probe,))
    bench.submit("one", "two")
    async with asyncio.timeout(5):
        await probe.started.wait()
    bench.store.disk.clear()
    prompt = "p0"
    if how == "completed":
        probe.release.set()
        bench.store.disk.set()
        await bench.until("assistant/message", count=2)
        bench.store.disk.clear()
        await bench.until("prompt/completed")
    else:
        prompt = "p1"
        assert bench.agent.cancel("p1", "user") == ["p1"]
    assert prompt in [data["prompt_id"] for data in bench.of("prompt/completed")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.agent.outcome(prompt) is None and prompt not in bench.outcomes
    assert bench.agent.is_waiting(prompt)
    probe.release.set()
    bench.store.disk.set()
    assert (await bench.result(prompt)).result.state == how
    assert bench.agent.outcome(prompt) is not None


async def test_the_use_of_a_turn_is_called_estimated_only_if_it_was() -> None:
    counted = Usage(input=7, output=2)
    bench = AgentBench([Step("one", usage=counted), "two", Step("three", usage=counted)])
    bench.submit("a", "b", "c")
    usages = [(await bench.result(f"p{n}")).result.usage for n in range(3)]
    assert [usage.estimated for usage in usages] == [None, True, None]
    assert usages[0] == usages[2] == counted
    assert bench.journal.fold.sums.usage().estimated
