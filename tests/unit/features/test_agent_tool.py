"""The Agent tool over a caller's children that are made up: what it asks of them, and what the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from kimi_ray.agent.background import TaskEnd, TaskWork
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.subagents import SubagentInfo, SubagentPlan, SubagentResult, SummaryPolicy
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, ToolError
from kimi_ray.features.subagents import AgentTool
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.settings import Profile
from kimi_ray.store.seam import Stream
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.local import LocalEnvironment

MODEL = ResolvedModel(name="m", provider="scripted", model="m")
CALLER = Profile(name="agent", tools=("Agent",), subagents=("coder",))
CODER = Profile(name="coder", description="Writes code.")


class Children:
    """``Subagents`` that tells what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.result = SubagentResult("agent-7", "coder", "completed", "all done")
        self.refusal: AgentError | None = None
        self.on_spawn: Callable[[], None] = lambda: None

    def offered(self) -> list[Profile]:
        return [CODER]

    def plan(self, profile: str | None = None, model: str | None = None, *, fork: bool = False) -> SubagentPlan:
        self.asked.append(("plan", (profile, model, fork)))
        if self.refusal is not None:
            raise self.refusal
        return SubagentPlan(CALLER if fork else CODER, MODEL, fork)

    async def spawn(
        self,
        plan: SubagentPlan,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        call_id: str | None = None,
        background: bool = False,
    ) -> str:
        self.asked.append(("spawn", (description, call_id, background)))
        self.on_spawn()
        return "agent-7"

    async def run(
        self,
        agent_id: str,
        prompt: str | None,
        *,
        timeout_s: float | None = None,
        summary: SummaryPolicy | None = None,
        signal: asyncio.Event | None = None,
        on_started: Callable[[], None] | None = None,
        will_retry: bool = False,
    ) -> SubagentResult:
        self.asked.append(("run", (agent_id, prompt, timeout_s, summary)))
        return self.result

    async def check_resume(self, agent_id: str) -> SubagentInfo:
        self.asked.append(("check", agent_id))
        if self.refusal is not None:
            raise self.refusal
        return SubagentInfo(agent_id, "plan")

    async def cancel(self, agent_id: str) -> None:
        raise AssertionError

    async def labels_of(self, agent_id: str) -> dict[str, str]:
        raise AssertionError


class Desk:
    """``BackgroundTasks`` that keeps the work."""

    def __init__(self) -> None:
        self.offered = True
        self.full = False
        self.rooms = 0
        self.work: TaskWork | None = None

    @contextmanager
    def room(self) -> Generator[None]:
        if self.full:
            raise AgentError("8 background tasks are running already", code="task.limit_exceeded")
        self.rooms += 1
        try:
            yield
        finally:
            self.rooms -= 1

    def start(
        self,
        kind: str,
        description: str,
        work: TaskWork,
        *,
        agent_id: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        assert (kind, agent_id, self.rooms) == ("agent", "agent-7", 0)
        self.work = work
        return "agent-abcdefgh"


class Bench:
    def __init__(self) -> None:
        self.children, self.desk = Children(), Desk()
        spec = AgentSpec(Stream("s", "main"), "n", CALLER, MODEL)
        self.tool = AgentTool(spec, self.children, self.desk, RuntimeConfig(home="/nowhere", subagent_timeout_s=60))
        self.context = ToolContext(LocalEnvironment(None), "s", "main", "call_1", asyncio.Event())

    async def call(self, **arguments: Any) -> ToolOutput:
        given = {"prompt": "do it", "description": "a task", **arguments}
        return await self.tool.run(self.tool.check(given), self.context)

    def asked(self, what: str) -> list[Any]:
        return [said for kind, said in self.children.asked if kind == what]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_an_answer(bench: Bench) -> None:
    output = await bench.call()
    assert output.content == (
        "agent_id: agent-7\nactual_subagent_type: coder\nstatus: completed\n\n[summary]\nall done"
    )
    assert not output.is_error and output.meta is not None and output.meta["agent_id"] == "agent-7"
    assert bench.children.asked == [
        ("plan", (None, None, False)),
        ("spawn", ("a task", "call_1", False)),
        ("run", ("agent-7", "do it", 60.0, SummaryPolicy(200, 1))),
    ]
    assert "- coder: Writes code." in bench.tool.description


async def test_a_failure_says_why(bench: Bench) -> None:
    error = AgentError("the model said no", code="provider.bad_request").to_data()
    bench.children.result = SubagentResult("agent-7", "coder", "failed", "", error=error)
    output = await bench.call()
    assert output.content == (
        "agent_id: agent-7\nactual_subagent_type: coder\nstatus: failed\n\nsubagent error: the model said no"
    )
    assert output.is_error and output.error_code == "provider.bad_request"


async def test_only_a_timeout_has_a_hint_to_resume(bench: Bench) -> None:
    error = AgentError("agent-7 timed out after 60 s", code="agent.timed_out").to_data()
    bench.children.result = SubagentResult("agent-7", "coder", "timed_out", "", error=error)
    lines = str((await bench.call()).content).splitlines()
    assert lines[2:5] == ["status: failed", "", "subagent error: agent-7 timed out after 60 s"]
    assert len(lines) == 6 and lines[5].startswith("resume_hint: ") and 'resume="agent-7"' in lines[5]


async def test_what_cannot_be_launched_is_one_line(bench: Bench) -> None:
    bench.children.refusal = AgentError("not that one", code="agent.type_not_allowed", hint="take coder")
    output = await bench.call(subagent_type="explore")
    assert (output.content, output.is_error) == ("subagent error: not that one (take coder)", True)
    assert output.error_code == "agent.type_not_allowed"


async def test_empty_texts_say_nothing(bench: Bench) -> None:
    await bench.call(subagent_type="", resume=" ", model="", run_in_background="", fork="")
    assert bench.asked("plan") == [(None, None, False)] and bench.asked("check") == []


@pytest.mark.parametrize("prompt", ["", "  \n"])
async def test_a_task_must_be_given(bench: Bench, prompt: str) -> None:
    with pytest.raises(ToolError) as refused:
        bench.tool.check({"prompt": prompt, "description": "x"})
    assert refused.value.code == "tool.bad_arguments"


async def test_resuming(bench: Bench) -> None:
    output = await bench.call(resume="agent-7")
    assert "status: completed" in str(output.content)
    assert bench.asked("check") == ["agent-7"] and bench.asked("spawn") == []
    assert bench.asked("run") == [("agent-7", "do it", 60.0, None)], "a planner's answer is not asked for again"


@pytest.mark.parametrize(
    "arguments",
    [
        {"resume": "agent-7", "subagent_type": "coder"},
        {"resume": "agent-7", "model": "m"},
        {"resume": "agent-7", "fork": True},
        {"fork": True, "subagent_type": "coder"},
        {"fork": True, "model": "other"},
    ],
    ids=str,
)
async def test_what_contradicts_itself_is_refused(bench: Bench, arguments: dict[str, Any]) -> None:
    output = await bench.call(**arguments)
    assert output.is_error and output.error_code == "validation.failed"
    assert str(output.content).startswith("subagent error: ") and bench.children.asked == []


@pytest.mark.parametrize("model", ["primary", "m", None])
async def test_a_fork_of_itself_is_no_contradiction(bench: Bench, model: str | None) -> None:
    output = await bench.call(fork=True, subagent_type="agent", model=model)
    assert not output.is_error
    assert [fork for _, _, fork in bench.asked("plan")] == [True]


async def test_calls_may_run_side_by_side(bench: Bench) -> None:
    assert bench.tool.accesses({"prompt": "a", "description": "b"}) == Accesses.none()
    assert bench.tool.writes, "it is left out of swarms unless it is asked for"


async def test_in_the_background(bench: Bench) -> None:
    output = await bench.call(run_in_background=True)
    lines = str(output.content).splitlines()
    assert lines[:7] == [
        "task_id: agent-abcdefgh",
        "status: running",
        "agent_id: agent-7",
        "actual_subagent_type: coder",
        "automatic_notification: true",
        "",
        "description: a task",
    ]
    assert lines[7] == "" and lines[8].startswith("next_step: ") and lines[9].startswith("resume_hint: ")
    assert "agent-7" in lines[9] and "agent-abcdefgh" in lines[9]
    assert bench.asked("run") == [] and bench.asked("spawn") == [("a task", "call_1", True)]
    assert bench.desk.work is not None
    written: list[str] = []
    assert await bench.desk.work(written.append) == TaskEnd("completed")
    assert written == ["all done"] and bench.asked("run")[0][0] == "agent-7"


@pytest.mark.parametrize(("status", "end"), [("failed", "failed"), ("cancelled", "killed"), ("timed_out", "timed_out")])
async def test_how_a_task_ends(bench: Bench, status: Any, end: str) -> None:
    await bench.call(run_in_background=True)
    error = AgentError("why", code="agent.x").to_data()
    bench.children.result = SubagentResult("agent-7", "coder", status, "so far", error=error)
    assert bench.desk.work is not None
    written: list[str] = []
    told = await bench.desk.work(written.append)
    assert (told.status, told.reason, written) == (end, "why", ["so far"])


async def test_no_background_without_the_tools_or_without_room(bench: Bench) -> None:
    bench.desk.full = True
    output = await bench.call(run_in_background=True)
    assert output.content == "Too many background tasks are already running." and output.is_error
    bench.desk.offered = False
    output = await bench.call(run_in_background=True)
    assert output.error_code == "validation.failed" and "TaskOutput" in str(output.content)
    assert bench.children.asked == [], "nothing was made for nothing"


async def test_the_place_of_its_task_is_kept_while_a_subagent_is_made(bench: Bench) -> None:
    kept: list[int] = []
    bench.children.on_spawn = lambda: kept.append(bench.desk.rooms)
    await bench.call(run_in_background=True)
    await bench.call()
    assert (kept, bench.desk.rooms) == ([1, 0], 0)
