"""Creations while the store's process dies: what was not published is gone with it, and is made once more."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.store import open_store
from tests.unit.runtime_fixtures import running
from tests.unit.test_runtime_fork_faults import Accident, kill


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["open_session", "place_agents", "run_many", "write_documents"])
async def test_the_store_dies_while_a_session_is_created(tmp_path: Path, method: str, after: bool) -> None:
    async with running(tmp_path, durability="os", store_timeout_s=10.0) as (runtime, _, model):
        accident = Accident(runtime, method, 0, after, lambda: kill(runtime, "store"))
        workspace = runtime.workspace(tmp_path / "work")
        try:
            session = await workspace.create_session("made", model=model, profile="bare", title="once")
        except StoreError as error:
            # Main lived already, with a log that was taken back under it: nothing is left.
            assert error.code == "store.fenced" and (method, after) in (("run_many", True), ("write_documents", False))
            assert await open_store(tmp_path / "home").list_documents() == []
            session = await workspace.create_session("again", model=model, profile="bare", title="once")
        assert accident.happened
        assert (await (await session.main.submit("one")).result(10)).text == "did one"
        await session.close()
        (document,) = await open_store(tmp_path / "home").list_documents()
        assert (document.session_id, document.value["title"]) == (session.id, "once")
        assert not list((tmp_path / "home" / "unpublished" / "new").iterdir())
