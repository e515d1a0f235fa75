"""Where forks work: in copies and worktrees of the source's directory, and beside it in its own session."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from kimi_ray.errors import AgentError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.runs.seeds import fork_seed
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile, Workdir
from kimi_ray.store import open_store
from tests.unit.runtime_fixtures import Stage, running
from tests.unit.test_runtime_forks import READER, ask, code_of, ids_in, worked

# -- directories ------------------------------------------------------------------------------------------------------


async def test_sixteen_forks_of_a_subagent_at_a_step(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        stage.faults["do it"] = [Step.call("Read", {"path": "a.txt"}), Step.call("Read", {"path": "a.txt"})]
        report = await source.swarm("do {{item}}", ["it"], profile=READER, workdir=Workdir.copy(workspace.path))
        agent_id = report.rows[0].agent_id
        assert agent_id is not None
        theirs = {r.step: r for r in stage.requests if r.agent_id == agent_id}
        forks = await workspace.fork_many(
            source.id, 16, agent_id=agent_id, at="0.0", workdir=Workdir.copy(workspace.path), seeds=5
        )
        assert len(forks) == 16
        requests = await asyncio.gather(*(goes_on_alone(fork, stage) for fork in forks))
        expected = theirs[1]
        for index, request in enumerate(requests):
            assert request.sampling.seed == fork_seed(5, index)
            same = request.sampling.model_copy(update={"seed": expected.sampling.seed})
            assert to_json([request.system, request.messages, request.tools, same]) == to_json(
                [expected.system, expected.messages, expected.tools, expected.sampling]
            )
        places = {await prepared(fork) for fork in forks}
        assert len(places) == 16 and all(Path(place, "a.txt").read_text() == "alpha\n" for place in places)
        assert [(await fork.metadata())["fork_index"] for fork in forks] == list(range(16))
        await forks[0].close()
        assert await prepared(await workspace.resume(forks[0].id)) in places


async def goes_on_alone(session: Session, stage: Stage) -> ChatRequest:
    """As ``goes_on``, with others beside it."""
    await (await session.main.continue_turn()).result(20)
    return next(request for request in stage.requests if request.session_id == session.id)


async def prepared(session: Session) -> str:
    events = [event async for event in session.main.events() if event.type == "profile/bind"]
    logs = await open_store(session_home(session)).list(session.id)
    header = next(log.header for log in logs if log.stream.agent_id == "main") or {}
    own = [event for event in events if event.seq >= header["seed_length"]]
    bound: Any = own[-1].data if own else header["bind"]
    assert bound["workdir"]["prepared"] == header["bind"]["workdir"]["prepared"]
    return bound["workdir"]["prepared"]


def session_home(session: Session) -> str:
    return session._services.courier.config.home  # pyright: ignore[reportPrivateUsage]


async def test_a_copy_of_the_sources_directory_as_it_is_now(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        (tmp_path / "work" / "later.txt").write_text("x")
        fork = await workspace.fork(source.id, workdir="copy")
        place = Path(await prepared(fork))
        assert (place / "later.txt").exists() and place != tmp_path / "work"
        (place / "own.txt").write_text("y")
        second = await workspace.fork(fork.id, workdir="copy")
        assert Path(await prepared(second), "own.txt").exists()
        shared = await workspace.fork(fork.id)
        stage.faults["where"] = [Step.call("Read", {"path": "own.txt"})]
        await ask(shared, "where")
        assert "y" in str(stage.requests[-1].messages[-1])
        await shared.close()
        await workspace.delete(shared.id)
        assert (place / "own.txt").exists(), "a shared directory is not the fork's to remove"
        await workspace.delete(second.id)
        await workspace.delete(fork.id)
        assert not place.exists()


async def test_a_source_whose_directory_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        await source.close()
        shutil.rmtree(tmp_path / "work")
        (fork,) = await runtime.forks.publish(source.id)
        assert fork.forked_from is not None
        assert (await code_of(runtime.forks.publish(source.id, workdir="copy"))).startswith("workdir.")
        (tmp_path / "new").mkdir()
        (elsewhere,) = await runtime.forks.publish(
            source.id, workdir=Workdir.shared(str(tmp_path / "new"), writes=True)
        )
        assert await ids_in(tmp_path / "home") == {source.id, fork.id, elsewhere.id}
        back = await runtime.workspace(tmp_path / "new").resume(elsewhere.id)
        await ask(back, "hello")


# -- agent forks (K 4.9) ----------------------------------------------------------------------------------------------


async def test_an_agent_forked_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (2,))
        stage.gate.clear()
        prompt = await source.main.submit("runs")
        await stage.until_running(1)
        theirs = stage.requests[-1]
        helper = await source.fork_agent("main")
        second = await source.fork_agent()
        assert (helper.id, second.id) == ("agent-1", "agent-2")
        stage.gate.set()
        assert (await prompt.result(10)).text == "did runs"
        assert (await (await helper.submit("help")).result(10)).text == "did help"
        ours = next(r for r in stage.requests if r.agent_id == helper.id)
        assert (ours.system, ours.tools, ours.model) == (theirs.system, theirs.tools, theirs.model)
        assert to_json(ours.messages[:-1]) == to_json(theirs.messages)
        spawned = [e.data async for e in source.main.events() if e.type == "subagent/spawned"]
        assert [data["agent_id"] for data in spawned] == ["agent-1", "agent-2"]
        types = [event.type async for event in helper.events()]
        assert types[spawned[0]["seq"] - 1] == "log/end-seed"
        document = await source.metadata()
        assert document["agents"]["agent-1"]["forked_from"] == "main"
        await source.close()
        back = await workspace.resume(source.id)
        assert (await (await back.agent("agent-1").submit("again")).result(10)).text == "did again"
        nested = await back.fork_agent("agent-1")
        assert nested.id == "agent-3" and (await nested.messages())[-1]["content"][0]["text"] == "did again"
        with pytest.raises(AgentError) as caught:
            await back.fork_agent("agent-9")
        assert caught.value.code == "agent.not_found"


async def test_an_open_tool_call_is_closed_for_the_new_agent_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        slow = Profile(name="slow", system_prompt="s", tools=("Bash",))
        source = await workspace.create_session(model=model, profile=slow)
        flag = tmp_path / "work" / "go"
        stage.faults["wait"] = [
            Step.call("Bash", {"command": f"while [ ! -e {flag} ]; do sleep 0.02; done; echo done"})
        ]
        prompt = await source.main.submit("wait")
        async with asyncio.timeout(10):
            async for event in source.main.events(follow=True):
                if event.type == "tool/call":
                    break
        helper = await source.fork_agent()
        assert (await (await helper.submit("help")).result(10)).state == "completed"
        ours = next(r for r in stage.requests if r.agent_id == helper.id)
        result = ours.messages[-2]["content"][0]
        assert result["type"] == "tool-result" and result["is_error"] is False
        assert "still running" in result["content"][0]["text"]
        flag.touch()
        assert (await prompt.result(10)).state == "completed"
        assert "done" in str(stage.requests[-1].messages[-1])
