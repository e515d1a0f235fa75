"""Pages of a log without reading all of it.

Batches verify by themselves, so a position in the file can be tried anywhere: the newest batch is found backwards from
the end, the batch that holds a seq by bisection over byte offsets. No index is kept; a page near the tail of a large
log costs about twenty small reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kimi_ray.errors import StoreError
from kimi_ray.store.batch_rows import (
    count_events,
    expand_payload,
    expand_row,
    expand_rows,
    is_storage_row,
    seq_of,
)
from kimi_ray.store.framing import Found, Framing, Probe
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_scan import corrupt, parse_header
from kimi_ray.store.seam import Page

_CLOSE_ENOUGH = 64 << 10


@dataclass(frozen=True, slots=True)
class Judged:
    """What the Tail rule says of a log that does not end with a verifying batch.

    ``kept`` are the lines that go on from ``next_seq``, ``error`` is ``store.corrupt``.
    """

    next_seq: int
    kept: tuple[bytes, ...]
    error: StoreError | None = None


def judge(framing: Framing, source: LogSource, boot: str) -> Judged:
    """Scan all of a log and judge its tail."""
    scan = framing.scan(source.read, source.size, source.path).finish()
    next_seq = scan.next_seq
    try:
        kept = scan.tail(boot).kept
    except StoreError as error:
        return Judged(next_seq, (), error)
    return Judged(next_seq, tuple(expand_rows(kept)))


def read_page(
    framing: Framing,
    source: LogSource,
    seq: int,
    limit: int,
    max_bytes: int,
    *,
    next_seq: int | None = None,
    epoch: int = 0,
    judged: Callable[[], Judged] | None = None,
    chunks: bool = True,
) -> Page | None:
    """The page of canonical lines from ``seq`` on, or None when the file holds no log yet.

    Args:
        framing: The encoding of the log.
        source: The log.
        seq: The first seq wanted.
        limit: At most so many events.
        max_bytes: At most about so many bytes of lines (one event always fits).
        next_seq: The seq after the last event when the caller knows it (a live log).
        epoch: Passed on.
        judged: Judges the tail of a log that does not end with a verifying batch.
        chunks: False lets packed chunks be: their lines may be empty.

    Raises:
        LogError: ``log.version_unsupported``.
        StoreError: ``store.corrupt`` when the first wanted event does not verify.
    """
    probe = framing.probe(source.read, source.size)
    header_line = probe.header_line()
    if header_line is None:
        return None
    try:
        parse_header(header_line, source.path)
    except StoreError:
        pass  # every event that verifies is read, whatever the header says
    last = probe.before(source.size)
    if last is None:
        return None
    kept: tuple[bytes, ...] = ()
    if next_seq is None:
        next_seq, whole = _stored_end(probe, source, last)
        if not whole and judged is not None:
            tail = judged()
            if tail.error is None:
                next_seq, kept = tail.next_seq, tail.kept
            elif seq >= next_seq:
                raise tail.error
    total = next_seq + len(kept)
    if seq >= total or limit <= 0:
        return Page(seq, (), total, epoch)
    lines: list[bytes] = []
    if seq < next_seq:
        offset = _bisect(probe, seq, last)
        lines = _collect(probe, source, offset, seq, min(limit, next_seq - seq), max_bytes, chunks)
    if seq + len(lines) >= next_seq:
        room = max_bytes - sum(map(len, lines))
        for text in kept[seq + len(lines) - next_seq :]:
            if len(lines) >= limit or (lines and len(text) > room):
                break
            lines.append(text)
            room -= len(text)
    return Page(seq, tuple(lines), total, epoch)


def _stored_end(probe: Probe, source: LogSource, last: Found) -> tuple[int, bool]:
    """The seq after the newest batch, counting only rows that verify, and whether that batch ends the file."""
    found = probe.rows(last)
    if found.payload is not None:
        return last.seq + count_events(found.payload), last.end == source.size
    rows: list[bytes] = []
    for _, row in found.rows:
        if row is None:
            break
        rows.append(row)
    return last.seq + count_events(b"".join(rows)), False


def _bisect(probe: Probe, seq: int, last: Found) -> int:
    """The offset of a batch at or shortly before the one that holds ``seq``."""
    if last.seq <= seq:
        return last.offset
    low, high = 0, last.offset
    while high - low > _CLOSE_ENOUGH:
        middle = (low + high) // 2
        found = probe.first(middle, high)
        if found is None or found.seq > seq:
            high = middle
        else:
            low = found.offset
    return low


def _collect(
    probe: Probe, source: LogSource, offset: int, seq: int, limit: int, max_bytes: int, chunks: bool
) -> list[bytes]:
    lines: list[bytes] = []
    taken = 0
    wanted = seq
    while offset < source.size and len(lines) < limit and taken < max_bytes:
        found = probe.at(offset)
        if found is None:
            found = probe.first(offset, source.size)
            if found is None or lines or found.seq > wanted:
                if lines:
                    return lines
                raise corrupt(source.path, offset, wanted, "no batch verifies here")
        elif found.seq > wanted:
            if lines:
                return lines
            raise corrupt(source.path, offset, wanted, "the rows before this batch do not verify")
        offset = found.end
        fresh = _lines_of(probe, source, found, wanted, bool(lines), chunks)
        for text in fresh:
            if len(lines) >= limit or (lines and taken + len(text) > max_bytes):
                return lines
            lines.append(text)
            taken += len(text)
        wanted += len(fresh)
    return lines


def _lines_of(probe: Probe, source: LogSource, found: Found, wanted: int, may_end: bool, chunks: bool) -> list[bytes]:
    """Lines from ``wanted`` on, without a gap, out of a batch; none when it ends before.

    Raises:
        StoreError: ``store.corrupt`` when ``wanted`` is in the batch and damaged, unless the page ``may_end`` here.
    """
    if found.payload is not None and found.seq + count_events(found.payload) <= wanted:
        return []
    rows = probe.rows(found)
    if rows.payload is not None:
        return expand_payload(rows.payload, chunks=chunks)[wanted - found.seq :]
    lines: list[bytes] = []
    first_bad = found.offset
    damaged = False
    for at, row in rows.rows:
        if row is None:
            if not damaged:
                first_bad, damaged = at, True
            if lines:
                return lines
        elif not is_storage_row(row):
            for event in expand_row(row):
                if seq_of(event) == wanted + len(lines):
                    lines.append(event)
    if not lines and not may_end and _holds(probe, source, found, wanted):
        raise corrupt(source.path, first_bad, wanted, "a row does not verify")
    return lines


def _holds(probe: Probe, source: LogSource, found: Found, wanted: int) -> bool:
    """Whether ``wanted`` lies in this damaged batch, by what the next batch says."""
    after = probe.first(found.end, source.size)
    return after is None or after.seq > wanted
