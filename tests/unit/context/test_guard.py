"""By itself: before a request that would be too large, and when one was refused as too long."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from kimi_ray.errors import ProviderError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step
from kimi_ray.log import message_tokens
from kimi_ray.log.pruning import MARKER
from kimi_ray.settings import Usage
from kimi_ray.tools import tool
from tests.unit.context.stage import WINDOW, ContextBench, Told, small


@tool
async def read(size: int) -> str:
    """Read something.

    Args:
        size: How much.
    """
    return "head" + "x" * size + "tail"


def reader(*sizes: int, text: str = "done") -> Any:
    """A model that reads once a step, each of these sizes, and then says something; for every prompt anew."""

    def script(request: ChatRequest) -> Step:
        return Step.call("read", {"size": sizes[request.step]}) if request.step < len(sizes) else Step(text)

    return script


def overflowing(times: int, text: str = "fine") -> Any:
    """A model that refuses a number of requests as too long, whatever they are."""
    left = [times]

    def script(request: ChatRequest) -> Step:
        if request.purpose == "step" and request.turn > 1 and left[0]:
            left[0] -= 1
            return Step.error("context.overflow", 400)
        return Step(text + " word" * 30)

    return script


async def test_pruning_alone_may_be_enough_and_then_no_model_is_asked() -> None:
    told = Told()
    bench = ContextBench(reader(3_000), tools=(read,), summarizer=told)
    await bench.say("read it")
    assert not told.tasks and "compaction/start" not in bench.types
    types = bench.types
    at = types.index("compaction/prune")
    assert types[at - 1 : at + 2] == ["step/start", "compaction/prune", "tool/result"]
    [first, second] = [event for event in bench.events if event.type == "tool/result"]
    assert second.replaced == (first.seq, first.seq) and second.sources == (first.seq,)
    [kept] = second.data["message"]["content"][0]["content"]
    assert kept["text"] == "head" + "x" * 96 + MARKER + "x" * 46 + "tail"
    assert {k: v for k, v in second.data.items() if k != "message"} == {
        k: v for k, v in first.data.items() if k != "message"
    }
    prune = bench.of("compaction/prune")[0]
    assert prune["shadowed_seqs"] == [first.seq] and prune["shadowed_tokens"] > 750
    assert prune["tokens"] >= prune["threshold"] > 0
    assert bench.requests[-1].messages[-1]["content"][0]["content"][0]["text"] == kept["text"]


async def test_results_that_no_request_had_yet_are_pruned_last() -> None:
    bench = ContextBench(reader(1_700, 1_600), tools=(read,), summarizer=(told := Told()))
    await bench.say("read it")
    first, second = (event.seq for event in bench.events if event.type == "tool/result" and event.replaced is None)
    assert [prune["shadowed_seqs"] for prune in bench.of("compaction/prune")] == [[first]] and not told.tasks
    assert second in bench.log.surface.seqs and first not in bench.log.surface.seqs
    bench = ContextBench(reader(1_700, 3_600), tools=(read,), summarizer=told)
    await bench.say("read it")
    assert len(bench.of("compaction/prune")) == 2 and not told.tasks


async def test_without_pruning_and_where_it_is_not_enough_the_conversation_is_compacted() -> None:
    told = Told()
    bench = ContextBench(reader(900, 900, 900, 900, 900), tools=(read,), summarizer=told, model=small())
    for _ in range(4):
        await bench.say("read it " + "please " * 60)
    assert told.tasks
    bench = ContextBench(
        reader(1_200, 1_200, 1_200),
        tools=(read,),
        summarizer=(told := Told()),
        model=small(compaction={"prune": False}),
    )
    await bench.say("read it")
    assert told.tasks and "compaction/prune" not in bench.types
    for request in bench.requests:
        ids = [m["source"]["call_id"] for m in request.messages if m["source"].get("kind") == "tool"]
        calls = [b["id"] for m in request.messages for b in m["content"] if b["type"] == "tool-call"]
        assert ids == calls


async def test_a_text_of_many_tokens_a_character_is_kept_in_the_window_by_what_the_server_counts() -> None:
    most: list[int] = []

    def script(request: ChatRequest) -> Step:
        tokens = 4 * sum(map(message_tokens, request.messages))
        most.append(tokens)
        return Step("word " * 20, usage=Usage(input=tokens, output=120))

    told = Told()
    bench = ContextBench(script, summarizer=told, model=small(max_context_tokens=4_000))
    for number in range(30):
        await bench.say(f"{number} " + "please " * 15)
    assert told.tasks and max(most) < 4_000
    assert len(told.tasks) < 12 and not any("error" in end for end in bench.of("compaction/end"))
    assert not bench.of("note/added")


async def test_what_stays_is_at_least_what_is_to_be_retained() -> None:
    told = Told()
    bench = ContextBench(lambda _r: Step("word " * 40), summarizer=told, model=small())
    for number in range(8):
        await bench.say(f"{number} " + "please " * 30)
    assert told.tasks
    [start, *_] = bench.of("compaction/start")
    assert start["threshold"] == 800 and start["tokens"] >= 800 and start["trigger"] == "pressure"
    assert len(bench.log.surface) > 2


async def test_a_compaction_that_fails_harms_no_turn_and_is_told_in_its_bracket() -> None:
    told = Told()
    told.error = ProviderError("no", code="provider.auth")
    bench = ContextBench(lambda _r: Step("word " * 40), summarizer=told)
    for number in range(8):
        await bench.say(f"{number} " + "please " * 40)
    assert all(outcome.result.state == "completed" for outcome in bench.outcomes.values())
    assert told.tasks and all("error" in end for end in bench.of("compaction/end"))
    assert not bench.of("note/added")


async def test_a_model_that_cannot_summarize_is_asked_seldom_and_more_often_with_less_room() -> None:
    told = Told()
    told.error = ProviderError("no", code="provider.auth")
    bench = ContextBench(lambda _r: Step("ok"), summarizer=told)
    for number in range(60):
        await bench.say(f"{number} please")
    starts = [start["tokens"] for start in bench.of("compaction/start")]
    assert 4 <= len(starts) <= 20 and len(told.tasks) == len(starts)
    for before, after in pairwise(starts):
        assert after >= before + max((WINDOW - before) * 0.25, WINDOW * 0.02)
    told.error = None
    while len(bench.of("compaction/end")) == len(starts):
        await bench.say("please " * 10)
    assert "error" not in bench.of("compaction/end")[-1] and bench.journal.fold.failed_at is None


async def test_another_model_is_asked_for_a_summary_at_once() -> None:
    told = Told()
    told.error = ProviderError("no", code="provider.auth")
    bench = ContextBench(lambda _r: Step("ok"), summarizer=told)
    while not told.tasks:
        await bench.say("please " * 10)
    await bench.say("go on")
    assert len(told.tasks) == 1 and bench.journal.fold.failed_at is not None
    bench.journal.append("profile/model", {"model": "other"})
    await bench.say("go on")
    assert len(told.tasks) == 2


async def test_what_cannot_be_shortened_is_told_once_and_the_request_goes_out() -> None:
    told = Told()
    bench = ContextBench(lambda _r: Step("ok"), summarizer=told)
    await bench.say("one")
    await bench.say("x" * 3_600)
    await bench.say("y" * 3_600)
    assert all(outcome.result.state == "completed" for outcome in bench.outcomes.values())
    notes = bench.of("note/added")
    assert len(notes) == 1 and "compaction.not_enough" in notes[0]["text"]


async def test_with_auto_off_nothing_happens_by_itself() -> None:
    told = Told()
    bench = ContextBench(overflowing(1), summarizer=told, model=small(compaction={"auto": False}))
    for number in range(3):
        await bench.say(f"{number} " + "please " * 100)
    assert not told.tasks and bench.outcomes["p2"].result.error is not None
    assert bench.outcomes["p2"].result.error["code"] == "context.overflow"


async def test_a_cancel_during_a_compaction_ends_the_turn_and_closes_both_brackets() -> None:
    told = Told()
    bench = ContextBench(lambda _r: Step("word " * 40), summarizer=told)
    told.gate.clear()
    for number in range(20):
        [last] = bench.submit(f"{number} " + "please " * 40)
        waiting = asyncio.ensure_future(told.asked.wait())
        ended = asyncio.ensure_future(bench.result(last))
        await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if told.asked.is_set():
            break
    bench.agent.cancel(None, "user")
    assert (await ended).result.state == "cancelled"
    assert bench.of("compaction/end")[-1]["error"]["code"] == "compaction.cancelled"
    assert bench.log.order.open_compaction is None and bench.log.order.open_turn is None


# -- refused as too long ---------------------------------------------------------------------------------------------


def unknown_window(**compaction: Any) -> ModelSettings:
    return small(max_context_tokens=None, compaction=compaction)


async def test_a_refused_request_is_made_again_behind_a_compaction_of_all_but_the_last_exchange() -> None:
    told = Told()
    bench = ContextBench(overflowing(1), summarizer=told, model=unknown_window())
    for number in range(3):
        await bench.say(f"{number} " + "please " * 20)
    assert bench.outcomes["p2"].result.state == "completed"
    assert bench.of("compaction/start")[0]["trigger"] == "overflow"
    assert bench.words[0] == "*" and bench.words[1].startswith("2 ")
    assert len(bench.requests[-1].messages) == 2
    responses = bench.of("llm/response")
    assert [response["attempt"] for response in responses[-2:]] == [1, 2]


async def test_it_is_made_again_from_a_durable_prune_even_if_the_summary_fails() -> None:
    told = Told()
    told.error = ProviderError("no", code="provider.auth")

    def script(request: ChatRequest) -> Step:
        if request.turn == 1 and request.step == 0 and request.attempt == 1:
            return Step.error("context.overflow", 400)
        return reader(2_000)(request)

    bench = ContextBench(script, summarizer=told, tools=(read,), model=unknown_window())
    await bench.say("zero")
    await bench.say("one")
    assert bench.outcomes["p1"].result.state == "completed"
    assert told.tasks and "compaction/prune" in bench.types
    assert bench.of("compaction/end")[0]["error"]["code"] == "compaction.summary"


async def test_where_nothing_was_changed_the_failure_stands() -> None:
    told = Told()
    told.error = ProviderError("no", code="provider.auth")
    bench = ContextBench(overflowing(1), summarizer=told, model=unknown_window())
    for number in range(3):
        await bench.say(f"{number} " + "please " * 20)
    assert bench.outcomes["p2"].result.error is not None
    assert bench.outcomes["p2"].result.error["code"] == "context.overflow"


async def test_a_cancel_while_an_overflow_is_mended_wins() -> None:
    told = Told()
    told.gate.clear()
    bench = ContextBench(overflowing(1), summarizer=told, model=unknown_window())
    await bench.say("zero " * 20)
    await bench.say("one " * 20)
    bench.submit("two " * 20)
    await told.asked.wait()
    bench.agent.cancel(None, "user")
    assert (await bench.result("p2")).result.state == "cancelled"
    assert bench.of("compaction/end")[0]["error"]["code"] == "compaction.cancelled"
    assert "*" not in bench.words


@pytest.mark.parametrize(("retries", "refused", "state"), [(1, 2, "failed"), (2, 2, "completed"), (0, 1, "failed")])
async def test_it_is_mended_so_often_in_a_row(retries: int, refused: int, state: str) -> None:
    told = Told()
    bench = ContextBench(overflowing(refused), summarizer=told, model=unknown_window(overflow_retries=retries))
    for number in range(2):
        await bench.say(f"{number} " + "please " * 60)
    # something to compact also the second time: a checkpoint of little, and a prompt beside it
    bench.submit("two " + "please " * 20)
    told.text = "a first summary " + "of many words " * 12
    told.during = lambda: setattr(told, "text", "short") if len(told.tasks) > 1 else None
    await bench.result("p2")
    assert bench.outcomes["p2"].result.state == state


async def test_an_answer_starts_the_count_anew() -> None:
    told = Told()
    refuse = {2, 4}

    def script(request: ChatRequest) -> Step:
        if request.turn in refuse:
            refuse.discard(request.turn)
            return Step.error("context.overflow", 400)
        return Step("word " * 40)

    bench = ContextBench(script, summarizer=told, model=unknown_window())
    for number in range(6):
        await bench.say(f"{number} " + "please " * 20)
    assert all(outcome.result.state == "completed" for outcome in bench.outcomes.values())
    assert [start["trigger"] for start in bench.of("compaction/start")].count("overflow") == 2


async def test_another_model_has_its_own_thresholds_from_its_next_turn_on() -> None:
    told = Told()
    bench = ContextBench(lambda _r: Step("word " * 40), summarizer=told, model=small(max_context_tokens=100_000))
    for number in range(6):
        await bench.say(f"{number} " + "please " * 40)
    assert not told.tasks
    other = bench.in_use.model.model_copy(update={"name": "small", "settings": small()})
    bench.agent.set_model(other, bench.provider)
    await bench.say("again")
    assert told.tasks
    bench.agent.set_model(other.model_copy(update={"settings": small(max_context_tokens=None)}), bench.provider)
    assert "compaction" not in bench.slots.step.handlers
    assert "compaction" in bench.slots.request_failed.handlers
