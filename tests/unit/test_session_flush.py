"""``Session.flush`` when agents are not where the session last saw them: nothing fails for what is cold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import LogEntry
from kimi_ray.hosts.steady_calls import RegistryCalls
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.store.seam import Stream
from tests.trees import stored_logs, types
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


async def with_children(runtime: Runtime, work: Path, model: str) -> Session:
    session = await runtime.workspace(work).create_session(model=model)
    for n in range(3):
        assert (await session.run_subagent(f"task {n} " * 40)).status == "completed"
    return session


async def kill_agent_hosts(runtime: Runtime) -> None:
    for host in await hosts_of(runtime, "agents"):
        cluster_of(runtime).kill_host(host)


async def test_children_whose_hosts_are_lost_are_passed_over_and_come_back_when_they_are_needed(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, tmp_path / "work", model)
        before = await stored_logs(tmp_path / "home", session.id)
        await kill_agent_hosts(runtime)
        await session.flush()
        await session.flush()
        logs = await stored_logs(tmp_path / "home", session.id)
        for name in ("agent-1", "agent-2", "agent-3"):
            assert logs[name] == before[name], "nobody needed it"
        assert (await (await session.agent("agent-2").submit("again")).result(10)).text == "did again"
        await session.flush()
        await session.close()
        lives = types((await stored_logs(tmp_path / "home", session.id))["agent-2"]).count("runtime/activated")
        assert lives == 2


async def test_a_host_that_only_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, tmp_path / "work", model)
        await kill_agent_hosts(runtime)
        await session.agent("main").wake()

        async def lives(_calls: RegistryCalls, _host: str) -> bool:
            return False

        with monkeypatch.context() as patched:
            patched.setattr(RegistryCalls, "report_lost", lives)
            with pytest.raises(KimiRayError) as caught:
                await session.flush()
        assert is_lost(caught.value.code)
        await session.flush()


async def test_an_agent_that_was_let_go_of_does_not_keep_its_neighbours_from_being_flushed(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=1) as (runtime, _, model):
        session = await with_children(runtime, tmp_path / "work", model)
        (host,) = await hosts_of(runtime, "agents")
        peer = cluster_of(runtime).peer(host)
        gone, stays = Stream(session.id, "agent-1"), Stream(session.id, "agent-3")
        await peer.call("close_agents", [gone], False, timeout_s=10, group="store")
        await peer.call("record", stays, [LogEntry("note/added", {"text": "x"})], timeout_s=5, group="control")
        await session.flush()
        assert types((await stored_logs(tmp_path / "home", session.id))["agent-3"])[-1] == "note/added"
