"""Whole sessions on SQLite, with shards, through the public API in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream
from tests.unit.runtime_fixtures import running

SETTINGS = {"backend": "sqlite", "shards": 2}


async def test_sessions_live_in_shards_and_are_resumed(tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        sessions = await asyncio.gather(*(work.create_session(model=model, profile="bare") for _ in range(8)))
        for session in sessions:
            assert (await (await session.main.submit("hello")).result(20)).text == "did hello"
        ids = [session.id for session in sessions]
        beside = open_store(tmp_path / "home")
        assert {row.stream.session_id for row in await beside.list()} == set(ids), "a reader in the same process"
    assert {path.name for path in (tmp_path / "home" / "shards").iterdir()} == {"0.db", "1.db"}
    async with running(tmp_path, **SETTINGS) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        for session_id in ids:
            session = await work.resume(session_id)
            assert (await (await session.main.submit("again")).result(20)).text == "did again"
        assert len(stage.requests) == 8
        assert all(len(request.messages) >= 3 for request in stage.requests), "each knows its past"
    store = open_store(tmp_path / "home")
    for session_id in ids:
        report = await store.verify(Stream(session_id, "main"))
        assert (report.ok, report.closed) == (True, True)
    assert {document.session_id for document in await store.list_documents()} == set(ids)
