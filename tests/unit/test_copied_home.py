"""A copy of a home beside the home that it was copied from: both have one id, and so one place for directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kimi_ray.hosts.agent_services import SleepingWorkdirs, workdirs_base
from kimi_ray.hosts.agent_workdirs import AgentWorkdirs
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Workdir
from kimi_ray.tools.workdirs import belongs_to, leftovers
from tests.unit.runtime_fixtures import running


def workdirs_of(runtime: Runtime) -> AgentWorkdirs:
    cluster = runtime.connection.cluster
    store = StoreCalls(cluster, runtime.config.shards, 5.0)
    return AgentWorkdirs(workdirs_base(cluster.home_id), store, SleepingWorkdirs())


async def test_a_copied_home_sweeps_nothing_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    async with running(tmp_path) as (runtime, _stage, model):
        await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
    shutil.copytree(tmp_path / "home", tmp_path / "copy" / "home")
    async with running(tmp_path) as (runtime, _stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        private = Workdir.copy(str(tmp_path / "tree"))
        session = await workspace.create_session(model=model, profile="bare", workdir=private)
        await (await session.main.submit("hello")).result(20)
        base = Path(workdirs_base(runtime.connection.cluster.home_id))
        mine = [one for one in base.iterdir() if not one.name.startswith(".")]
        assert len(mine) == 1
        monkeypatch.setattr(leftovers, "_age_s", lambda _path: 7200.0)
        async with running(tmp_path / "copy") as (other, _stage, _model):
            assert other.connection.cluster.home_id == runtime.connection.cluster.home_id
            assert await other.sessions.get(session.id) is None
            for _ in range(100):  # its host sweeps when it starts, and there is one sweep at a time
                assert await workdirs_of(other).sweep() == 0 and mine[0].is_dir()
        assert await workdirs_of(runtime).sweep() == 0 and mine[0].is_dir()
        await session.close()
        await runtime.delete(session.id)
    shutil.rmtree(base)


def test_a_home_that_was_moved_goes_on(tmp_path: Path) -> None:
    base, first, second = (str(tmp_path / name) for name in ("base", "first", "second"))
    Path(first).mkdir()
    assert belongs_to(base, first) and belongs_to(base, first)
    assert not belongs_to(base, second) and belongs_to(base, first)
    Path(first).rename(second)
    assert belongs_to(base, second) and not belongs_to(base, first)
    assert [one.name for one in Path(base).iterdir()] == [".home"]
