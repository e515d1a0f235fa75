"""Logs whose surface was replaced are replayed by position: compactions, prunes, overflows that were mended, undos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.replay import rebuild_session
from tests.unit.replay.recorded_sessions import (
    Facts,
    assert_as_recorded,
    look,
    recorded,
    replayed,
    scripted,
    source_of,
)

SUMMARY = Step("## Request and intent\n- questions")


class Talk:
    """A model that calls ``look`` once a turn, and says much."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.summaries: list[ChatRequest] = []
        self.overflow_at: int | None = None

    def answer(self, request: ChatRequest) -> Step:
        if request.purpose == "compaction":
            self.summaries.append(request)
            return SUMMARY
        self.requests.append(request)
        if len(self.requests) == self.overflow_at:
            return Step.error("context.overflow", 400)
        last = request.messages[-1]
        if last["source"]["kind"] == "user":
            return Step.call("look", {"what": "x" * 300})
        return Step(f"{len(self.requests)} " + "word " * 40)


def window(script: Any, **table: Any) -> dict[str, Any]:
    model = {"provider": "scripted", "script": scripted(script).partition(":")[2], "max_context_tokens": 1500}
    return {"models": {"small": {**model, **table}}}


async def _talk(tmp_path: Path, talk: Talk, turns: int, **table: Any) -> None:
    async with recorded(tmp_path, talk.answer, **window(talk.answer, **table)) as session:
        await session.main.set_model("small")
        for number in range(turns):
            await (await session.main.submit(f"question {number} " + "please " * 30)).result(10)
        await session.main.compact("keep the numbers")
        await (await session.main.submit("after the compaction")).result(10)
        await session.main.undo(1)
        await (await session.main.submit("after the undo")).result(10)


async def _types(tmp_path: Path) -> list[str]:
    from kimi_ray.events import parse_event
    from kimi_ray.store.seam import Stream

    page = await source_of(tmp_path).read_from(Stream("s1", "main"), 0, 10_000)
    return [parse_event(line).type for line in page.lines]


async def test_compactions_before_steps_by_hand_and_undos(tmp_path: Path) -> None:
    talk = Talk()
    await _talk(tmp_path, talk, 12)
    types = await _types(tmp_path)
    assert types.count("compaction/summary") > 2 and "surface/cut" in types
    report = await assert_as_recorded(tmp_path)
    assert report.requests == len(talk.requests) == 28
    agent = (await rebuild_session(source_of(tmp_path), "s1")).main
    found = [one.request.messages async for one in agent.requests()]
    assert found == [one.messages for one in talk.requests]
    asked = [one async for one in agent.summary_requests()]
    assert [one.request for one in asked] == talk.summaries != []
    assert [one.index for one in asked] == list(range(len(asked)))
    assert all(SUMMARY.text in one.answer[0]["text"] and one.error is None for one in asked)
    assert all(types[one.seq] == "compaction/request" and one.header["model"] == one.request.model for one in asked)


async def test_results_that_were_pruned(tmp_path: Path) -> None:
    talk = Talk()
    limits = {"prune_chars": 200, "prune_head_chars": 100, "prune_tail_chars": 50}
    await _talk(tmp_path, talk, 12, compaction=limits)
    assert (await _types(tmp_path)).count("compaction/prune") > 3
    await assert_as_recorded(tmp_path)
    assert (await replayed(tmp_path, tools="real")).ok
    Facts.value = "something else"
    found = (await replayed(tmp_path, tools="real")).divergence
    assert found is not None and found.request == 1


async def test_a_request_that_was_too_long_and_was_mended(tmp_path: Path) -> None:
    talk = Talk()
    talk.overflow_at = 7
    async with recorded(tmp_path, talk.answer, tools=(look,)) as session:
        for number in range(5):
            await (await session.main.submit(f"question {number} " + "please " * 30)).result(10)
    types = await _types(tmp_path)
    # The second is by itself: below the window that the refusal has taught.
    assert types.count("compaction/summary") == 2 and "llm/retry" not in types
    report = await assert_as_recorded(tmp_path)
    assert report.requests == len(talk.requests) == 11
