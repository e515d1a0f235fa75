"""The registry of workspaces: one entry a directory, whatever it is called, and made again from the documents."""

from __future__ import annotations

import asyncio
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import SessionError, StoreError
from kimi_ray.ids import workspace_id, workspace_root_key
from kimi_ray.store.fs import RealFs
from kimi_ray.store.session_index_query import SessionQuery
from kimi_ray.store.workspace_registry import Place, Registry, WorkspaceEntry, WorkspaceRegistry, alias_ids, merged
from tests.unit.store_index.index_home import opened

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "workdir_vectors.json").read_text()
)["encodeWorkDirKey"]
X, LOWER, SLASHES = "C:\\Work\\X", "c:/work/x/", "C:/Work/X"


def registry(home: Path, *places: Place, clock: int = 1_700_000_000_000) -> WorkspaceRegistry:
    async def read() -> list[Place]:
        return list(places)

    return WorkspaceRegistry(RealFs(), str(home), read, clock=lambda: clock)


def stored(home: Path) -> dict[str, Any]:
    return json.loads((home / "workspaces.json").read_text())


async def test_touching_makes_an_entry_and_then_dates_it(tmp_path: Path) -> None:
    made = await registry(tmp_path).touch("/home/user/project")
    one = workspace_id("/home/user/project")
    assert (made.id, made.name, made.root) == (one, "project", "/home/user/project")
    again = await registry(tmp_path, clock=1_700_000_060_000).touch("/home/user/project", "Mine")
    assert (again.created_at, again.last_opened_at, again.name) == (1_700_000_000_000, 1_700_000_060_000, "Mine")
    assert stored(tmp_path) == {
        "version": 1,
        "workspaces": {
            one: {
                "root": "/home/user/project",
                "name": "Mine",
                "created_at": "2023-11-14T22:13:20.000Z",
                "last_opened_at": "2023-11-14T22:14:20.000Z",
            }
        },
        "deleted_workspace_ids": [],
    }


async def test_spellings_of_one_directory_are_one_workspace(tmp_path: Path) -> None:
    kept = registry(tmp_path, (workspace_id(LOWER), LOWER), (workspace_id(X), X))
    first = await kept.touch(X)
    assert (await kept.touch(LOWER)).id == first.id
    (only,) = await kept.list()
    assert only.alias_ids and {only.id, *only.alias_ids} == {workspace_id(X), workspace_id(LOWER)}
    for one in (workspace_id(X), workspace_id(LOWER)):
        assert set(await kept.aliases([one])) == {workspace_id(X), workspace_id(LOWER)}
    await kept.delete(first.id)
    assert set(stored(tmp_path)["deleted_workspace_ids"]) == {workspace_id(X), workspace_id(LOWER)}
    assert await kept.list() == [] == await registry(tmp_path, (workspace_id(LOWER), LOWER)).list()
    assert (await kept.touch(LOWER)).root == LOWER
    assert len(await kept.list()) == 1


def test_of_equal_roots_the_one_with_its_own_id_is_preferred() -> None:
    def entry(one: str, root: str) -> WorkspaceEntry:
        return WorkspaceEntry(id=one, root=root, name="n", created_at=1, last_opened_at=1)

    own = entry(workspace_id(X), X)
    for entries in ([entry("wd_old_000000000000", LOWER), own], [own, entry("wd_old_000000000000", LOWER)]):
        found = Registry(entries={one.id: one for one in entries})
        (shown,) = merged(found, [])
        assert shown.id == own.id and "wd_old_000000000000" in shown.alias_ids
        assert found.by_root(SLASHES) == own


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["id"]))
def test_every_vector_leads_to_all_ids_of_its_root(vector: dict[str, Any]) -> None:
    root: str = vector["input"]
    places = [(str(one["id"]), str(one["input"])) for one in VECTORS]
    same = {str(one["id"]) for one in VECTORS if one["rootKey"] == vector["rootKey"]}
    assert workspace_root_key(root) == vector["rootKey"] and workspace_id(root) == vector["id"]
    assert set(alias_ids([str(vector["id"])], Registry(), places)) >= same


NO_ENTRY = b'{"version": 1, "workspaces": {"a": 3}, "deleted_workspace_ids": []}'


NO_LIST = b'{"version": 1, "workspaces": {}, "deleted_workspace_ids": "wd_a"}'
NO_NUMBER = b'{"version": 1e400, "workspaces": {}, "deleted_workspace_ids": []}'


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]", b'{"version": 1}', NO_ENTRY, NO_LIST, NO_NUMBER])
async def test_lost_or_damaged_it_is_made_from_the_documents(tmp_path: Path, damage: bytes | None) -> None:
    if damage is not None:
        (tmp_path / "workspaces.json").write_bytes(damage)
    kept = registry(tmp_path, ("wd_a", "/a"), ("wd_b", "relative"), ("wd_c", X), ("wd_d", LOWER))
    assert sorted(one.root for one in await kept.list()) == ["/a", X]
    asides = list(tmp_path.glob("workspaces.json.damaged-*"))
    assert [one.read_bytes() for one in asides] == ([] if damage is None else [damage])
    assert len(stored(tmp_path)["workspaces"]) == 2


async def test_a_newer_registry_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "workspaces.json").write_text('{"version": 2}')
    with pytest.raises(StoreError) as caught:
        await registry(tmp_path).touch("/a")
    assert caught.value.code == "store.format_unsupported"
    assert (tmp_path / "workspaces.json").read_text() == '{"version": 2}'


async def test_operations_are_one_after_the_other(tmp_path: Path) -> None:
    kept = registry(tmp_path)
    await asyncio.gather(*(kept.touch(f"/work/{number}") for number in range(20)))
    assert len(stored(tmp_path)["workspaces"]) == 20
    renamed = await kept.update(workspace_id("/work/3"), "third")
    assert renamed.name == "third"
    assert {one.name for one in await kept.list()} >= {"third", "4"}
    for call in (kept.update("wd_nobody", "x"), kept.delete("wd_nobody")):
        with pytest.raises(SessionError) as caught:
            await call
        assert caught.value.code == "workspace.unknown" and caught.value.hint


async def test_sessions_of_all_spellings_are_listed_together(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("one", at=1, workspace_id=workspace_id(X), cwd=X)
        await home.write("two", at=2, workspace_id=workspace_id(LOWER), cwd=LOWER)
        await home.write("other", at=3, workspace_id="w", cwd="/elsewhere")
        for state in ("first", "ready"):
            if state == "ready":
                await home.ready()
            for one in (workspace_id(X), workspace_id(LOWER)):
                query = SessionQuery(workspace_ids=(one,))
                page = await home.service.query_sessions(query, aliases=True)
                assert [item.id for item in page.items] == ["two", "one"], state
                assert await home.service.count_sessions(query, aliases=True) == 2
                assert await home.service.count_sessions(query) == 1
        found = await home.service.list_workspaces()
        assert len(found) == 2 and {entry.root for entry in found} - {X, LOWER} == {"/elsewhere"}
        await home.service.delete_workspace(found[0].id)
        assert len(await home.service.list_workspaces()) == 1 and len(await home.ids()) == 3


async def test_changes_of_several_processes_all_survive(tmp_path: Path) -> None:
    processes = [registry(tmp_path) for _ in range(4)]
    roots = [f"/home/user/{n}" for n in range(40)]
    await asyncio.gather(*(processes[n % 4].touch(root) for n, root in enumerate(roots)))
    assert {one["root"] for one in stored(tmp_path)["workspaces"].values()} == set(roots)


async def test_what_a_killed_writer_left_goes_at_the_next_start(tmp_path: Path) -> None:
    kept = registry(tmp_path)
    await kept.touch("/home/user/one")
    before = stored(tmp_path)
    left = tmp_path / "workspaces.json.tmp-01M8PRM6DCD7VT8D346W3MMB0F"
    left.write_text('{"version": 1, "works')
    await registry(tmp_path).clear_leftovers()
    assert not left.exists() and stored(tmp_path) == before


async def test_a_start_neither_waits_for_a_turn_nor_takes_what_is_being_written(tmp_path: Path) -> None:
    left = tmp_path / "workspaces.json.tmp-01M8PRM6DCD7VT8D346W3MMB0F"
    left.write_text("half of it")
    with open(tmp_path / "workspaces.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        async with asyncio.timeout(5):
            await registry(tmp_path).clear_leftovers()
    assert left.exists()
    await registry(tmp_path).clear_leftovers()
    assert not left.exists()
