"""Forks on Ray: with directories and live forks, and with the processes killed that make them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kimi_ray import KimiRayError, Runtime, Workspace, open_store
from kimi_ray.config import RuntimeConfig
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from tests.actors.conftest import until
from tests.actors.fault_models import FAST_ECHO
from tests.actors.faults import hosts_of, kill, read_session, store_of
from tests.actors.test_processes import ROOT

COUNT = 16


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config, hosts_per_node=2) as runtime:
        yield runtime


@pytest.fixture
def workspace(runtime: Runtime, tmp_path: Path) -> Workspace:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("a")
    return runtime.workspace(tmp_path / "work")


async def forks_of(home: str, source: str) -> list[str]:
    """The forks in the home, each checked to be whole."""
    found = [d for d in await open_store(home).list_documents() if d.session_id != source]
    for document in found:
        assert document.value["forked_from"]["session_id"] == source
        await read_session(home, document.session_id)
    return [document.session_id for document in found]


async def test_forks_come_to_life_with_their_directories_and_go_on(runtime: Runtime, workspace: Workspace) -> None:
    source = await workspace.create_session(model=FAST_ECHO, profile="bare")
    for text in ("one", "two"):
        await (await source.main.submit(text)).result(60)
    forks = await workspace.fork_many(source.id, 6, at="0", workdir="copy", seeds=1)
    results = await asyncio.gather(*[(await fork.main.continue_turn()).result(60) for fork in forks])
    assert [result.text for result in results] == ["did one"] * 6
    headers = [(await open_store(runtime.config.home).inspect(Stream(fork.id, "main"))).header for fork in forks]
    places = {header["bind"]["workdir"]["prepared"] for header in headers}
    assert len(places) == 6 and all(Path(place, "a.txt").exists() for place in places)
    await asyncio.gather(*(fork.close() for fork in forks))
    back = await workspace.resume(forks[3].id)
    assert (await (await back.main.submit("three")).result(60)).turn == 2
    helper = await source.fork_agent()
    assert (await (await helper.submit("help")).result(60)).text == "did help"
    await asyncio.gather(*(workspace.delete(fork.id) for fork in forks))
    assert not any(Path(place).exists() for place in places)
    assert (await (await source.main.submit("three")).result(60)).text == "did three"


@pytest.mark.parametrize("kind", ["sessions", "store"])
async def test_sixteen_or_none_when_a_process_is_killed(runtime: Runtime, workspace: Workspace, kind: str) -> None:
    source = await workspace.create_session("source", model=FAST_ECHO, profile="bare")
    await (await source.main.submit("one")).result(60)
    chance = random.Random(kind)
    for _ in range(2):
        before = set(await forks_of(runtime.config.home, "source"))
        forking = asyncio.ensure_future(
            runtime.forks.publish("source", COUNT, at="0", workdir=Workdir.copy(workspace.path))
        )
        await asyncio.sleep(chance.uniform(0.0, 0.25))
        names = [store_of(runtime)] if kind == "store" else [h["name"] for h in await hosts_of(runtime, "sessions")]
        for name in names:
            await kill(runtime, name)
        try:
            made = {fork.id for fork in await forking}
        except KimiRayError as error:
            assert error.retryable, error
            made = set[str]()
        assert len(made) in (0, COUNT)

        async def settled(made: set[str] = made, before: set[str] = before) -> bool:
            return set(await forks_of(runtime.config.home, "source")) - before == made

        await until(settled)
    assert (await (await source.main.submit("two")).result(60)).text == "did two"


DRIVER = """
import asyncio, sys
from kimi_ray import Runtime
from kimi_ray.settings import Workdir

async def main(home, namespace, address, work):
    async with Runtime.connect(
        home, address, namespace, hosts_per_node=2, close_timeout_s=10, claim_timeout_s=8,
    ) as runtime:
        print("connected", flush=True)
        workspace = runtime.workspace(work)
        await workspace.fork_many("source", 16, at="0", workdir=Workdir.copy(work))
        print("forked", flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_sixteen_or_none_when_the_driver_is_killed(
    runtime: Runtime, workspace: Workspace, local_ray: str
) -> None:
    source = await workspace.create_session("source", model=FAST_ECHO, profile="bare")
    await (await source.main.submit("one")).result(60)
    home, namespace = runtime.config.home, runtime.config.namespace
    groups = Path(home, "unpublished", "groups")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", DRIVER, home, namespace, local_ray, workspace.path],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        stdout = driver.stdout
        assert stdout is not None
        assert (await asyncio.to_thread(stdout.readline)).strip() == "connected"
        async with asyncio.timeout(60):
            while not any(groups.glob("*")) and not len(list(Path(home).glob("sessions/*/*"))) > 1:
                await asyncio.sleep(0.002)
    finally:
        driver.send_signal(signal.SIGKILL)
        await asyncio.to_thread(driver.wait)

    async def all_or_none() -> bool:
        """Also after a while, when whatever was under way has come to its end."""
        return not any(groups.glob("*")) and len(await forks_of(home, "source")) in (0, COUNT)

    await until(all_or_none)
    assert (await (await source.main.submit("two")).result(60)).text == "did two"
