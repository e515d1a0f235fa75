"""Permissions in a whole runtime: nobody there, somebody there, resumes, forks, children."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.revival import LOST
from kimi_ray.errors import ConfigError, ToolError
from kimi_ray.events import CORE, SessionEvent
from kimi_ray.features.permissions import Approval
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile, Workdir
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

WORKER = Profile(name="worker", tools=("Read", "Write", "Bash"))
MAKE = Step.call("Bash", {"command": "echo made >> made"})


async def events_of(session: Session, agent_id: str = "main") -> list[SessionEvent]:
    return [event async for event in session.agent(agent_id).events()]


async def decisions(session: Session, agent_id: str = "main") -> list[tuple[str, str]]:
    events = await events_of(session, agent_id)
    return [(event.data["decision"], event.data["by"]) for event in events if event.type == "permission/decided"]


async def modes(session: Session, agent_id: str = "main") -> list[str]:
    return [event.data["mode"] for event in await events_of(session, agent_id) if event.type == "permission/mode"]


async def ask(session: Session, text: str = "go") -> Any:
    return await (await session.main.submit(text)).result(20)


async def question(session: Session) -> Approval:
    async with asyncio.timeout(10):
        while not (found := await session.approvals()):
            await asyncio.sleep(0.01)
    return found[0]


def results_of(request: Any) -> str:
    return json.dumps(
        [
            message
            for message in request.messages
            if message["role"] == "tool" or "tool" in json.dumps(message["source"])
        ]
    )


async def test_a_headless_run_never_hangs_on_a_question(tmp_path: Path) -> None:
    async with running(tmp_path, permission_mode="manual") as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        stage.faults["go"] = [MAKE, Step.call("Read", {"path": "made"})]
        began = time.monotonic()
        assert (await ask(session)).state == "completed"
        assert time.monotonic() - began < 5
        assert not (tmp_path / "work" / "made").exists()
        assert "nobody answered" in results_of(stage.requests[1])
        assert await decisions(session) == [("deny", "nobody"), ("allow", "default")]
        assert await session.approvals() == []


async def test_a_rule_that_denies_holds_in_every_mode_and_the_default_is_auto(tmp_path: Path) -> None:
    rules = [{"tool": "Bash(rm *)", "decision": "deny"}]
    async with running(tmp_path, permissions=rules) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        (tmp_path / "work" / "kept").touch()
        for mode in (None, "yolo", "auto"):
            session = await workspace.create_session(model=model, profile=WORKER, permission_mode=mode)
            stage.faults["go"] = [Step.call("Bash", {"command": "true && /bin/rm kept"}), MAKE]
            assert (await ask(session)).state == "completed"
            assert await decisions(session) == [("deny", "rule")]
            assert await modes(session) == ([] if mode is None else [mode])
        assert (tmp_path / "work" / "kept").exists()
        assert (tmp_path / "work" / "made").read_text() == "made\n" * 3


async def test_somebody_answers(tmp_path: Path) -> None:
    async with running(tmp_path, permission_wait_s=30) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile=WORKER, permission_mode="manual"
        )
        stage.faults["go"] = [MAKE, Step.call("Bash", {"command": "echo other"})]
        prompt = await session.main.submit("go")
        first = await question(session)
        assert (first.agent_id, first.tool, first.about, first.by) == ("main", "Bash", "echo made >> made", "mode")
        with pytest.raises(ToolError) as caught:
            await session.main.decide("call_other", "allow")
        assert caught.value.code == "tool.not_asked"
        with pytest.raises(ConfigError):
            await session.main.decide(first.call_id, "yes")  # type: ignore[arg-type]
        await session.main.decide(first.call_id, "allow")
        second = await question(session)
        await session.main.decide(second.call_id, "deny", feedback="say it instead")
        assert (await prompt.result(10)).state == "completed"
        assert (tmp_path / "work" / "made").exists()
        assert "say it instead" in results_of(stage.requests[2])
        assert await decisions(session) == [("allow", "user"), ("deny", "user")]
        for event in await events_of(session):
            entry = CORE.get(event.type)
            assert entry is not None
            entry.payload.model_validate(dict(event.data))


async def test_what_is_no_answer_is_refused_and_the_call_still_waits(tmp_path: Path) -> None:
    async with running(tmp_path, permission_wait_s=30) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile=WORKER, permission_mode="manual"
        )
        stage.faults["go"] = [MAKE]
        prompt = await session.main.submit("go")
        asked = await question(session)
        main: Any = session.main
        for answer in (
            lambda: main.decide(["x"], "deny"),
            lambda: main.decide(asked, "deny"),
            lambda: main.decide("\ud800", "deny"),
            lambda: main.decide(asked.call_id, "deny", feedback=5),
            lambda: main.decide(asked.call_id, "deny", feedback="\ud800"),
            lambda: main.decide(asked.call_id, {}, scope="session"),
            lambda: main.set_permission_mode(None),
            lambda: main.set_permission_mode("\ud800"),
        ):
            with pytest.raises(ConfigError) as caught:
                await answer()
            assert caught.value.code == "request.invalid" and str(caught.value).isascii()
        assert await session.approvals() == [asked]
        await main.decide(asked.call_id, "deny", feedback="no\0 \u0301")
        assert (await prompt.result(10)).state == "completed"
        assert await modes(session) == ["manual"]


async def test_what_was_approved_and_the_mode_outlive_a_resume_and_a_fork(tmp_path: Path) -> None:
    async with running(tmp_path, permission_wait_s=30) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile=WORKER, permission_mode="yolo")
        await session.main.set_permission_mode("manual")
        stage.faults["go"] = [MAKE]
        prompt = await session.main.submit("go")
        await session.main.decide((await question(session)).call_id, "allow", scope="session")
        assert (await prompt.result(10)).state == "completed"
        await session.close()
        fork = await workspace.fork(session.id)
        for same in (await workspace.resume(session.id), fork):
            stage.faults["go"] = [MAKE]
            assert (await ask(same)).state == "completed"
            assert (await decisions(same))[-2:] == [("allow", "user"), ("allow", "session")]
            assert await modes(same) == ["yolo", "manual"]
            stage.faults["go"] = [Step.call("Bash", {"command": "echo another"})]
            waiting = await same.main.submit("go")
            assert (await question(same)).about == "echo another"
            await same.main.set_permission_mode("auto")
            assert (await waiting.result(10)).state == "completed"
        assert (tmp_path / "work" / "made").read_text() == "made\n" * 3


async def test_a_question_ends_with_its_turn(tmp_path: Path) -> None:
    async with running(tmp_path, permission_mode="manual", permission_wait_s=600) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile=WORKER)
        stage.faults["go"] = [MAKE, MAKE]
        prompt = await session.main.submit("go")
        await question(session)
        began = time.monotonic()
        await prompt.cancel()
        assert (await prompt.result(10)).state == "cancelled"
        assert await session.approvals() == []
        assert await decisions(session) == [("cancelled", "turn")]
        again = await session.main.submit("go")
        await question(session)
        await session.close()
        assert (await again.result(10)).state in ("cancelled", "failed")
        assert time.monotonic() - began < 10
        assert not (tmp_path / "work" / "made").exists()


async def test_every_call_of_an_answer_is_decided_by_itself(tmp_path: Path) -> None:
    rules = [{"tool": "Bash(echo *)", "decision": "allow"}]
    async with running(tmp_path, permission_mode="manual", permissions=rules) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        lines = ["echo a", "echo b; touch c", "echo $(touch d)", "echo e > f", "echo g"]
        stage.faults["go"] = [Step(tool_calls=tuple(ToolCall("Bash", json.dumps({"command": line})) for line in lines))]
        assert (await ask(session)).state == "completed"
        assert [decision for decision, _ in await decisions(session)] == ["allow", "deny", "deny", "deny", "allow"]
        assert list((tmp_path / "work").iterdir()) == []


async def test_children_begin_with_the_mode_of_their_caller(tmp_path: Path) -> None:
    lead = Profile(name="lead", tools=("Agent",), subagents=("coder",))
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile=lead, permission_mode="yolo"
        )
        await session.main.set_permission_mode("manual")
        stage.faults["go"] = [
            Step.call("Agent", {"prompt": "make it", "description": "make", "subagent_type": "coder"})
        ]
        stage.faults["make it"] = [MAKE, Step(text="a long answer. " * 30)]
        assert (await ask(session)).state == "completed"
        [child] = [row["agent_id"] for row in await session.agents() if row["type"] == "sub"]
        assert await modes(session, child) == ["manual"]
        assert await decisions(session, child) == [("deny", "nobody")]
        told = next(results_of(request) for request in stage.requests if "nobody answered" in results_of(request))
        assert "You are a subagent" in told
        assert not (tmp_path / "work" / "made").exists()


async def test_the_agents_of_a_swarm_begin_with_the_mode_of_their_parent(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        for mode, made in (("manual", 0), (None, 2)):
            session = await runtime.workspace(tmp_path / "work").create_session(model=model, permission_mode=mode)
            stage.faults |= {f"do {n}": [MAKE] for n in range(2)}
            report = await session.swarm(
                "do {{item}}",
                ["0", "1"],
                profile=WORKER,
                tools=["Bash"],
                workdir=Workdir.shared(str(tmp_path / "work"), writes=True),
            )
            assert [row.status for row in report.rows] == ["completed"] * 2
            found = tmp_path / "work" / "made"
            assert (found.read_text().count("made") if found.exists() else 0) == made


async def test_what_is_no_mode_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        with pytest.raises(ConfigError) as caught:
            await workspace.create_session(model=model, permission_mode="careful")  # type: ignore[arg-type]
        assert caught.value.code == "request.invalid" and "manual" in (caught.value.hint or "")
        session = await workspace.create_session(model=model)
        with pytest.raises(ConfigError):
            await session.main.set_permission_mode("careful")  # type: ignore[arg-type]
        assert await modes(session) == []


async def test_what_a_lost_host_left_open_is_closed_when_its_agent_comes_back(tmp_path: Path) -> None:
    hooks = [
        {"event": "PermissionRequest", "command": "sleep 300", "timeout_s": 300.0},
        {"event": "PreToolUse", "command": "true"},
    ]
    config = {"permission_mode": "manual", "permission_wait_s": 60.0, "hooks": hooks}
    async with running(tmp_path, **config) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(
            model=model, profile=WORKER, workdir=Workdir.shared(str(tmp_path / "work"))
        )
        stage.faults["go"] = [MAKE]
        handle = await session.main.submit("go")
        waiting = await question(session)
        async with asyncio.timeout(10):
            while [event.type for event in await events_of(session)].count("hook/invoked") < 2:
                await asyncio.sleep(0.01)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        assert (await handle.result(40)).state == "failed"
        assert await session.approvals() == []
        events = await events_of(session)
    assert [event.data for event in events if event.type == "permission/decided"] == [
        {"call_id": waiting.call_id, "decision": "cancelled", "by": "host"}
    ]
    invoked = [event.seq for event in events if event.type == "hook/invoked"]
    ends = [event.data for event in events if event.type == "hook/result"]
    assert [end["invoked"] for end in ends] == invoked
    assert [end.get("error") for end in ends] == [None, LOST]
    assert (tmp_path / "work" / "made").exists() is False
