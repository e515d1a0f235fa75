"""Checking everything about one log, and reporting instead of stopping."""

from __future__ import annotations

import re
from zlib import crc32

from kimi_ray.errors import KimiRayError, LogError, StoreError
from kimi_ray.store.batch_rows import (
    CLOSED_START,
    EPOCH_START,
    EVENT_START,
    expand_row,
    parse_closed_row,
    parse_epoch_row,
    seq_of,
)
from kimi_ray.store.framing import Framing, Probe
from kimi_ray.store.fs import Fs, exists
from kimi_ray.store.layout import REDO_NAME, not_found
from kimi_ray.store.log_files import LogSource, open_log
from kimi_ray.store.log_scan import LogScan, corrupt
from kimi_ray.store.seam import Stream, VerifyReport

_SEQS = re.compile(rb'^\{"seq":(0|[1-9][0-9]*),', re.MULTILINE)
NO_DAMAGE = frozenset({"store.torn_tail", "store.repair_pending"})
"""Problems that a crash leaves and the next writer settles: a report with no others is still ``ok``."""


def verify_log(
    fs: Fs, directory: str, framing: Framing, stream: Stream, boot: str, *, size: int | None = None
) -> VerifyReport:
    """Check header, checksums, batch numbers, seqs, epochs of a log, from its first byte to its last.

    Args:
        fs: The files.
        directory: The agent's.
        framing: The encoding of its log.
        stream: Its name, for errors.
        boot: The present boot id of the machine.
        size: Read only this far (a live log's written size); None takes the whole file.

    Raises:
        StoreError: ``store.not_found``; damage is in the report.
    """
    problems: list[dict[str, object]] = []
    try:
        source = _open(fs, directory, framing, size, problems)
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(stream) from None
    except LogError as error:
        return VerifyReport(
            session_id=stream.session_id, agent_id=stream.agent_id, ok=False, problems=(error.to_data(),)
        )
    with source:
        scan = framing.scan(source.read, source.size, source.path)
        rows = _RowCheck(source.path, problems)
        torn = 0
        try:
            for batch in scan:
                if batch.only_events and rows.in_place(batch.payload, batch.seq, batch.next_seq):
                    continue
                rows.start(batch.seq)
                at = batch.end - len(batch.payload) if framing.covers_header else batch.offset
                for row in batch.rows:
                    rows.check(row, at)
                    at += len(row) if framing.covers_header else 0
            torn = _check_tail(framing, source, scan, boot, rows)
        except KimiRayError as error:
            problems.append(error.to_data())
    return VerifyReport(
        session_id=stream.session_id,
        agent_id=stream.agent_id,
        ok=all(problem["code"] in NO_DAMAGE for problem in problems),
        events=scan.next_seq,
        batches=scan.batches_read,
        bytes=scan.good,
        epoch=rows.epoch,
        closed=scan.closed,
        torn_bytes=torn,
        problems=tuple(problems),
    )


def _open(fs: Fs, directory: str, framing: Framing, size: int | None, problems: list[dict[str, object]]) -> LogSource:
    try:
        source = open_log(fs, directory, framing, size=size)
    except StoreError as error:  # a damaged repair: check the log as it stands
        if error.code != "store.corrupt":
            raise
        problems.append(error.to_data())
        return open_log(fs, directory, framing, repaired=False)
    redo = f"{directory}/{REDO_NAME}"
    if size is None and exists(fs, redo):
        why = "a repair of the log beside it is decided and not finished; the next writer finishes it"
        problems.append(problem("store.repair_pending", why, redo, 0, -1))
    return source


def _check_tail(framing: Framing, source: LogSource, scan: LogScan, boot: str, rows: _RowCheck) -> int:
    try:
        tail = scan.tail(boot)
    except StoreError as error:
        rows.problems.append(error.to_data())
        _check_on(framing.probe(source.read, source.size), source, scan, rows)
        return 0
    if tail.unborn:
        rows.problems.append(problem("store.unborn", "the log never came to be", source.path, 0, 0))
    elif tail.size:
        why = f"a crash cut the last {tail.torn_bytes} bytes short; the next writer moves them aside"
        rows.problems.append(problem("store.torn_tail", why, source.path, tail.offset, scan.next_seq))
    return tail.torn_bytes


def _check_on(probe: Probe, source: LogSource, scan: LogScan, rows: _RowCheck) -> None:
    """Go on behind the first damage."""
    offset = scan.good or probe.body()
    number = scan.batches_read
    rows.start(scan.next_seq)
    _check_header(probe, source, scan, rows)
    while offset < source.size:
        found = probe.first(offset, source.size)
        if found is None:
            rows.damaged(offset, "no batch verifies here")
            return
        if found.offset > offset:
            rows.damaged(offset, "no batch verifies here")
        if found.number >= 0 and found.number != number:
            rows.found("log.bad_batch", f"batch {found.number} stands where {number} belongs", found.offset)
        elif found.seq != rows.seq and found.offset == offset and not rows.lost:
            rows.found("log.bad_seq", f"a batch from seq {found.seq} stands where {rows.seq} belongs", found.offset)
        rows.start(found.seq)
        pieces = probe.rows(found)
        at = found.start
        for at, row in pieces.rows:
            if row is None:
                rows.damaged(at, "a row does not verify")
                rows.lost = True
            else:
                rows.check(row, at)
        if pieces.missing:
            rows.damaged(at, f"{pieces.missing} rows of a batch are missing")
        number = max(number, found.number) + 1
        offset = max(found.start, found.offset + 1) if pieces.missing else found.end


def _check_header(probe: Probe, source: LogSource, scan: LogScan, rows: _RowCheck) -> None:
    first = probe.first(0, source.size) if scan.batches_read == 0 else None
    line = scan.header_line
    if first is None or first.row is None or first.number != 0 or line is None:
        return
    if first.row.crc_values[:1] != [crc32(line)]:
        rows.damaged(0, "the header does not verify")


class _RowCheck:
    """Follows the rows of a log: each event has the seq of its place, epochs rise."""

    def __init__(self, file: str, problems: list[dict[str, object]]) -> None:
        self._file = file
        self.problems = problems
        self.seq = 0
        self.epoch = 0
        self.lost = False

    def start(self, seq: int) -> None:
        """Go on with the batch that starts with ``seq``."""
        self.seq = seq
        self.lost = False

    def in_place(self, payload: bytes, seq: int, next_seq: int) -> bool:
        """Whether these rows of one event each have the seqs ``seq`` .. ``next_seq - 1``: one look at all of them."""
        return [int(text) for text in _SEQS.findall(payload)] == list(range(seq, next_seq))

    def check(self, row: bytes, at: int) -> None:
        """One row that verifies."""
        if row.startswith(EPOCH_START):
            granted = parse_epoch_row(row)
            if granted is None or granted.epoch <= self.epoch or (granted.seq != self.seq and not self.lost):
                self.found("log.bad_epoch", "an epoch does not rise", at)
            else:
                self.epoch = granted.epoch
            return
        if row.startswith(CLOSED_START):
            closed = parse_closed_row(row)
            if closed is None or closed[0] != self.epoch:
                self.found("log.bad_epoch", "a grant is closed that is not the newest", at)
            return
        try:
            lines = expand_row(row)
        except KimiRayError as error:
            self.damaged(at, error.message)
            self.lost = True
            return
        for line in lines:
            seq = seq_of(line) if line.startswith(EVENT_START) else -1
            if seq < 0 or (seq != self.seq and not self.lost):
                self.found("log.bad_seq", "a seq is not its index", at)
            if self.lost and seq >= 0:
                self.seq, self.lost = seq, False
            self.seq += 1

    def damaged(self, at: int, why: str) -> None:
        """Bytes that do not verify; a place that is reported already is not reported again."""
        data = corrupt(self._file, at, self.seq, why).to_data()
        if not any(found.get("details") == data["details"] for found in self.problems):
            self.problems.append(data)

    def found(self, code: str, why: str, at: int) -> None:
        """Something else that is wrong."""
        self.problems.append(problem(code, why, self._file, at, self.seq))


def problem(code: str, why: str, file: str, offset: int, seq: int) -> dict[str, object]:
    """An item of ``VerifyReport.problems``."""
    return {
        "code": code,
        "message": f"{file}: {why} at byte {offset} (seq {seq})",
        "details": {"file": file, "offset": offset, "seq": seq},
    }
