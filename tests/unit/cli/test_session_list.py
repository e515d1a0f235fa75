"""``sessions list``: filters, pages, spellings; from the index or the documents, beside a writer or after it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.ids import workspace_id
from kimi_ray.store.session_index_marks import distrust
from tests.unit.cli.conftest import Cli
from tests.unit.store_index.index_home import Home

X, SLASHES = "C:\\Work\\X", "c:/work/x"
NOW = 1_790_000_000_000


async def fill(path: Path) -> Home:
    """Sessions of every kind; the store is still open."""
    home = Home(path)
    child = {"parent_session_id": "session_0A", "child_session_kind": "child"}
    changes: list[dict[str, Any]] = [
        {"title": "First of all", "cwd": "/work/a", "tags": {"kind": "x", "who": "me"}},
        {"title": "second", "last_prompt": "FIX the Bug", "cwd": "/work/a", "custom": {"run_id": "run_9"}},
        {"title": "a child", "cwd": X, "workspace_id": workspace_id(X), "custom": child},
        {"title": "a fork", "cwd": SLASHES, "workspace_id": workspace_id(SLASHES), "forked_from": "session_0A"},
        {"title": "put away", "cwd": "/work/a", "archived": True, "tags": {"kind": "x"}},
    ]
    for number, change in enumerate(changes):
        place = str(change.pop("workspace_id", workspace_id("/work/a")))
        await home.write(f"session_0{'ABCDE'[number]}", NOW + number * 60_000, place, **change)
    await home.ready()
    return home


async def said(cli: Cli, *arguments: object) -> Any:
    """What a command says, while this loop serves its store."""
    return await asyncio.to_thread(cli, "sessions", *arguments)


async def names(cli: Cli, *arguments: str) -> list[str]:
    result = await said(cli, "list", *arguments, "--json")
    assert result.code == 0, result
    document = result.document
    assert document["total"] >= len(document["sessions"])
    return [one["session_id"].removeprefix("session_0") for one in document["sessions"]]


@pytest.mark.parametrize("standing", ["ready", "degraded", "none", "beside"])
async def test_filters(cli: Cli, home: Path, standing: str) -> None:
    store = await fill(home)
    if standing != "beside":
        await store.service.close()
    if standing == "degraded":
        distrust(str(home))
    elif standing == "none":
        (home / "index.sqlite").unlink()
    before = {path.relative_to(home): path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    date = datetime.fromtimestamp((NOW + 120_000) / 1000, UTC).isoformat()
    try:
        assert (await said(cli, "list", "--json")).document["index"] == ("ready" if standing == "beside" else standing)
        assert await names(cli) == ["D", "C", "B", "A"]
        assert await names(cli, "--archived") == ["E"] and await names(cli, "--all") == ["E", "D", "C", "B", "A"]
        assert (
            await names(cli, "--workspace", "/work/a") == await names(cli, "-w", workspace_id("/work/a")) == ["B", "A"]
        )
        for spelling in (X, SLASHES, "C:/Work/X/", workspace_id(X), workspace_id(SLASHES)):
            assert await names(cli, "--workspace", spelling) == ["D", "C"], spelling
        assert await names(cli, "--workspace", "/nowhere") == []
        assert await names(cli, "--parent", "session_0A") == await names(cli, "--parent", "0a") == ["C"]
        assert await names(cli, "--tag", "kind=x") == ["A"]
        assert await names(cli, "--tag", "kind=x", "--tag", "who=me", "--all") == ["A"]
        assert await names(cli, "--run", "run_9") == ["B"] and await names(cli, "--run", "run_8") == []
        assert await names(cli, "--text", "bug") == ["B"] and await names(cli, "--text", "FIRST") == ["A"]
        assert await names(cli, "--since", date) == ["D", "C"] and await names(cli, "--since", "3000-01-01") == []
        page = (await said(cli, "list", "--limit", 3, "--json")).document
        assert (page["total"], page["next_cursor"]) == (4, "session_0B")
        assert await names(cli, "--after", page["next_cursor"]) == await names(cli, "--after", "0b") == ["A"]
        shown = await said(cli, "list", "--limit", 1)
        assert "a fork" in shown.out and "--after session_0D" in shown.err
        after = {path.relative_to(home): path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
        if standing != "beside":
            assert after == before, "a command that reads wrote"
        assert (await said(cli, "show", "@last", "--json")).document["session"]["session_id"] == "session_0E"
    finally:
        await store.service.close()


async def test_since_a_while_ago(cli: Cli, home: Path) -> None:
    store = Home(home)
    await store.write("old", at=int(time.time() * 1000) - 7_200_000)
    await store.write("new", at=int(time.time() * 1000))
    await store.service.close()
    for text, expected in (("1h", 1), ("119m", 1), ("121m", 2), ("1w", 2), ("9000000s", 2)):
        assert len(await names(cli, "--since", text)) == expected, text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--since", "soon"), ("--since", "2x"), ("--since", "999999999w"), ("--tag", "x"), ("--tag", "=x")],
)
def test_what_cannot_be_read_is_named(cli: Cli, option: str, value: str) -> None:
    result = cli("sessions", "list", option, value, "--json")
    assert (result.code, result.document["error"]["code"]) == (2, "request.bad_usage")
    assert value in result.document["error"]["message"] and result.document["error"]["hint"]


async def test_a_damaged_document_is_told(cli: Cli, home: Path) -> None:
    store = await fill(home)
    await store.service.close()
    (file,) = home.glob("sessions/*/session_0B/state.json")
    file.write_text("{")
    distrust(str(home))
    rows = {one["session_id"]: one for one in (await said(cli, "list", "--json")).document["sessions"]}
    assert rows["session_0B"]["error"]["code"] == "store.corrupt" and "error" not in rows["session_0A"]
    assert "damaged" in (await said(cli, "list")).out


@pytest.mark.parametrize("arguments", [("--run", ""), ("--fork-group", ""), ("--after", ""), ("--text", "nowhere")])
async def test_no_match_is_not_told_as_an_empty_home(cli: Cli, home: Path, arguments: tuple[str, str]) -> None:
    store = await fill(home)
    await store.service.close()
    assert (await said(cli, "list", *arguments)).out == f"no sessions in {home} match\n"
