"""Checking everything about one log, and reporting instead of stopping; and its name and head, however damaged."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from sqlite3 import Connection
from typing import Any

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.layout import not_found
from kimi_ray.store.log_read import seq_of
from kimi_ray.store.seam import Stream, VerifyReport
from kimi_ray.store.sqlite.catalogue import find_stream, read_head, refuse_removed, stream_of
from kimi_ray.store.sqlite.failures import FAILURES, corrupt_database, corrupt_row, is_damage
from kimi_ray.store.sqlite.granting import read_grants
from kimi_ray.store.sqlite.schema import Head
from kimi_ray.store.sqlite.shard_reads import ShardReads
from kimi_ray.store.sqlite.surviving import surviving_rows

_EVENTS_AT_ONCE = 2000
_CHECK_AGAIN_S = 60.0
_MOST_PROBLEMS = 20


@dataclass(slots=True)
class DamagedLog:
    """A log as far as it can be told. ``next_seq`` is None when its head does not verify."""

    number: int
    header: dict[str, Any] | None = None
    head: Head | None = None
    damage: list[KimiRayError] = field(default_factory=list[KimiRayError])

    @property
    def next_seq(self) -> int | None:
        """The seq after the last event."""
        return None if self.head is None else self.head.next_seq


def survivors_of(connection: Connection, file: str, stream: Stream) -> DamagedLog:
    """The number of a log, and what verifies of its header and head.

    Raises:
        StoreError: ``store.not_found``, ``store.deleted``; ``store.corrupt`` when its number cannot be told.
    """
    log = DamagedLog(_number(connection, file, stream))
    try:
        found = find_stream(connection, file, stream)
        log.header = None if found is None else found.header(file)
    except KimiRayError as error:
        log.damage.append(error)
    try:
        log.head = read_head(connection, file, log.number)
        if log.head is None:
            raise corrupt_row(file, log.number, -1, f"{stream} has no head", table="streams")
    except StoreError as error:
        log.damage.append(error)
    if log.head is not None and not log.head.published:
        raise not_found(stream).with_details(unborn=True)
    return log


def _number(connection: Connection, file: str, stream: Stream) -> int:
    """The number of a log, by the index or else by looking at all names."""
    by_index = "SELECT id FROM streams WHERE session_id = ? AND agent_id = ? COLLATE BINARY"
    by_name = by_index.replace("streams WHERE", "streams NOT INDEXED WHERE")
    for query in (by_index, by_name):
        try:
            row = connection.execute(query, tuple(stream)).fetchone()
        except FAILURES as error:
            if not is_damage(error):
                raise
            if query == by_name:
                raise
            continue
        if row is not None:
            return row[0]
    try:
        refuse_removed(connection, file, stream.session_id)
    except StoreError as error:
        if error.code == "store.deleted":
            raise
    everything = "SELECT id, session_id, agent_id, incarnation, created_at, header, crc FROM streams"
    for row in connection.execute(everything).fetchall():
        try:
            stream_of(row, file)
        except StoreError:
            header = row[5]
            names = (b'"session_id":"%s"' % stream.session_id.encode(), b'"agent_id":"%s"' % stream.agent_id.encode())
            if isinstance(header, bytes) and all(name in header for name in names):
                return row[0]
    raise not_found(stream)


class Verifier:
    """Verifies logs; the structure of a database is checked once for many of its logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked: dict[int, tuple[float, list[StoreError]]] = {}

    def verify(self, shard: ShardReads, stream: Stream) -> VerifyReport:
        """See ``Store.verify``. The check of the structure is one long read transaction.

        Raises:
            StoreError: ``store.not_found``, ``store.deleted``; damage is in the report.
        """
        file = shard.file.path
        problems: list[KimiRayError] = []
        try:
            log = shard.read(lambda c: _known(c, file, stream))
        except StoreError as error:
            if error.code in ("store.not_found", "store.deleted", "store.invalid_id"):
                raise
            return _report(stream, None, [error])
        problems.extend(log.damage)
        events = rows = size = 0
        seq: int | None = 0
        while seq is not None:
            found = shard.read(
                lambda c, seq=seq: surviving_rows(
                    _there(c, stream), file, log.number, seq, _EVENTS_AT_ONCE, end=log.next_seq
                )
            )
            problems.extend(found.damage)
            for at, line in found.events:
                if seq_of(line) != at:
                    problems.append(corrupt_row(file, at, at, "the event in this row has another seq"))
            events, rows, size = events + len(found.events), rows + found.rows, size + found.bytes
            seq = found.next_seq
        problems.extend(shard.read(lambda c: _grants(_there(c, stream), file, log)))
        problems.extend(self._structure(shard))
        return _report(stream, log, problems, events, rows, size)

    def _structure(self, shard: ShardReads) -> list[StoreError]:
        file = shard.file
        with self._lock:
            known = self._checked.get(file.shard)
            if known is None or time.monotonic() - known[0] > _CHECK_AGAIN_S:
                known = time.monotonic(), shard.read(lambda c: _quick_check(c, file.path))
                self._checked[file.shard] = time.monotonic(), known[1]
            return known[1]


def _there(connection: Connection | None, stream: Stream) -> Connection:
    if connection is None:
        raise not_found(stream)
    return connection


def _known(connection: Connection | None, file: str, stream: Stream) -> DamagedLog:
    return survivors_of(_there(connection, stream), file, stream)


def _grants(connection: Connection, file: str, log: DamagedLog) -> list[StoreError]:
    try:
        grants = read_grants(connection, file, log.number)
    except StoreError as error:
        return [error]
    found: list[StoreError] = []
    seq = 0
    for grant in grants:
        if grant.seq < seq or (log.head is not None and grant.seq > log.head.next_seq):
            found.append(_bad_epoch(file, log.number, grant.seq, f"grant {grant.epoch} is not after the one before"))
        seq = max(seq, grant.seq, grant.closed_seq)
    newest = grants[-1] if grants else None
    head = log.head
    if head is not None and (
        newest is None or (newest.epoch, newest.nonce, newest.closed_seq >= 0) != (head.epoch, head.nonce, head.closed)
    ):
        found.append(_bad_epoch(file, log.number, head.next_seq, f"the newest grant is not {head.epoch}"))
    return found


def _bad_epoch(file: str, number: int, seq: int, why: str) -> StoreError:
    return StoreError(
        f"{file}: {why} (seq {seq})",
        code="log.bad_epoch",
        details={"file": file, "table": "grants", "rowid": number, "seq": seq},
    )


def _quick_check(connection: Connection | None, file: str) -> list[StoreError]:
    if connection is None:
        return []
    try:
        rows = connection.execute(f"PRAGMA quick_check({_MOST_PROBLEMS})").fetchall()
    except FAILURES as error:
        if not is_damage(error):
            raise
        return [corrupt_database(file, str(error))]
    return [corrupt_database(file, str(text)) for (text,) in rows if text != "ok"]


def _report(
    stream: Stream, log: DamagedLog | None, problems: list[KimiRayError], events: int = 0, rows: int = 0, size: int = 0
) -> VerifyReport:
    head = None if log is None else log.head
    return VerifyReport(
        session_id=stream.session_id,
        agent_id=stream.agent_id,
        ok=not problems,
        events=events,
        batches=rows,
        bytes=size,
        epoch=0 if head is None else head.epoch,
        closed=head is not None and head.closed,
        problems=tuple(error.to_data() for error in problems),
    )
