"""What the contract of a store is written with: a home to open and kill, logs of numbered notes, and how they are read.

``Home.open`` stands for a new store process on the same home, ``Home.kill`` for its SIGKILL: nothing is flushed, its
locks are free, and whatever it still does fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from kimi_ray.store.seam import AppendResult, Batch, Store, StoreOptions, Stream

MAIN = Stream("s1", "main")


class Home(Protocol):
    """A home of the backend under test."""

    path: Path

    async def open(self, **options: Any) -> Store:
        """A store process on this home; ``options`` are fields of ``StoreOptions``."""
        ...

    async def kill(self, store: Store) -> None:
        """SIGKILL."""
        ...

    def options(self, **options: Any) -> StoreOptions:
        """The options that ``open`` uses."""
        ...


def header(stream: Stream = MAIN) -> dict[str, Any]:
    return {"type": "log", "version": 1, "enc": 1, "session_id": stream.session_id, "agent_id": stream.agent_id}


def line(seq: int, kind: str = "note/added", **data: Any) -> bytes:
    text = json.dumps({"seq": seq, "time": 1700 + seq, "type": kind, "data": data}, separators=(",", ":"))
    return text.encode()


def batch(lines: list[bytes], first: int, *, epoch: int = 1, nonce: str = "w", stream: Stream = MAIN) -> Batch:
    rows = [text + b"\n" for text in lines]
    return Batch(stream, epoch, nonce, first, b"".join(rows), tuple(map(len, rows)), (1,) * len(rows))


def notes(first: int, end: int, **how: Any) -> Batch:
    return batch([line(seq, text=f"n{seq}") for seq in range(first, end)], first, **how)


def ok(results: list[AppendResult]) -> AppendResult:
    assert [result.error for result in results] == [None] * len(results)
    return results[0]


def code(result: AppendResult) -> str:
    assert result.error is not None
    return result.error["code"]


async def all_lines(store: Any, stream: Stream = MAIN) -> list[bytes]:
    lines: list[bytes] = []
    while True:
        page = await store.read_from(stream, len(lines))
        lines.extend(page.lines)
        if not page.lines:
            assert page.next_seq == len(lines)
            return lines


def fingerprint(path: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def interrupted_turn() -> list[bytes]:
    """A turn with an open step, as a crash leaves it."""
    return [line(0, "turn/start", turn=0), line(1, "step/start", turn=0, step=0)]


def chunk_events(count: int) -> list[Any]:
    """A run of streamed text."""
    from kimi_ray.events import event_from_data

    return [
        event_from_data(
            {
                "seq": seq,
                "time": 1700 + seq,
                "type": "assistant/chunk",
                "data": {
                    "turn": 0,
                    "step": 0,
                    "attempt": 1,
                    "chunk": {"type": "text-delta", "index": 0, "text": f"t{seq} "},
                },
            }
        )
        for seq in range(count)
    ]


class Contract:
    """Subclass it and give the fixture ``home``."""

    @pytest.fixture
    async def store(self, home: Home) -> AsyncIterator[Store]:
        store = await home.open()
        yield store
        await store.close()

    @staticmethod
    async def start(store: Store, stream: Stream = MAIN, *, count: int = 0, nonce: str = "w") -> None:
        await store.open_session(stream.session_id, "n", workspace_id="wd_x_0123")
        grant = await store.open_writer(header(stream), nonce)
        assert (grant.epoch, grant.next_seq) == (1, 0)
        if count:
            ok(await store.append([notes(0, count, stream=stream, nonce=nonce)], sync=True))
