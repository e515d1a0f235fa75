"""Undo: prompts leave the surface with all that came of them; the todo list goes back, nothing else does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.features.compaction import Undo, UndoResult
from kimi_ray.features.todo import TodoList
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from tests.unit.context.stage import ContextBench, Told, bare, rebuilt, small


def todo_writer(request: ChatRequest) -> Step:
    if request.step == 0:
        return Step.call("TodoList", {"todos": [{"title": f"t{request.turn}", "status": "pending"}]})
    return Step(f"answer {request.turn}")


class UndoBench(ContextBench):
    """With a todo list, and ``undo`` as a host does it."""

    def __init__(self, script: Any = None, **options: Any) -> None:
        self.list: Any = _Late()
        super().__init__(
            script or todo_writer,
            summarizer=Told(),
            model=small(max_context_tokens=100_000),
            tools=(self.list,),
            **options,
        )
        self.list.tool = TodoList(self.journal)
        self.undoing = Undo(self.journal)

    async def undo(self, count: int = 1, undo_id: str | None = None) -> UndoResult:
        name = undo_id or f"u{self.log.next_seq}"
        async with self.undoing.turn:
            return await self.agent.maintain("undo", lambda: self.undoing.undo(count, name))


class _Late:
    """A tool that is made when its journal is there."""

    name, description, parameters = TodoList.name, TodoList.description, TodoList.parameters
    tool: TodoList

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)


async def test_the_last_prompts_go_and_the_next_request_does_not_have_them() -> None:
    bench = UndoBench(lambda request: Step(f"answer {request.turn}"))
    await bench.say("one", "two", "three")
    result = await bench.undo(2)
    assert result.prompts == ("p1", "p2") and result.last_prompt is not None
    assert [block["text"] for block in result.last_prompt] == ["one"]
    assert bench.words == ["one", "answer 0"]
    await bench.say("four")
    assert bench.words == ["one", "answer 0", "four", "answer 3"]
    assert len(bench.requests[-1].messages) == 3
    assert [bare(request) for request in bench.requests] == rebuilt(bench.events, bench.store.blobs)
    [cut] = [event for event in bench.events if event.type == "surface/cut"]
    assert cut.data["prompts"] == ["p1", "p2"] and bench.store.durable_seq >= cut.seq
    assert bench.again().log.messages() == bench.log.messages()


async def test_what_the_world_has_seen_stays() -> None:
    bench = UndoBench()
    await bench.say("one", "two")
    before = bench.journal.fold.totals()
    await bench.undo()
    assert bench.journal.fold.totals() == before
    assert bench.journal.log.order.next_turn == 2
    assert bench.outcomes["p1"].result.state == "completed"


async def test_the_todo_list_is_as_it_was_in_this_life_and_in_the_next() -> None:
    bench = UndoBench()
    for word in ("one", "two", "three"):
        await bench.say(word)
    for left in (["t1"], ["t0"], None):
        await bench.undo()
        for one in (bench, UndoBench(events=bench.events)):
            todos = one.journal.fold.todos
            assert (None if todos is None else [todo["title"] for todo in todos]) == left


@pytest.mark.parametrize(("count", "reason"), [(1, "empty"), (2, "empty")])
async def test_without_prompts_there_is_nothing_to_undo(count: int, reason: str) -> None:
    bench = UndoBench()
    with pytest.raises(AgentError) as raised:
        await bench.undo(count)
    assert raised.value.code == "agent.undo_unavailable" and raised.value.details["reason"] == reason
    assert bench.log.next_seq == 0


async def test_why_prompts_cannot_be_taken_back() -> None:
    bench = UndoBench(lambda _request: Step("answer " + "word " * 30))
    await bench.say("one " * 20, "two " * 20)
    with pytest.raises(AgentError) as raised:
        await bench.undo(3)
    assert raised.value.details["reason"] == "insufficient"
    assert await bench.compact() is not None
    with pytest.raises(AgentError) as raised:
        await bench.undo()
    assert raised.value.details["reason"] == "compaction_boundary"
    assert raised.value.hint == "fork before it: sessions fork ID --at ^N"
    await bench.say("three")
    assert (await bench.undo()).prompts == ("p2",)


async def test_it_never_cancels_a_turn() -> None:
    gate = asyncio.Event()

    async def slow(_request: Any) -> Step:
        await gate.wait()
        return Step("done")

    bench = UndoBench(slow)
    bench.submit("one")
    await bench.until("step/start")
    with pytest.raises(AgentError) as raised:
        await bench.undo()
    assert (raised.value.code, raised.value.details["reason"], raised.value.retryable) == ("agent.busy", "turn", True)
    gate.set()
    assert (await bench.result("p0")).result.state == "completed"


async def test_undos_run_one_after_the_other_and_one_that_is_asked_twice_is_done_once() -> None:
    bench = UndoBench()
    for word in ("one", "two", "three"):
        await bench.say(word)
    results = await asyncio.gather(bench.undo(), bench.undo(undo_id="mine"))
    assert [result.prompts for result in results] == [("p2",), ("p1",)]
    again = UndoBench(events=bench.events)
    assert (await again.undo(undo_id="mine")).prompts == ("p1",)
    assert again.types.count("surface/cut") == 2 and again.words[0] == "one"
    assert (await again.undo(undo_id="other")).prompts == ("p0",)
    assert again.words == []


async def test_a_log_that_takes_no_cut_keeps_everything() -> None:
    bench = UndoBench()
    await bench.say("one")

    def veto(event: Any) -> None:
        if event.type == "surface/cut":
            raise KimiRayError("no", code="log.bad_surface")

    bench.log.veto_with(veto)
    before = bench.log.surface.seqs
    with pytest.raises(KimiRayError):
        await bench.undo()
    assert bench.log.surface.seqs == before and not bench.agent.busy
