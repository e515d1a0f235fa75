"""The named races of the store that need a live turn or a child, in a whole runtime in this process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.hosts.ports import store_name
from kimi_ray.runtime import Runtime
from kimi_ray.store import StoreOptions, Stream, open_store_for_writing
from kimi_ray.store.seam import LogView, Page
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

PATIENCE_S = 20.0


async def ask_store(runtime: Runtime, method: str, *args: Any) -> Any:
    """A call to the store's host."""
    cluster = cluster_of(runtime)
    return await cluster.peer(store_name(cluster.home_id, 0)).call(method, *args, timeout_s=PATIENCE_S)


async def restart_store(runtime: Runtime) -> None:
    """The store dies and another takes its place; its locks go as the kernel lets go of those of a process."""
    cluster = cluster_of(runtime)
    name = store_name(cluster.home_id, 0)
    cluster.kill_host(name)
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.realpath(entry).startswith(f"{runtime.config.home}/writers/"):
            os.close(int(entry.name))
    if name not in [host.name for host in await cluster.list_hosts()]:
        await cluster.start_host("store", name)


async def test_a_load_at_a_restart_with_a_live_turn(tmp_path: Path) -> None:
    """The new store does not know whether the turn's agent lives: it repairs nothing until somebody says that not."""
    async with running(tmp_path, durability="os") as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        main = Stream("s1", "main")
        stage.gate.clear()
        prompt = await session.main.submit("wait")
        await stage.until_running(1)
        await session.flush()
        await restart_store(runtime)
        seen: LogView = await ask_store(runtime, "inspect", main)
        assert seen.closers, "the turn is open"
        for knowledge in (None, True):
            with pytest.raises(StoreError) as caught:
                await ask_store(runtime, "load", main, knowledge)
            assert caught.value.code == "log.turn_open"
        stage.gate.set()
        assert (await prompt.result(PATIENCE_S)).text == "did wait"
        await session.flush()
        page: Page = await ask_store(runtime, "read_from", main, 0)
        assert not any(b'"interrupted"' in line for line in page.lines)
        assert (await ask_store(runtime, "load", main, None)).closers == ()
        assert (await (await session.main.submit("more")).result(PATIENCE_S)).text == "did more"


async def test_eight_live_loads_at_concurrency_four(tmp_path: Path) -> None:
    """Loads of live logs whose agents write all the while: every one ends, and no agent is disturbed."""
    async with running(tmp_path, durability="os") as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        sessions = [await work.create_session(f"s{n}", model=model, profile="bare") for n in range(8)]
        four = asyncio.Semaphore(4)

        async def load(session_id: str) -> LogView:
            async with four:
                return await ask_store(runtime, "load", Stream(session_id, "main"), None)

        for text in ("one", "two"):
            prompts = [await session.main.submit(text) for session in sessions]
            done = await asyncio.gather(*(prompt.result(PATIENCE_S) for prompt in prompts))
            assert {result.text for result in done} == {f"did {text}"}
            flushes = [session.flush() for session in sessions]
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*flushes)
                views = await asyncio.gather(*(load(session.id) for session in sessions))
            assert {(view.closers, view.epoch) for view in views} == {((), 1)}


async def test_a_child_is_lost_after_its_report_and_then_forked_there(tmp_path: Path) -> None:
    """``subagent/completed`` names a seq that the child flushed through: a fork there is whole, whoever was lost."""
    async with running(tmp_path, durability="disk") as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")
        handle = await session.start_swarm("{{item}}", ["a", "b"], profile="bare")
        async with asyncio.timeout(PATIENCE_S):
            while not [event async for event in session.main.events() if event.type == "subagent/completed"]:
                await asyncio.sleep(0.01)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        await restart_store(runtime)
        await handle.result(PATIENCE_S)
        reports = [event.data async for event in session.main.events() if event.type == "subagent/completed"]
    assert len(reports) == 2
    store = await open_store_for_writing(str(tmp_path / "home"), StoreOptions())
    for number, report in enumerate(reports):
        child, cut = Stream("s1", report["agent_id"]), report["seq"]
        source = await store.read_from(child, 0)
        assert source.next_seq >= cut
        assert report["message_seq"] < cut
        view = await store.inspect(child)
        copy = Stream("s1", f"fork-{number}")
        header = {**view.header, "agent_id": copy.agent_id, "origin": "fork"}
        grant = await store.fork(child, cut, header, "f")
        assert grant.next_seq == cut
        assert grant.epoch > report["epoch"]
        assert (await store.read_from(copy, 0)).lines == source.lines[:cut]
        assert (await store.inspect(copy)).closers == (), "a report comes after the turn"
    await store.close()
