"""``rt.workspaces`` and listings through a whole runtime."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import kimi_ray
from kimi_ray.app import WorkspaceEntry, WorkspaceList
from kimi_ray.errors import SessionError, StoreError
from kimi_ray.ids import workspace_id


class Calls:
    """A store that notes what is touched."""

    def __init__(self) -> None:
        self.touched: list[str] = []
        self.gate = asyncio.Event()
        self.error: StoreError | None = None

    async def list_workspaces(self) -> list[WorkspaceEntry]:
        return [WorkspaceEntry(id="a", root="/a", name="a", created_at=1, last_opened_at=1, alias_ids=("b",))]

    async def touch_workspace(self, root: str, name: str | None = None) -> WorkspaceEntry:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.touched.append(root)
        return (await self.list_workspaces())[0]

    async def update_workspace(self, workspace_id: str, name: str) -> WorkspaceEntry:
        raise SessionError(workspace_id, code="workspace.unknown")

    async def delete_workspace(self, workspace_id: str) -> None:
        raise SessionError(workspace_id, code="workspace.unknown")


async def test_a_touch_is_not_waited_for_and_not_repeated() -> None:
    calls = Calls()
    workspaces = WorkspaceList(calls)
    for path in ("/a", "/b", "/a"):
        workspaces.touch(path)
    assert calls.touched == []
    calls.gate.set()
    await workspaces.close()
    assert calls.touched == ["/a", "/b"]
    workspaces.touch("/a")
    await workspaces.close()
    assert calls.touched == ["/a", "/b"]
    assert (await workspaces.get("b")) == (await workspaces.get("a")) is not None
    assert await workspaces.get("c") is None


async def test_a_touch_that_fails_is_kept_as_data_and_tried_again() -> None:
    calls = Calls()
    calls.gate.set()
    calls.error = StoreError("full", code="store.disk_full")
    workspaces = WorkspaceList(calls)
    workspaces.touch("/a")
    await workspaces.close()
    assert workspaces.last_error is calls.error
    calls.error = None
    workspaces.touch("/a")
    await workspaces.close()
    assert calls.touched == ["/a"]


@pytest.mark.parametrize("shards", [1, 2])
async def test_through_a_runtime(tmp_path: Path, shards: int) -> None:
    place = tmp_path / "project"
    place.mkdir()
    async with kimi_ray.Runtime.connect(
        home=tmp_path / "home", address="in-process", shards=shards, default_model="scripted"
    ) as runtime:
        ids: list[str] = []
        for number in range(4):
            session = await runtime.workspace(place).create_session(
                title=f"Number {number}", tags={"n": str(number)}, model="scripted"
            )
            ids.insert(0, session.id)
            assert [one.id for one in await runtime.sessions.list_recent()] == ids
        one = workspace_id(str(place))
        assert [row.id for row in await runtime.sessions.list_recent(workspace_id=one)] == ids
        assert [row.id for row in await runtime.sessions.list_recent(tags={"n": "2"})] == [ids[1]]
        assert [row.id for row in await runtime.sessions.list_recent(text="NUMBER 3")] == [ids[0]]
        page = await runtime.sessions.page(2)
        assert [row.id for row in (await runtime.sessions.page(2, after=page.next_cursor)).items] == ids[2:]
        status = await runtime.sessions.prepare()
        assert (status.state, status.sessions is not None) == ("ready", True)
        await runtime.sessions.remove(ids[0])
        assert await runtime.sessions.get(ids[0]) is None
        other = tmp_path / "other"
        other.mkdir()
        await runtime.workspace(other).create_session(model="scripted")
        await runtime.workspaces.close()
        assert {one.root for one in await runtime.workspaces.list()} == {str(place), str(other)}
        await runtime.workspaces.forget(workspace_id(str(other)))
        entry = (await runtime.workspaces.list())[0]
        assert (entry.id, entry.root) == (one, str(place))
        assert (await runtime.workspaces.rename(one, "Mine")).name == "Mine"
        await runtime.workspaces.forget(one)
        assert await runtime.workspaces.list() == []
        assert len(await runtime.sessions.list_recent()) >= 3
