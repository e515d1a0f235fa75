"""What of a batch may be stored: its rows are whole, no event is missing before it, what is stored already is equal.

Every backend admits batches by these rules; only reading what is stored is its own.
"""

from __future__ import annotations

from collections.abc import Callable

from kimi_ray.errors import StoreError
from kimi_ray.store.batch_rows import EVENT_START, STORAGE_STARTS, expand_row, named_seq
from kimi_ray.store.seam import Batch, Stream

MAX_ROW_BYTES = 128 << 20
"""No backend has to hold more than this of one row in memory."""
StoredLines = Callable[[int, int], list[bytes]]
"""``stored(start, end)``: the canonical lines of the events ``start`` .. ``end - 1``, without newline."""


def checked_payload(batch: Batch, next_seq: int) -> bytes:
    """The payload of a batch that is whole and leaves no hole.

    Args:
        batch: What was sent.
        next_seq: The seq after the last stored event.

    Raises:
        StoreError: ``store.bad_batch``, ``store.gap`` {expected}.
    """
    payload = bytes(batch.payload)
    rows = batch.row_bytes
    if len(rows) != len(batch.row_events) or sum(rows) != len(payload) or payload.count(b"\n") != len(rows):
        raise _malformed(batch, "its row lengths do not fit its payload")
    if rows and payload[-1] != 10:
        raise _malformed(batch, "its last row has no newline")
    if rows and named_seq(payload) not in (batch.first_seq, None):
        raise _malformed(batch, "its first row names another seq")
    if rows and max(rows) > MAX_ROW_BYTES:
        raise _malformed(batch, f"a row has more than {MAX_ROW_BYTES} bytes")
    if payload.count(b'\n{"seq":') + payload.startswith(EVENT_START) != len(rows):
        for row in payload.split(b"\n"):
            if row.startswith(STORAGE_STARTS):
                raise _malformed(batch, "a row looks like one of the store's own")
    if batch.first_seq > next_seq:
        raise StoreError(
            f"{batch.stream} has events up to seq {next_seq}, the batch starts at {batch.first_seq}",
            code="store.gap",
            hint="send the events from the expected seq on",
            details={"stream": list(batch.stream), "expected": next_seq, "first_seq": batch.first_seq},
            retryable=True,
        )
    return payload


def rows_after_overlap(batch: Batch, payload: bytes, next_seq: int, stored: StoredLines) -> list[tuple[bytes, int]]:
    """The rows that are not stored yet, each with its number of events; a row that is stored in part is taken apart.

    Raises:
        StoreError: ``store.conflict`` {seq} when a stored event differs from the one that is sent.
    """
    end = min(next_seq, batch.next_seq)
    lines_there = stored(batch.first_seq, end)
    seq = batch.first_seq
    start = 0
    fresh: list[tuple[bytes, int]] = []
    for size, events in zip(batch.row_bytes, batch.row_events, strict=True):
        row = payload[start : start + size]
        start += size
        if seq >= end:
            fresh.append((row, events))
            seq += events
            continue
        for line in [row[:-1]] if events == 1 else expand_row(row):
            if seq >= end:
                fresh.append((line + b"\n", 1))
            elif lines_there[seq - batch.first_seq] != line:
                raise _conflict(batch.stream, seq)
            seq += 1
    return fresh


def _conflict(stream: Stream, seq: int) -> StoreError:
    return StoreError(
        f"{stream} holds another event at seq {seq} than the one that is sent",
        code="store.conflict",
        hint="two writers made different events under one grant; fork from the stored log",
        details={"stream": list(stream), "seq": seq},
    )


def _malformed(batch: Batch, why: str) -> StoreError:
    return StoreError(
        f"a batch for {batch.stream} cannot be stored: {why}",
        code="store.bad_batch",
        details={"stream": list(batch.stream), "first_seq": batch.first_seq},
    )
