"""A log of thirty events with everything a log can hold, in both encodings, and looks at damaged copies of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.events import event_from_data
from kimi_ray.store.batch_rows import EpochRow, encode_closed_row, encode_epoch_row, expand_rows
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.framing import Framing, encode_rows, framing_of
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_read import judge, read_page
from kimi_ray.store.log_scan import Tail
from kimi_ray.store.surviving import surviving_page

HEADER = b'{"type":"log","version":1,"enc":1,"session_id":"s1","agent_id":"main"}\n'
SAME, OTHER = "boot-1", "boot-2"
ENCODINGS = ("none", "zstd")
EVENTS = 30


def note(seq: int, text: str = "some text") -> bytes:
    return b'{"seq":%d,"time":%d,"type":"note/added","data":{"text":"%s"}}' % (seq, 1700 + seq, text.encode())


def chunks(first: int, end: int) -> tuple[list[bytes], list[bytes]]:
    """Streamed chunks as canonical lines, and as the packed rows they are stored as."""
    place: dict[str, Any] = {"turn": 0, "step": 0, "attempt": 1}
    events = [
        event_from_data(
            {
                "seq": seq,
                "time": 1700 + seq,
                "type": "assistant/chunk",
                "data": {**place, "chunk": {"type": "text-delta", "index": 0, "text": f"w{seq} "}},
            }
        )
        for seq in range(first, end)
    ]
    return [event.line for event in events], [row for row, _ in pack_rows(events)]


@dataclass
class Built:
    """A log, its canonical lines, and ``(offset, seq, end, next_seq)`` of each of its batches or frames."""

    framing: Framing
    data: bytes
    lines: list[bytes]
    batches: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    def whole_events(self, cut: int) -> int:
        """How many events the batches hold that end at or before this byte."""
        return max([next_seq for _, _, end, next_seq in self.batches if end <= cut], default=0)

    def batch_at(self, offset: int) -> tuple[int, int, int, int]:
        """The batch that this byte is in; the header counts as one."""
        start = self.batches[0][0]
        if offset < start:
            return (0, 0, start, 0)
        return next(batch for batch in self.batches if batch[0] <= offset < batch[2])


class Source(LogSource):
    """A log in memory."""

    def __init__(self, data: bytes) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.data = data
        self.size = len(data)
        self.path = "log"
        self.reads = 0

    def read(self, offset: int, size: int) -> bytes:
        self.reads += 1
        return self.data[offset : offset + size]


def put_together(framing: Framing, batches: list[list[bytes]]) -> bytes:
    """A log of these batches of stored rows; the first row is a grant's."""
    first, *rest = batches[0]
    started = framing.begin(HEADER, first, framing.prepare(b"".join(rest), [len(row) for row in rest]))
    parts, number, seq = [started.data], started.batches, len(expand_rows(rest))
    for rows in batches[1:]:
        encoded = encode_rows(framing, number, seq, rows)
        parts.append(encoded.data)
        number += encoded.batches
        seq += len(expand_rows(rows))
    return b"".join(parts)


def thirty_events(compression: str) -> Built:
    lines: list[bytes] = []

    def notes(count: int) -> list[bytes]:
        fresh = [note(len(lines) + at) for at in range(count)]
        lines.extend(fresh)
        return [line + b"\n" for line in fresh]

    def packed(count: int) -> list[bytes]:
        fresh, rows = chunks(len(lines), len(lines) + count)
        lines.extend(fresh)
        return rows

    first = encode_epoch_row(EpochRow(1, 0, "w1", SAME, "disk"))
    batches = [
        [first, *notes(3)],
        [*packed(8), *notes(1)],
        [encode_closed_row(1, 12)],
        [encode_epoch_row(EpochRow(2, 12, "w2", SAME, "disk"))],
        notes(7),
        [*packed(5), *notes(2)],
        notes(4),
    ]
    assert len(lines) == EVENTS
    framing = framing_of(compression)
    built = Built(framing, put_together(framing, batches), lines)
    scan = framing.scan(Source(built.data).read, len(built.data), "log")
    built.batches = [(batch.offset, batch.seq, batch.end, batch.next_seq) for batch in scan]
    assert scan.good == len(built.data)
    return built


def scanned(framing: Framing, data: bytes, boot: str) -> tuple[list[bytes], Tail]:
    """The lines that a scan and the Tail rule give."""
    scan = framing.scan(Source(data).read, len(data), "log")
    lines = [line for batch in scan for line in expand_rows(batch.rows)]
    tail = scan.tail(boot)
    lines += expand_rows(tail.kept)
    assert tail.unborn or scan.next_seq == len(lines)
    return lines, tail


def paged(framing: Framing, data: bytes, boot: str, *, limit: int = 7, max_bytes: int = 1 << 20) -> list[bytes]:
    """The lines that pages give, up to the first error or the end."""
    source = Source(data)
    lines: list[bytes] = []
    while True:
        page = read_page(framing, source, len(lines), limit, max_bytes, judged=lambda: judge(framing, source, boot))
        if page is None or not page.lines:
            return lines
        lines.extend(page.lines)


def surviving(framing: Framing, data: bytes, boot: str, *, limit: int = 5) -> list[tuple[int, bytes]]:
    """All surviving rows."""
    source = Source(data)
    found: list[tuple[int, bytes]] = []
    cursor: int | None = 0
    while cursor is not None:
        page = surviving_page(framing, source, cursor, limit, boot)
        found.extend(page.events)
        assert page.cursor is None or page.cursor > cursor
        cursor = page.cursor
    return found


def coded(error: KimiRayError) -> str:
    """The code of an error that a damaged log may give, its details checked."""
    assert error.code in ("store.corrupt", "log.version_unsupported"), error
    if error.code == "store.corrupt":
        assert error.details["file"] == "log"
        assert error.details["offset"] >= 0
        assert 0 <= error.details["seq"] <= EVENTS
    return error.code
