"""Packed chunks are passed over as they are stored: everything else is where it was, in every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray import frames
from kimi_ray.store import chunk_rows
from kimi_ray.store.fs import RealFs
from kimi_ray.store.identity import require_identity
from kimi_ray.store.reader import Reader, open_reader
from kimi_ray.store.seam import Stream
from tests.unit.frames.homes import BACKENDS, USAGE, Scribe, store_logs

MAIN = Stream("session_one", "main")
CHUNK = b'"type":"assistant/chunk"'


def streamed() -> Scribe:
    """Runs of chunks that are packed, single ones that are not, and one of a call whose id looks like gaps."""
    log = Scribe()
    log.bind()
    for turn in range(6):
        log.turn()
        log.step()
        log.user(f"ask {turn}")
        for block in range(3):
            for n in range((1, 40, 3)[block]):
                chunk: dict[str, Any] = {"type": "text-delta", "index": block, "text": f'w{n} "dt":[1,2'}
                if block == 2:
                    chunk = {"type": "tool-call-delta", "index": 2, "id": '"dt":[9,9]', "name": "[x", "arguments": "{"}
                log.add("assistant/chunk", **log.where, attempt=1, chunk=chunk)
        log.response(finish_reason="stop", usage=USAGE)
        log.answer(f"did {turn}", attempt=1)
        log.end()
    return log


def reader_of(home: Path) -> Reader:
    return open_reader(RealFs(), str(home), require_identity(RealFs(), str(home)))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
async def test_lines_stand_where_they_stood(tmp_path: Path, backend: tuple[str, str]) -> None:
    log = streamed()
    await store_logs(tmp_path, [log], backend, packed=True)
    reader = reader_of(tmp_path)
    everything = [event.line for event in log.events]
    for seq in range(0, len(everything), 7):
        for limit, size in ((5, 1 << 20), (10_000, 1 << 20), (10_000, 900)):
            whole = reader.read_from(MAIN, seq, limit, size).lines
            assert list(whole) == everything[seq : seq + len(whole)]
            page = reader.read_from(MAIN, seq, limit, size, chunks=False)
            assert page.next_seq == len(everything) and 0 < len(page.lines) <= limit
            assert len(page.lines) >= len(whole)
            for line, real in zip(page.lines, everything[seq:], strict=False):
                assert line == real or (line == b"" and CHUNK in real)
    packed = reader.read_from(MAIN, 0, 10_000, 1 << 20, chunks=False).lines
    assert sum(line == b"" for line in packed) == 6 * 43
    reader.close()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
async def test_frames_unpack_none(tmp_path: Path, backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    log = streamed()
    await store_logs(tmp_path / "packed", [log], backend, packed=True)
    await store_logs(tmp_path / "plain", [log], backend)
    plain = frames.tables("session_one", home=tmp_path / "plain")

    def unpack(_row: bytes) -> list[bytes]:
        raise AssertionError("a packed row was unpacked")

    monkeypatch.setattr(chunk_rows, "unpack_row", unpack)
    found = frames.tables("session_one", home=tmp_path / "packed")
    for name in frames.FRAMES:
        assert found[name].to_pylist() == plain[name].to_pylist()
    assert found["rows"].to_pylist()[0]["last_seq"] == len(log.events) - 1
