"""Archive, restore, delete, and what stands in their way; through the public API, everything in this process."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Workdir
from kimi_ray.store.workspace_registry import WorkspaceEntry
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

ECHO = "scripted:kimi_ray.llm.scripts:echo"


def state_of(home: Path, session_id: str) -> dict[str, Any]:
    (found,) = home.glob(f"sessions/*/{session_id}/state.json")
    return json.loads(found.read_text())


def files_of(home: Path, session_id: str) -> list[Path]:
    return [path for path in home.rglob(f"*{session_id}*") if path.parent.name != "tombstones"]


async def code_of(awaitable: Any) -> str:
    with pytest.raises(KimiRayError) as caught:
        await awaitable
    return caught.value.code


async def load_of(runtime: Runtime) -> int:
    status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
    return sum(row["load"] for row in status["hosts"])


async def test_archive_and_restore_of_a_cold_session_open_no_agent(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        await (await session.main.submit("hello")).result(10)
        await session.close()
        before = state_of(tmp_path / "home", "s1")
        log = next((tmp_path / "home").glob("sessions/*/s1/agents/main/*")).read_bytes()

        archived = await work.archive("s1")
        assert archived.archived and archived.updated_at == before["updated_at"] and archived.title == "hello"
        state = state_of(tmp_path / "home", "s1")
        assert state["archived"] is True and state["archived_at"] > 0 and state["revision"] == before["revision"] + 1
        assert (await work.archive("s1")).archived
        assert state_of(tmp_path / "home", "s1") == state
        assert await runtime.sessions.list_recent() == []
        assert [row.id for row in await runtime.sessions.list_recent(archived=True)] == ["s1"]

        restored = await work.restore("s1")
        assert not restored.archived and restored.updated_at == before["updated_at"]
        after = state_of(tmp_path / "home", "s1")
        assert after == {**before, "revision": before["revision"] + 2}
        assert next((tmp_path / "home").glob("sessions/*/s1/agents/main/*")).read_bytes() == log
        assert await runtime.connection.registry.call("find_session", "s1", timeout_s=5, group="control") is None
        assert await load_of(runtime) == 0
        assert not list((tmp_path / "home").glob("owners/s1"))


async def test_archive_of_a_live_session_closes_it_and_it_can_be_resumed(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        await (await session.main.submit("hello")).result(10)
        assert (await work.archive("s1")).archived
        assert await code_of(session.metadata()) == "session.closed"
        assert await code_of(session.update(title="x")) == "session.closed"
        assert await code_of(asyncio.wait_for(session.main.submit("late"), 10)) == "session.closed"
        await session.close()
        assert [event.seq async for event in session.main.events(0)][:1] == [0]
        assert not await runtime.is_live("s1")

        again = await work.resume("s1")
        assert again is not session and (await again.metadata())["archived"] is True
        assert (await (await again.main.submit("more")).result(10)).turn == 1
        assert not (await work.restore("s1")).archived
        assert await runtime.is_live("s1") and (await again.metadata())["archived"] is False
        assert (await (await again.main.submit("and more")).result(10)).turn == 2


async def test_resume_and_close_move_no_time(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        await (await session.main.submit("one")).result(10)
        await session.close()
        before = state_of(tmp_path / "home", "s1")
        for _ in range(2):
            again = await work.resume("s1")
            await again.close()
        assert state_of(tmp_path / "home", "s1") == before


async def test_delete_leaves_nothing_and_the_id_is_not_used_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        live = await work.create_session("s1", model=model, profile="bare")
        await (await live.main.submit("x")).result(10)
        await live.swarm("{{item}}", ["a", "b"], profile="bare")
        cold = await work.create_session("s2", model=model, profile="bare")
        await cold.close()
        await work.delete("s1")
        await runtime.delete("s2")
        for session_id in ("s1", "s2"):
            assert files_of(tmp_path / "home", session_id) == []
            assert await code_of(work.resume(session_id)) == "session.not_found"
            assert await code_of(work.delete(session_id)) == "session.not_found"
            assert await code_of(work.archive(session_id)) == "session.not_found"
            assert await code_of(work.create_session(session_id, model=model)) == "session.exists"
        assert await code_of(live.metadata()) == "session.closed"
        assert await runtime.sessions.count(archived=None) == 0
        assert await load_of(runtime) == 0


async def test_delete_removes_the_private_directory_of_main(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        (tmp_path / "work" / "file").write_text("x")
        session = await work.create_session(
            "s1", model=model, profile="bare", workdir=Workdir.copy(str(tmp_path / "work"))
        )
        binding = await runtime.binding("s1")
        assert binding is not None
        private = Path(binding["workdir"]["prepared"])
        assert (private / "file").read_text() == "x"
        await session.close()
        await work.delete("s1")
        assert not private.exists() and (tmp_path / "work" / "file").exists()


async def test_a_session_whose_directory_is_gone_can_be_archived_restored_and_deleted(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        for session_id in ("s1", "s2"):
            session = await runtime.workspace(tmp_path / "work").create_session(session_id, model=model, tools=["Read"])
            await session.close()
            await session.close()
        assert await runtime.sessions.count() == 2
    shutil.rmtree(tmp_path / "work")
    async with Runtime.connect(tmp_path / "home", "in-process") as runtime:
        with pytest.raises(SessionError):
            runtime.workspace(tmp_path / "work")
        codes = [await code_of(runtime.workspace(tmp_path).resume("s1", model=ECHO)) for _ in range(2)]
        assert codes == ["workdir.lost"] * 2
        assert (await runtime.archive("s1")).cwd == str(tmp_path / "work")
        assert await load_of(runtime) == 0
        assert not (await runtime.restore("s1")).archived
        await runtime.delete("s1")
        assert [row.id for row in await runtime.sessions.list_recent()] == ["s2"]


async def test_another_workspaces_session_is_not_found(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        (tmp_path / "other").mkdir()
        other = runtime.workspace(tmp_path / "other")
        work = runtime.workspace(tmp_path / "work")
        live = await work.create_session("live", model=model, profile="bare")
        await (await work.create_session("cold", model=model, profile="bare")).close()
        for session_id in ("live", "cold"):
            assert await code_of(other.archive(session_id)) == "session.not_found"
            assert await code_of(other.restore(session_id)) == "session.not_found"
            assert await code_of(other.delete(session_id)) == "session.not_found"
        assert (await (await live.main.submit("x")).result(10)).text == "did x"
        assert {row.id for row in await runtime.sessions.list_recent()} == {"live", "cold"}
        assert await code_of(runtime.archive("../up")) == "session.bad_id"


async def test_a_workspace_under_another_spelling_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as (runtime, _, model):
        (tmp_path / "Work").mkdir()
        work, other = runtime.workspace(tmp_path / "work"), runtime.workspace(tmp_path / "Work")
        await (await other.create_session("s1", model=model, profile="bare")).close()
        assert await code_of(work.archive("s1")) == "session.not_found"
        assert await code_of(work.fork("s1", model=model)) == "session.not_found"

        async def aliased(workspace_id: str) -> WorkspaceEntry:
            return WorkspaceEntry(
                id=other.id, root=other.path, name="w", created_at=1, last_opened_at=1, alias_ids=(workspace_id,)
            )

        monkeypatch.setattr(runtime.workspaces, "get", aliased)
        assert (await work.archive("s1")).archived and not (await work.restore("s1")).archived
        fork = await work.fork("s1", model=model)
        assert (await fork.metadata())["workspace_id"] == work.id
        await work.delete("s1")


async def test_a_batch_tells_for_each(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        for number in range(12):
            session = await work.create_session(f"s{number}", model=model, profile="bare")
            if number % 3:
                await session.close()
        (damaged,) = (tmp_path / "home").glob("sessions/*/s1/state.json")
        damaged.write_text("{not json")
        ids = [*(f"s{number}" for number in range(12)), "nobody", "bad id"]
        results = await work.archive_many(ids)
        assert [one.id for one in results] == ids
        told = {one.id: (one.ok, one.reason) for one in results}
        assert told.pop("nobody") == (False, "not_found")
        assert told.pop("s1") == (False, "error")
        assert told.pop("bad id") == (False, "error")
        assert set(told.values()) == {(True, None)}
        assert all(one.ok or one.message for one in results)
        shown = {row.id for row in await runtime.sessions.list_recent(100, archived=True)}
        assert shown - {"s1"} == {f"s{number}" for number in range(12)} - {"s1"}
        assert await code_of(work.archive_many(["s1"], concurrency=0)) == "request.out_of_range"


async def test_a_session_without_its_document_is_archived_from_its_log(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        await (await session.main.submit("x")).result(10)
        await session.close()
        (state,) = (tmp_path / "home").glob("sessions/*/s1/state.json")
        state.unlink()
        archived = await work.archive("s1")
        assert archived.archived and archived.cwd == str(tmp_path / "work")
        again = await work.resume("s1")
        assert (await again.metadata())["last_prompt"] == "x"


async def test_an_odd_document_is_written_once_at_the_resume(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        await (await work.create_session("s1", model=model, profile="bare", title="T")).close()
        (path,) = (tmp_path / "home").glob("sessions/*/s1/state.json")
        state = json.loads(path.read_text())
        path.write_text(json.dumps({**state, "title_kind": "theirs", "tags": None}))
        await (await work.resume("s1")).close()
        mended = state_of(tmp_path / "home", "s1")
        assert mended == {**state, "title_kind": "replaceable", "revision": state["revision"] + 1}
        await (await work.resume("s1")).close()
        assert state_of(tmp_path / "home", "s1") == mended


async def test_agents_that_outlived_their_sessions_host_end_with_the_session(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        for session_id in ("archived", "deleted"):
            session = await work.create_session(session_id, model=model, profile="bare")
            stage.gate.clear()
            await session.main.submit("runs")
            await stage.until_running(1)
            for host in await hosts_of(runtime, "sessions"):
                cluster_of(runtime).kill_host(host)
            await (work.archive if session_id == "archived" else work.delete)(session_id)
            stage.gate.set()
            for host in await hosts_of(runtime, "agents"):
                held = await cluster_of(runtime).peer(host).call("ping", timeout_s=5, group="control")
                assert held["streams"] == []
        assert files_of(tmp_path / "home", "deleted") == []
        again = await work.resume("archived")
        assert (await (await again.main.submit("next")).result(10)).text == "did next"


async def test_a_zombie_cannot_bring_a_deleted_session_back(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        spec = session._link.spec
        stage.gate.clear()
        await session.main.submit("runs")
        await stage.until_running(1)
        (host,) = await hosts_of(runtime, "sessions")
        live = cluster_of(runtime)._held[host].core._sessions["s1"]  # type: ignore[union-attr]
        main_host = live.host_of("main")

        async def nothing(*_args: Any, **_kwargs: Any) -> None:
            """The agents do not hear of their end."""

        live._close_agents = nothing
        await work.delete("s1")
        stage.gate.set()
        peer = cluster_of(runtime).peer(str(main_host))
        async with asyncio.timeout(20):
            while True:
                try:
                    await peer.call("flush", [spec.main.stream], timeout_s=5, group="store")
                except KimiRayError as error:
                    assert error.code in ("store.deleted", "store.fenced", "agent.not_found", "store.not_found"), error
                    break
                await asyncio.sleep(0.02)
        assert files_of(tmp_path / "home", "s1") == []
        assert await runtime.sessions.count(archived=None) == 0


async def test_a_session_of_another_program_is_in_use(tmp_path: Path) -> None:
    async with running(tmp_path, claim_timeout_s=0.2) as (first, _, model):
        session = await first.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        async with running(tmp_path, claim_timeout_s=0.2) as (second, _, _model):
            for operation in (second.archive, second.delete):
                assert await code_of(operation("s1")) == "session.in_use"
            assert (await second.archive_many(["s1"]))[0].reason == "error"
            assert not (await second.restore("s1")).archived  # it is as wanted: nothing to write
            assert (await (await session.main.submit("x")).result(10)).text == "did x"
            await session.close()
            await second.delete("s1")
        assert await code_of(first.workspace(tmp_path / "work").resume("s1")) == "session.not_found"


async def test_a_failed_resume_is_forgotten_by_the_next(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare", title="T")
        await session.close()
        (path,) = (tmp_path / "home").glob("sessions/*/s1/state.json")
        whole = path.read_bytes()
        path.write_bytes(json.dumps({**json.loads(whole), "version": 99}).encode())
        codes = await asyncio.gather(*(code_of(work.resume("s1")) for _ in range(3)))
        assert codes == ["session.version_unsupported"] * 3
        assert await load_of(runtime) == 0
        path.write_bytes(whole)
        again = await asyncio.gather(*(work.resume("s1") for _ in range(3)))
        assert again[0] is again[1] is again[2]
        assert (await again[0].metadata())["title"] == "T"


async def test_turns_that_no_driver_watches_move_the_time(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        stage.gate.clear()
        await session.main.submit("unwatched")
        await stage.until_running(1)
        await session.flush()
        seen = await session.metadata()
        stage.gate.set()
        async with asyncio.timeout(15):
            while (value := await session.metadata()).get("last_turn_reason") != "completed":
                await asyncio.sleep(0.05)
        ends = [event.time async for event in session.main.events() if event.type == "turn/end"]
        assert value["updated_at"] == ends[-1] >= seen["updated_at"]
        stage.gate.clear()
        await session.main.submit("and at the close")
        await stage.until_running(1)
        await asyncio.sleep(0.2)  # the turn takes its time
        stage.gate.set()
        async with asyncio.timeout(10):
            while len([event async for event in session.main.events() if event.type == "turn/end"]) < 2:
                await asyncio.sleep(0.02)
        await session.close()
        state = state_of(tmp_path / "home", "s1")
        ends = [event.time async for event in session.main.events() if event.type == "turn/end"]
        assert state["last_prompt"] == "and at the close" and state["updated_at"] == ends[-1]
