"""A session's tree after its hosts were killed, one by one and together: nothing accepted is lost or runs twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.events import SessionEvent
from kimi_ray.ids import new_ulid
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream
from tests.trees import check_positions, check_prompts, stored_logs, types
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

BARE: dict[str, Any] = {"profile": "bare", "model": None}
KINDS = (("sessions",), ("agents",), ("sessions", "agents"))


async def kill(runtime: Runtime, *kinds: str) -> None:
    for kind in kinds:
        for host in await hosts_of(runtime, kind):
            cluster_of(runtime).kill_host(host)


async def logs_of(tmp_path: Path, session_id: str) -> dict[str, list[SessionEvent]]:
    return await stored_logs(tmp_path / "home", session_id)


async def headers_of(tmp_path: Path, session_id: str) -> dict[str, dict[str, Any]]:
    logs = await open_store(tmp_path / "home").list(session_id)
    return {log.stream.agent_id: log.header for log in logs if log.header is not None}


async def until(condition: Any, within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not (await condition() if asyncio.iscoroutinefunction(condition) else condition()):
            await asyncio.sleep(0.01)


async def with_children(runtime: Runtime, model: str, work: Path, count: int = 3) -> Session:
    session = await runtime.workspace(work).create_session(model=model, profile="bare")
    report = await session.swarm("{{item}}", [f"i{n}" for n in range(count)], profile="bare")
    assert report.ok
    return session


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
async def test_prompts_of_subagents_run_though_nobody_asks_for_them(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await with_children(runtime, model, tmp_path / "work")
        stage.gate.clear()
        for name in ("main", "agent-1", "agent-3"):
            agent = session.agent(name)
            await agent.submit(f"{name} first")
            await agent.submit(f"{name} second")
        await stage.until_running(3)
        await kill(runtime, *kinds)
        await runtime.workspace(tmp_path / "work").resume(session.id)
        stage.gate.set()

        async def all_ended() -> bool:
            logs = await logs_of(tmp_path, session.id)
            return all(types(logs[n]).count("prompt/completed") >= 2 for n in ("main", "agent-1", "agent-3"))

        await until(all_ended)
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        check_prompts(logs)
        check_positions(logs)
        for name in ("main", "agent-1", "agent-3"):
            states = [e.data["state"] for e in logs[name] if e.type == "prompt/completed"][-2:]
            lives = types(logs[name]).count("runtime/activated")
            if "agents" in kinds:
                assert states == ["failed", "completed"], name
            else:
                # They lived on: the same writer, no turn cut short.
                assert (states, lives) == (["completed", "completed"], 1 if name == "main" else 2), name
        assert types(logs["agent-2"]).count("runtime/activated") == 1


async def test_a_subagent_of_another_model_runs_on_too(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session(model="scripted:kimi_ray.llm.scripts:echo", profile="bare")
        assert (await session.swarm("{{item}}", ["a"], profile="bare", model=model)).ok
        stage.gate.clear()
        await session.agent("agent-1").submit("held", on_interrupt="continue")
        await stage.until_running(1)
        await kill(runtime, "sessions", "agents")
        again = await work.resume(session.id)
        stage.gate.set()

        async def ended() -> bool:
            return types((await logs_of(tmp_path, session.id))["agent-1"]).count("prompt/completed") == 2

        await until(ended)
        await again.close()
        check_prompts(await logs_of(tmp_path, session.id))
        document = (await open_store(tmp_path / "home").read_document(session.id)).value  # type: ignore[union-attr]
        assert "in_flight" not in document


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
async def test_a_swarm_goes_on_in_its_logs(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [f"i{n}" for n in range(6)], profile="bare", max_concurrency=4)
        await stage.until_running(4)
        await kill(runtime, *kinds)
        await session.metadata()

        async def begun_again() -> bool:
            try:
                return (await handle.refresh()).running == 4
            except KimiRayError:
                return False

        await until(begun_again)
        stage.gate.set()
        report = await handle.result(30)
        assert [row.status for row in report.rows] == ["completed"] * 6
        assert [row.attempt for row in report.rows] == [1] * 6
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        assert len(logs) == 7
        check_prompts(logs)
        check_positions(logs)
        assert types(logs["main"]).count("swarm/end") == 1
        if kinds == ("sessions",):
            lives = {name: types(events).count("runtime/activated") for name, events in logs.items()}
            assert lives == dict.fromkeys(logs, 1)
            assert sum(stage.seen.values()) == 6
        spawned = [e.data["agent_id"] for e in logs["main"] if e.type == "subagent/spawned"]
        assert sorted(spawned) == sorted(set(spawned)) and len(spawned) == 6


async def test_rollouts_that_end_while_a_new_session_host_takes_them_over_live_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimi_ray.hosts import tree_recovery

    looks_at = tree_recovery.going_on
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["a", "b", "c"], profile="bare")
        await stage.until_running(3)

        async def gone() -> bool:
            hosts = await hosts_of(runtime, "agents")
            told = [await cluster_of(runtime).peer(host).call("ping", timeout_s=5, group="control") for host in hosts]
            return sum(one["agents"] for one in told) == 1  # main

        async def looks_and_then_they_end(*args: Any) -> Any:
            found = await looks_at(*args)
            stage.gate.set()
            await until(gone)
            return found

        monkeypatch.setattr(tree_recovery, "going_on", looks_and_then_they_end)
        await kill(runtime, "sessions")
        report = await handle.result(30)
        assert [(row.status, row.text, row.attempt) for row in report.rows] == [
            ("completed", f"did {item}", 1) for item in "abc"
        ]
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        check_prompts(logs)
        check_positions(logs)
        lives = {name: types(events).count("runtime/activated") for name, events in logs.items()}
        assert lives == dict.fromkeys(logs, 1)
        assert sum(stage.seen.values()) == 3


async def test_rollouts_that_ended_unseen_are_told_from_their_logs(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [f"i{n}" for n in range(5)], profile="bare")
        await stage.until_running(5)
        assert handle._main is not None
        handle._main.cancel()  # its driver is gone
        await kill(runtime, "sessions")
        stage.gate.set()

        async def all_ended() -> bool:
            logs = await logs_of(tmp_path, session.id)
            return len(logs) == 6 and all(types(logs[f"agent-{n}"])[-1] == "prompt/completed" for n in range(1, 6))

        await until(all_ended)
        before = await logs_of(tmp_path, session.id)
        again = await runtime.workspace(tmp_path / "work").resume(session.id)
        report = await again.swarm("{{item}}", [f"i{n}" for n in range(5)], profile="bare", run_id=handle.run_id)
        assert [(row.status, row.text, row.attempt) for row in report.rows] == [
            ("completed", f"did i{n}", 1) for n in range(5)
        ]
        assert all(row.usage.output > 0 and row.timing.wall_ms > 0 and row.node_id for row in report.rows)
        await again.close()
        logs = await logs_of(tmp_path, session.id)
        check_positions(logs)
        for name, events in before.items():
            if name != "main":
                assert types(logs[name]) == types(events)
        assert types(logs["main"]).count("subagent/completed") == 5
        assert sum(stage.seen.values()) == 5


async def test_a_swarm_that_restarts_begins_again_with_new_attempts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["a", "b"], profile="bare", on_interrupted="restart")
        await stage.until_running(2)
        await kill(runtime, "sessions")
        await session.metadata()
        stage.gate.set()
        report = await handle.result(30)
        assert [(row.status, row.attempt) for row in report.rows] == [("completed", 2)] * 2
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        check_prompts(logs)
        check_positions(logs)


async def nest(session: Session) -> None:
    """Three levels: two agents of main's, two of each of theirs."""
    assert (await session.swarm("{{item}}", ["a", "b"], profile="bare")).ok
    for parent in ("agent-1", "agent-2"):
        assert (await session.swarm("{{item}}", [f"{parent} x", f"{parent} y"], profile="bare", parent=parent)).ok


async def test_a_nested_tree_is_the_same_after_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await nest(session)
        before = {row["agent_id"]: row for row in await session.agents()}
        assert [before[f"agent-{n}"]["parent_agent_id"] for n in range(1, 7)] == [
            "main", "main", "agent-1", "agent-1", "agent-2", "agent-2"
        ]  # fmt: skip
        assert [before[f"agent-{n}"]["delegation_depth"] for n in range(1, 7)] == [1, 1, 2, 2, 2, 2]
        # A third level under way.
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["deep"], profile="bare", parent="agent-4")
        await session.agent("agent-6").submit("direct", on_interrupt="continue")
        await stage.until_running(2)
        await kill(runtime, "sessions", "agents")
        again = await runtime.workspace(tmp_path / "work").resume(session.id)
        stage.gate.set()
        report = await handle.result(30)
        assert (report.rows[0].agent_id, report.rows[0].attempt) == ("agent-7", 1)
        for row in await again.agents():
            known = before.get(row["agent_id"])
            if known is not None:
                assert {k: row[k] for k in ("labels", "item_id", "parent_agent_id", "delegation_depth")} == {
                    k: known[k] for k in ("labels", "item_id", "parent_agent_id", "delegation_depth")
                }
        prompt = await again.agent("agent-5").submit("afterwards")
        assert (await prompt.result(10)).text == "did afterwards"
        document = await again.metadata()
        assert document["agents"]["agent-7"]["parent_agent_id"] == "agent-4"
        assert document["agents"]["agent-7"]["labels"] == {"item": "0000", "parent_agent_id": "agent-4"} or (
            document["agents"]["agent-7"]["labels"]["parent_agent_id"] == "agent-4"
        )
        await again.close()
        logs, headers = await logs_of(tmp_path, session.id), await headers_of(tmp_path, session.id)
        check_prompts(logs)
        check_positions(logs)
        assert headers["agent-7"]["delegation_depth"] == 3
        assert headers["agent-7"]["parent"] == {"session_id": session.id, "agent_id": "agent-4"}
        assert {"swarm/start", "subagent/spawned", "subagent/completed", "swarm/end"} <= set(types(logs["agent-4"]))
        assert types(logs["agent-6"]).count("prompt/completed") == 2


async def test_the_parent_of_a_swarm_must_exist(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(KimiRayError) as caught:
            await session.start_swarm("{{item}}", ["a"], profile="bare", parent="agent-9")
        assert caught.value.code == "agent.not_found"


async def test_tree_limits_count_all_levels(tmp_path: Path) -> None:
    from kimi_ray.settings import Limits

    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile="bare", limits=Limits(max_steps=4)
        )
        await session.swarm("{{item}}", ["a", "b"], profile="bare")
        report = await session.swarm("{{item}}", ["c", "d", "e"], profile="bare", parent="agent-1", max_concurrency=1)
        assert [row.status for row in report.rows].count("completed") == 2
        with pytest.raises(KimiRayError) as caught:
            await session.swarm("{{item}}", ["f"], profile="bare", parent="agent-2")
        assert caught.value.code == "limit.max_steps"


async def test_the_document_has_all_agents_after_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, model, tmp_path / "work", 5)
        await kill(runtime, "sessions", "agents")
        again = await runtime.workspace(tmp_path / "work").resume(session.id)
        document = await again.metadata()
        headers = await headers_of(tmp_path, session.id)
        assert document["agent_count"] == 6
        for agent_id, header in headers.items():
            entry = document["agents"][agent_id]
            assert entry.get("labels", {}) == header.get("labels", {}), agent_id


async def test_an_agent_that_kills_its_hosts_is_given_up_and_the_tree_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await with_children(runtime, model, tmp_path / "work")
        stage.gate.clear()
        poison = await session.agent("agent-1").submit("poison", on_interrupt="continue")
        behind = await session.agent("agent-1").submit("behind")
        for life in range(4):
            await stage.until_running(1)
            # The count is in the log: half of the time nobody is left who could have counted.
            await kill(runtime, *(("agents",) if life % 2 else ("sessions", "agents")))
            await session.agent("agent-1").wake()
        result = await poison.result(20)
        assert result.state == "failed" and result.error is not None
        assert result.error["code"] == "agent.revivals_exhausted"
        assert result.error["details"]["stream"] == f"{session.id}/agent-1"
        assert (await behind.result(10)).error["code"] == "agent.revivals_exhausted"  # type: ignore[index]
        stage.gate.set()
        for name in ("main", "agent-2", "agent-1"):
            assert (await (await session.agent(name).submit("fine")).result(10)).state == "completed"
        # It finished a turn: it may be revived again.
        stage.gate.clear()
        prompt = await session.agent("agent-1").submit("again", on_interrupt="continue")
        await stage.until_running(1)
        await kill(runtime, "agents")
        stage.gate.set()
        assert (await prompt.result(20)).state == "completed"
        await session.close()
        check_prompts(await logs_of(tmp_path, session.id))


async def taken_over(runtime: Runtime, session: Session) -> tuple[str, str]:
    """The session resumed on another host while its own one lives on: (twin, new host)."""
    from dataclasses import replace

    (twin,) = await hosts_of(runtime, "sessions")
    other = f"{runtime.connection.home_id}/sessions-other"
    cluster = cluster_of(runtime)
    await cluster.start_host("sessions", other)
    registry = runtime.connection.registry
    await registry.call("forget_session", session.id, timeout_s=5, group="control")
    spec = session._link.spec
    spec = replace(spec, nonce=new_ulid(), main=replace(spec.main, nonce=new_ulid()))
    await cluster.peer(other).call("resume_session", spec, timeout_s=20)
    return twin, other


async def test_a_twin_can_write_close_cancel_and_take_over_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await with_children(runtime, model, tmp_path / "work")
        stage.gate.clear()
        for name in ("main", "agent-1"):
            await session.agent(name).submit("held")
        await stage.until_running(2)
        twin, other = await taken_over(runtime, session)
        cluster = cluster_of(runtime)
        old = cluster._held[twin].core._sessions[session.id]  # type: ignore[union-attr]
        peer, claim = cluster.peer(old.host_of("agent-1")), old.spec.nonce
        stream = Stream(session.id, "agent-1")
        with pytest.raises(KimiRayError) as caught:
            await peer.call("record", stream, [], claim, timeout_s=5, group="control")
        assert caught.value.code == "session.fenced"
        with pytest.raises(KimiRayError) as caught:
            await peer.call("cancel", stream, None, "user", None, claim, timeout_s=5, group="control")
        assert caught.value.code == "session.fenced"
        (ack,) = await peer.call("close_agents", [stream], True, claim, timeout_s=5, group="store")
        assert ack.error is not None and ack.error["code"] == "session.fenced"
        for name in ("main", "agent-1", "agent-2"):
            with pytest.raises(KimiRayError) as caught:
                old.agents.pop(name, None) if name != "main" else None
                await (old._relocate(old.agents["main"]) if name == "main" else old.agent_host(name, None, None))
            assert caught.value.code in ("session.fenced", "store.fenced"), name
        with pytest.raises(KimiRayError):
            await cluster.peer(twin).call("close_session", session.id, False, timeout_s=20)
        assert stage.running == 2
        assert await runtime.connection.registry.call("find_session", session.id, timeout_s=5, group="control") == other
        stage.gate.set()
        session._link.host = other
        assert (await (await session.main.submit("on")).result(10)).state == "completed"
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        check_prompts(logs)
        assert [e.data["state"] for e in logs["agent-1"] if e.type == "prompt/completed"] == ["completed", "completed"]
        assert types(logs["main"]).count("runtime/activated") == 1


async def test_children_without_a_last_word_have_positions(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["a", "b", "c"], profile=Profile(name="bare"))
        await stage.until_running(3)
        await handle.cancel(0.0)
        report = await handle.result(20)
        assert [row.status for row in report.rows] == ["cancelled"] * 3
        stage.gate.set()
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        check_positions(logs)
        (end,) = [e for e in logs["main"] if e.type == "swarm/end"]
        assert len(end.data["agents"]) == 3


async def test_what_a_lost_host_could_not_say_is_said_at_the_resume(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.faults["bad"] = []
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [f"i{n}" for n in range(4)], profile="bare")
        await stage.until_running(4)
        assert handle._main is not None
        handle._main.cancel()  # nobody will begin it again
        await kill(runtime, "sessions", "agents")
        again = await runtime.workspace(tmp_path / "work").resume(session.id)
        logs = await logs_of(tmp_path, session.id)
        check_positions(logs)
        assert types(logs["main"]).count("subagent/suspended") == 4
        stage.gate.set()
        # Somebody goes on with it after all.
        report = await again.swarm("{{item}}", [f"i{n}" for n in range(4)], profile="bare", run_id=handle.run_id)
        assert [(row.status, row.attempt) for row in report.rows] == [("completed", 1)] * 4
        await again.close()
        logs = await logs_of(tmp_path, session.id)
        check_prompts(logs)
        check_positions(logs)
