"""A session that closes: whoever comes in the middle of it leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.hosts import live_session
from kimi_ray.hosts.session_host import SessionHost
from kimi_ray.runtime import Runtime
from tests.unit.hosts.fakes import until
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


async def core_of(runtime: Runtime) -> SessionHost:
    (name,) = await hosts_of(runtime, "sessions")
    core = cluster_of(runtime)._held[name].core
    assert isinstance(core, SessionHost)
    return core


async def agents_of(runtime: Runtime, session_id: str) -> list[str]:
    found: list[str] = []
    for name in await hosts_of(runtime, "agents"):
        core: Any = cluster_of(runtime)._held[name].core
        found += [stream.agent_id for stream in core._agents if stream.session_id == session_id]
    return sorted(found)


def slow_document(core: SessionHost) -> tuple[asyncio.Event, asyncio.Event]:
    """The document of s1 closes slowly: an event when it is asked to, and one that lets it."""
    document, asked, goes_on = core._sessions["s1"].document, asyncio.Event(), asyncio.Event()
    close = document.close

    async def slowly() -> None:
        asked.set()
        await goes_on.wait()
        await close()

    document.close = slowly  # type: ignore[method-assign]
    return asked, goes_on


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """An event when an agent is about to be brought to life for a session, and one that lets it."""
    comes, opens = asyncio.Event(), asyncio.Event()
    activate: Callable[..., Awaitable[str]] = live_session.activate_agent

    async def slowly(*args: Any, **said: Any) -> str:
        comes.set()
        await opens.wait()
        return await activate(*args, **said)

    monkeypatch.setattr(live_session, "activate_agent", slowly)
    return comes, opens


async def test_an_agent_that_is_brought_to_life_while_its_session_closes_is_closed_with_it(
    tmp_path: Path, gate: tuple[asyncio.Event, asyncio.Event]
) -> None:
    comes, opens = gate
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        await session.fork_agent()
        core = await core_of(runtime)
        addressing = asyncio.create_task(core.agent_host("s1", "agent-1"))
        await comes.wait()
        _, goes_on = slow_document(core)
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(0.05)
        opens.set()
        await asyncio.wait([addressing])  # the claim of the session is still held
        goes_on.set()
        await asyncio.wait_for(closing, 10)
        assert await agents_of(runtime, "s1") == []


async def test_an_agent_that_is_asked_for_while_its_session_closes_stays_cold(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        await session.fork_agent()
        core = await core_of(runtime)
        asked, goes_on = slow_document(core)
        closing = asyncio.create_task(session.close())
        await asked.wait()
        with pytest.raises(SessionError) as caught:
            await core.agent_host("s1", "agent-1")
        assert caught.value.code == "session.not_live"
        with pytest.raises(SessionError):
            await core.agent_host("s1", "main", (await hosts_of(runtime, "agents"))[0])
        goes_on.set()
        await asyncio.wait_for(closing, 10)
        assert await agents_of(runtime, "s1") == []


async def test_a_session_that_is_fenced_while_it_closes_is_closed_without_a_defect(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        core = await core_of(runtime)
        live = core._sessions["s1"]
        close = live.document.close

        async def fenced() -> None:
            core._fenced(live, KimiRayError("it lives elsewhere", code="session.fenced"))
            await close()

        live.document.close = fenced  # type: ignore[method-assign]
        await session.close()
        assert not core._sessions and not core._opening._scopes


async def test_a_session_that_is_created_while_its_host_closes_is_closed_too(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        await work.create_session("s0", model=model, profile="bare")
        core = await core_of(runtime)
        store, began, goes_on = core._services.store, asyncio.Event(), asyncio.Event()
        write = store.write_document

        async def slowly(*args: Any) -> int:
            if args[0] == "s1":
                began.set()
                await goes_on.wait()
            return await write(*args)

        store.write_document = slowly  # type: ignore[method-assign]
        creating = asyncio.create_task(work.create_session("s1", model=model, profile="bare"))
        await began.wait()
        closing = asyncio.create_task(core.close())
        await until(lambda: "s0" not in core._sessions)
        goes_on.set()
        await asyncio.wait_for(closing, 10)
        await asyncio.wait([creating])
        assert not core._sessions
        assert await agents_of(runtime, "s1") == []
        with pytest.raises(SessionError) as caught:
            await core.resume_session(core_spec(runtime, work, model))
        assert caught.value.code == "session.not_live"


def core_spec(runtime: Runtime, work: Any, model: str) -> Any:
    """Enough of a spec for a host that takes nobody any more."""
    from kimi_ray.agent.specs import AgentSpec
    from kimi_ray.hosts.specs import SessionSpec
    from kimi_ray.settings import Profile
    from kimi_ray.store.seam import Stream

    main = AgentSpec(
        stream=Stream("s1", "main"), nonce="n", profile=Profile(name="bare"), model=runtime.resolve_model(model)
    )
    return SessionSpec("s1", "n", work.id, work.path, create=False, main=main)


async def test_a_session_with_large_last_events_is_reconciled_with_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimi_ray.hosts import reconciling

    monkeypatch.setattr(reconciling, "_TAIL_BYTES", 3000)
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        for number in range(3):
            await (await session.main.submit(f"prompt {number} " + "x" * 2000)).result(10)
        live = (await core_of(runtime))._sessions["s1"]
        live.document._value["last_prompt"] = "an older one"
        await live.reconcile()
        assert str(live.document.snapshot()["last_prompt"]).startswith("prompt 2")


async def slow_creation(runtime: Runtime, session_id: str) -> tuple[asyncio.Event, asyncio.Event]:
    """The document of a new session is written slowly: an event when it is to be, and one that lets it."""
    store, began, goes_on = (await core_of(runtime))._services.store, asyncio.Event(), asyncio.Event()
    write = store.write_document

    async def slowly(*args: Any) -> int:
        if args[0] == session_id:
            began.set()
            await goes_on.wait()
        return await write(*args)

    store.write_document = slowly  # type: ignore[method-assign]
    return began, goes_on


async def test_a_creation_that_is_given_up_is_this_programs_to_close(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        began, goes_on = await slow_creation(runtime, "s1")
        creating = asyncio.create_task(work.create_session("s1", model=model, profile="bare"))
        await began.wait()
        creating.cancel()
        await asyncio.wait([creating])
        goes_on.set()
        await until(lambda: "s1" in runtime._links)
        assert runtime._links["s1"].opened


async def test_a_session_that_is_created_while_the_runtime_closes_is_closed_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        began, goes_on = await slow_creation(runtime, "s1")
        creating = asyncio.create_task(work.create_session("s1", model=model, profile="bare"))
        await began.wait()
        core = await core_of(runtime)
        closing = asyncio.create_task(runtime.close())
        ended: list[bool] = []
        disconnect = runtime.connection.disconnect

        async def noting(**how: Any) -> None:
            ended.append(bool(core._sessions))
            await disconnect(**how)

        runtime.connection.disconnect = noting  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        goes_on.set()
        await asyncio.wait_for(closing, 10)
        await asyncio.wait([creating])
        assert ended == [False]
        assert (tmp_path / "home").exists() and runtime._links["s1"].closed


async def test_a_host_that_closes_does_not_wait_for_what_opens_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, _model):
        core = await core_of(runtime)
        async with core._only("s1"):  # a fork that copies for minutes, say: the next one to open the home undoes it
            await asyncio.wait_for(core.close(), 5)
