"""The Zstandard encoding as a ``Framing``: frame 0 is the header line, every later frame whole rows of one batch.

``zstd -dc`` shows the log. The first frame after the header holds the row of the first grant alone: it says what may be
lost (``mode``, ``boot``) even when the frame after it is damaged. The first row of a frame names its seq.

The Tail rule, with frames: a verifying frame after G, or a full-length bad one with an unchanged boot id, is corrupt;
everything else after G is torn. The rows of a frame that the file's end cuts are not verified by anything: while the
boot id is unchanged, what can be decoded of it is what was written, and its complete rows are kept if they are
canonical and go on from the last seq. After a restart of the machine a lost sector may decode to wrong text; then
nothing of it is kept. It is moved aside, never destroyed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.batch_rows import (
    CLOSED_START,
    EPOCH_START,
    EVENT_START,
    census,
    count_events,
    encode_closed_row,
    encode_epoch_row,
    expand_row,
    named_seq,
    parse_closed_row,
    parse_epoch_row,
    seq_of,
    split_rows,
)
from kimi_ray.store.framing import Encoded, Found, FoundRows, Prepared, encode_rows
from kimi_ray.store.layout import LOG_NAMES
from kimi_ray.store.log_scan import LogScan, ScannedBatch, Tail, corrupt, parse_header
from kimi_ray.store.window import ReadAt, Window
from kimi_ray.store.zstd_frames import (
    MAGIC,
    Codec,
    measure,
    one_bit_from_whole,
    split_content,
)

_HEADER_MAX = 16 << 20
_LOOK = 1 << 12
_READ_AHEAD = 256 << 10
_LAST_FRAME_MAX = 20 << 20


class ZstdFraming:
    """Standard frames with content checksum and size, one a batch."""

    compression = "zstd"
    log_name = LOG_NAMES["zstd"]
    covers_header = False

    def __init__(self) -> None:
        """The contexts of all threads that use this encoding."""
        self.codec = Codec()

    def prepare(self, payload: bytes, row_sizes: Sequence[int]) -> Prepared:
        """See ``Framing.prepare``."""
        return Prepared(payload, frames=tuple(map(self.codec.compress, split_content(payload, row_sizes))))

    def encode(self, number: int, seq: int, prepared: Prepared) -> Encoded:
        """See ``Framing.encode``; a frame is the same wherever it stands."""
        return Encoded(b"".join(prepared.frames), len(prepared.frames))

    def begin(self, header_line: bytes, storage_row: bytes, prepared: Prepared) -> Encoded:
        """See ``Framing.begin``."""
        first = self.codec.compress(storage_row)
        return Encoded(b"".join((self.header(header_line), first, *prepared.frames)), 1 + len(prepared.frames))

    def header(self, header_line: bytes) -> bytes:
        """See ``Framing.header``."""
        return self.codec.compress(header_line)

    def scan(self, read: ReadAt, size: int, file: str) -> ZstdScan:
        """See ``Framing.scan``."""
        return ZstdScan(self, read, size, file)

    def probe(self, read: ReadAt, size: int) -> ZstdProbe:
        """See ``Framing.probe``."""
        return ZstdProbe(self.codec, read, size)


class _Frames:
    """Frames of one file."""

    def __init__(self, codec: Codec, window: Window) -> None:
        self.codec = codec
        self.window = window

    def at(self, offset: int) -> tuple[bytes, int] | None:
        """The content of the verifying frame at ``offset``, and where the next one starts."""
        wanted = _LOOK
        while True:
            buffer, at = self.window.buffer_at(offset, wanted)
            found = measure(buffer, at)
            if found is None:
                return None
            if found.whole:
                content = self.codec.decompress(memoryview(buffer)[at : at + found.length])
                return None if content is None else (content, offset + found.length)
            have = len(buffer) - at
            if have < wanted or offset + have >= self.window.size:
                return None
            wanted = max(found.length, have * 2)

    def header_line(self) -> bytes | None:
        """The first line of the first frame, whatever else is wrong with it: a newer program may write it otherwise."""
        found = self.at(0)
        content = found[0] if found is not None else b""
        if not content:
            head = self.window.bytes_at(0, _LOOK)
            content = self.codec.beginning(head) if head.startswith(MAGIC) else b""
        end = content.find(b"\n")
        return content[: end + 1] if 0 <= end < _HEADER_MAX else None


class ZstdScan(LogScan):
    """A pass over a Zstandard log."""

    def __init__(self, framing: ZstdFraming, read: ReadAt, size: int, file: str) -> None:
        """As ``LogScan``."""
        super().__init__(read, size, file)
        self._framing = framing
        self._frames = _Frames(framing.codec, self.window)

    def read_header(self) -> int | None:
        """See ``LogScan.read_header``."""
        found = self._frames.at(0)
        if found is None or found[0].find(b"\n") != len(found[0]) - 1:
            line = self._frames.header_line()
            if line is not None:
                self._refuse_version(line)
            return None
        content, self.good = found
        self.header = parse_header(content, self.file)
        self.header_line = content
        return self.good

    def _refuse_version(self, line: bytes) -> None:
        try:
            parse_header(line, self.file)
        except StoreError:
            return

    def next_batch(self, offset: int) -> ScannedBatch | None:
        """See ``LogScan.next_batch``."""
        found = self._frames.at(offset)
        if found is None:
            return None
        payload, end = found
        seq = first_seq(payload)
        if seq != self.next_seq:
            return None
        events, only = census(payload)
        return ScannedBatch(self.batches_read, seq, seq + events, offset, end, payload, only)

    def encode_kept(self, kept: list[bytes]) -> bytes:
        """See ``LogScan.encode_kept``."""
        return encode_rows(self._framing, 0, 0, kept).data

    def tail(self, boot: str) -> Tail:
        """See ``LogScan.tail``."""
        size = self.window.size - self.good
        if self.header_line is None:
            return self._headerless()
        if size <= 0 and self.batches_read > 0:
            return Tail(self.good, 0)
        if self._frame_after(self.good):
            raise corrupt(self.file, self.good, self.next_seq, "whole frames follow")
        rest, cut = self._rest()
        kept = self._kept(rest, boot) if cut else []
        unchanged = self.same_boot(boot)
        if rest and (unchanged or self.batches_read == 0) and (not cut or self._was_whole(rest)):
            raise corrupt(self.file, self.good, self.next_seq, "a complete frame does not verify")
        payload = b"".join(kept)
        self.account(payload)
        self.next_seq += count_events(payload)
        unborn = self.batches_read == 0 and self.epoch is None
        return Tail(self.good, size, size, [] if unborn else kept, unborn)

    def _headerless(self) -> Tail:
        """A file without a header frame: it never came to be, unless that frame was whole once."""
        size = self.window.size
        if self._frame_after(0):
            raise corrupt(self.file, 0, 0, "the header frame does not verify, and whole frames follow")
        rest, cut = self._rest()
        if (rest and (not cut or self._was_whole(rest))) or (not rest and self._has_bytes()):
            raise corrupt(self.file, 0, 0, "the first frame is not a header")
        return Tail(0, size, size, unborn=True)

    def _has_bytes(self) -> bool:
        at = 0
        while at < self.window.size:
            data = self.window.bytes_at(at, 1 << 20)
            if not data:
                break
            if data.strip(b"\0"):
                return True
            at += len(data)
        return False

    def _rest(self) -> tuple[bytes, bool]:
        """What stands after G if it looks like a frame (empty: it does not), and whether the file ends inside it."""
        wanted = _LOOK
        while True:
            data = self.window.bytes_at(self.good, wanted)
            found = measure(data)
            at_end = len(data) < wanted or self.good + len(data) >= self.window.size
            if found is None:
                left = self.window.size - self.good
                rest = self.window.bytes_at(self.good, left) if left <= _LAST_FRAME_MAX else b""
                return (rest, False) if rest and self._was_whole(rest) else (b"", False)
            if found.whole:
                return data, False
            if at_end:
                return data, True
            wanted = max(found.length, len(data) * 2)

    def _was_whole(self, rest: bytes) -> bool:
        return one_bit_from_whole(self._framing.codec, rest)

    def _kept(self, rest: bytes, boot: str) -> list[bytes]:
        """The rows of a cut frame that go on from the last seq, if the machine has not been restarted since."""
        rows = split_rows(self._framing.codec.beginning(rest))
        granted = self.epoch
        if granted is None and rows and rows[0].startswith(EPOCH_START):
            granted = parse_epoch_row(rows[0])
        if granted is None or not boot or granted.boot != boot:
            return []
        return canonical_run(rows, self.next_seq)

    def _frame_after(self, offset: int) -> bool:
        """Whether a verifying frame stands at ``offset`` or later, at any byte."""
        places = self.window.occurrences(MAGIC, offset, self.window.size)
        return any(self._frames.at(at) is not None for at in places)


class ZstdProbe:
    """Frames found by their magic number and checked whole."""

    def __init__(self, codec: Codec, read: ReadAt, size: int) -> None:
        """As ``Framing.probe``."""
        self._window = Window(read, size, _READ_AHEAD)
        self._frames = _Frames(codec, self._window)
        self._head = _Frames(codec, Window(read, size, _LOOK))

    def header_line(self) -> bytes | None:
        """See ``Probe.header_line``."""
        return self._head.header_line()

    def at(self, offset: int) -> Found | None:
        """See ``Probe.at``."""
        found = self._frames.at(offset)
        if found is None:
            return None
        payload, end = found
        seq = first_seq(payload)
        return None if seq < 0 else Found(offset, offset, end, seq, payload=payload)

    def body(self) -> int:
        """See ``Probe.body``."""
        found = self._head.at(0)
        return found[1] if found is not None and first_seq(found[0]) < 0 else 0

    def first(self, start: int, end: int) -> Found | None:
        """See ``Probe.first``."""
        for at in self._window.occurrences(MAGIC, start, end):
            found = self.at(at)
            if found is not None:
                return found
        return None

    def before(self, end: int) -> Found | None:
        """See ``Probe.before``."""
        for at in self._window.occurrences_before(MAGIC, end):
            found = self.at(at)
            if found is not None:
                return found
        return None

    def rows(self, found: Found) -> FoundRows:
        """See ``Probe.rows``; all have the offset of their frame."""
        payload = found.payload or b""
        return FoundRows([(found.offset, row) for row in split_rows(payload)], payload=payload)

    def loose(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """See ``Probe.loose``: nothing of a damaged frame verifies."""
        return []


def first_seq(payload: bytes) -> int:
    """The seq that the first row of a frame names, or -1 when these are not rows of a log."""
    seq = named_seq(payload)
    return seq if seq is not None and payload.endswith(b"\n") else -1


def canonical_run(rows: Sequence[bytes], seq: int) -> list[bytes]:
    """The rows up to the first that is not spelled as this program spells it, or does not go on from ``seq``."""
    kept: list[bytes] = []
    for row in rows:
        try:
            if row.startswith(EPOCH_START):
                granted = parse_epoch_row(row)
                if granted is None or granted.seq != seq or encode_epoch_row(granted) != row:
                    break
            elif row.startswith(CLOSED_START):
                closed = parse_closed_row(row)
                if closed is None or closed[1] != seq or encode_closed_row(*closed) != row:
                    break
            elif row.startswith(EVENT_START):
                value: Any = from_json(row)
                if seq_of(row) != seq or to_json(value) + b"\n" != row:
                    break
                seq += 1
            else:
                lines = expand_row(row)
                if not lines or seq_of(lines[0]) != seq:
                    break
                seq += len(lines)
        except (ValueError, KimiRayError):
            break
        kept.append(row)
    return kept
