"""Reading a whole log with every checksum, and the Tail rule: what is torn, what is corrupt.

G is the end of the unbroken run of verifying batches from the start of the file. What lies after G is *torn* (a write
that a crash cut short) or *corrupt* (bytes that were whole once):

- a verifying batch after G, or a closed row that counts more events than there are: corrupt (a closed row that counts
  no more is the end of a closing batch that was cut short itself);
- a full-length bad batch while the machine has not been restarted since the newest grant: corrupt, for the page cache
  loses nothing when only a process dies; likewise a bad first batch, which was synced before the log became visible;
- anything else is torn: rows that verify are kept, for their acknowledgement may have been lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from zlib import crc32

from pydantic_core import from_json

from kimi_ray.errors import LogError, StoreError
from kimi_ray.store.batch_rows import (
    BATCH_START,
    CLOSED_START,
    EPOCH_START,
    BatchRow,
    EpochRow,
    count_events,
    parse_batch_row,
    parse_closed_row,
    parse_epoch_row,
    rows_verify,
    split_rows,
    verified_prefix,
)

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: fewer bytes only at the end."""

LOG_VERSION = 1
_WINDOW = 1 << 20
_HEADER_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class ScannedBatch:
    """A batch whose every checksum is right. ``rows`` keep their newline and include storage rows."""

    number: int
    seq: int
    next_seq: int
    offset: int
    payload_offset: int
    rows: list[bytes]


@dataclass(frozen=True, slots=True)
class Tail:
    """What lies after G. ``size`` 0: nothing. ``kept`` are rows that verify; ``unborn``: the log never came to be."""

    offset: int
    size: int
    kept: list[bytes] = field(default_factory=list[bytes])
    unborn: bool = False


def corrupt(file: str, offset: int, seq: int, why: str) -> StoreError:
    """``store.corrupt`` {file, offset, seq}."""
    return StoreError(
        f"{file} is damaged at byte {offset} (seq {seq}): {why}",
        code="store.corrupt",
        hint="`kimi-ray sessions salvage` makes a new session of everything that verifies",
        details={"file": file, "offset": offset, "seq": seq},
    )


def parse_header(line: bytes, file: str) -> dict[str, Any]:
    """The header object of a log's first line.

    Raises:
        LogError: ``log.version_unsupported`` before anything else is looked at.
        StoreError: ``store.corrupt`` when the line is not a header.
    """
    try:
        value: Any = from_json(line)
    except ValueError:
        raise corrupt(file, 0, 0, "the first line is not JSON") from None
    if not isinstance(value, dict):
        raise corrupt(file, 0, 0, "the first line is not a header")
    header = cast("dict[str, Any]", value)
    version = header.get("version")
    if isinstance(version, int) and version != LOG_VERSION:
        newer = version > LOG_VERSION
        raise LogError(
            f"{file} has log version {version}; this program reads version {LOG_VERSION}",
            code="log.version_unsupported",
            hint="upgrade the program" if newer else "no program reads this version any more",
            details={"file": file, "version": version},
        )
    if header.get("type") != "log" or version is None:
        raise corrupt(file, 0, 0, "the first line is not a header")
    return header


class LogScan:
    """One pass over a log, from byte 0, a batch at a time; memory is bounded by the largest batch."""

    def __init__(self, read: ReadAt, size: int, file: str) -> None:
        """
        Args:
            read: Reads at an offset.
            size: Where the log ends.
            file: Its name, for errors.
        """
        self._read = read
        self._size = size
        self._file = file
        self._base = 0
        self._buffer = b""
        self.header_line: bytes | None = None
        self.header: dict[str, Any] = {}
        self.good = 0
        """G: the end of the last verifying batch."""
        self.batches_read = 0
        self.next_seq = 0
        self.epoch: EpochRow | None = None
        self.closed = False
        self._bad: tuple[BatchRow, int] | None = None

    def __iter__(self) -> Iterator[ScannedBatch]:
        """The verifying batches in order; after the last one the attributes describe the log up to G."""
        offset = self._read_header()
        if offset is None:
            return
        while offset < self._size:
            batch = self._next(offset)
            if batch is None:
                return
            self._account(batch.rows)
            offset = self.good = batch.payload_offset + sum(map(len, batch.rows))
            self.batches_read += 1
            self.next_seq = batch.next_seq
            yield batch

    def finish(self) -> LogScan:
        """Run to the end without looking at the rows."""
        for _ in self:
            pass
        return self

    def _read_header(self) -> int | None:
        line = self._line_at(0, _HEADER_MAX)
        if line is None:
            return None
        self.header_line = line
        try:
            self.header = parse_header(line, self._file)
        except StoreError:
            if line.strip(b"\0\n"):
                raise
            self.header_line = None
            return None
        return len(line)

    def _next(self, offset: int) -> ScannedBatch | None:
        line = self._line_at(offset, self._size - offset)
        row = None if line is None else parse_batch_row(line)
        if line is None or row is None:
            return None
        start = offset + len(line)
        self._bad = (row, start)
        if row.size > self._size - start:
            return None
        payload = self._bytes_at(start, row.size)
        rows = split_rows(payload)
        header = self.header_line if self.batches_read == 0 else None
        if payload[-1:] != b"\n" or not rows_verify(row, rows, len(payload), header):
            return None
        if row.number != self.batches_read or row.seq != self.next_seq:
            return None
        self._bad = None
        return ScannedBatch(row.number, row.seq, row.seq + count_events(rows, payload), offset, start, rows)

    def _account(self, rows: list[bytes]) -> None:
        for row in rows:
            if row.startswith(EPOCH_START):
                found = parse_epoch_row(row)
                if found is not None:
                    self.epoch, self.closed = found, False
            elif row.startswith(CLOSED_START):
                closed = parse_closed_row(row)
                if closed is not None and self.epoch is not None and closed[0] == self.epoch.epoch:
                    self.closed = True

    def tail(self, boot: str) -> Tail:
        """Judge what lies after G, by the Tail rule. Call it after the iteration ended.

        Args:
            boot: The present boot id of the machine.

        Raises:
            StoreError: ``store.corrupt`` {file, offset, seq}.
        """
        size = self._size - self.good
        if size <= 0 and self.batches_read > 0:
            return Tail(self.good, 0)
        kept, damage = self._keep()
        at, seq = damage
        if self._whole_after(self.good, seq):
            raise corrupt(self._file, at, seq, "whole batches follow")
        if not self._is_cut() and not self._may_be_lost(kept, boot):
            raise corrupt(self._file, at, seq, "a complete batch does not verify")
        self._account(kept)
        unborn = self.batches_read == 0 and self.epoch is None
        if not unborn:
            payload = b"".join(kept)
            self.next_seq += count_events(kept, payload)
        return Tail(self.good, size, [] if unborn else kept, unborn)

    def _keep(self) -> tuple[list[bytes], tuple[int, int]]:
        """Rows after G that verify, and ``(offset, seq)`` of the first that does not."""
        if self._bad is None:
            return [], (self.good, self.next_seq)
        row, start = self._bad
        if row.number != self.batches_read or row.seq != self.next_seq:
            return [], (self.good, self.next_seq)
        payload = self._bytes_at(start, min(row.size, self._size - start))
        header = self.header_line if self.batches_read == 0 else None
        if header is not None and row.row_crcs[:1] != [b"%08x" % crc32(header)]:
            return [], (0, 0)
        kept = verified_prefix(row, payload, header)
        joined = b"".join(kept)
        return kept, (start + len(joined), self.next_seq + count_events(kept, joined))

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
        """Whether what follows G can be the beginning of one batch whose write stopped half way."""
        at = self.good or len(self.header_line or b"")
        if self._line_at(at, self._size - at) is None:
            return True
        if self._bad is None:
            return False
        row, start = self._bad
        have = self._size - start
        if have >= row.size or row.number != self.batches_read or row.seq != self.next_seq:
            return False
        payload = self._bytes_at(start, have)
        header = self.header_line if self.batches_read == 0 else None
        return len(verified_prefix(row, payload, header)) == payload.count(b"\n")

    def _whole_after(self, offset: int, seq: int) -> bool:
        """Whether a verifying batch, or a closed row that counts events from ``seq`` on, stands after ``offset``."""
        for start, line in self._candidates(offset):
            if line.startswith(CLOSED_START):
                closed = parse_closed_row(line)
                if closed is not None and closed[1] > seq:
                    return True
                continue
            row = parse_batch_row(line)
            if row is None or row.size > self._size - start - len(line):
                continue
            payload = self._bytes_at(start + len(line), row.size)
            header = self.header_line if row.number == 0 else None
            if payload[-1:] == b"\n" and rows_verify(row, split_rows(payload), len(payload), header):
                return True
        return False

    def _candidates(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """Places at or after ``offset`` where a batch row or a closed row may start, at any byte."""
        base = offset
        while base < self._size:
            window = self._bytes_at(base, min(_WINDOW, self._size - base))
            for needle in (BATCH_START, CLOSED_START):
                at = window.find(needle)
                while at >= 0:
                    line = self._line_at(base + at, self._size - base - at)
                    if line is not None:
                        yield base + at, line
                    at = window.find(needle, at + 1)
            if base + len(window) >= self._size:
                return
            base += max(1, len(window) - len(CLOSED_START))

    def _line_at(self, offset: int, limit: int) -> bytes | None:
        """The line at ``offset`` with its newline; None when there is no newline within the log."""
        size = min(_WINDOW, limit)
        while True:
            at = offset - self._base
            if 0 <= at < len(self._buffer):
                end = self._buffer.find(b"\n", at)
                if end >= 0:
                    return self._buffer[at : end + 1]
            if at >= 0 and offset + size <= self._base + len(self._buffer):
                if size >= limit:
                    return None
                size = min(size * 4, limit)
            if not self._fill(offset, size):
                return None

    def _bytes_at(self, offset: int, size: int) -> bytes:
        at = offset - self._base
        if at < 0 or at + size > len(self._buffer):
            self._fill(offset, max(size, min(_WINDOW, self._size - offset)))
            at = 0
        return self._buffer[at : at + size]

    def _fill(self, offset: int, size: int) -> bool:
        wanted = min(size, self._size - offset)
        if wanted <= 0:
            return False
        if offset == self._base and len(self._buffer) >= wanted:
            return False
        self._buffer = self._read(offset, wanted)
        self._base = offset
        return bool(self._buffer)
