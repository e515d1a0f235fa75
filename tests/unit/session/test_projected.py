"""Projections of stored logs, live and cold: the suffix is read, and a checkpoint that lies costs a whole read only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.session import STANDARD_PROJECTIONS, ColdReader, project
from kimi_ray.store import open_store
from kimi_ray.store.seam import Page, Stream
from tests.unit.frames.homes import BACKENDS, Scribe, store_logs

MAIN = Stream("session_one", "main")


class Watched:
    """A reader that tells from where pages were asked for."""

    def __init__(self, home: Path) -> None:
        self._reader = ColdReader(open_store(home))
        self.asked: list[int] = []

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        self.asked.append(seq)
        return await self._reader.read_from(stream, seq, limit, max_bytes)

    async def list_logs(self, session_id: str) -> Any:
        return await self._reader.list_logs(session_id)


def scribe(turns: int) -> Scribe:
    log = Scribe()
    prompt = [{"type": "text", "text": "Fix it,\n please. api_key=abcdefghijk"}]
    log.add("prompt/submitted", prompt_id="p", content=prompt)
    log.add("prompt/submitted", prompt_id="q", content=[{"type": "text", "text": "another"}])
    for n in range(turns):
        log.plain_turn(f"turn {n}")
    return log


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
async def test_only_the_suffix_is_read(tmp_path: Path, backend: tuple[str, str]) -> None:
    await store_logs(tmp_path / "short", [scribe(20)], backend)
    await store_logs(tmp_path / "long", [scribe(30)], backend)
    short = await project(Watched(tmp_path / "short"), MAIN)
    rows = json.loads(json.dumps(short.checkpoint()))
    watched = Watched(tmp_path / "long")
    found = (await project(watched, MAIN, rows=rows)).snapshot()
    assert watched.asked[0] == short.snapshot().as_of
    assert found == (await project(Watched(tmp_path / "long"), MAIN)).snapshot()
    assert found.values["usage"]["turns"] == 30 and found.values["todos"] is None
    assert found.values["title"] == "Fix it, please. api_key=[redacted]"
    # the log is shorter than the checkpoint says, or another: folded anew
    longer = (await project(Watched(tmp_path / "long"), MAIN)).checkpoint()
    for stale in (longer, {key: {**row, "crc": 1} for key, row in rows.items()}):
        watched = Watched(tmp_path / "short")
        assert (await project(watched, MAIN, rows=stale)).snapshot() == short.snapshot()
        assert 0 in watched.asked


async def test_a_log_without_anything_to_see(tmp_path: Path) -> None:
    other = Scribe("session_one", "agent-1")
    other.add("note/added", text="x")
    await store_logs(tmp_path, [other, scribe(1)])
    found = await project(ColdReader(open_store(tmp_path)), Stream("session_one", "agent-1"))
    assert (
        found.snapshot().as_of == 0
        and found.snapshot().values["title"] is None
        and set(found.checkpoint()) == {unit.key for unit in STANDARD_PROJECTIONS}
    )
