"""Pages of a log without reading all of it.

Batch rows verify by themselves, so a position in the file can be tried anywhere: the newest batch is found backwards
from the end, the batch that holds a seq by bisection over byte offsets. No index is kept; a page near the tail of a
large log costs about twenty small reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from kimi_ray.store.batch_rows import (
    BATCH_START,
    BatchRow,
    count_events,
    expand_row,
    expand_rows,
    is_storage_row,
    parse_batch_row,
    rows_verify,
    split_rows,
    verified_prefix,
)
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_scan import corrupt
from kimi_ray.store.seam import Page

_WINDOW = 64 << 10
_READ_AHEAD = 256 << 10
_HEADER_MAX = 16 << 20
_MARK = b"\n" + BATCH_START


@dataclass(frozen=True, slots=True)
class Found:
    """A batch row at its place."""

    offset: int
    line: bytes
    row: BatchRow

    @property
    def start(self) -> int:
        """Where its payload starts."""
        return self.offset + len(self.line)

    @property
    def end(self) -> int:
        """Where the next batch starts."""
        return self.start + self.row.size


def read_header_line(source: LogSource) -> bytes | None:
    """The first line with its newline, or None when there is none."""
    return _line(source, 0, _HEADER_MAX)


def last_batch(source: LogSource) -> Found | None:
    """The newest batch row that verifies by itself."""
    window = _WINDOW
    end = source.size
    while True:
        start = max(0, end - window)
        data = source.read(start, end - start)
        at = data.rfind(_MARK)
        while at >= 0:
            found = _try(source, start + at + 1)
            if found is not None:
                return found
            at = data.rfind(_MARK, 0, at)
        if start == 0:
            return None
        window = min(window * 4, 16 << 20)
        end = start + len(_MARK)


def stored_next_seq(source: LogSource, last: Found, header_line: bytes | None) -> int:
    """The seq after the last stored event: what the newest batch says, counting only rows that verify."""
    payload = source.read(last.start, min(last.row.size, source.size - last.start))
    header = header_line if last.row.number == 0 else None
    rows = split_rows(payload)
    if not rows_verify(last.row, rows, len(payload), header):
        rows = verified_prefix(last.row, payload, header)
        payload = b"".join(rows)
    return last.row.seq + count_events(rows, payload)


def read_page(
    source: LogSource, seq: int, limit: int, max_bytes: int, *, next_seq: int | None = None, epoch: int = 0
) -> Page | None:
    """The page of canonical lines from ``seq`` on, or None when the file holds no log yet.

    Args:
        source: The log.
        seq: The first seq wanted.
        limit: At most so many events.
        max_bytes: At most about so many bytes of lines (one event always fits).
        next_seq: The seq after the last event when the caller knows it (a live log).
        epoch: Passed on.

    Raises:
        StoreError: ``store.corrupt`` when the first wanted event does not verify.
    """
    header_line = read_header_line(source)
    last = None if header_line is None else last_batch(source)
    if header_line is None or last is None:
        return None
    if next_seq is None:
        next_seq = stored_next_seq(source, last, header_line)
    if seq >= next_seq or limit <= 0:
        return Page(seq, (), next_seq, epoch)
    offset = _bisect(source, seq, len(header_line), last)
    lines = _collect(source, offset, seq, min(limit, next_seq - seq), max_bytes, header_line)
    return Page(seq, tuple(lines), next_seq, epoch)


def _bisect(source: LogSource, seq: int, first: int, last: Found) -> int:
    """The offset of a batch at or shortly before the one that holds ``seq``."""
    if last.row.seq <= seq:
        return last.offset
    low, high = first, last.offset
    while high - low > _WINDOW:
        middle = (low + high) // 2
        found = _first_batch(source, middle, high)
        if found is None or found.row.seq > seq:
            high = middle
        else:
            low = found.offset
    return low


def find_batch(source: LogSource, start: int) -> Found | None:
    """The first batch row at or after ``start`` that verifies by itself."""
    at_start = _try(source, start) if start < source.size else None
    return at_start or _first_batch(source, start, source.size)


def _first_batch(source: LogSource, start: int, end: int) -> Found | None:
    base = start
    while base < end:
        data = source.read(base, min(_WINDOW, end - base) + len(_MARK))
        at = data.find(_MARK)
        while at >= 0:
            if base + at + 1 >= end:
                return None
            found = _try(source, base + at + 1)
            if found is not None:
                return found
            at = data.find(_MARK, at + 1)
        base += _WINDOW
    return None


def _collect(source: LogSource, offset: int, seq: int, limit: int, max_bytes: int, header_line: bytes) -> list[bytes]:
    lines: list[bytes] = []
    taken = 0
    wanted = seq
    base, buffer = offset, b""
    while offset < source.size and len(lines) < limit and taken < max_bytes:
        at = offset - base
        end = buffer.find(b"\n", at)
        if end < 0:
            base, buffer, at = offset, source.read(offset, _READ_AHEAD), 0
            end = buffer.find(b"\n")
        line = buffer[at : end + 1] if end >= 0 else _line(source, offset, source.size - offset)
        row = None if line is None else parse_batch_row(line)
        if line is None or row is None:
            found = _first_batch(source, offset, source.size)
            if found is None or lines or found.row.seq > wanted:
                if lines:
                    return lines
                raise corrupt(source.path, offset, wanted, "a batch row does not verify")
            offset = found.offset
            continue
        if row.seq > wanted:
            if lines:
                return lines
            raise corrupt(source.path, offset, wanted, "the rows before this batch do not verify")
        start = offset + len(line)
        at = start - base
        if at + row.size > len(buffer):
            base, buffer, at = start, source.read(start, max(row.size, _READ_AHEAD)), 0
        payload = buffer[at : at + row.size]
        offset = start + row.size
        rows = split_rows(payload)
        if rows_verify(row, rows, len(payload), header_line if row.number == 0 else None):
            if row.seq + count_events(rows, payload) <= wanted:
                continue
            fresh = expand_rows(rows)[wanted - row.seq :]
        else:
            fresh = _surviving(row, payload, wanted)
            if not fresh and _damage_matters(source, row, offset, wanted):
                if lines:
                    return lines
                raise corrupt(source.path, start + _first_bad(row, rows), wanted, "a row does not verify")
        for text in fresh:
            if len(lines) >= limit or (lines and taken + len(text) > max_bytes):
                return lines
            lines.append(text)
            taken += len(text)
        wanted += len(fresh)
    return lines


def _damage_matters(source: LogSource, row: BatchRow, end: int, wanted: int) -> bool:
    """Whether ``wanted`` lies in this damaged batch, by what the next batch says."""
    after = _first_batch(source, end - 1, source.size) if end < source.size else None
    return after is None or after.row.seq > wanted


def _surviving(row: BatchRow, payload: bytes, wanted: int) -> list[bytes]:
    """Lines from ``wanted`` on, without a gap, out of a damaged batch: each verifying row says its own seq."""
    expected = row.row_crcs
    rows = split_rows(payload)
    if row.number == 0:
        expected = expected[1:]
    lines: list[bytes] = []
    for line, crc in zip(rows, expected, strict=False):
        if b"%08x" % crc32(line) != crc:
            if lines:
                return lines
            continue
        if is_storage_row(line):
            continue
        for event in expand_row(line):
            if seq_of(event) == wanted + len(lines):
                lines.append(event)
    return lines


def _first_bad(row: BatchRow, rows: list[bytes]) -> int:
    expected = row.row_crcs[1:] if row.number == 0 else row.row_crcs
    offset = 0
    for line, crc in zip(rows, expected, strict=False):
        if b"%08x" % crc32(line) != crc:
            break
        offset += len(line)
    return offset


def seq_of(line: bytes) -> int:
    """The seq of a canonical line, or -1."""
    digits = line[7 : line.find(b",")]
    return int(digits) if digits.isdigit() else -1


def _try(source: LogSource, offset: int) -> Found | None:
    line = _line(source, offset, source.size - offset)
    row = None if line is None else parse_batch_row(line)
    return None if line is None or row is None else Found(offset, line, row)


def _line(source: LogSource, offset: int, limit: int) -> bytes | None:
    size = min(_WINDOW, limit)
    while True:
        data = source.read(offset, size)
        end = data.find(b"\n")
        if end >= 0:
            return data[: end + 1]
        if size >= limit or len(data) < size:
            return None
        size = min(size * 4, limit)
