"""The writer on the real JSONL store: what a flush acknowledged is there after the store was lost and opened again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kimi_ray.errors import RuntimeFault
from kimi_ray.events import make_event
from kimi_ray.store.jsonl import JsonlStore
from kimi_ray.store.seam import AppendResult, Batch, StoreOptions, Stream
from kimi_ray.store.sender import Sender
from kimi_ray.store.wire import pack_call, unpack_call
from kimi_ray.store.write_controller import WriteController
from kimi_ray.store.writer_settings import WriterSettings

AGENTS = 8
TURNS = 6
LOST_ANSWERS = {2, 5}
LOST_STORES = {3, 6}
DIGEST = "sha256:ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
"""Of ``content``."""


class Home:
    """A home whose store can be lost: calls then fail until it is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "home")
        self.store: JsonlStore | None = None
        self.calls = 0
        self.reopening: list[asyncio.Task[JsonlStore]] = []

    async def open(self) -> JsonlStore:
        self.store = await JsonlStore.open(self.path, StoreOptions(claim_timeout_s=2))
        return self.store

    async def lose(self) -> None:
        store, self.store = self.store, None
        assert store is not None
        await store.close()

    def reach(self) -> JsonlStore:
        if self.store is None:
            raise RuntimeFault("the store is away", code="infra.actor_died")
        return self.store

    async def append(self, batches: list[Batch], sync: bool) -> list[AppendResult]:
        results = await self.reach().append(unpack_call(pack_call(batches, sync=sync)), sync=sync)
        self.calls += 1
        if self.calls in LOST_ANSWERS:
            raise RuntimeFault("the answer was lost", code="infra.timeout", retryable=True)
        if self.calls in LOST_STORES:
            await self.lose()
            self.reopening.append(asyncio.create_task(self.open()))
            raise RuntimeFault("the store died", code="infra.actor_died")
        return results

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        await self.reach().put_blobs(blobs)


def header(session_id: str) -> dict[str, Any]:
    return {
        "type": "log",
        "version": 1,
        "enc": 1,
        "session_id": session_id,
        "agent_id": "main",
        "created_at": 0,
        "origin": "main",
        "delegation_depth": 0,
        "labels": {},
        "writer": {"name": "test", "version": "0"},
    }


def turn(first: int) -> list[tuple[str, dict[str, Any]]]:
    chunks = [
        (
            "assistant/chunk",
            {"turn": 0, "step": 0, "attempt": 1, "chunk": {"type": "text-delta", "index": 0, "text": t}},
        )
        for t in ("he", "llo", " wörld", "\n")
    ]
    return [("note/added", {"text": f"before {first}"}), *chunks, ("note/added", {"text": "after"})]


async def test_flushed_events_survive_the_loss_of_the_store(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = await home.open()
    settings = WriterSettings(write_window_ms=5, sync_interval_ms=20, backoff_initial_ms=5, backoff_max_ms=20)
    sender = Sender(home.append, home.put_blobs, settings=settings)
    writers: list[WriteController] = []
    lines: list[list[bytes]] = []
    for number in range(AGENTS):
        session_id = f"session_{number}"
        await store.open_session(session_id, "nonce", workspace_id="wd_test_000000000000")
        grant = await store.open_writer(header(session_id), "nonce")
        stream = Stream(session_id, "main")
        writers.append(
            WriteController(stream, epoch=grant.epoch, nonce="nonce", first_seq=grant.next_seq, sender=sender)
        )
        lines.append([])

    async def agent(number: int) -> None:
        writer, mine = writers[number], lines[number]
        for _ in range(TURNS):
            for kind, data in turn(len(mine)):
                event = make_event(len(mine), 1_700_000_000_000 + len(mine), kind, data)
                if kind == "note/added" and number == 0:
                    writer.attach_blob(DIGEST, b"content")
                mine.append(event.line)
                writer.enqueue(event)
            await writer.flush()
            target = len(mine)
            assert writer.durable_seq >= target

    agents = [asyncio.create_task(agent(number)) for number in range(AGENTS)]
    async with asyncio.timeout(20):
        await asyncio.gather(*agents, *home.reopening)
    assert home.calls > max(LOST_STORES) and sender.stats()["calls_lost"] >= 4
    await home.lose()
    store = await home.open()
    for writer, mine in zip(writers, lines, strict=True):
        page = await store.read_from(writer.stream, 0, 1000)
        assert list(page.lines) == mine
        raw = await store.read_raw(writer.stream)
        assert b'{"type":"text-chunks"' in raw
    assert await store.read_blob(DIGEST) == b"content"
    assert await sender.close(5) == 0
    await store.close()
