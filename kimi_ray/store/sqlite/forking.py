"""A new log from the beginning of another, in short transactions; nobody sees it before the last of them.

The rows of the source are verified and copied as they are: only the stream in their checksums changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.layout import not_found
from kimi_ray.store.refusals import already_exists, source_too_short
from kimi_ray.store.seam import Stream
from kimi_ray.store.sqlite.catalogue import (
    find_stream,
    insert_stream,
    place_session,
    read_head,
    require_stream,
    write_head,
)
from kimi_ray.store.sqlite.failures import corrupt_row
from kimi_ray.store.sqlite.granting import Granter, forget_unborn, read_grant, read_grants, write_grant
from kimi_ray.store.sqlite.leftovers import ROWS_AT_ONCE, delete_some, mark_deleted
from kimi_ray.store.sqlite.paging import lines_of, rows_from
from kimi_ray.store.sqlite.schema import Head, StoredGrant, moved_crc, row_crc, row_id
from kimi_ray.store.sqlite.shard import Shard
from kimi_ray.wall_clock import epoch_ms

_BYTES_AT_ONCE = 8 << 20

Row = tuple[int, int, int, bytes]
Read = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work in a thread of the store."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What of a source is copied: its first ``cut`` events, and the grants up to there."""

    number: int
    cut: int
    grants: list[StoredGrant]


async def fork_log(
    source: Shard,
    source_stream: Stream,
    cut: int,
    target: Shard,
    stream: Stream,
    workspace_id: str,
    header: dict[str, Any],
    nonce: str,
    *,
    granter: Granter,
    writer: str,
    read: Read,
    tail: tuple[bytes, ...] | None = None,
) -> Head:
    """Copy the first ``cut`` events of a log into a new one, granted to ``nonce``; its claim is held by the caller.

    With ``tail`` these events (canonical lines) follow, and the grant is given back at once.

    Raises:
        StoreError: ``store.gap`` {expected}, ``store.exists``, ``store.not_found``, ``store.corrupt``.
    """
    copied: Copied = await read(lambda: _look_at(source, source_stream, cut))
    run = target.transactions.run

    def begin(connection: Connection) -> Head | int:
        return _begin(connection, granter.file, stream, workspace_id, header, nonce, writer)

    made = await run(begin)
    if isinstance(made, Head):
        return made
    try:
        pending: asyncio.Task[None] | None = None
        seq = 0
        try:
            while seq < cut:
                rows, seq = await read(lambda seq=seq: _next_rows(source, source_stream, copied, seq, made))
                if pending is not None:
                    await pending
                size = sum(len(row[3]) for row in rows)
                pending = asyncio.ensure_future(run(lambda c, rows=rows: _insert(c, rows), sync=False, size=size))
        finally:
            if pending is not None:
                await asyncio.wait([pending])
        if pending is not None:
            pending.result()
        return await run(lambda connection: _publish(connection, granter, copied, made, nonce, tail))
    except BaseException:
        with contextlib.suppress(StoreError):  # what is left now goes at the next start
            await _give_up(target, made)
        raise


def _look_at(source: Shard, stream: Stream, cut: int) -> Copied:
    file = source.file.path

    def work(connection: Connection | None) -> Copied:
        if connection is None:
            raise not_found(stream)
        found, head = require_stream(connection, file, stream)
        if head.next_seq < cut:
            raise source_too_short(stream, head.next_seq, cut)
        return Copied(found.id, cut, [grant for grant in read_grants(connection, file, found.id) if grant.seq <= cut])

    return source.read(work)


def _begin(
    connection: Connection,
    file: str,
    stream: Stream,
    workspace_id: str,
    header: dict[str, Any],
    nonce: str,
    writer: str,
) -> Head | int:
    """The number of the copy to be, or the head of the finished one when ``nonce`` made it before."""
    place_session(connection, file, stream.session_id, workspace_id)
    found = find_stream(connection, file, stream)
    if found is not None:
        head = read_head(connection, file, found.id)
        if head is None:
            raise corrupt_row(file, found.id, -1, f"{stream} has no head", table="streams")
        if head.published:
            if head.nonce == nonce:
                return head
            raise already_exists(stream)
        if head.copied_by:
            mark_deleted(connection, head.stream)
        else:
            forget_unborn(connection, head.stream, "")
    number = insert_stream(connection, file, stream, new_ulid(), epoch_ms(), header)
    write_head(connection, Head(number, 0, 0, "", True, False, writer, 0))
    return number


def _next_rows(source: Shard, stream: Stream, copied: Copied, seq: int, target: int) -> tuple[list[Row], int]:
    """The next rows of the copy, and the seq after them."""
    file = source.file.path
    moved, first = moved_crc(copied.number, target), row_id(target, 0)

    def work(connection: Connection | None) -> tuple[list[Row], int]:
        if connection is None:
            raise not_found(stream)
        found, head = require_stream(connection, file, stream)
        if found.id != copied.number:
            raise not_found(stream)
        rows: list[Row] = []
        size = 0
        at = seq
        for rowid, at, events, data, crc in rows_from(connection, file, found.id, seq, head.next_seq):
            if at + events > copied.cut:
                for offset, line in enumerate(lines_of(data, events, file, rowid, at)[: copied.cut - at]):
                    rows.append(_row(target, at + offset, line))
                return rows, copied.cut
            rows.append((first + at, events, crc ^ moved, data))
            size += len(data)
            if len(rows) >= ROWS_AT_ONCE or size >= _BYTES_AT_ONCE or at + events == copied.cut:
                return rows, at + events
        return rows, at

    return source.read(work)


def _insert(connection: Connection, rows: list[Row]) -> None:
    connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", rows)


def _publish(
    connection: Connection, granter: Granter, copied: Copied, number: int, nonce: str, tail: tuple[bytes, ...] | None
) -> Head:
    head = read_head(connection, granter.file, number)
    if head is None:
        raise corrupt_row(granter.file, number, -1, "the copy is gone", table="heads")
    if head.published:
        return head
    for grant in copied.grants:
        write_grant(connection, replace(grant, stream=number, closed_seq=min(grant.closed_seq, copied.cut)))
    epoch = max((grant.epoch for grant in copied.grants), default=0)
    head = replace(head, next_seq=copied.cut, epoch=epoch, published=True, copied_by="")
    head = granter.next_epoch(connection, head, nonce)
    if tail is None:
        return head
    seqs = range(copied.cut, copied.cut + len(tail))
    _insert(connection, [_row(number, seq, line) for seq, line in zip(seqs, tail, strict=True)])
    head = replace(head, next_seq=seqs.stop, closed=True)
    granted = read_grant(connection, granter.file, number, head.epoch)
    write_grant(connection, replace(granted, closed_seq=seqs.stop))
    write_head(connection, head)
    return head


def _row(stream: int, seq: int, line: bytes) -> Row:
    data = line + b"\n"
    return row_id(stream, seq), 1, row_crc(stream, seq, 1, data), data


async def _give_up(target: Shard, number: int) -> None:
    """Delete what there is of a copy; what cannot be deleted now is deleted at the next start."""

    def mark(connection: Connection) -> bool:
        head = read_head(connection, target.file.path, number)
        if head is None or head.published:
            return False
        mark_deleted(connection, number)
        return True

    if await target.transactions.run(mark, sync=False):
        while await target.transactions.run(lambda connection: delete_some(connection, number), sync=False):
            pass
