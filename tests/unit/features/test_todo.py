"""TodoList: the log is where the list is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.fold import AgentFold
from kimi_ray.errors import LogError, ToolError
from kimi_ray.features.todo import TodoList
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.tools import ToolContext, ToolOutput
from kimi_ray.tools.contract import Accesses
from kimi_ray.tools.scheduling import conflict
from tests.unit.agent.bench import AgentBench

TODOS = [{"title": "look", "status": "done"}, {"title": "tell", "status": "in_progress"}]


class Bound:
    """TodoList for a bench, whose journal is there only once the bench is."""

    name, description, parameters = TodoList.name, TodoList.description, TodoList.parameters
    writes = False

    def __init__(self) -> None:
        self.bench: AgentBench | None = None

    @property
    def real(self) -> TodoList:
        assert self.bench is not None
        return TodoList(self.bench.journal)

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        return self.real.accesses(arguments)

    def check(self, arguments: Any) -> dict[str, Any]:
        return self.real.check(arguments)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        return await self.real.run(arguments, context)


def bench_of(script: Any, **settings: Any) -> AgentBench:
    tool = Bound()
    tool.bench = AgentBench(script, tools=(tool,), **settings)  # type: ignore[arg-type]
    return tool.bench


def results(bench: AgentBench) -> list[str]:
    return [data["message"]["content"][0]["content"][0]["text"] for data in bench.of("tool/result")]


async def test_it_is_written_as_a_whole_and_read() -> None:
    bench = bench_of([Step.call("TodoList"), Step.call("TodoList", {"todos": TODOS}), Step.call("TodoList"), "done"])
    bench.submit("go")
    await bench.result()
    assert results(bench) == [
        "The todo list is empty.",
        "The todo list is now:\n[x] look\n[~] tell",
        "The todo list:\n[x] look\n[~] tell",
    ]
    assert bench.of("todo/write") == [{"todos": TODOS}]
    # another life reads it from the log
    more = ["-"] * 4 + [Step.call("TodoList"), Step.call("TodoList", {"todos": []}), "done"]
    again = bench_of(more, events=bench.events)
    again.submit("go")
    await again.result("p1")
    assert results(again)[-2:] == ["The todo list:\n[x] look\n[~] tell", "The todo list was cleared."]
    assert again.journal.fold.todos == []


async def test_calls_of_one_answer_see_the_list_in_their_order() -> None:
    def write(title: str) -> ToolCall:
        return Step.call("TodoList", {"todos": [{"title": title, "status": "pending"}]}).tool_calls[0]

    read = Step.call("TodoList").tool_calls[0]
    bench = bench_of([Step(tool_calls=(write("a"), read, write("b"), read)), "done"])
    bench.submit("go")
    await bench.result()
    assert [text.splitlines()[-1] for text in results(bench)] == ["[ ] a", "[ ] a", "[ ] b", "[ ] b"]


def test_a_write_and_a_read_of_it_do_not_run_side_by_side_but_files_go_beside_it() -> None:
    bench = bench_of(["x"])
    tool = TodoList(bench.journal)
    read, write = tool.accesses({}), tool.accesses({"todos": []})
    assert conflict(write, read) and conflict(write, write) and not conflict(read, read)
    assert not conflict(write, Accesses.writes("a"), root="/work")


@pytest.mark.parametrize(
    "arguments",
    [
        {"todos": [{"title": "", "status": "pending"}]},
        {"todos": [{"title": "a", "status": "maybe"}]},
        {"todos": [{"title": "a"}]},
        {"todos": [{"title": "a", "status": "done", "more": 1}]},
        {"todos": [{"title": "a" * 501, "status": "done"}]},
        {"todos": [{"title": "a", "status": "done"}] * 201},
        {"todo": []},
    ],
)
def test_bad_lists(arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolError) as caught:
        TodoList(bench_of(["x"]).journal).check(arguments)
    assert caught.value.code == "tool.bad_arguments"


async def test_outside_a_turn_nothing_is_written() -> None:
    bench = bench_of(["x"])
    tool = TodoList(bench.journal)
    context = ToolContext(bench.agent._environment, "s", "main", "c", asyncio.Event())
    with pytest.raises(LogError):
        await tool.run({"todos": TODOS}, context)
    assert bench.journal.fold.todos is None and isinstance(bench.journal.fold, AgentFold)
