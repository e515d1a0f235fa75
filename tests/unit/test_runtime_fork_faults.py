"""Forks while hosts die: the driver asks again, and there are exactly as many as asked for, or none."""

from __future__ import annotations

import asyncio
import os
import random
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import store_name
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Workdir
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream
from tests.unit.runtime_fixtures import FAST, cluster_of, hosts_of, running

COUNT = 16
PLACES = ("fork_sessions", "begin_publication", "make_workdirs", "copy_session", "check_quiescence", "publish")


class Accident:
    """Something that happens before or after a certain call between cores."""

    def __init__(self, runtime: Runtime, method: str, which: int, after: bool, happen: Any) -> None:
        self._cluster: Any = cluster_of(runtime)
        self._at = (method, which)
        self._after = after
        self._happen = happen
        self._seen = 0
        self._call = self._cluster._call
        self._cluster._call = self._watched
        self.happened = False

    async def _watched(self, name: str, method: str, *rest: Any) -> Any:
        hit = method == self._at[0] and self._seen == self._at[1] and not self.happened
        self._seen += method == self._at[0]
        if hit and not self._after:
            await self._now()
        answer = await self._call(name, method, *rest)
        if hit and self._after:
            await self._now()
        return answer

    async def _now(self) -> None:
        """In a task of nobody's, which a killed caller does not take with it."""
        self.happened = True
        await asyncio.shield(asyncio.get_running_loop().create_task(self._happen(), context=Context()))


async def kill(runtime: Runtime, kind: str) -> None:
    """The hosts of a kind die; a store's locks go as the kernel lets go of those of a process."""
    cluster = cluster_of(runtime)
    for host in await hosts_of(runtime, kind):
        cluster.kill_host(host)
    if kind == "store":
        for entry in Path("/proc/self/fd").iterdir():
            if os.path.realpath(entry).startswith(f"{runtime.config.home}/writers/"):
                os.close(int(entry.name))
        await cluster.start_host("store", store_name(cluster.home_id, 0))


def cases() -> list[tuple[str, str, int, bool]]:
    chance = random.Random(20)
    found = [
        (kind, method, chance.randrange(COUNT) if method == "copy_session" else 0, after)
        for kind in ("sessions", "store")
        for method in PLACES
        for after in (False, True)
    ]
    return chance.sample(found, 12)


@pytest.mark.parametrize(("kind", "method", "which", "after"), cases())
async def test_a_host_that_dies_in_the_middle(tmp_path: Path, kind: str, method: str, which: int, after: bool) -> None:
    home = tmp_path / "home"
    async with running(tmp_path, durability="os", store_timeout_s=10.0) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        (tmp_path / "work" / "a.txt").write_text("a")
        source = await workspace.create_session("source", model=model, profile="bare")
        for text in ("one", "two"):
            await (await source.main.submit(text)).result(10)
        accident = Accident(runtime, method, which, after, lambda: kill(runtime, kind))
        failed: KimiRayError | None = None
        try:
            forks = await workspace.fork_many("source", COUNT, workdir=Workdir.copy(workspace.path), seeds=3)
            assert len(forks) == COUNT
        except KimiRayError as error:
            failed = error
        assert accident.happened
        assert failed is None, failed
    await look(home, COUNT)
    async with Runtime.connect(home, "in-process", config=FAST) as again:
        ids = [d.session_id for d in await open_store(home).list_documents() if d.session_id != "source"]
        back = await again.workspace(tmp_path / "work").resume(ids[0], model=model)
        assert (await (await back.main.submit("three")).result(10)).text == "did three"
        assert [m["content"][0]["text"] for m in await back.main.messages()][::2] == ["one", "two", "three"]


async def look(home: Path, count: int) -> None:
    """So many forks of one group, each whole and with a directory of its own; nothing of others."""
    store = open_store(home)
    forks = [d for d in await store.list_documents() if d.session_id != "source"]
    assert len(forks) == count
    assert sorted(d.value["fork_index"] for d in forks) == list(range(count))
    assert len({d.value["fork_group"] for d in forks}) == min(1, count)
    logs = [log for log in await store.list() if log.stream.session_id != "source"]
    assert sorted(log.stream.session_id for log in logs) == sorted(d.session_id for d in forks)
    seeds: list[bytes] = []
    for fork in forks:
        view = await store.inspect(Stream(fork.session_id, "main"))
        length = view.header["seed_length"]
        seeds.append(b"\n".join((await store.read_from(Stream(fork.session_id, "main"), 0, length)).lines))
        assert (Path(view.header["bind"]["workdir"]["prepared"]) / "a.txt").read_text() == "a"
    assert len(set(seeds)) == min(1, count)


async def test_a_driver_that_dies_leaves_all_of_them_or_none(tmp_path: Path) -> None:
    """It asked, and nobody waits for the answer any more: what was asked for happens, or nothing."""
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        for steps in (0, 1, 2, 5, 20, 100):
            asked = asyncio.ensure_future(runtime.forks.publish("source", 4))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            async with asyncio.timeout(10):
                while True:
                    now = [d for d in await open_store(tmp_path / "home").list_documents() if d.session_id != "source"]
                    if not now and not list((tmp_path / "home" / "unpublished" / "groups").glob("*")):
                        break
                    await asyncio.sleep(0.02)


async def test_a_fork_asked_twice_is_one(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        accident = Accident(runtime, "fork_sessions", 0, True, lambda: kill(runtime, "sessions"))
        forks = await runtime.forks.publish("source", 3)
        assert accident.happened
        found = [d.session_id for d in await open_store(tmp_path / "home").list_documents()]
        assert sorted(found) == sorted(["source", *(fork.id for fork in forks)])


async def test_a_source_whose_agents_were_just_lost(tmp_path: Path) -> None:
    """What was durable is forked; the turn that was open is open in the source, and closed in the fork."""
    async with running(tmp_path, durability="os") as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        stage.gate.clear()
        prompt = await source.main.submit("two", on_interrupt="continue")
        await stage.until_running(1)
        await source.flush()
        await kill(runtime, "agents")
        fork = await workspace.fork("source", at="0")
        assert len(await fork.main.messages()) == 2
        stage.gate.set()
        assert (await prompt.result(20)).text == "did two"
        await fork.close()
        await source.close()
        whole = await workspace.fork("source")
        assert [m["content"][0]["text"] for m in await whole.main.messages()][-1] == "did two"


async def test_a_crashed_source_is_forked_as_far_as_it_came(tmp_path: Path) -> None:
    async with running(tmp_path, durability="os") as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        stage.gate.clear()
        await source.main.submit("two")
        await stage.until_running(1)
        await source.flush()
        for kind in ("sessions", "agents"):
            await kill(runtime, kind)
        stage.gate.set()
        for fork in (
            (await runtime.forks.publish("source"))[0],
            (await runtime.forks.publish("source", at="1"))[0],
        ):
            back = await workspace.resume(fork.id, model=model)
            messages = await back.main.messages()
            assert [m["content"][0]["text"] for m in messages] == ["one", "did one", "two"]
            assert (await (await back.main.continue_turn()).result(10)).text == "did two"
        view = await open_store(tmp_path / "home").inspect(Stream("source", "main"))
        assert [closer["type"] for closer in view.closers] == ["step/end", "turn/end"], "the source is as it was"


async def test_forks_that_cannot_come_to_life_are_taken_back(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        (tmp_path / "gone").mkdir()

        async def remove() -> None:
            (tmp_path / "gone").rmdir()

        Accident(runtime, "publish", 0, True, remove)
        with pytest.raises(KimiRayError) as caught:
            await workspace.fork_many("source", 3, workdir=Workdir.shared(str(tmp_path / "gone"), writes=True))
        assert caught.value.code.startswith("workdir."), caught.value
        assert [d.session_id for d in await open_store(tmp_path / "home").list_documents()] == ["source"]
        assert await runtime.sessions.count() == 1
