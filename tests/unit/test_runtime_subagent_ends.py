"""Subagents whose end comes from outside: cancelled, closed, timed out, lost with a host."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kimi_ray import AgentError
from kimi_ray.hosts.subagent_words import BeginSubagent, SpawnSubagent
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from tests.trees import check_positions, check_prompts, stored_logs
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running
from tests.unit.subagent_stage import (
    ASKS,
    LONG,
    Port,
    ask,
    begin,
    holders,
    results,
    told,
    until,
    until_asked,
    until_told,
)


async def test_a_run_that_takes_too_long_is_cancelled_and_can_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        result = await session.run_subagent("slow", timeout_s=0.3)
        assert result.status == "timed_out" and result.error is not None
        assert result.error["code"] == "agent.timed_out"
        assert "(timeout_s of the call" in result.error["hint"]
        stage.gate.set()
        assert (await session.run_subagent("now", resume=result.agent_id)).status == "completed"
        words = [kind for kind, _ in await told(session)]
        assert words == [f"subagent/{word}" for word in ("spawned", "started", "failed", "started", "completed")]


async def test_the_end_of_the_callers_turn_is_the_end_of_the_childs(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await until_asked(session, stage)
        await handle.cancel()
        assert (await handle.result()).state == "cancelled"
        ended = await until_told(session, "completed")
        assert ended["status"] == "cancelled"
        assert stage.running == 0
        assert (await session.agent("agent-1").messages())[-1]["role"] == "user"


async def test_cancelling_the_wait_of_a_program_cancels_the_child(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        task = asyncio.create_task(session.run_subagent("look"))
        await stage.until_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await until_told(session, "completed"))["status"] == "cancelled"
        stage.gate.set()
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


async def test_a_close_in_the_middle_tells_where_the_child_stood(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await until_asked(session, stage)
        await session.close()
        assert (await handle.result()).state == "cancelled"
        stage.gate.set()
        session = await runtime.workspace(str(tmp_path / "work")).resume(session.id)
        last = (await told(session))[-1]
        assert last[0] in ("subagent/completed", "subagent/suspended") and last[1]["seq"] > 0
        assert stage.seen["go"] == 1, "the caller made no further request"
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


async def test_a_lost_host_of_the_child_is_only_an_interruption(tmp_path: Path) -> None:
    async with running(tmp_path, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_subagent("look")
        await stage.until_running(1)
        main_host = session._link.main_host
        (childs,) = [name for name in await holders(runtime, session.id, "agent-1") if name != main_host]
        cluster_of(runtime).kill_host(childs)
        await stage.until_running(1)
        stage.gate.set()
        result = await handle.result()
        assert (result.status, result.text) == ("completed", "did look")
        assert stage.seen["look"] == 2


async def test_a_lost_host_of_the_session_does_not_end_the_wait(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["look"] = [Step(text=LONG)]
        handle = await until_asked(session, stage)
        (host,) = await hosts_of(runtime, "sessions")
        cluster_of(runtime).kill_host(host)
        stage.gate.set()
        result = await handle.result()  # its driver asks main's host and never hears of the session's
        assert result.state == "completed"
        assert "status: completed" in (await results(session))[0]
        words = [kind for kind, _ in await told(session)]
        assert words.count("subagent/spawned") == 1 and words[-1] == "subagent/completed"


async def test_a_lost_host_of_the_caller_ends_its_children(tmp_path: Path) -> None:
    async with running(tmp_path, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await until_asked(session, stage)
        assert session._link.main_host is not None
        cluster_of(runtime).kill_host(session._link.main_host)
        assert (await handle.result()).state == "failed"
        ended = await until_told(session, "completed")
        assert ended["status"] == "cancelled" and ended["seq"] > 0
        stage.gate.set()
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


async def test_cancel_and_signal_end_a_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        subagents, _ = await Port.of(runtime, session)
        first, second = [await subagents.spawn(subagents.plan()) for _ in range(2)]
        stage.gate.clear()
        signal = asyncio.Event()
        runs = [
            asyncio.create_task(subagents.run(first, "a")),
            asyncio.create_task(subagents.run(second, "b", signal=signal)),
        ]
        await stage.until_running(2)
        with pytest.raises(AgentError) as refused:
            await subagents.run(first, "c")
        assert refused.value.code == "agent.already_running"
        await subagents.cancel(first)
        signal.set()
        assert [result.status for result in await asyncio.gather(*runs)] == ["cancelled", "cancelled"]
        await subagents.cancel(first)  # nothing to do


@pytest.mark.parametrize("by_agent", [False, True])
async def test_whoever_is_gone_leaves_no_child_at_work_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_agent: bool
) -> None:
    monkeypatch.setattr("kimi_ray.hosts.subagent_watch._QUIET_MS", 100)
    monkeypatch.setattr("kimi_ray.hosts.subagent_watch._LOOK_S", 0.05)
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        await session.run_subagent("look")
        gone = BeginSubagent("main", "agent-1", "msg_of_a_program_that_is_gone", by_agent=by_agent)
        await session._link.call("begin_subagent", session.id, gone)
        await (await session.agent("agent-1").submit("its task", prompt_id=gone.run_id)).result()
        ended = await until_told(session, "completed", 2)
        assert ended["status"] == "completed"
        assert (await session.run_subagent("more", resume="agent-1")).text == "did more"
        assert stage.seen["its task"] == 1


async def test_a_closed_session_is_not_brought_back_by_its_agents(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        holds = asyncio.Event()

        async def answer(request: ChatRequest) -> Step:
            step = await stage.answer(request)
            if stage.prompt(request) == "look":
                await holds.wait()
            return step

        sys.modules["kimi_ray_test_models"].answer = answer  # type: ignore[attr-defined]
        session = await begin(runtime, tmp_path, model, profile="agent")
        stage.faults["go"] = [ask("look", run_in_background=True)]
        await (await session.main.submit("go")).result()
        await until(lambda: stage.seen["look"])
        await session.close()
        assert stage.seen["look"] == 1
        (host,) = await hosts_of(runtime, "sessions")
        for _ in range(20):
            await asyncio.sleep(0.02)
            ping = await cluster_of(runtime).peer(host).call("ping", timeout_s=5.0, group="control")
            assert ping["sessions"] == []


@pytest.mark.parametrize("kinds", [("agents",), ("sessions",), ("sessions", "agents")], ids="+".join)
async def test_whatever_is_lost_the_logs_agree(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    async with running(tmp_path, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        await session.run_subagent("before", profile=ASKS)
        handle = await until_asked(session, stage)
        for kind in kinds:
            for host in await hosts_of(runtime, kind):
                cluster_of(runtime).kill_host(host)
        stage.gate.set()
        result = await handle.result()
        assert result.state == ("completed" if kinds == ("sessions",) else "failed")
        again = await session.run_subagent("after", resume="agent-2")
        assert again.status == "completed"
        assert (await session.run_subagent("beside", resume="agent-1")).status == "completed"
        await session.close()
    logs = await stored_logs(tmp_path / "home", session.id)
    check_prompts(logs)
    check_positions(logs)
    assert set(logs) == {"main", "agent-1", "agent-2"}


@pytest.mark.parametrize("fork", [False, True])
async def test_a_call_whose_answer_was_lost_makes_no_second_child(tmp_path: Path, fork: bool) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        profile = runtime.features.profile("coder")
        spec = SpawnSubagent("main", "nonce1", profile, None, fork=fork)
        spawn = partial(session._link.call, "spawn_subagent", session.id)
        first = await asyncio.gather(*(spawn(spec) for _ in range(3)))
        assert {child.agent_id for child in first} == {"agent-1"}
        (host,) = await hosts_of(runtime, "sessions")
        cluster_of(runtime).kill_host(host)
        assert (await spawn(spec)).agent_id == "agent-1"
        assert (await spawn(replace(spec, nonce="nonce2"))).agent_id == "agent-2"
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"
