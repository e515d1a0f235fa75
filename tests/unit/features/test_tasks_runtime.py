"""Background tasks, long results and the todo list in a whole runtime: woken, closed, lost, forked, in a swarm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_ray.events import SessionEvent
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile, Workdir
from kimi_ray.tools import tool
from kimi_ray.tools.previews import MAX_SHOWN_CHARS, PREVIEW_CHARS
from tests.unit.features.test_tasks_processes import alive
from tests.unit.runtime_fixtures import Stage, running
from tests.unit.test_runtime_fork_faults import kill

WORKER = Profile(
    name="worker", tools=("Read", "Grep", "Bash", "TaskList", "TaskOutput", "TaskStop", "WaitFor", "TodoList")
)
BACKGROUND = {"run_in_background": True, "description": "a test"}


def said(request: ChatRequest) -> list[str]:
    """The texts of all messages of a request, results included."""
    texts: list[str] = []
    for message in request.messages:
        for block in message["content"]:
            texts += [inner["text"] for inner in block.get("content", [block]) if inner.get("type") == "text"]
    return texts


def notices(request: ChatRequest) -> list[str]:
    """The statuses of the tasks whose end a request tells."""
    return [
        message["source"]["status"]
        for message in request.messages
        if message["role"] == "user" and message["source"]["kind"] == "task"
    ]


async def events_of(session: Session) -> list[SessionEvent]:
    return [event async for event in session.main.events()]


async def until(session: Session, condition: Callable[[list[SessionEvent]], Any], within_s: float = 15.0) -> Any:
    async with asyncio.timeout(within_s):
        while not (found := condition(await events_of(session))):
            await asyncio.sleep(0.02)
    return found


def count(kind: str, number: int) -> Callable[[list[SessionEvent]], bool]:
    return lambda events: sum(event.type == kind for event in events) >= number


async def ask(session: Session, text: str) -> str:
    return (await (await session.main.submit(text)).result(20)).raise_for_state().text


def script(stage: Stage, text: str, *steps: Step) -> None:
    stage.faults[text] = list(steps)


async def test_an_idle_agent_is_woken_by_the_end_of_its_task(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        script(
            stage, "go", Step.call("Bash", {"command": "until [ -e go ]; do sleep 0.02; done; echo done"} | BACKGROUND)
        )
        assert await ask(session, "go") == "did go"
        assert len(stage.requests) == 2
        (tmp_path / "work" / "go").touch()
        await until(session, count("turn/end", 2))
        assert "<notification" in said(stage.requests[2])[-1] and "done" in said(stage.requests[2])[-1]
        events = await events_of(session)
        kinds = [event.type for event in events]
        start = next(event for event in events if event.type == "turn/start" and event.data["turn"] == 1)
        assert start.data == {"turn": 1, "prompts": [], "continuation": "task"}
        assert kinds.index("task/ended") < start.seq
        assert await ask(session, "next") == "did next"
        assert notices(stage.requests[3]) == ["completed"]


async def test_an_end_joins_the_running_turn(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        script(
            stage, "go",
            Step.call("Bash", {"command": "echo quick"} | BACKGROUND),
            Step.call("Bash", {"command": "sleep 0.5"}),
            Step.call("Bash", {"command": "true"}),
        )  # fmt: skip
        await ask(session, "go")
        events = await events_of(session)
        assert [event.data["turn"] for event in events if event.type == "turn/start"] == [0]
        told = next(
            event for event in events if event.type == "user/message" and event.data["source"]["kind"] == "task"
        )
        assert any("quick" in block["text"] for block in told.data["content"])


async def test_a_session_that_closes_leaves_no_process_and_says_so_in_the_log(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile=WORKER)
        script(stage, "go", Step.call("Bash", {"command": "echo $$ > pid; exec sleep 60"} | BACKGROUND))
        await ask(session, "go")
        pid_file = tmp_path / "work" / "pid"
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.01)
        pid = int(pid_file.read_text())
        assert alive(pid)
        await session.close()
        assert not alive(pid)
        again = await workspace.resume(session.id)
        events = await events_of(again)
        [ended] = [event.data for event in events if event.type == "task/ended"]
        assert (ended["status"], ended["reason"]) == ("killed", "the agent was closed")
        before = len(stage.requests)
        await ask(again, "more")
        assert notices(stage.requests[before]) == ["killed"]
        assert notices(stage.requests[-1]) == ["killed"]


async def test_a_lost_host_loses_the_task_and_the_model_hears_it_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        script(stage, "go", Step.call("Bash", {"command": "exec sleep 60", "disable_timeout": True} | BACKGROUND))
        await ask(session, "go")
        await session.flush()
        await kill(runtime, "agents")
        before = len(stage.requests)
        assert await ask(session, "still there?") == "did still there?"
        assert len(stage.requests) == before + 1  # the loss began no turn of its own
        assert notices(stage.requests[-1]) == ["lost"]
        await ask(session, "and now?")
        assert notices(stage.requests[-1]) == ["lost"]
        assert len([event for event in await events_of(session) if event.type == "task/lost"]) == 1


async def test_a_fork_hears_that_the_task_is_not_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile=WORKER)
        script(
            stage, "go",
            Step.call("TodoList", {"todos": [{"title": "first", "status": "in_progress"}]}),
            Step.call("Bash", {"command": "exec sleep 60"} | BACKGROUND),
        )  # fmt: skip
        await ask(session, "go")
        child = await workspace.fork(session.id)
        script(stage, "and?", Step.call("TodoList"), Step.call("TaskList"))
        await ask(child, "and?")
        texts = said(stage.requests[-1])
        assert "The todo list:\n[~] first" in texts and "no background task is running" in texts
        assert notices(stage.requests[-1]) == ["lost"]
        script(stage, "here?", Step.call("TaskList"))
        await ask(session, "here?")
        assert "status: running" in said(stage.requests[-1])[-1]


async def test_the_todo_list_survives(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile=WORKER)
        todos = [{"title": "look", "status": "done"}, {"title": "tell", "status": "pending"}]
        script(stage, "go", Step.call("TodoList", {"todos": todos}))
        await ask(session, "go")
        await session.close()
        again = await workspace.resume(session.id)
        script(stage, "read", Step.call("TodoList"))
        await ask(again, "read")
        assert said(stage.requests[-1])[-1] == "The todo list:\n[x] look\n[ ] tell"
        [written] = [event.data for event in await events_of(again) if event.type == "todo/write"]
        assert written == {"todos": todos}


async def test_a_rollout_does_not_wait_for_its_tasks_and_leaves_none(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        command = {"command": 'echo $$ > "pid-$RANDOM$RANDOM"; exec sleep 60'}
        for text in ("do one", "do two"):
            script(stage, text, Step.call("Bash", command | BACKGROUND), Step.call("Bash", {"command": "sleep 0.3"}))
        async with asyncio.timeout(20):
            workdir = Workdir.shared(str(tmp_path / "work"), writes=True)
            items = ["one", "two"]
            report = await session.swarm("do {{item}}", items, profile=WORKER, workdir=workdir, tools=WORKER.tools)
        assert [row.status for row in report.rows] == ["completed", "completed"]
        assert [row.turns for row in report.rows] == [1, 1]
        pids = [int(path.read_text()) for path in (tmp_path / "work").glob("pid-*")]
        assert len(pids) == 2
        async with asyncio.timeout(10):
            while any(map(alive, pids)):
                await asyncio.sleep(0.02)


@tool
def flood(lines: int) -> str:
    """Say a lot."""
    return "\n".join(f"line {number} of a long result é" for number in range(lines))


async def test_of_a_long_result_the_model_sees_both_ends_and_can_read_the_rest(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile="bare", tools=["Read", "Grep", flood])
        script(stage, "go", Step.call("flood", {"lines": 5000}), Step.call("flood", {"lines": 3}))
        await ask(session, "go")
        whole = "\n".join(f"line {number} of a long result é" for number in range(5000))
        assert len(whole) > MAX_SHOWN_CHARS
        _, shown, short, *_ = said(stage.requests[-1])
        assert short == "line 0 of a long result é\nline 1 of a long result é\nline 2 of a long result é"
        assert len(shown) < PREVIEW_CHARS + 500
        assert "\nline 0 of a long result é\n" in shown and shown.endswith("line 4999 of a long result é")
        assert f"flood returned {len(whole)} characters in 5000 lines" in shown
        results = [event.data for event in await events_of(session) if event.type == "tool/result"]
        call_id = results[0]["message"]["source"]["call_id"]
        assert results[0]["full"]["bytes"] == len(whole.encode()) and "full" not in results[1]
        await session.close()

        again = await workspace.resume(session.id, tools=["Read", "Grep", flood])
        script(
            stage, "more",
            Step.call("Read", {"path": f"result:{call_id}", "line_offset": 2501, "n_lines": 1}),
            Step.call("Grep", {"path": f"result:{call_id}", "pattern": "line 31[0-9]1 ", "output_mode": "content"}),
            Step.call("Read", {"path": "result:call_other"}),
        )  # fmt: skip
        await ask(again, "more")
        read, found, other = said(stage.requests[-1])[-3:]
        assert read.startswith("  2501\tline 2500 of a long result é")
        assert [line.split(":")[-1] for line in found.splitlines()] == [
            f"line 31{n}1 of a long result é" for n in range(10)
        ]
        assert "does not exist" in other
        # what was asked is in the log: the message derived from it is the one that went over the wire
        messages = json.dumps(await again.main.messages())
        assert json.dumps(shown)[1:-1] in messages
        child = await workspace.fork(again.id)
        script(stage, "mine?", Step.call("Read", {"path": f"result:{call_id}", "line_offset": -1}))
        await ask(child, "mine?")
        assert said(stage.requests[-1])[-1].startswith("  5000\tline 4999 of a long result é")


async def test_a_failed_commands_end_is_in_the_preview_of_its_output(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        script(stage, "go", Step.call("Bash", {"command": "seq 1 40000; echo broken >&2; exit 7"}))
        await ask(session, "go")
        shown = said(stage.requests[-1])[-1]
        assert shown.endswith("39999\n40000\nbroken\n[exit code 7]") and "\n1\n2\n3\n" in shown
        [result] = [event.data for event in await events_of(session) if event.type == "tool/result"]
        assert result["error"] == {"code": "tool.exit_code"} and result["exit_code"] == 7
        assert result["full"]["bytes"] > 200_000
