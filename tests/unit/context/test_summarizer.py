"""The summarizer that asks the agent's model: what it sends, what it takes for an answer, when it asks again."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.agent.summarizer import INSTRUCTION, KEPT_SHARES, MAX_ATTEMPTS, _left_out  # pyright: ignore[reportPrivateUsage]
from kimi_ray.errors import KimiRayError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.settings import Sampling, Usage
from tests.unit.context.stage import ContextBench, bare, rebuilt, small
from tests.unit.context.test_guard import read


async def talked(summary: Any, **options: Any) -> ContextBench:
    steps = list(summary) if isinstance(summary, list) else None

    def script(request: ChatRequest) -> Step:
        if request.purpose == "compaction":
            return steps.pop(0) if steps is not None else summary
        return Step("answer " + "word " * 40)

    model = options.pop("model", None) or small(max_context_tokens=options.pop("window", 100_000))
    bench = ContextBench(script, model=model, **options)
    for number in range(4):
        await bench.say(f"question {number} " + "please " * 20)
    return bench


async def test_it_sends_the_last_requests_prefix_and_one_instruction() -> None:
    bench = await talked(Step("A summary."), tools=(read,), sampling=Sampling(temperature=0.5, stop=("x",)))
    last = bench.requests[-1]
    result = await bench.compact("in French")
    request = bench.requests[-1]
    assert result is not None and result.summary == "A summary."
    assert request.messages[:-1] == last.messages[: len(request.messages) - 1]
    assert (request.system, request.tools, request.model) == (last.system, last.tools, last.model)
    text = request.messages[-1]["content"][0]["text"]
    assert text.startswith(INSTRUCTION) and text.endswith("The user asks of it: in French")
    assert text.count("\n## ") == 8
    assert request.sampling.said() == {"temperature": 0.5, "max_output_tokens": 8_192}
    assert [bare(one) for one in bench.requests] == rebuilt(bench.events)


async def test_what_it_used_counts_in_the_agents_totals() -> None:
    bench = await talked(Step("A summary.", usage=Usage(input=900, output=7)))
    before = bench.journal.fold.totals().usage
    await bench.compact()
    after = bench.journal.fold.totals().usage
    assert (after.input - before.input, after.output - before.output) == (900, 7)
    [response] = bench.of("compaction/response")
    assert response["usage"] == {"input": 900, "cached": 0, "cache_write": 0, "output": 7, "reasoning": 0}
    assert bench.of("compaction/summary")[0]["usage"] == response["usage"]
    assert bench.again().journal.fold.totals().usage == after


async def test_failures_that_pass_are_tried_again_and_the_others_are_not() -> None:
    bench = await talked([Step.error("provider.server", 500), Step.error("provider.overloaded", 529), Step("ok")])
    assert (result := await bench.compact()) is not None and result.summary == "ok"
    assert [one["attempt"] for one in bench.of("compaction/request")] == [1, 2, 3]
    assert [one.get("error", {}).get("code") for one in bench.of("compaction/response")] == [
        "provider.server",
        "provider.overloaded",
        None,
    ]
    bench = await talked(Step.error("provider.server", 500))
    with pytest.raises(KimiRayError):
        await bench.compact()
    assert len(bench.of("compaction/request")) == MAX_ATTEMPTS
    bench = await talked(Step.error("provider.auth", 401))
    with pytest.raises(KimiRayError):
        await bench.compact()
    assert len(bench.of("compaction/request")) == 1


async def test_a_request_that_is_too_long_is_made_with_less_of_the_oldest() -> None:
    refused = Step.error("context.overflow", 400)
    bench = await talked([refused, refused, Step("ok")])
    assert await bench.compact() is not None
    lengths = [len(request.messages) for request in bench.requests if request.purpose == "compaction"]
    assert lengths[0] == 8 and lengths[0] > lengths[1] > lengths[2] > 1
    assert [one.get("left_out", 0) for one in bench.of("compaction/request")] == [8 - length for length in lengths]
    assert [bare(one) for one in bench.requests] == rebuilt(bench.events)
    assert bench.words[0] == "*" and len(bench.words) == 2  # all of it is replaced even so
    bench = await talked(refused)
    with pytest.raises(KimiRayError) as raised:
        await bench.compact()
    assert raised.value.details["cause"]["code"] == "context.overflow"
    assert len(bench.of("compaction/request")) == 4


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Step("half of", finish="max-tokens"), "compaction.summary"),
        (Step("no", finish="filtered"), "provider.filtered"),
        (Step.error("provider.empty_response"), "provider.empty_response"),
    ],
)
async def test_what_is_no_summary_is_an_error(answer: Step, cause: str) -> None:
    bench = await talked(answer)
    before = bench.log.surface.seqs
    with pytest.raises(KimiRayError) as raised:
        await bench.compact()
    assert raised.value.code == "compaction.summary"
    assert raised.value.details["cause"]["code"] == cause
    assert bench.log.surface.seqs == before


async def test_a_summary_that_is_cut_off_says_so_once_and_what_bounds_it() -> None:
    bench = await talked(Step("half of", finish="max-tokens"))
    with pytest.raises(KimiRayError) as raised:
        await bench.compact()
    assert raised.value.message.count("there is no summary") == 1
    assert "cut off at" in raised.value.message and "compaction]" in (raised.value.hint or "")


async def test_a_summary_that_is_cut_off_is_asked_for_once_more_and_shorter() -> None:
    bench = await talked([Step("half of", finish="max-tokens"), Step("Short.")])
    result = await bench.compact()
    assert result is not None and result.summary == "Short."
    asked = [one["message"]["content"][0]["text"] for one in bench.of("compaction/request")]
    bounds = [int(text.partition("Stay below ")[2].split()[0]) for text in asked]
    assert len(bounds) == 2 and bounds[1] < bounds[0] / 2
    assert [bare(one) for one in bench.requests] == rebuilt(bench.events)
    bench = await talked(Step("half of", finish="max-tokens"))
    with pytest.raises(KimiRayError):
        await bench.compact()
    assert len(bench.of("compaction/request")) == 2


async def test_only_the_text_of_an_answer_is_the_summary() -> None:
    call = Step.call("read", {"size": 1}, text="The summary.")
    bench = await talked(Step(call.text, reasoning="Let me think.", tool_calls=call.tool_calls), tools=(read,))
    result = await bench.compact()
    assert result is not None and result.summary == "The summary."


async def test_in_a_small_window_the_summary_has_the_room_that_is_left() -> None:
    bench = await talked(Step("ok"), model=small(max_context_tokens=1_000))
    await bench.compact()
    asked = [request for request in bench.requests if request.purpose == "compaction"]
    for request in asked:
        assert 256 <= (request.sampling.max_output_tokens or 0) < 1_000


@pytest.mark.parametrize("results", [1, 3])
@pytest.mark.parametrize("share", KEPT_SHARES)
def test_results_at_the_end_stay_with_their_calls_however_long_they_are(share: float, results: int) -> None:
    def said(role: str, kind: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}], "source": {"kind": kind}}

    long = [said("user", "tool", "word " * 900) for _ in range(results)]
    messages = [said("user", "user", "go"), said("assistant", "model", "word " * 2000), *long]
    at = _left_out(messages, share)
    assert at < len(messages) and messages[at]["source"]["kind"] != "tool"
