"""A creation whose answer was lost: its own session is found, another one's of the same id is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import RuntimeFault, SessionError
from kimi_ray.runtime import Runtime
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


async def lose_the_first_creation(runtime: Runtime, *, behind: bool) -> None:
    """The session host dies in the next creation: ``behind`` the whole of it, or before anything of it."""
    (name,) = await hosts_of(runtime, "sessions")
    cluster = cluster_of(runtime)
    core: Any = cluster._held[name].core
    create = core.create_session

    async def dying(spec: Any) -> Any:
        if behind:
            await create(spec)
        cluster.kill_host(name)
        raise RuntimeFault("gone", code="infra.actor_died")

    core.create_session = dying


@pytest.mark.parametrize("closed", [True, False])
async def test_the_session_of_another_one_is_not_taken_for_the_one_that_was_to_be_made(
    tmp_path: Path, closed: bool
) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        theirs = await work.create_session("s1", title="Theirs", model=model, profile="bare")
        if closed:
            await theirs.close()
        await lose_the_first_creation(runtime, behind=False)
        with pytest.raises(SessionError) as caught:
            await work.create_session("s1", title="Mine", model=model, profile="bare")
        assert caught.value.code == "session.exists"


async def test_a_creation_that_did_happen_is_found(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        await lose_the_first_creation(runtime, behind=True)
        mine = await work.create_session("s1", title="Mine", model=model, profile="bare")
        assert (await mine.metadata())["title"] == "Mine"
        assert (await (await mine.main.submit("x")).result(10)).text == "did x"
