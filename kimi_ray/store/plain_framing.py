"""The plain encoding as a ``Framing``: batch rows found and judged in a file (``batch_rows`` has the format itself)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from zlib import crc32

from kimi_ray.errors import StoreError
from kimi_ray.store.batch_rows import (
    BATCH_START,
    CLOSED_START,
    EPOCH_START,
    BatchRow,
    census,
    count_events,
    crcs_of,
    encode_batch_row,
    encode_rows,
    parse_batch_row,
    parse_closed_row,
    parse_epoch_row,
    payload_verifies,
    split_rows,
    verified_prefix,
)
from kimi_ray.store.framing import Encoded, Found, FoundRows, Prepared
from kimi_ray.store.layout import LOG_NAMES
from kimi_ray.store.log_scan import LogScan, ScannedBatch, Tail, corrupt, parse_header
from kimi_ray.store.window import ReadAt, Window

_HEADER_MAX = 16 << 20
_READ_AHEAD = 256 << 10
_HEADER_AHEAD = 4 << 10
_MARK = b"\n" + BATCH_START
_LOOSE_MOST = 64 << 20
_CRC_TEXT = re.compile(rb'"([0-9a-f]{8})"')
_ROW_LIKE = re.compile(rb'\{"(?:seq|batch|epoch|closed|type)":')


class PlainFraming:
    """A header line, then batches of lines led by rows of checksums."""

    compression = "none"
    log_name = LOG_NAMES["none"]
    covers_header = True

    def prepare(self, payload: bytes, row_sizes: Sequence[int]) -> Prepared:
        """See ``Framing.prepare``."""
        crcs: list[int] = []
        start = 0
        for size in row_sizes:
            crcs.append(crc32(payload[start : start + size]))
            start += size
        return Prepared(payload, tuple(crcs))

    def encode(self, number: int, seq: int, prepared: Prepared) -> Encoded:
        """See ``Framing.encode``."""
        row = encode_batch_row(number, seq, len(prepared.payload), prepared.crcs)
        return Encoded(row + prepared.payload, 1)

    def begin(self, header_line: bytes, storage_row: bytes, prepared: Prepared) -> Encoded:
        """See ``Framing.begin``."""
        crcs = (crc32(header_line), crc32(storage_row), *prepared.crcs)
        row = encode_batch_row(0, 0, len(storage_row) + len(prepared.payload), crcs)
        return Encoded(b"".join((header_line, row, storage_row, prepared.payload)), 1)

    def header(self, header_line: bytes) -> bytes:
        """See ``Framing.header``."""
        return header_line

    def scan(self, read: ReadAt, size: int, file: str) -> PlainScan:
        """See ``Framing.scan``."""
        return PlainScan(read, size, file)

    def probe(self, read: ReadAt, size: int) -> PlainProbe:
        """See ``Framing.probe``."""
        return PlainProbe(read, size)


class PlainScan(LogScan):
    """A pass over a plain log."""

    def __init__(self, read: ReadAt, size: int, file: str) -> None:
        """As ``LogScan``."""
        super().__init__(read, size, file)
        self._bad: tuple[BatchRow, int] | None = None

    def read_header(self) -> int | None:
        """See ``LogScan.read_header``."""
        line = self.window.line_at(0, _HEADER_MAX)
        if line is None:
            return None
        self.header_line = line
        try:
            self.header = parse_header(line, self.file)
        except StoreError:
            if line.strip(b"\0\n"):
                raise
            self.header_line = None
            return None
        return len(line)

    def next_batch(self, offset: int) -> ScannedBatch | None:
        """See ``LogScan.next_batch``."""
        line = self.window.line_at(offset)
        row = None if line is None else parse_batch_row(line)
        if line is None or row is None:
            return None
        start = offset + len(line)
        self._bad = (row, start)
        if row.size > self.window.size - start:
            return None
        payload = self.window.bytes_at(start, row.size)
        if not payload_verifies(row, payload, self.header_line if self.batches_read == 0 else None):
            return None
        if row.number != self.batches_read or row.seq != self.next_seq:
            return None
        self._bad = None
        events, only = census(payload)
        end = start + row.size
        return ScannedBatch(row.number, row.seq, row.seq + events, offset, end, payload, only)

    def encode_kept(self, kept: list[bytes]) -> bytes:
        """See ``LogScan.encode_kept``."""
        if not kept:
            return b""
        header = self.header_line if self.batches_read == 0 else None
        return encode_rows(self.batches_read, self.next_seq - count_events(b"".join(kept)), kept, header_line=header)

    def tail(self, boot: str) -> Tail:
        """See ``LogScan.tail``."""
        size = self.window.size - self.good
        if size <= 0 and self.batches_read > 0:
            return Tail(self.good, 0)
        kept, damage = self._keep()
        at, seq = damage
        if self._whole_after(self.good, seq):
            raise corrupt(self.file, at, seq, "whole batches follow")
        if not self._is_cut() and not self._may_be_lost(kept, boot):
            raise corrupt(self.file, at, seq, "a complete batch does not verify")
        payload = b"".join(kept)
        self.account(payload)
        unborn = self.batches_read == 0 and self.epoch is None
        if not unborn:
            self.next_seq += count_events(payload)
        return Tail(self.good, size, size - len(payload), [] if unborn else kept, unborn)

    def _keep(self) -> tuple[list[bytes], tuple[int, int]]:
        """Rows after G that verify, and ``(offset, seq)`` of the first that does not."""
        at = self.good or len(self.header_line or b"")
        if self._bad is None:
            return [], (at, self.next_seq)
        row, start = self._bad
        if row.number != self.batches_read or row.seq != self.next_seq:
            return [], (at, self.next_seq)
        payload = self.window.bytes_at(start, min(row.size, self.window.size - start))
        header = self.header_line if self.batches_read == 0 else None
        if header is not None and row.row_crcs[:1] != [b"%08x" % crc32(header)]:
            return [], (0, 0)
        kept = verified_prefix(row, payload, header)
        joined = b"".join(kept)
        return kept, (start + len(joined), self.next_seq + count_events(joined))

    def _may_be_lost(self, kept: list[bytes], boot: str) -> bool:
        """Whether a power cut may have lost parts of a full-length batch: it was not synced, and the boot changed.

        A first batch in ``disk`` mode was durable before the log became visible.
        """
        if self.batches_read > 0:
            epoch = self.epoch
        else:
            epoch = next((parse_epoch_row(row) for row in kept if row.startswith(EPOCH_START)), None)
            if epoch is None or epoch.mode == "disk":
                return False
        return epoch is None or not boot or epoch.boot != boot

    def _is_cut(self) -> bool:
        """Whether what follows G can be the beginning of one batch whose write stopped half way, or nothing of ours."""
        at = self.good or len(self.header_line or b"")
        if self.window.line_at(at) is None:
            return True
        if self._bad is None:
            return self.batches_read > 0 and not self._rows_after(at)
        row, start = self._bad
        have = self.window.size - start
        if have >= row.size or row.number != self.batches_read or row.seq != self.next_seq:
            return False
        payload = self.window.bytes_at(start, have)
        header = self.header_line if self.batches_read == 0 else None
        return len(verified_prefix(row, payload, header)) == payload.count(b"\n")

    def _rows_after(self, offset: int) -> bool:
        """Whether a line that looks like one of ours starts at ``offset`` or later: garbage has none."""
        while offset < self.window.size:
            line = self.window.line_at(offset)
            if line is None:
                return False
            if _ROW_LIKE.match(line):
                return True
            offset += len(line)
        return False

    def _whole_after(self, offset: int, seq: int) -> bool:
        """Whether a verifying batch, or a closed row that counts events from ``seq`` on, stands after ``offset``."""
        for start, line in self._candidates(offset):
            if line.startswith(CLOSED_START):
                closed = parse_closed_row(line)
                if closed is not None and closed[1] > seq:
                    return True
                continue
            row = parse_batch_row(line)
            if row is None or row.size > self.window.size - start - len(line):
                continue
            payload = self.window.bytes_at(start + len(line), row.size)
            if payload_verifies(row, payload, self.header_line if row.number == 0 else None):
                return True
        return False

    def _candidates(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """Places at or after ``offset`` where a batch row or a closed row may start, at any byte."""
        for needle in (BATCH_START, CLOSED_START):
            for at in self.window.occurrences(needle, offset, self.window.size):
                line = self.window.line_at(at)
                if line is not None:
                    yield at, line


class PlainProbe:
    """Batch rows verify alone, so that a place in the file can be tried anywhere."""

    def __init__(self, read: ReadAt, size: int) -> None:
        """As ``Framing.probe``."""
        self._window = Window(read, size, _READ_AHEAD)
        self._head = Window(read, size, _HEADER_AHEAD)
        self._header: bytes | None = None

    def header_line(self) -> bytes | None:
        """See ``Probe.header_line``."""
        if self._header is None:
            self._header = self._head.line_at(0, _HEADER_MAX)
        return self._header

    def body(self) -> int:
        """See ``Probe.body``."""
        line = self.header_line()
        return 0 if line is None or line.startswith(BATCH_START) else len(line)

    def at(self, offset: int) -> Found | None:
        """See ``Probe.at``."""
        line = self._window.line_at(offset)
        row = None if line is None else parse_batch_row(line)
        if line is None or row is None:
            return None
        start = offset + len(line)
        return Found(offset, start, start + row.size, row.seq, row.number, row)

    def first(self, start: int, end: int) -> Found | None:
        """See ``Probe.first``."""
        found = self.at(start) if start < end else None
        if found is not None:
            return found
        for at in self._window.occurrences(_MARK, start, end - 1):
            found = self.at(at + 1)
            if found is not None:
                return found
        return None

    def before(self, end: int) -> Found | None:
        """See ``Probe.before``."""
        for at in self._window.occurrences_before(_MARK, end - 1):
            found = self.at(at + 1)
            if found is not None:
                return found
        return None

    def rows(self, found: Found) -> FoundRows:
        """See ``Probe.rows``. A row is known by its checksum: a lost newline costs the rows beside it only."""
        row = found.row
        if row is None:
            return FoundRows([])
        payload = self._window.bytes_at(found.start, min(row.size, self._window.size - found.start))
        expected = row.crc_values[1:] if row.number == 0 else row.crc_values
        rows: list[tuple[int, bytes | None]] = []
        lines = split_rows(payload)
        crcs = crcs_of(lines)
        if crcs == expected and len(payload) == row.size and payload.endswith(b"\n"):
            rows.extend(zip(accumulate(map(len, lines), initial=found.start), lines, strict=False))
            return FoundRows(rows, payload=payload)
        at, next_crc, lost = found.start, 0, 0
        for line, crc in zip(lines, crcs, strict=True):
            place = next_crc
            if place >= len(expected) or expected[place] != crc:
                place = expected.index(crc, next_crc) if crc in expected[next_crc:] else -1
            if place < 0:
                rows.append((at, None))
                lost -= 1
            else:
                rows.append((at, line))
                lost += place - next_crc
                next_crc = place + 1
            at += len(line)
        lost += len(expected) - next_crc
        if not lost and at != found.end:
            lost = 1
        return FoundRows(rows, max(0, lost))

    def loose(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """See ``Probe.loose``: a damaged batch row still names the checksums of its rows."""
        if end - start > _LOOSE_MOST:
            return []
        data = self._window.bytes_at(start, end - start)
        known = {int(text, 16) for text in _CRC_TEXT.findall(data)}
        rows: list[tuple[int, bytes]] = []
        at = start
        for line in split_rows(data):
            if crc32(line) in known:
                rows.append((at, line))
            at += len(line)
        return rows
