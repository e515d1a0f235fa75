"""Directories of forks while hosts die that make them: each fork has one, and nobody else's is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.agent_services import workdirs_base
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Workdir
from tests.unit.runtime_fixtures import cluster_of, running
from tests.unit.test_runtime_fork_faults import Accident, kill


def private(runtime: Runtime) -> list[str]:
    """The session of each private directory on this node, also of those that are half made."""
    base = workdirs_base(cluster_of(runtime).home_id)
    names = os.listdir(base) if os.path.isdir(base) else []
    return sorted(name.lstrip(".").partition(".")[0] for name in names if "session_" in name)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "method"), [("agents", "make_workdirs"), ("sessions", "make_workdirs"), ("sessions", "publish")]
)
async def test_a_host_dies_that_makes_them(tmp_path: Path, kind: str, method: str, after: bool) -> None:
    async with running(tmp_path, durability="os") as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)
        accident = Accident(runtime, method, 0, after, lambda: kill(runtime, kind))
        made = await runtime.forks.publish("source", 4, at="0", workdir=Workdir.copy(workspace.path))
        assert accident.happened
        assert private(runtime) == sorted(fork.id for fork in made)
        assert (await (await source.main.submit("two")).result(10)).text == "did two"


async def test_they_come_to_nothing_when_their_host_dies_as_well(tmp_path: Path) -> None:
    async with running(tmp_path, durability="os") as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session("source", model=model, profile="bare")
        await (await source.main.submit("one")).result(10)

        async def lose() -> None:
            """The source moves, so to say, and the host is gone that made the directories."""
            await kill(runtime, "agents")

        accident = Accident(runtime, "check_quiescence", 0, False, lose)
        with pytest.raises(KimiRayError) as failed:
            await runtime.forks.publish("source", 4, workdir=Workdir.copy(workspace.path))
        assert accident.happened and failed.value.code == "session.quiescence_lost"
        assert len(await runtime.sessions.list_recent()) == 1
        assert private(runtime) == []
