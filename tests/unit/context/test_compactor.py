"""The transaction of a compaction: whole or not at all, and told in the log and to the caller, whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kimi_ray.agent.slots import Compacted, Compacting
from kimi_ray.agent.summarizer import Summarizer, Summary, SummaryTask
from kimi_ray.errors import AgentError, KimiRayError, LogError, ProviderError, StoreError
from kimi_ray.events import SessionEvent
from kimi_ray.llm.script import Step
from tests.unit.agent.bench import AgentBench
from tests.unit.context.stage import ContextBench, Told, small
from tests.unit.log.scripts import begin, end, new_log, user


async def talked(turns: int = 3, **options: Any) -> ContextBench:
    """A bench behind some turns, far from its threshold, with a summarizer that is told what to say."""
    bench = ContextBench(
        lambda _request: Step("answer " + "word " * 30),
        summarizer=options.pop("summarizer", None) or Told(),
        model=options.pop("model", None) or small(max_context_tokens=100_000),
        **options,
    )
    for number in range(turns):
        await bench.say(f"question {number} " + "please " * 20)
    return bench


def told(bench: ContextBench) -> Told:
    assert isinstance(bench.summarizer, Told)
    return bench.summarizer


def refuse(bench: AgentBench, *types: str, after: int = 0, error: KimiRayError | None = None) -> list[str]:
    """Refuse events of these types, once ``after`` of them were let in."""
    seen: list[str] = []

    def veto(event: SessionEvent) -> None:
        if event.type in types:
            seen.append(event.type)
            if len(seen) > after:
                raise error or LogError("refused", code="log.bad_payload")

    bench.log.veto_with(veto)
    return seen


async def raised_by(bench: ContextBench, **options: Any) -> KimiRayError:
    with pytest.raises(KimiRayError) as raised:
        await bench.compact(**options)
    return raised.value


async def test_a_manual_compaction_is_one_bracket_and_durable() -> None:
    bench = await talked()
    before = bench.log.surface.seqs
    result = await bench.compact("short")
    assert result is not None
    types = bench.types[result.start_seq :]
    assert types == ["compaction/start", "compaction/summary", "user/message", "compaction/end"]
    assert bench.store.durable_seq == bench.log.next_seq
    events = bench.events
    replacing = events[result.message_seq]
    assert replacing.replaced == (before[0], before[-2])
    assert replacing.sources == (result.start_seq, result.summary_seq, *before[:-1])
    assert replacing.data["source"] == {
        "kind": "compaction",
        "compaction_id": result.compaction_id,
        "kept": 3,
        "answers": 2,
    }
    summary = events[result.summary_seq].data
    assert summary["shadowed_seqs"] == list(before[:-1]) and summary["shadowed_tokens"] == result.shadowed_tokens
    assert (summary["shadowed_range"]["start"], summary["shadowed_range"]["end"]) == result.shadowed_range
    assert bench.log.surface.seqs == (result.message_seq, before[-1])
    assert told(bench).tasks[0].instruction == "short" and len(told(bench).tasks[0].messages) == 5
    assert result.message_tokens < result.shadowed_tokens


async def test_a_checkpoint_alone_is_not_compacted_again() -> None:
    bench = await talked()
    assert await bench.compact() is not None
    assert await bench.compact() is None
    assert bench.types.count("compaction/start") == 1


async def test_with_one_message_or_none_nothing_is_written() -> None:
    bench = await talked(0)
    assert await bench.compact() is None
    user(bench.log, "only one")
    assert await bench.compact() is None
    assert "compaction/start" not in bench.types


@pytest.mark.parametrize("mark", ["log/end-seed", "runtime/activated"])
async def test_an_orphan_of_another_life_is_stale_and_one_of_this_life_is_busy(mark: str) -> None:
    bench = await talked()
    bench.log.append("compaction/start", {"compaction_id": "lost"})
    seq = bench.log.next_seq
    error = await raised_by(bench)
    assert error.code == "compaction.busy" and error.details["compaction_id"] == "lost"
    assert bench.log.next_seq == seq
    bench.log.append(mark, {"epoch": 2} if mark == "runtime/activated" else {})
    assert await bench.compact() is not None


async def test_an_end_that_cannot_be_written_leaves_one_orphan_and_nothing_is_flushed() -> None:
    bench = await talked()
    flushes = len(bench.store.flushes)
    refuse(bench, "compaction/end")
    error = await raised_by(bench)
    assert error.code == "compaction.commit"
    assert bench.types.count("compaction/start") == 1 and "compaction/end" not in bench.types
    assert len(bench.store.flushes) == flushes
    assert bench.log.order.open_compaction is not None
    assert (await raised_by(bench)).code == "compaction.busy"


async def test_the_end_of_a_failure_that_cannot_be_written_leaves_one_orphan_too() -> None:
    bench = await talked()
    told(bench).error = ProviderError("no", code="provider.auth")
    flushes = len(bench.store.flushes)
    seen = refuse(bench, "compaction/end")
    error = await raised_by(bench)
    assert error.code == "compaction.summary" and error.details["end_failed"]["code"] == "log.bad_payload"
    assert seen == ["compaction/end"]  # one attempt
    assert len(bench.store.flushes) == flushes and bench.log.order.open_compaction is not None


@pytest.mark.parametrize("kind", ["compaction/summary", "user/message"])
async def test_an_event_that_is_refused_in_the_commit_leaves_the_surface_as_it_was(kind: str) -> None:
    bench = await talked()
    before = bench.log.surface.seqs
    refuse(bench, kind)
    error = await raised_by(bench)
    assert error.code == "compaction.commit" and error.details["cause"]["code"] == "log.bad_payload"
    assert bench.log.surface.seqs == before and bench.log.order.open_compaction is None
    [end] = bench.of("compaction/end")
    assert end["error"]["code"] == "compaction.commit"
    assert bench.store.durable_seq == bench.log.next_seq  # a closed bracket is made durable


async def test_a_summarizer_that_fails_is_the_error_of_the_bracket_and_of_the_caller() -> None:
    bench = await talked()
    before = bench.log.surface.seqs
    told(bench).error = ProviderError("no key", code="provider.auth", hint="set it")
    error = await raised_by(bench)
    assert (error.code, error.hint) == ("compaction.summary", "set it")
    assert error.details["cause"]["code"] == "provider.auth"
    [end] = bench.of("compaction/end")
    assert end["error"]["details"]["cause"]["code"] == "provider.auth"
    assert bench.log.surface.seqs == before


class Odd(Summarizer):
    """Gives, or raises, what no summarizer should."""

    def __init__(self, what: object) -> None:
        self.what = what

    async def summarize(self, task: SummaryTask) -> Summary:
        if isinstance(self.what, BaseException):
            raise self.what
        return cast("Summary", self.what)


def _summary(*blocks: Any, model: Any = None, usage: Any = None) -> Summary:
    return Summary(list(blocks), model, usage)


_SAID = {"type": "text", "text": "It went well."}
ODD: dict[str, object] = {
    "ValueError": ValueError("boom"),
    "TimeoutError": TimeoutError("slow"),
    "SystemExit": SystemExit(3),
    "a CancelledError that nobody asked for": asyncio.CancelledError("own"),
    "nothing": _summary(),
    "blanks": _summary({"type": "text", "text": "  \n"}, {"type": "text", "text": ""}),
    "None": None,
    "a text": "It went well.",
    "no list": Summary(cast("Any", "It went well.")),
    "a block that is none": _summary("It went well."),
    "an image": _summary({"type": "image", "url": "u"}),
    "a text with an image": _summary(_SAID, {"type": "image", "url": "u"}),
    "a text that is none": _summary({"type": "text", "text": 3}),
    "a lone surrogate": _summary({"type": "text", "text": "a\ud800b"}),
    "a model that is no name": _summary(_SAID, model=object()),
    "usage that is none": _summary(_SAID, usage="much"),
    "a count that is no number": _summary(_SAID, usage={"input": float("nan")}),
    "a fraction of a token": _summary(_SAID, usage={"output": 1.5}),
}


@pytest.mark.parametrize("what", ODD)
async def test_what_is_no_summary_is_told_as_such_and_erases_nothing(what: str) -> None:
    bench = await talked(summarizer=Odd(ODD[what]))
    before = bench.log.surface.seqs
    error = await raised_by(bench)
    assert error.code == "compaction.summary" and error.message.startswith("there is no summary")
    [end] = bench.of("compaction/end")
    assert end["error"]["code"] == "compaction.summary"
    assert bench.log.surface.seqs == before and bench.log.order.open_compaction is None
    await bench.say("and on")
    assert bench.words[-2] == "and on"


@pytest.mark.parametrize("what", ODD)
async def test_what_is_no_summary_harms_no_turn(what: str) -> None:
    bench = ContextBench(lambda _request: Step("word " * 60), summarizer=Odd(ODD[what]))
    for _ in range(12):
        ended = await bench.result(bench.submit("please " * 20)[-1])
        assert ended.result.state == "completed" and ended.result.error is None
        if bench.of("compaction/end"):
            break
    found = bench.of("compaction/end")
    assert found and {end["error"]["code"] for end in found} == {"compaction.summary"}
    assert "*" not in bench.words


async def test_a_summary_must_be_smaller_than_what_it_replaces() -> None:
    bench = await talked()
    before = bench.log.surface.seqs
    told(bench).text = "long " * 2_000
    error = await raised_by(bench)
    assert error.code == "compaction.summary"
    assert error.details["tokens"] >= error.details["shadowed_tokens"]
    assert bench.log.surface.seqs == before
    # Without the user's words it may still fit: they give way.
    bench = await talked(1)
    await bench.say("x" * 4_000)
    told(bench).text = "s" * 3_000
    result = await bench.compact()
    assert result is not None
    [checkpoint, _] = bench.log.messages()
    assert checkpoint["source"].get("kept", 0) < 3


async def test_only_the_selected_span_must_stand_still_between_turns() -> None:
    bench = await talked()
    told(bench).during = lambda: user(bench.log, "from outside") and None
    assert await bench.compact() is not None
    assert bench.words[0] == "*" and bench.words[-1] == "from outside"
    seqs = bench.log.surface.seqs

    def replace_the_first() -> None:
        span = {"replace": [seqs[0], seqs[0]]}
        user(bench.log, "another", surface=span, sources=[seqs[0]])

    told(bench).during = replace_the_first
    error = await raised_by(bench)
    assert error.code == "compaction.changed" and error.retryable
    assert bench.words[0] == "another"


async def test_a_store_that_fails_behind_a_whole_compaction_is_told_as_such() -> None:
    bench = await talked()
    bench.store.error = StoreError("disk full", code="store.no_space")
    error = await raised_by(bench)
    assert error.code == "compaction.persistence" and error.details["cause"]["code"] == "store.no_space"
    assert bench.words[0] == "*"
    # Of a failure the failure is told, not what the flush behind it said.
    told(bench).error = ProviderError("no", code="provider.auth")
    bench.log.append("note/added", {"text": "x"})
    await asyncio.sleep(0)
    bench.store.error = None
    await bench.say("more " * 40)
    bench.store.error = StoreError("disk full", code="store.no_space")
    assert (await raised_by(bench)).code == "compaction.summary"


async def test_a_cancel_is_the_end_of_the_bracket_and_wins_over_everything() -> None:
    bench = await talked()
    before = bench.log.surface.seqs
    told(bench).gate.clear()
    task = asyncio.ensure_future(bench.compact())
    await told(bench).asked.wait()
    bench.store.error = StoreError("disk full", code="store.no_space")
    bench.agent.cancel(None, "user")
    with pytest.raises(AgentError) as raised:
        await task
    assert raised.value.code == "agent.cancelled"
    [end] = bench.of("compaction/end")
    assert end["error"]["code"] == "compaction.cancelled"
    assert bench.log.surface.seqs == before and not bench.agent.busy


async def test_who_waits_and_is_cancelled_ends_the_work() -> None:
    bench = await talked()
    told(bench).gate.clear()
    task = asyncio.ensure_future(bench.compact())
    await told(bench).asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.of("compaction/end")[0]["error"]["code"] == "compaction.cancelled"
    assert not bench.agent.busy


async def test_closing_the_agent_ends_a_compaction_and_closes_its_bracket() -> None:
    bench = await talked()
    told(bench).gate.clear()
    task = asyncio.ensure_future(bench.compact())
    await told(bench).asked.wait()
    await bench.agent.close()
    with pytest.raises(AgentError):
        await task
    assert bench.of("compaction/end")[0]["error"]["code"] == "compaction.cancelled"


async def test_a_fenced_agent_writes_nothing_more() -> None:
    bench = await talked()
    told(bench).gate.clear()
    task = asyncio.ensure_future(bench.compact())
    await told(bench).asked.wait()
    bench.agent.fence()
    with pytest.raises(KimiRayError):
        await task
    assert bench.types[-1] == "compaction/start"


async def test_a_prompt_that_comes_meanwhile_waits_and_runs_afterwards() -> None:
    bench = await talked()
    told(bench).gate.clear()
    task = asyncio.ensure_future(bench.compact())
    await told(bench).asked.wait()
    [late] = bench.submit("late")
    assert bench.agent.busy and bench.agent.status(late).state == "pending"
    told(bench).gate.set()
    await task
    await bench.result(late)
    assert bench.words[-2] == "late"
    assert bench.types.index("compaction/end") < len(bench.types) - 1 - bench.types[::-1].index("turn/start")


async def test_while_a_turn_runs_or_a_prompt_waits_there_is_no_maintenance() -> None:
    gate = asyncio.Event()

    async def slow(_request: Any) -> Step:
        await gate.wait()
        return Step("done")

    bench = ContextBench(slow, summarizer=Told(), model=small(max_context_tokens=100_000))
    bench.submit("one")
    await bench.until("step/start")
    for _ in range(2):
        error = await raised_by(bench)
        assert (error.code, error.details["reason"]) == ("agent.busy", "turn")
    gate.set()
    await bench.result("p0")
    bench.agent.hold("a fork")
    assert (await raised_by(bench)).details["reason"] == "held"


async def test_the_todo_list_is_in_the_checkpoint_and_the_users_words_are_carried_on() -> None:
    bench = await talked()
    bench.log.append("turn/start", {"turn": 3, "prompts": []})
    bench.log.append("todo/write", {"todos": [{"title": "ship it", "status": "in_progress"}]})
    bench.log.append("turn/end", {"turn": 3, "reason": {"kind": "completed"}})
    await bench.compact()
    await bench.say("more " * 40)
    await bench.say("and more " * 40)
    told(bench).text = "Second."
    await bench.compact()
    [checkpoint, _] = bench.log.messages()
    blocks = [block["text"] for block in checkpoint["content"]]
    assert [block[:10] for block in blocks[1:4]] == ["question 0", "question 1", "question 2"]
    assert blocks[4].startswith("more") and checkpoint["source"]["kept"] == 5
    assert blocks[-2] == "## Todo list\n[~] ship it" and "Second." in blocks[-1]
    assert checkpoint["source"]["answers"] == 4
    assert sum("<compacted-summary>" in block for block in blocks) == 1


def test_a_log_takes_no_compaction_out_of_its_order() -> None:
    log = new_log()
    user(log, "one")
    with pytest.raises(LogError):
        log.append("compaction/start", {"compaction_id": "k", "turn": 0})
    begin(log)
    with pytest.raises(LogError):
        log.append("compaction/start", {"compaction_id": "k"})
    log.append("compaction/start", {"compaction_id": "k", "turn": 0})
    summary = {"summary": [], "shadowed_range": {}, "shadowed_seqs": [0], "shadowed_tokens": 1}
    for compaction_id in ("other", ""):
        with pytest.raises(LogError) as raised:
            log.append("compaction/summary", {"compaction_id": compaction_id, **summary})
        assert raised.value.code == "log.out_of_order"
    log.append("compaction/summary", {"compaction_id": "k", **summary})
    log.append("compaction/end", {"compaction_id": "k", "turn": 0})
    with pytest.raises(LogError):
        log.append("compaction/summary", {"compaction_id": "k", **summary})
    end(log)


async def test_a_features_own_span_is_compacted_inside_a_turn_only() -> None:
    spans: list[tuple[int, ...]] = []

    class OnStep:
        async def look(self, _event: Any) -> None:
            if len(bench.log.surface) >= 5 and not spans:
                seqs = bench.log.surface.seqs
                result = await bench.engine.compact_region(seqs[1], seqs[2])
                spans.append(result.shadowed_seqs)

    bench = await talked(0)
    bench.slots.step.register("own", OnStep().look)
    for number in range(3):
        await bench.say(f"question {number} " + "please " * 30)
    assert len(spans) == 1 and len(spans[0]) == 2
    assert bench.of("compaction/start")[0]["trigger"] == "region" and bench.words[1] == "*"
    seqs = bench.log.surface.seqs
    with pytest.raises(AgentError) as raised:
        await bench.engine.compact_region(seqs[0], seqs[1])
    assert raised.value.code == "compaction.no_turn"


async def test_whoever_is_asked_before_can_let_it_fail_and_the_bracket_says_so() -> None:
    bench = await talked()

    async def no(_event: Compacting) -> None:
        raise KimiRayError("not now", code="house.no")

    bench.slots.compacting.register("house", no)
    assert (await raised_by(bench)).code == "house.no"
    assert bench.of("compaction/end")[0]["error"]["code"] == "house.no"
    bench.slots.compacting.remove("house")
    told_of: list[Compacted] = []

    async def hear(event: Compacted) -> None:
        told_of.append(event)

    bench.slots.compacted.register("house", hear)
    result = await bench.compact()
    await bench.notices.settled()
    assert result is not None and told_of[0].compaction_id == result.compaction_id
    assert told_of[0].tokens == bench.size.total
