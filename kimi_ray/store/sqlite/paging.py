"""Rows back into events, each verified: a hole, a wrong checksum or a missing end is never passed over in silence."""

from __future__ import annotations

from collections.abc import Iterator
from sqlite3 import Connection
from typing import Any

from kimi_ray.errors import StoreError
from kimi_ray.store.batch_rows import EVENT_START, expand_row
from kimi_ray.store.chunk_rows import MAX_MEMBERS
from kimi_ray.store.seam import Page
from kimi_ray.store.sqlite.failures import corrupt_row
from kimi_ray.store.sqlite.schema import SEQ_BITS, Head, row_crc, row_id

_AT_ONCE = 256
_SEQ_MASK = (1 << SEQ_BITS) - 1
_SELECT = f"SELECT id, events, crc, data FROM rows WHERE id >= ? AND id < ? ORDER BY id LIMIT {_AT_ONCE}"


def verified(row: tuple[Any, ...], file: str) -> tuple[int, int, bytes]:
    """``(seq, events, data)`` of a row whose checksum is right.

    Raises:
        StoreError: ``store.corrupt`` {file, rowid, seq}.
    """
    rowid, events, crc, data = row
    seq = rowid & _SEQ_MASK
    if not isinstance(data, bytes) or not isinstance(events, int) or not 1 <= events <= MAX_MEMBERS:
        raise corrupt_row(file, rowid, seq, "it is no row of events")
    if row_crc(rowid >> SEQ_BITS, seq, events, data) != crc:
        raise corrupt_row(file, rowid, seq, "its checksum is wrong")
    return seq, events, data


def lines_of(data: bytes, events: int, file: str, rowid: int, seq: int) -> list[bytes]:
    """The canonical lines of the events in a verified row.

    Raises:
        StoreError: ``store.corrupt``.
    """
    if data.startswith(EVENT_START):
        lines = [data[:-1]]
    else:
        try:
            lines = expand_row(data)
        except StoreError as error:
            raise corrupt_row(file, rowid, seq, error.message) from error
    if len(lines) != events:
        raise corrupt_row(file, rowid, seq, f"it holds {len(lines)} events instead of {events}")
    return lines


def first_row(connection: Connection, stream: int, seq: int) -> int:
    """The rowid of the row that holds ``seq``, or where it should be."""
    row = connection.execute(
        "SELECT id FROM rows WHERE id > ? AND id <= ? ORDER BY id DESC LIMIT 1",
        (max(row_id(stream, 0) - 1, row_id(stream, seq) - MAX_MEMBERS), row_id(stream, seq)),
    ).fetchone()
    return row_id(stream, seq) if row is None else row[0]


def rows_from(
    connection: Connection, file: str, stream: int, seq: int, end: int
) -> Iterator[tuple[int, int, int, bytes, int]]:
    """``(rowid, seq, events, data, checksum)`` of the unbroken run of rows that holds ``seq`` .. ``end - 1``.

    Raises:
        StoreError: ``store.corrupt`` at the first row that is damaged or missing.
    """
    if seq >= end:
        return
    expected = first_row(connection, stream, seq) & _SEQ_MASK
    while expected < end:
        # Each query is read to its end: one left half read keeps its snapshot, whoever uses the connection next.
        rows = connection.execute(_SELECT, (row_id(stream, expected), row_id(stream, end))).fetchall()
        for row in rows:
            found, events, data = verified(row, file)
            if found != expected:
                raise corrupt_row(file, row_id(stream, expected), expected, "the row is missing")
            yield row[0], found, events, data, row[2]
            expected += events
        if not rows and expected < end:
            raise corrupt_row(file, row_id(stream, expected), expected, "the row is missing")
    if expected > end:
        raise corrupt_row(file, row_id(stream, end), end, "the last row reaches beyond the end of the log")


def read_lines(connection: Connection, file: str, head: Head, start: int, end: int) -> list[bytes]:
    """Canonical lines ``start`` .. ``end - 1``; ``end`` is at most the log's own.

    Raises:
        StoreError: ``store.corrupt``.
    """
    lines: list[bytes] = []
    for rowid, seq, events, data, _ in rows_from(connection, file, head.stream, start, head.next_seq):
        if seq >= end:
            break
        for at, line in enumerate(lines_of(data, events, file, rowid, seq), seq):
            if start <= at < end:
                lines.append(line)
    return lines


def read_page(
    connection: Connection, file: str, head: Head, seq: int, limit: int, max_bytes: int, chunks: bool = True
) -> Page:
    """See ``Reader.read_from``.

    Raises:
        StoreError: ``store.corrupt`` when the first wanted event does not verify; a later one ends the page before it.
    """
    lines: list[bytes] = []
    size = 0
    limit = min(limit, head.next_seq - seq)
    if limit <= 0:
        return Page(seq, (), head.next_seq, head.epoch)
    try:
        for rowid, at, events, data, _ in rows_from(connection, file, head.stream, seq, head.next_seq):
            packed = not chunks and not data.startswith(EVENT_START)
            found = [b""] * events if packed else lines_of(data, events, file, rowid, at)
            for line in found[max(0, seq - at) :]:
                size += len(line) + 1
                if lines and (size > max_bytes or len(lines) >= limit):
                    return Page(seq, tuple(lines), head.next_seq, head.epoch)
                lines.append(line)
            if len(lines) >= limit:
                break
    except StoreError:
        if not lines:
            raise
    return Page(seq, tuple(lines[:limit]), head.next_seq, head.epoch)
