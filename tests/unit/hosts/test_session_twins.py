"""A host of sessions that was taken for lost and goes on: it must not write where another host now does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.ids import new_ulid
from kimi_ray.store import open_store
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


async def test_a_twin_starts_nothing_and_lets_go(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(8)], profile="bare", max_concurrency=2)
        await stage.until_running(2)
        (twin,) = await hosts_of(runtime, "sessions")
        other = f"{runtime.connection.home_id}/sessions-other"
        cluster = cluster_of(runtime)
        await cluster.start_host("sessions", other)
        # The registry took it for lost, and its end did not reach it.
        await runtime.connection.registry.call("forget_session", session.id, timeout_s=5, group="control")
        spec = session._link.spec
        spec = replace(spec, nonce=new_ulid(), main=replace(spec.main, nonce=new_ulid()))
        await cluster.peer(other).call("resume_session", spec, timeout_s=20)

        stage.gate.set()
        async with asyncio.timeout(10):
            while (await cluster.peer(twin).call("ping", timeout_s=5, group="control"))["sessions"]:
                await asyncio.sleep(0.01)
        with pytest.raises(KimiRayError) as caught:
            await cluster.peer(twin).call("swarm_progress", handle._key, timeout_s=5, group="control")
        assert caught.value.code == "session.not_live"
        logs = await open_store(tmp_path / "home").list(session.id)
        assert len([log for log in logs if log.stream.agent_id != "main"]) == 2

        # The driver, which knew the twin only, brings the session back and has all its rows.
        report = await handle.result(30)
        assert [row.status for row in report.rows] == ["completed"] * 8
        events = [event async for event in session.main.events()]
        assert "subagent/failed" not in {event.type for event in events}
        logs = await open_store(tmp_path / "home").list(session.id)
        headers = [log.header for log in logs if log.header and "item_id" in log.header]
        keys = [(header["item_id"], header["attempt"]) for header in headers]
        assert len(set(keys)) == len(keys)


async def test_a_header_never_opens_the_log_of_another_rollout(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        report = await session.swarm("{{item}}", ["a", "b"], profile="bare")
        assert report.ok
        store = open_store(tmp_path / "home")
        before = {log.stream: (await store.inspect(log.stream)).next_seq for log in await store.list(session.id)}
        (host,) = await hosts_of(runtime, "sessions")
        live = cluster_of(runtime)._held[host].core._sessions[session.id]  # type: ignore[union-attr]
        live._next_number = 1
        again = await session.swarm("{{item}}", ["c", "d"], profile="bare")
        assert [row.text for row in again.rows] == ["did c", "did d"]
        assert [row.attempt for row in again.rows] == [2, 2]
        for log in await store.list(session.id):
            if log.stream in before and log.stream.agent_id != "main":
                assert (await store.inspect(log.stream)).next_seq == before[log.stream]


async def test_main_outlives_the_host_of_its_session(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=3) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        for turn in range(3):
            stage.gate.clear()
            prompt = await session.main.submit(f"turn {turn}")
            await stage.until_running(1)
            for host in await hosts_of(runtime, "sessions"):
                cluster_of(runtime).kill_host(host)
            await session.metadata()
            stage.gate.set()
            assert (await prompt.result(10)).state == "completed"
        assert [stage.prompt(request) for request in stage.requests] == ["turn 0", "turn 1", "turn 2"]
        await session.flush()
        (log,) = await open_store(tmp_path / "home").list(session.id)
        assert (await open_store(tmp_path / "home").inspect(log.stream)).epoch == 1
