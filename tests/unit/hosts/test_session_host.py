"""The session host where something goes wrong: nothing half made is left, nothing is taken from its owner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, SessionError, StoreError
from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.hosts.session_host import SessionHost
from kimi_ray.hosts.swarm_words import SwarmKey
from kimi_ray.store.seam import Stream
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


def core_of(cluster: LocalCluster, name: str) -> SessionHost:
    core = cluster._held[name].core
    assert isinstance(core, SessionHost)
    return core


async def test_a_session_that_cannot_be_published_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        (host,) = await hosts_of(runtime, "sessions")
        store = core_of(cluster_of(runtime), host)._services.store

        async def full(*_args: Any) -> int:
            raise StoreError("no space", code="store.no_space", hint="free some")

        write, store.write_document = store.write_document, full  # type: ignore[method-assign]
        with pytest.raises(StoreError) as caught:
            await work.create_session("s1", model=model, profile="bare")
        assert caught.value.code == "store.no_space"
        store.write_document = write  # type: ignore[method-assign]
        assert await runtime.sessions.count() == 0
        assert not list((tmp_path / "home").glob("sessions/*/s1"))
        assert not list((tmp_path / "home").glob("owners/s1"))
        status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
        assert sum(row["load"] for row in status["hosts"]) == 0
        fine = await work.create_session("s2", model=model, profile="bare")
        assert (await (await fine.main.submit("x")).result(10)).text == "did x"


async def test_an_opening_that_failed_closes_nothing_that_is_another_claims(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        cluster = cluster_of(runtime)
        store = core_of(cluster, (await hosts_of(runtime, "sessions"))[0])._services.store
        main = Stream("s1", "main")
        living: list[Any] = []

        async def overtaken(*_args: Any) -> int:
            for name in await hosts_of(runtime, "agents"):
                core: Any = cluster._held[name].core
                if main in core._agents:
                    core._claims[main] = "another"
                    living.append(core)
            raise StoreError("no space", code="store.no_space", hint="free some")

        store.write_document = overtaken  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await work.create_session("s1", model=model, profile="bare")
        (host,) = living
        assert main in host._agents and not host._agents[main].closed


async def test_a_creation_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        (host,) = await hosts_of(runtime, "sessions")
        store = core_of(cluster_of(runtime), host)._services.store
        entered = asyncio.Event()

        async def hang(*_args: Any) -> int:
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError

        store.write_document = hang  # type: ignore[method-assign]
        creating = asyncio.create_task(work.create_session("s1", model=model, profile="bare"))
        await asyncio.wait_for(entered.wait(), 10)
        cluster_of(runtime).kill_host(host)
        session = await asyncio.wait_for(creating, 30)
        assert session.id == "s1" and await runtime.sessions.count() == 1
        assert (await (await session.main.submit("x")).result(10)).text == "did x"


async def test_a_creation_that_comes_too_late_takes_nothing_from_the_one_that_did_it(tmp_path: Path) -> None:
    """A host that was taken for lost goes on with its creation after another one has done it under the same nonce."""
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        (twin,) = await hosts_of(runtime, "sessions")
        cluster = cluster_of(runtime)
        store = core_of(cluster, twin)._services.store
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def late(*_args: Any) -> int:
            entered.set()
            await go_on.wait()
            raise StoreError("away", code="store.unavailable")

        store.write_document = late  # type: ignore[method-assign]
        creating = asyncio.create_task(work.create_session("s1", model=model, profile="bare"))
        await asyncio.wait_for(entered.wait(), 10)
        (spec,) = [call.cr_frame.f_locals["spec"] for call in _running(core_of(cluster, twin).create_session)]
        other = f"{runtime.connection.home_id}/sessions-other"
        await cluster.start_host("sessions", other)
        registry = runtime.connection.registry
        await registry.call("forget_session", "s1", timeout_s=5, group="control")
        await cluster.peer(other).call("create_session", spec, timeout_s=20)
        go_on.set()
        with pytest.raises(StoreError):
            await creating
        assert [row.id for row in await runtime.sessions.list_recent()] == ["s1"]
        session = await work.resume("s1", model=model)
        assert session._link.host == other
        assert (await session.update(title="T"))["title"] == "T"
        assert (await (await session.main.submit("x")).result(10)).text == "did x"


def _running(method: Any) -> list[Any]:
    """The coroutines of a method that are under way."""
    found: list[Any] = []
    for task in asyncio.all_tasks():
        one: Any = task.get_coro()
        while one is not None and hasattr(one, "cr_code"):
            if one.cr_code is method.__func__.__code__:
                found.append(one)
            one = one.cr_await
    return found


async def test_a_session_of_another_program_is_in_use(tmp_path: Path) -> None:
    async with running(tmp_path, claim_timeout_s=0.2) as (first, _, model):
        session = await first.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        async with running(tmp_path, claim_timeout_s=0.2) as (second, _, _model):
            with pytest.raises(KimiRayError) as caught:
                await second.workspace(tmp_path / "work").resume("s1")
            assert caught.value.code == "session.in_use"
            assert [row.id for row in await second.sessions.list_recent()] == ["s1"]
            other = await second.workspace(tmp_path / "work").create_session("s2", model=model, profile="bare")
            assert (await (await other.main.submit("y")).result(10)).text == "did y"
            assert (await (await session.main.submit("x")).result(10)).text == "did x"
            await session.close()
            again = await second.workspace(tmp_path / "work").resume("s1")
            assert (await (await again.main.submit("z")).result(10)).turn == 1


async def test_two_creations_of_one_id_make_one_session(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        results = await asyncio.gather(
            *(work.create_session("same", model=model, profile="bare") for _ in range(5)), return_exceptions=True
        )
        made = [result for result in results if not isinstance(result, BaseException)]
        refused = [result for result in results if isinstance(result, SessionError)]
        assert len(made) == 1 and [error.code for error in refused] == ["session.exists"] * 4
        assert (await (await made[0].main.submit("x")).result(10)).text == "did x"


async def test_calls_to_a_session_that_is_not_live_say_so(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, _model):
        (host,) = await hosts_of(runtime, "sessions")
        peer = cluster_of(runtime).peer(host)
        for method, args, group in (
            ("session_info", ("nobody",), "control"),
            ("agent_host", ("nobody", "main"), "default"),
            ("flush_session", ("nobody",), "store"),
            ("read_rows", (SwarmKey("nobody", "r", "c"), 0, 1, 0.0), "wait"),
        ):
            with pytest.raises(SessionError) as caught:
                await peer.call(method, *args, timeout_s=5, group=group)  # type: ignore[arg-type]
            assert caught.value.code == "session.not_live"
        await peer.call("close_session", "nobody", timeout_s=5)
        await peer.call("note_activity", [], timeout_s=5, group="control")
