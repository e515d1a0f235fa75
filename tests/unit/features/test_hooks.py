"""Hooks in a whole runtime: what each event tells, what may be blocked, and that no hook can do harm."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.events import CORE, SessionEvent
from kimi_ray.features.external_hooks import SessionHooks
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile
from kimi_ray.workspace_handle import Workspace
from tests.unit.runtime_fixtures import Stage, cluster_of, hosts_of, running

WORKER = Profile(name="worker", tools=("Read", "Write", "Bash", "TaskList", "TaskOutput", "TaskStop"))


class World:
    """A runtime with hooks, its workspace, and what the hooks were told: each appends its stdin to a file."""

    def __init__(self, tmp_path: Path, runtime: Runtime, stage: Stage, model: str) -> None:
        self.heard = tmp_path / "heard"
        self.runtime = runtime
        self.stage = stage
        self.model = model
        self.workspace: Workspace = runtime.workspace(tmp_path / "work")

    async def session(self, **more: Any) -> Session:
        return await self.workspace.create_session(model=self.model, **{"profile": WORKER, **more})

    def told(self, event: str) -> list[dict[str, Any]]:
        """What hooks of an event were told so far."""
        if not self.heard.exists():
            return []
        lines = [json.loads(line) for line in self.heard.read_text().splitlines()]
        return [line for line in lines if line["hook_event_name"] == event]

    async def until_told(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        async with asyncio.timeout(10):
            while len(found := self.told(event)) < count:
                await asyncio.sleep(0.01)
        return found


@asynccontextmanager
async def world(tmp_path: Path, *hooks: dict[str, Any], **settings: Any) -> AsyncGenerator[World]:
    (tmp_path / "heard").unlink(missing_ok=True)
    async with running(tmp_path, hooks=list(hooks), **settings) as (runtime, stage, model):
        yield World(tmp_path, runtime, stage, model)


def hook(event: str, command: str, **more: Any) -> dict[str, Any]:
    return {"event": event, "command": command, **more}


def hear(tmp_path: Path, *events: str, **more: Any) -> list[dict[str, Any]]:
    """Hooks that write down what they are told."""
    return [hook(event, f"cat >> {tmp_path / 'heard'}", **more) for event in events]


async def events_of(session: Session, agent_id: str = "main") -> list[SessionEvent]:
    return [event async for event in session.agent(agent_id).events()]


def of_type(events: list[SessionEvent], kind: str) -> list[dict[str, Any]]:
    return [dict(event.data) for event in events if event.type == kind]


async def ask(session: Session, text: str = "go") -> Any:
    return await (await session.main.submit(text)).result(20)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def texts(request: Any) -> list[str]:
    """All texts of a request, results included."""
    found: list[str] = []
    for message in request.messages:
        for block in message["content"]:
            found += [inner["text"] for inner in block.get("content", [block]) if inner.get("type") == "text"]
    return found


async def test_an_agent_that_moves_its_directory_away_is_still_guarded(tmp_path: Path) -> None:
    async with world(tmp_path, hook("PreToolUse", "echo no >&2; exit 2", matcher="Write")) as here:
        session = await here.session()
        here.stage.faults["go"] = [
            Step.call("Bash", {"command": 'mv "$PWD" "$PWD.gone"'}),
            Step.call("Write", {"path": "made", "content": "x"}),
        ]
        await ask(session)
        [result] = of_type(await events_of(session), "hook/result")
        assert result["blocked"] and not (tmp_path / "work").exists()


# -- prompts --------------------------------------------------------------------------------------------------------


async def test_what_a_hook_says_goes_before_the_prompt(tmp_path: Path) -> None:
    hooks = [
        hook("UserPromptSubmit", "echo one"),
        hook("UserPromptSubmit", "echo one"),
        hook("UserPromptSubmit", 'echo \'{"message": "two"}\''),
        hook("UserPromptSubmit", "echo never", matcher="^other$"),
        hook("UserPromptSubmit", "echo three", matcher="g."),
    ]
    async with world(tmp_path, *hooks) as here:
        session = await here.session()
        assert (await ask(session)).state == "completed"
        first, second = here.stage.requests[0].messages
        assert [block["text"] for block in first["content"]] == [
            f'<hook_result hook_event="UserPromptSubmit">\n{text}\n</hook_result>' for text in ("one", "two", "three")
        ]
        assert first["role"] == "user" and first["source"] == {"kind": "hook_result"}
        assert second["content"][0]["text"] == "go"
        events = await events_of(session)
        assert len(of_type(events, "hook/invoked")) == 3  # the same command in the same directory runs once
        for event in events:
            entry = CORE.get(event.type)
            assert entry is not None
            entry.payload.model_validate(dict(event.data))


async def test_a_blocked_prompt_runs_no_turn_and_says_why(tmp_path: Path) -> None:
    hooks = [
        hook("UserPromptSubmit", "echo 'not today' >&2; exit 2", matcher="secret"),
        hook("UserPromptSubmit", "echo x"),
    ]
    async with world(tmp_path, *hooks) as here:
        session = await here.session()
        result = await ask(session, "the secret")
        assert result.state == "blocked" and "not today" in result.error["message"]
        assert here.stage.requests == []
        events = await events_of(session)
        assert not of_type(events, "turn/start")
        assert "not today" in json.dumps(of_type(events, "user/message"))
        assert (await ask(session, "fine")).state == "completed"


async def test_steered_prompts_pass_the_hooks_too(tmp_path: Path) -> None:
    hooks = [*hear(tmp_path, "UserPromptSubmit"), hook("UserPromptSubmit", "echo no >&2; exit 2", matcher="bad")]
    async with world(tmp_path, *hooks) as here:
        session = await here.session()
        here.stage.gate.clear()
        first = await session.main.submit("go")
        await here.stage.until_running(1)
        good = await session.main.submit("good", steer_if_active=True)
        bad = await session.main.submit("bad", steer_if_active=True)
        here.stage.gate.set()
        assert [(await one.result(20)).state for one in (first, good, bad)] == ["completed", "completed", "blocked"]
        assert [(told["prompt"], told["is_steer"]) for told in here.told("UserPromptSubmit")] == [
            ("go", False),
            ("good", True),
            ("bad", True),
        ]


async def test_what_a_hook_is_told(tmp_path: Path) -> None:
    async with world(tmp_path, *hear(tmp_path, "UserPromptSubmit", "TurnStarted", "UserPromptQueued")) as here:
        session = await here.session()
        here.stage.gate.clear()
        long = "x" * 40_000  # kept as a blob in the log
        first = await session.main.submit(long)
        await here.stage.until_running(1)
        second = await session.main.submit("next")
        [queued] = await here.until_told("UserPromptQueued")
        assert (queued["prompt"], queued["queue_length"], queued["prompt_id"]) == ("next", 1, second.id)
        here.stage.gate.set()
        await first.result(20)
        await second.result(20)
        told = here.told("UserPromptSubmit")[0]
        assert {key: told[key] for key in ("session_id", "agent_id", "cwd", "prompt", "is_steer")} == {
            "session_id": session.id,
            "agent_id": "main",
            "cwd": str(tmp_path / "work"),
            "prompt": long,
            "is_steer": False,
        }
        turns = await here.until_told("TurnStarted", 2)
        assert [(one["turn_id"], one["origin_kind"]) for one in turns] == [(0, "user"), (1, "user")]


# -- tools ----------------------------------------------------------------------------------------------------------


async def test_a_blocked_call_is_an_error_for_the_model(tmp_path: Path) -> None:
    hooks = [
        hook("PreToolUse", "grep -q 'rm ' && { echo 'no rm here' >&2; exit 2; } || exit 0", matcher="^Bash$"),
        *hear(tmp_path, "PreToolUse", "PostToolUse", "PostToolUseFailure"),
    ]
    async with world(tmp_path, *hooks) as here:
        (tmp_path / "work" / "kept").touch()
        here.stage.faults["go"] = [
            Step(
                tool_calls=(
                    ToolCall("Bash", '{"command": "rm kept"}', "call_a"),
                    ToolCall("Bash", '{"command": "echo hi"}', "call_b"),
                    ToolCall("Read", '{"path": "missing"}', "call_c"),
                )
            )
        ]
        session = await here.session()
        assert (await ask(session)).state == "completed"
        assert (tmp_path / "work" / "kept").exists()
        assert "no rm here" in texts(here.stage.requests[1])
        results = of_type(await events_of(session), "tool/result")
        assert [result.get("error", {}).get("code") for result in results] == [
            "tool.denied",
            None,
            "environment.not_found",
        ]
        [done] = await here.until_told("PostToolUse")
        assert (done["tool_name"], done["tool_input"], done["tool_call_id"]) == ("Bash", done["tool_input"], "call_b")
        assert done["tool_input"]["command"] == "echo hi" and done["tool_output"].strip() == "hi"
        [failure] = await here.until_told("PostToolUseFailure")
        assert (failure["tool_call_id"], failure["error"]["code"]) == ("call_c", "environment.not_found")
        assert {one["tool_call_id"] for one in here.told("PreToolUse")} == {"call_a", "call_b", "call_c"}


async def test_a_json_answer_denies_and_long_outputs_are_told_in_part(tmp_path: Path) -> None:
    deny = json.dumps({"hookSpecificOutput": {"permissionDecision": "deny", "permissionDecisionReason": "by json"}})
    hooks = [hook("PreToolUse", f"echo '{deny}'", matcher="Write"), *hear(tmp_path, "PostToolUse")]
    async with world(tmp_path, *hooks) as here:
        here.stage.faults["go"] = [
            Step.call("Write", {"path": "a", "content": "x"}),
            Step.call("Bash", {"command": "head -c 9000 /dev/zero | tr '\\0' y"}),
        ]
        session = await here.session()
        await ask(session)
        assert "by json" in texts(here.stage.requests[1])
        [told] = await here.until_told("PostToolUse")
        assert told["tool_output"] == "y" * 2000


@pytest.mark.parametrize(
    ("command", "about"),
    [
        ("exit 1", "exit code 1"),
        ("sleep 60", "took too long"),
        ("trap '' TERM; while :; do sleep 1; done", "took too long"),
        ("no-such-program", "exit code 127"),
        ("kill -9 $$", "exit code 137"),
    ],
)
async def test_a_hook_that_fails_lets_the_call_go_on_with_a_record(tmp_path: Path, command: str, about: str) -> None:
    async with world(tmp_path, hook("PreToolUse", command, timeout_s=0.3)) as here:
        here.stage.faults["go"] = [Step.call("Bash", {"command": "echo ran > mark"})]
        session = await here.session()
        assert (await ask(session)).state == "completed"
        assert (tmp_path / "work" / "mark").exists()
        [result] = of_type(await events_of(session), "hook/result")
        assert not result["blocked"] and about in result["error"]
        assert result.get("timed_out", False) is ("too long" in about)


async def test_a_matcher_that_is_no_regular_expression_is_told_once(tmp_path: Path) -> None:
    hooks = [hook("PreToolUse", "exit 2", matcher="(("), hook("PreToolUse", "true", matcher="Bash")]
    async with world(tmp_path, *hooks) as here:
        here.stage.faults["go"] = [Step.call("Bash", {"command": "true"}), Step.call("Bash", {"command": "true"})]
        session = await here.session()
        assert (await ask(session)).state == "completed"
        results = of_type(await events_of(session), "hook/result")
        assert ["no regular expression" in result.get("error", "") for result in results] == [True, False, False]


async def test_matching_hooks_run_side_by_side(tmp_path: Path) -> None:
    meet = "touch {0}; until [ -e {1} ]; do sleep 0.01; done"
    one, two = tmp_path / "one", tmp_path / "two"
    hooks = [
        hook("PreToolUse", meet.format(one, two), timeout_s=10),
        hook("PreToolUse", meet.format(two, one), timeout_s=10),
    ]
    async with world(tmp_path, *hooks) as here:
        here.stage.faults["go"] = [Step.call("Bash", {"command": "true"})]
        session = await here.session()
        await ask(session)
        assert [result["exit_code"] for result in of_type(await events_of(session), "hook/result")] == [0, 0]


async def test_a_cancel_ends_a_hook_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, hook("PreToolUse", f"touch {tmp_path / 'begun'}; sleep 60")) as here:
        here.stage.faults["go"] = [Step.call("Bash", {"command": "touch ran"})]
        session = await here.session()
        prompt = await session.main.submit("go")
        await until((tmp_path / "begun").exists)
        began = time.monotonic()
        assert await prompt.cancel()
        assert (await prompt.result(10)).state == "cancelled"
        assert time.monotonic() - began < 3
        assert not (tmp_path / "work" / "ran").exists()
        [result] = of_type(await events_of(session), "hook/result")
        assert "was killed" in result["error"]


@pytest.mark.parametrize("ends", ["cancel", "close"])
async def test_a_prompt_that_ends_at_its_hook_runs_no_turn(tmp_path: Path, ends: str) -> None:
    async with world(tmp_path, hook("UserPromptSubmit", f"touch {tmp_path / 'begun'}; sleep 60")) as here:
        session = await here.session()
        prompt = await session.main.submit("go")
        await until((tmp_path / "begun").exists)
        began = time.monotonic()
        if ends == "cancel":
            assert await prompt.cancel()
            assert (await prompt.result(10)).state == "cancelled"
        else:
            await session.close()
            session = await here.workspace.resume(session.id)
        assert time.monotonic() - began < 5
        events = await events_of(session)
        assert not of_type(events, "turn/start") and here.stage.requests == []
        assert [one["state"] for one in of_type(events, "prompt/completed")] == ["cancelled"]
        assert "was killed" in of_type(events, "hook/result")[0]["error"]


# -- turns ----------------------------------------------------------------------------------------------------------


async def test_stop_goes_on_once_a_turn(tmp_path: Path) -> None:
    hooks = [hook("Stop", f"echo x >> {tmp_path / 'asked'}; echo 'run the tests' >&2; exit 2")]
    async with world(tmp_path, *hooks) as here:
        session = await here.session()
        for turn in (1, 2):
            assert (await ask(session)).state == "completed"
            assert (tmp_path / "asked").read_text() == "x\n" * turn
        assert len(here.stage.requests) == 4
        said = here.stage.requests[1].messages[-1]
        assert said["content"][0]["text"] == "run the tests" and said["source"] == {"kind": "stop_hook"}
        assert len(of_type(await events_of(session), "turn/start")) == 2


async def test_a_failed_turn_is_told_and_only_a_users_cancel_is_an_interrupt(tmp_path: Path) -> None:
    async with world(tmp_path, *hear(tmp_path, "StopFailure", "Interrupt", "Stop")) as here:
        session = await here.session()
        here.stage.faults["broken"] = [Step.error("provider.auth", 401)]
        assert (await ask(session, "broken")).state == "failed"
        [failure] = await here.until_told("StopFailure")
        assert failure["error_type"] == "provider.auth" and failure["error_message"]
        here.stage.gate.clear()
        prompt = await session.main.submit("go")
        await here.stage.until_running(1)
        await prompt.cancel()
        [interrupt] = await here.until_told("Interrupt")
        assert (interrupt["turn_id"], interrupt["reason"]) == (1, "cancelled")
        await session.main.submit("again")
        await here.stage.until_running(1)
        await session.close()
        assert len(here.told("Interrupt")) == 1 and here.told("Stop") == []


# -- sessions -------------------------------------------------------------------------------------------------------


async def test_a_session_starts_ends_and_resumes_and_a_fork_does_none_of_it(tmp_path: Path) -> None:
    hooks = [
        *hear(tmp_path, "SessionStart", "SessionEnd"),
        hook("SessionStart", "sleep 0.2; touch ready", matcher="startup"),
    ]
    async with world(tmp_path, *hooks) as here:
        session = await here.session()
        here.stage.faults["go"] = [Step.call("Read", {"path": "ready"})]
        await ask(session)
        assert "environment.not_found" not in json.dumps(of_type(await events_of(session), "tool/result"), default=str)
        [started] = here.told("SessionStart")
        assert (started["source"], started["profile"], started["model"]) == ("startup", "worker", here.model)
        await session.close()
        assert [one["reason"] for one in here.told("SessionEnd")] == ["exit"]
        again = await here.workspace.resume(session.id)
        assert [one["source"] for one in await here.until_told("SessionStart", 2)] == ["startup", "resume"]
        fork = await here.workspace.fork(session.id)
        await ask(fork)
        assert len(here.told("SessionStart")) == 2
        await fork.close()
        await again.close()


async def test_the_end_of_a_session_waits_for_hooks_but_not_for_ever(tmp_path: Path) -> None:
    hooks = [
        hook("SessionEnd", f"sleep 0.3; touch {tmp_path / 'ended'}"),
        hook("TurnStarted", "sleep 600", timeout_s=600),
    ]
    async with world(tmp_path, *hooks, close_timeout_s=3.0) as here:
        session = await here.session()
        await ask(session)
        began = time.monotonic()
        await session.close()
        assert time.monotonic() - began < 4
        assert (tmp_path / "ended").exists()
        results = [event async for event in (await here.workspace.resume(session.id)).main.events()]
        assert any("was killed" in one.get("error", "") for one in of_type(results, "hook/result"))


async def test_the_heartbeat_beats_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionHooks.__init__, "__defaults__", (0.05,))
    async with world(tmp_path, *hear(tmp_path, "SessionHeartbeat")) as here:
        session = await here.session()
        beats = await here.until_told("SessionHeartbeat", 2)
        assert beats[1]["uptime_ms"] > beats[0]["uptime_ms"] >= 0
        await session.close()
        count = len(here.told("SessionHeartbeat"))
        await asyncio.sleep(0.15)  # three beats, if there were any
        assert len(here.told("SessionHeartbeat")) == count
    async with world(tmp_path, *hear(tmp_path, "SessionEnd")) as here:
        await here.session()
        assert not any(task.get_name() == "hook heartbeat" for task in asyncio.all_tasks())


async def test_tasks_and_their_ends_are_told(tmp_path: Path) -> None:
    async with world(tmp_path, *hear(tmp_path, "TaskStarted", "Notification")) as here:
        here.stage.faults["go"] = [
            Step.call("Bash", {"command": "true", "run_in_background": True, "description": "a test"})
        ]
        session = await here.session()
        await ask(session)
        [started] = await here.until_told("TaskStarted")
        assert (started["kind"], started["status"], started["description"]) == ("process", "running", "a test")
        assert started["detached"] is True and isinstance(started["started_at"], int)
        [ended] = await here.until_told("Notification")
        assert (ended["notification_type"], ended["task_id"]) == ("task.completed", started["task_id"])
        await session.close()


async def test_subagents_are_told_and_their_own_hooks_run_in_their_logs(tmp_path: Path) -> None:
    lead = Profile(name="lead", tools=("Agent",), subagents=("coder",))
    hooks = [*hear(tmp_path, "SubagentStart", "SubagentStop", "SessionStart"), hook("UserPromptSubmit", "true")]
    async with world(tmp_path, *hooks) as here:
        answer = "a long answer. " * 30
        here.stage.faults["go"] = [
            Step.call("Agent", {"prompt": "look around", "description": "look", "subagent_type": "coder"})
        ]
        here.stage.faults["look around"] = [Step(text=answer)]
        session = await here.session(profile=lead)
        await ask(session)
        [started] = here.told("SubagentStart")
        assert (started["agent_id"], started["agent_name"], started["prompt"]) == ("main", "coder", "look around")
        [stopped] = await here.until_told("SubagentStop")
        assert stopped["response"].strip() == answer.strip()
        assert len(here.told("SessionStart")) == 1
        child = await events_of(session, started["child_agent_id"])
        assert [one["event"] for one in of_type(child, "hook/invoked")] == ["UserPromptSubmit"]


# -- questions, and many --------------------------------------------------------------------------------------------


async def test_questions_and_their_answers_are_told(tmp_path: Path) -> None:
    hooks = hear(tmp_path, "PermissionRequest", "PermissionResult")
    async with world(tmp_path, *hooks, permission_mode="manual", permission_wait_s=30) as here:
        here.stage.faults["go"] = [Step.call("Bash", {"command": "echo hi"})]
        session = await here.session()
        prompt = await session.main.submit("go")
        [asked] = await here.until_told("PermissionRequest")
        assert (asked["tool_name"], asked["about"]) == ("Bash", "echo hi")
        await session.main.decide(asked["tool_call_id"], "allow")
        assert (await prompt.result(10)).state == "completed"
        [answered] = await here.until_told("PermissionResult")
        assert (answered["tool_name"], answered["decision"], answered["by"]) == ("Bash", "allow", "user")


async def test_a_hook_comes_before_the_question(tmp_path: Path) -> None:
    hooks = [hook("PreToolUse", "echo no >&2; exit 2")]
    async with world(tmp_path, *hooks, permission_mode="manual", permission_wait_s=30) as here:
        here.stage.faults["go"] = [Step.call("Bash", {"command": "echo hi"})]
        session = await here.session()
        assert (await ask(session)).state == "completed"
        assert not of_type(await events_of(session), "permission/asked")


async def test_a_lost_host_takes_its_hooks_with_it_and_nothing_hangs(tmp_path: Path) -> None:
    async with world(
        tmp_path, hook("UserPromptSubmit", "[ -e second ] || { touch begun; sleep 60; }", timeout_s=90)
    ) as here:
        session = await here.session()
        prompt = await session.main.submit("go", on_interrupt="continue")
        await until((tmp_path / "work" / "begun").exists)
        (tmp_path / "work" / "second").touch()
        for host in await hosts_of(here.runtime, "agents"):
            cluster_of(here.runtime).kill_host(host)
        assert (await prompt.result(20)).state == "completed"


async def test_many_calls_with_hooks(tmp_path: Path) -> None:
    """500 calls of ten agents, a hook for each tenth: no call and no record is lost."""
    hooks = [hook("PreToolUse", "exit 0", matcher="Bash"), hook("PostToolUse", "exit 0", matcher="Never")]
    async with world(tmp_path, *hooks) as here:
        calls = tuple(
            ToolCall("Bash", json.dumps({"command": f": {n}"}), f"c{n}")
            if n % 10 == 0
            else ToolCall("Read", '{"path": "a"}', f"c{n}")
            for n in range(50)
        )
        (tmp_path / "work" / "a").write_text("a\n")
        sessions = [await here.session() for _ in range(10)]
        here.stage.faults["go"] = [Step(tool_calls=calls) for _ in sessions]
        results = await asyncio.gather(*(ask(session) for session in sessions))
        assert [result.state for result in results] == ["completed"] * 10
        for session in sessions:
            events = await events_of(session)
            assert len(of_type(events, "tool/result")) == 50
            assert [one["exit_code"] for one in of_type(events, "hook/result")] == [0] * 5
