"""A window that fills: before a step the conversation is compacted, the log explains it, a resume finds the same."""

from __future__ import annotations

from typing import Any

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from tests.unit.context.stage import SUMMARY, ContextBench, bare, rebuilt, small


def chatty(request: ChatRequest) -> Step:
    return Step(SUMMARY if request.purpose == "compaction" else f"{len(request.messages)} " + "word " * 60)


async def test_a_window_that_fills_is_compacted_before_a_step_and_every_request_fits() -> None:
    bench = ContextBench(chatty)
    for number in range(30):
        await bench.say(f"question {number} " + "please " * 20)
    ends = bench.of("compaction/end")
    assert len(ends) > 2 and not any("error" in end for end in ends)
    steps = [request for request in bench.requests if request.purpose == "step"]
    assert len(steps) == 30
    for request in steps:
        answer = [m for m in request.messages if m["role"] == "assistant"]
        assert len(answer) < 12
    assert not bench.of("note/added")
    for response in bench.of("llm/response"):
        assert response["usage"]["input"] < 1_000
    types = bench.types
    at = types.index("compaction/start")
    assert types[at - 2 : at + 6] == [
        "step/start",
        "user/message",
        "compaction/start",
        "compaction/request",
        "compaction/response",
        "compaction/summary",
        "user/message",
        "compaction/end",
    ]
    assert types[at + 6] == "llm/response"
    start: dict[str, Any] = bench.of("compaction/start")[0]
    assert start["trigger"] == "pressure" and start["tokens"] >= start["threshold"] == 800


async def test_the_checkpoint_holds_the_users_words_the_summary_and_how_many_there_are() -> None:
    bench = ContextBench(chatty)
    for number in range(12):
        await bench.say(f"question {number} " + "please " * 20)
    [checkpoint, *_] = [m for m in bench.log.messages() if m["source"]["kind"] == "compaction"]
    blocks = [block["text"] for block in checkpoint["content"]]
    assert blocks[1].startswith("question 0 ") and checkpoint["source"]["kept"] == len(blocks) - 2
    assert blocks[-1] == f"<compacted-summary>\n{SUMMARY}\n</compacted-summary>"
    assert len([m for m in bench.log.messages() if m["source"]["kind"] == "compaction"]) == 1


async def test_what_a_resumed_agent_asks_is_what_the_living_one_would_have() -> None:
    bench = ContextBench(chatty)
    for number in range(9):
        await bench.say(f"question {number} " + "please " * 20)
    again = bench.again(chatty)
    assert again.log.messages() == bench.log.messages()
    assert again.size.total == bench.size.total
    for one in (bench, again):
        await one.say("the last question")
    assert bare(again.requests[-1]) == bare(bench.requests[-1])


async def test_every_request_can_be_made_of_the_log_alone() -> None:
    bench = ContextBench(chatty)
    for number in range(20):
        await bench.say(f"question {number} " + "please " * 20)
    assert [bare(request) for request in bench.requests] == rebuilt(bench.events)


async def test_far_from_the_threshold_nothing_is_written_that_was_not_before() -> None:
    bench = ContextBench(lambda _request: Step("fine"), model=small(max_context_tokens=100_000))
    await bench.say("one", "two")
    assert not [name for name in bench.types if name.startswith("compaction")]
    unknown = ContextBench(lambda _request: Step("fine"), model=small(max_context_tokens=None))
    await unknown.say("one", "two")
    assert unknown.types == bench.types and "compaction" not in unknown.slots.step.handlers
