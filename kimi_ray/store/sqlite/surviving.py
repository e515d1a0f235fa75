"""Every row of a damaged log that verifies, and the places between them; also around pages that SQLite cannot read."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from sqlite3 import Connection
from typing import Any

from kimi_ray.errors import StoreError
from kimi_ray.store.sqlite.failures import FAILURES, corrupt_row, is_damage
from kimi_ray.store.sqlite.paging import first_row, lines_of, verified
from kimi_ray.store.sqlite.schema import SEQ_BITS, row_id

_SEQ_MASK = (1 << SEQ_BITS) - 1
_SELECT = "SELECT id, events, crc, data FROM rows WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"


@dataclass(slots=True)
class Survivors:
    """What was found from some seq on. ``next_seq`` is where to go on; None: there is nothing more."""

    events: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    damage: list[StoreError] = field(default_factory=list[StoreError])
    rows: int = 0
    bytes: int = 0
    next_seq: int | None = None


def surviving_rows(
    connection: Connection, file: str, stream: int, seq: int, limit: int, *, end: int | None
) -> Survivors:
    """Rows from ``seq`` on, about ``limit`` events of them.

    Args:
        connection: Inside a read transaction.
        file: The database, for messages.
        stream: The log.
        seq: Where to begin.
        limit: How many events are enough.
        end: The seq after the last event, as far as it is known.
    """
    found = Survivors()
    with contextlib.closing(_rows(connection, file, stream, seq, limit, found)) as rows:
        _take(rows, found, file, stream, seq, limit, end)
    return found


def _take(
    rows: Iterable[tuple[Any, ...]], found: Survivors, file: str, stream: int, seq: int, limit: int, end: int | None
) -> None:
    expected = seq
    for row in rows:
        at = row[0] & _SEQ_MASK
        try:
            _, count, data = verified(row, file)
            lines = lines_of(data, count, file, row[0], at)
        except StoreError as error:
            _miss(found, file, stream, expected, at)
            found.damage.append(error)
            expected = max(expected, at + 1)
            continue
        _miss(found, file, stream, expected, at)
        found.events.extend((at + offset, line) for offset, line in enumerate(lines) if at + offset >= expected)
        found.rows += 1
        found.bytes += len(data)
        expected = max(expected, at + count)
        if len(found.events) >= limit:
            found.next_seq = expected
            return
    if end is not None:
        _miss(found, file, stream, expected, end)


def _miss(found: Survivors, file: str, stream: int, expected: int, at: int) -> None:
    if at > expected and not (found.damage and found.damage[-1].details.get("next") == at):
        why = f"the rows up to seq {at - 1} are missing"
        found.damage.append(corrupt_row(file, row_id(stream, expected), expected, why))


def _rows(
    connection: Connection, file: str, stream: int, seq: int, limit: int, found: Survivors
) -> Generator[tuple[Any, ...]]:
    end = row_id(stream + 1, 0)
    try:
        at = first_row(connection, stream, seq) if seq else row_id(stream, 0)
    except FAILURES as error:
        if not is_damage(error):
            raise
        at = row_id(stream, seq)
    while at < end:
        try:
            with contextlib.closing(connection.execute(_SELECT, (at, end, limit + 1))) as cursor:
                for row in cursor:
                    at = max(at, row[0]) + 1  # a damaged tree may have rows out of their order
                    yield row
            return
        except FAILURES as error:
            if not is_damage(error):
                raise
            beyond = _readable_beyond(connection, at, end)
            where = min(beyond, end)
            why = f"SQLite cannot read what lies here, up to {'the end' if beyond >= end else f'row {beyond}'}: {error}"
            damage = corrupt_row(file, at, at & _SEQ_MASK, why)
            found.damage.append(damage.with_details(next=where & _SEQ_MASK))
            at = beyond


def _readable_beyond(connection: Connection, start: int, end: int) -> int:
    """The first rowid after ``start`` from which on SQLite can read again."""
    low, step = start, 1
    while True:
        high = min(start + step, end)
        found = _next(connection, high, end)
        if found is not None:
            break
        low, step = high, step * 2
    while high - low > 1:
        middle = (low + high) // 2
        nearer = _next(connection, middle, end)
        if nearer is None:
            low = middle
        else:
            high, found = middle, nearer
    return max(high, found)


def _next(connection: Connection, start: int, end: int) -> int | None:
    """The rowid of the first row at or after ``start`` (``end``: there is none), or None when it cannot be read."""
    if start >= end:
        return end
    try:
        row = connection.execute(_SELECT, (start, end, 1)).fetchone()
    except FAILURES as error:
        if not is_damage(error):
            raise
        return None
    return end if row is None else row[0]
