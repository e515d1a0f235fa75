"""Deletions that are cut short behind the tombstone are finished when asked again; forks of what is just deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.hosts.agent_services import workdirs_base
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Workdir
from kimi_ray.store import open_store
from tests.unit.runtime_fixtures import FAST, cluster_of, hosts_of, running
from tests.unit.test_runtime_fork_faults import Accident, kill


def private(runtime: Runtime) -> list[str]:
    """The sessions that have a private directory on this node."""
    base = workdirs_base(cluster_of(runtime).home_id)
    return sorted(name.partition(".")[0] for name in os.listdir(base) if not name.startswith("."))


async def test_its_host_dies_behind_the_tombstone(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        await workspace.create_session("source", model=model, profile="bare")
        forks = await runtime.forks.publish("source", 2, workdir=Workdir.copy(workspace.path))
        accident = Accident(runtime, "remove", 0, True, lambda: kill(runtime, "sessions"))
        await runtime.delete(forks[0].id)
        assert accident.happened
        assert private(runtime) == [forks[1].id]


async def test_everybody_dies_behind_the_tombstone(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        await workspace.create_session("source", model=model, profile="bare")
        forks = await runtime.forks.publish("source", 2, workdir=Workdir.copy(workspace.path))

        async def end() -> None:
            for name in await hosts_of(runtime, "agents"):
                cluster_of(runtime).kill_host(name)
            await kill(runtime, "sessions")

        Accident(runtime, "remove", 0, True, end)
        await runtime.delete(forks[0].id)
    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as again:
        back = await again.workspace(tmp_path / "work").resume("source", model=model)
        await (await back.main.submit("there is a host of agents again")).result(10)
        with pytest.raises(SessionError) as refused:
            await again.delete(forks[0].id)
        assert refused.value.code == "session.not_found"
        assert private(again) == [forks[1].id]


@pytest.mark.parametrize("method", ["begin_publication", "copy_session", "publish"])
async def test_a_source_that_another_program_deletes_meanwhile_is_not_found(tmp_path: Path, method: str) -> None:
    async with running(tmp_path, durability="os") as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        await source.close()
        async with Runtime.connect(tmp_path / "home", "in-process", config={**FAST, "durability": "os"}) as other:
            accident = Accident(runtime, method, 0, False, lambda: other.delete("source"))
            try:
                made = await runtime.forks.publish("source", 3, at="0")
            except KimiRayError as error:
                assert error.code == "session.not_found"
                made = []
            assert accident.happened
            left = await open_store(tmp_path / "home").list_documents()
            assert {one.session_id for one in left} == {one.id for one in made}
