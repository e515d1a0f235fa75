"""Batches into rows: the grant, the place and every event that is there already are checked in the same transaction."""

from __future__ import annotations

from dataclasses import replace
from sqlite3 import Connection, IntegrityError

from kimi_ray.errors import KimiRayError
from kimi_ray.store.admission import checked_payload, rows_after_overlap
from kimi_ray.store.layout import not_found
from kimi_ray.store.refusals import grant_fenced
from kimi_ray.store.seam import Batch, LogView, Stream
from kimi_ray.store.sqlite.catalogue import find_stream, read_head, refuse_gone, write_head
from kimi_ray.store.sqlite.failures import FAILURES, corrupt_row, is_damage, store_error
from kimi_ray.store.sqlite.granting import Granter
from kimi_ray.store.sqlite.paging import read_lines
from kimi_ray.store.sqlite.schema import Head, row_crc, row_id
from kimi_ray.store.survey import closer_rows

Written = int | KimiRayError
"""The seq after the last written event of the batch's log, or why the batch was refused."""


def append_batches(connection: Connection, file: str, batches: list[Batch]) -> list[Written]:
    """Append each batch or say why not; one that is refused changes nothing.

    Raises:
        sqlite3.Error: When the transaction itself cannot go on.
    """
    answers: list[Written] = []
    for batch in batches:
        connection.execute("SAVEPOINT batch")
        try:
            answers.append(_append(connection, file, batch))
        except (KimiRayError, *FAILURES) as error:
            # A page that cannot be read is the trouble of this batch; anything else ends the transaction.
            if not isinstance(error, KimiRayError) and not is_damage(error):
                raise
            connection.execute("ROLLBACK TO batch")
            answers.append(error if isinstance(error, KimiRayError) else store_error(error, file))
        connection.execute("RELEASE batch")
    return answers


def close_turn(connection: Connection, granter: Granter, stream: Stream, view: LogView, nonce: str) -> int | None:
    """Close the open turn that ``view`` shows, under a grant of its own that is given back at once.

    Returns:
        The epoch of that grant, or None when the log has grown or was granted meanwhile.

    Raises:
        StoreError: ``store.corrupt``, ``store.deleted``, ``store.not_found``.
    """
    head = granter.present(connection, stream)
    if head.nonce == nonce:
        return head.epoch  # a first try was committed after all
    if (head.next_seq, head.epoch) != (view.cut, view.epoch):
        return None
    rows = closer_rows(view.closers)
    epoch = granter.next_epoch(connection, head, nonce).epoch
    _append(
        connection,
        granter.file,
        Batch(stream, epoch, nonce, view.cut, b"".join(rows), tuple(map(len, rows)), (1,) * len(rows), closing=True),
    )
    granter.close(connection, stream, epoch, nonce)
    return epoch


def _append(connection: Connection, file: str, batch: Batch) -> int:
    head = _head(connection, file, batch)
    if (batch.epoch, batch.nonce) != (head.epoch, head.nonce) or head.closed:
        raise grant_fenced(batch, head.epoch, head.nonce)
    payload = checked_payload(batch, head.next_seq)
    if batch.first_seq < head.next_seq:
        rows = rows_after_overlap(
            batch, payload, head.next_seq, lambda start, end: read_lines(connection, file, head, start, end)
        )
        sizes, events = [len(row) for row, _ in rows], [count for _, count in rows]
        payload = b"".join(row for row, _ in rows)
    else:
        sizes, events = batch.row_bytes, batch.row_events
    if not sizes:
        return head.next_seq
    try:
        connection.executemany(
            "INSERT INTO rows VALUES (?, ?, ?, ?)", _encoded(head.stream, head.next_seq, payload, sizes, events)
        )
    except IntegrityError as error:
        where = row_id(head.stream, head.next_seq)
        raise corrupt_row(file, where, head.next_seq, "there is a row beyond the end of its log") from error
    end = max(head.next_seq, batch.next_seq)
    write_head(connection, replace(head, next_seq=end, published=True, revision=head.revision + 1))
    return end


def _head(connection: Connection, file: str, batch: Batch) -> Head:
    found = find_stream(connection, file, batch.stream)
    if found is None:
        refuse_gone(connection, file, batch.stream.session_id)
        raise not_found(batch.stream)
    head = read_head(connection, file, found.id)
    if head is None:
        raise corrupt_row(file, found.id, -1, f"{batch.stream} has no head", table="streams")
    if head.copied_by:
        raise not_found(batch.stream)
    return head


def _encoded(
    stream: int, seq: int, payload: bytes, sizes: list[int] | tuple[int, ...], events: list[int] | tuple[int, ...]
) -> list[tuple[int, int, int, bytes]]:
    rows: list[tuple[int, int, int, bytes]] = []
    start = 0
    for size, count in zip(sizes, events, strict=True):
        data = payload[start : start + size]
        start += size
        rows.append((row_id(stream, seq), count, row_crc(stream, seq, count, data), data))
        seq += count
    return rows
