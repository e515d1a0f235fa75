"""Subagents that a model starts, on Ray: the child's process, the session's and the caller's are killed under them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Profile, Runtime
from kimi_ray.config import RuntimeConfig
from kimi_ray.handles import PromptHandle
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, tool_call
from kimi_ray.session_handle import Session
from tests.actors.conftest import until
from tests.actors.fault_models import held, said
from tests.actors.faults import hosts_of

ASKS = "scripted:tests.actors.test_subagents:asks"
DELEGATES = "scripted:tests.actors.test_subagents:delegates"
CALLER = Profile(name="caller", tools=("Agent",), subagents=("bare",))
FULL = "a full account " * 20


async def asks(request: ChatRequest) -> Step:
    """The prompt ``ask FILE`` hands ``held FILE`` to a subagent; others are answered at length."""
    last = request.messages[-1]["content"][0]
    file = said(request).removeprefix("ask ")
    if last["type"] != "tool-result" and file != said(request):
        return Step.call("Agent", {"prompt": f"held {file}", "description": "a task", "subagent_type": "bare"})
    step = await held(request)
    return Step(text=f"{step.text} {FULL}")


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config, hosts_per_node=2, agents_per_host=1) as runtime:
        yield runtime


async def asked(runtime: Runtime, tmp_path: Path) -> tuple[Session, PromptHandle, Path]:
    """Main waits for a subagent, which waits for a file."""
    (tmp_path / "work").mkdir()
    session = await runtime.workspace(tmp_path / "work").create_session(model=ASKS, profile=CALLER)
    file = tmp_path / "go"
    handle = await session.main.submit(f"ask {file}")

    async def begun() -> bool:
        events = [event.type async for event in session.agent("agent-1").events()]
        return "request/header" in events

    await until(lambda: in_log(session, "subagent/started"))
    await until(begun)
    return session, handle, file


async def in_log(session: Session, kind: str) -> list[dict[str, Any]]:
    return [dict(event.data) async for event in session.main.events() if event.type == kind]


async def process_of(runtime: Runtime, session: Session, agent_id: str) -> int:
    """The process in which an agent lives."""
    for host in await hosts_of(runtime, "agents"):
        ping = await runtime.connection.cluster.peer(host["name"]).call("ping", timeout_s=10.0, group="control")
        if (session.id, agent_id) in [tuple(stream) for stream in ping["streams"]]:
            return int(ping["pid"])
    raise AssertionError(f"{agent_id} lives nowhere")


async def test_a_child_whose_process_dies_answers_all_the_same(runtime: Runtime, tmp_path: Path) -> None:
    session, handle, file = await asked(runtime, tmp_path)
    mains, childs = await process_of(runtime, session, "main"), await process_of(runtime, session, "agent-1")
    assert mains != childs
    os.kill(childs, signal.SIGKILL)
    (sessions,) = [host["pid"] for host in await hosts_of(runtime, "sessions") if session.id in host["sessions"]]
    os.kill(sessions, signal.SIGKILL)
    await asyncio.sleep(0.1)
    file.touch()
    result = await handle.result(timeout_s=90)
    assert result.state == "completed"
    results = await in_log(session, "tool/result")
    text = results[0]["message"]["content"][0]["content"][0]["text"]
    assert text.startswith("agent_id: agent-1\nactual_subagent_type: bare\nstatus: completed\n\n[summary]\ndid held")
    assert len(await in_log(session, "subagent/spawned")) == 1
    (completed,) = await in_log(session, "subagent/completed")
    events = [event async for event in session.agent("agent-1").events()]
    assert completed["status"] == "completed" and completed["seq"] == events[-1].seq + 1


async def test_a_caller_whose_process_dies_takes_its_child_with_it(runtime: Runtime, tmp_path: Path) -> None:
    session, handle, file = await asked(runtime, tmp_path)
    os.kill(await process_of(runtime, session, "main"), signal.SIGKILL)
    assert (await handle.result(timeout_s=90)).stop == "interrupted"

    async def ended() -> list[dict[str, Any]]:
        return await in_log(session, "subagent/completed")

    (told,) = await until(ended)
    assert told["status"] == "cancelled" and told["seq"] > 0
    file.touch()
    again = await session.run_subagent("and now", resume="agent-1")
    assert again.status == "completed" and again.text.startswith("did and now")


async def delegates(request: ChatRequest) -> Step:
    """The prompt ``by MODEL ...`` starts a subagent for each MODEL; ``-`` names none. Others are answered at length."""
    last = request.messages[-1]["content"][0]
    names = said(request).removeprefix("by ").split()
    if last["type"] == "tool-result" or not said(request).startswith("by "):
        return Step(text=f"did {said(request)} {FULL}")
    calls = [{"prompt": f"for {name}", "description": "a task", "subagent_type": "bare"} for name in names]
    named = [{**call, "model": name} if name != "-" else call for call, name in zip(calls, names, strict=True)]
    return Step(tool_calls=tuple(tool_call("Agent", call) for call in named))


async def test_subagents_speak_to_configured_models_also_when_hosts_were_lost(
    config: RuntimeConfig, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    table = {"provider": "scripted", "script": DELEGATES.removeprefix("scripted:")}
    far = {"base_url": "https://models.invalid/v1", "api_key_env": "KIMI_RAY_TEST_NO_SUCH_KEY"}
    own = config.model_copy(update={"models": {"one": table, "two": table, "far": far}, "default_model": "one"})
    async with Runtime.connect(config=own, hosts_per_node=1) as runtime:
        session = await runtime.workspace(tmp_path / "work").create_session(profile=CALLER)
        assert (await (await session.main.submit("by two far none")).result(60)).state == "completed"
        await session.main.set_model(DELEGATES)
        for kind in ("agents", "sessions"):
            for host in await hosts_of(runtime, kind):
                os.kill(host["pid"], signal.SIGKILL)
        assert (await (await session.main.submit("by - two one")).result(90)).state == "completed"
        spawned = [data["model"] for data in await in_log(session, "subagent/spawned")]
        assert (spawned[0], sorted(spawned[1:])) == ("two", sorted([DELEGATES, "one", "two"]))
        texts = [r["message"]["content"][0]["content"][0]["text"] for r in await in_log(session, "tool/result")]
        refused = sorted(text for text in texts if text.startswith("subagent error"))
        assert len(refused) == 2 and "no model 'none' is configured" in refused[0]
        assert "needs a key, and the variable KIMI_RAY_TEST_NO_SUCH_KEY" in refused[1]
