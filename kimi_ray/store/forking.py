"""A new log from the beginning of another: whole batches are copied as they are, nothing is decoded twice.

Only the first batch is encoded anew, because its checksums cover the header, and the batch that the cut goes through.
The copy's own first row is an epoch row above every copied one.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.batch_rows import EpochRow, encode_closed_row, encode_epoch_row, events_in, expand_row
from kimi_ray.store.framing import encode_rows
from kimi_ray.store.fs import Fs, pwrite_all
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_scan import corrupt
from kimi_ray.store.seam import Stream
from kimi_ray.store.stream_log import LogTools, StreamLog


class _Out:
    """A file written from its beginning."""

    def __init__(self, fs: Fs, fd: int) -> None:
        self._fs = fs
        self._fd = fd
        self.size = 0

    def put(self, data: bytes) -> None:
        pwrite_all(self._fs, self._fd, data, self.size)
        self.size += len(data)

    def copy(self, source: LogSource, start: int, end: int) -> None:
        while start < end:
            copied = source.copy(start, end - start, self._fd, self.size)
            if not copied:
                raise corrupt(source.path, start, -1, "it was cut while it was copied")
            start += copied
            self.size += copied


@dataclass(frozen=True, slots=True)
class _Copied:
    """What was written. ``batches`` are those of the file, ``end`` the seq after its last event."""

    size: int
    batches: int
    epoch: int
    end: int


def fork_log(
    tools: LogTools, source: LogSource, cut: int, target: Stream, header: dict[str, Any], directory: str, nonce: str
) -> StreamLog:
    """Create the log ``target`` with the first ``cut`` events of ``source``, granted to ``nonce``. Blocking.

    Raises:
        StoreError: ``store.gap`` {expected} when the source has fewer events, ``store.exists``, ``store.corrupt``.
        OSError: As the file system gave it.
    """
    copied = _write(tools, source, cut, target, header, directory, nonce, tail=None)
    log = StreamLog(tools, target, directory, header)
    log.born = True
    log.size = log.synced = copied.size
    log.next_seq = log.durable_seq = copied.end
    log.batches = copied.batches
    log.turn_from = 0  # the cut may be anywhere
    log.reserve(copied.epoch, nonce)
    return log


def copy_log(
    tools: LogTools,
    source: LogSource,
    cut: int,
    target: Stream,
    header: dict[str, Any],
    directory: str,
    tail: tuple[bytes, ...],
) -> None:
    """Create the log ``target`` with the first ``cut`` events of ``source`` and then ``tail`` (canonical lines); its
    grant is given back in the same write. Blocking.

    Raises:
        StoreError: As ``fork_log``.
        OSError: As the file system gave it.
    """
    _write(tools, source, cut, target, header, directory, new_ulid(), tail=tail)


def _write(
    tools: LogTools,
    source: LogSource,
    cut: int,
    target: Stream,
    header: dict[str, Any],
    directory: str,
    nonce: str,
    *,
    tail: tuple[bytes, ...] | None,
) -> _Copied:
    fs, framing = tools.fs, tools.framing
    tools.directories.ensure(directory)
    path = f"{directory}/{framing.log_name}"
    temporary = f"{path}.tmp-{new_ulid()}"
    fd = fs.open(temporary, os.O_RDWR | os.O_CREAT)
    try:
        out = _Out(fs, fd)
        batches, epoch = _copy(tools, source, out, cut, to_json(header) + b"\n")
        end = cut + len(tail or ())
        rows = [encode_epoch_row(EpochRow(epoch + 1, cut, nonce, tools.boot, tools.mode))]
        rows.extend(line + b"\n" for line in tail or ())
        out.put(encode_rows(framing, batches, cut, rows).data)
        if tail is not None:
            out.put(encode_rows(framing, batches + 1, end, [encode_closed_row(epoch + 1, end)]).data)
        if tools.durable:
            fs.fsync(fd)
        fs.link(temporary, path)
    except FileExistsError:
        raise StoreError(f"{target} exists already", code="store.exists", details={"stream": list(target)}) from None
    finally:
        fs.close(fd)
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
    tools.directories.sync(directory)
    return _Copied(out.size, batches + (1 if tail is None else 2), epoch + 1, end)


def _copy(tools: LogTools, source: LogSource, out: _Out, cut: int, header_line: bytes) -> tuple[int, int]:
    """Write the copied batches; returns how many, and the newest epoch that was seen."""
    framing = tools.framing
    scan = framing.scan(source.read, source.size, source.path)
    batches = 0
    start = end = -1
    for batch in scan:
        if batch.number > 0 and batch.seq >= cut:
            break
        if start < 0:
            start = end = batch.offset
            if not framing.covers_header:
                out.put(framing.header(header_line))
        if batch.number == 0 and framing.covers_header:
            first, *rest = _rows_before(batch.rows, batch.seq, cut)
            out.put(framing.begin(header_line, first, framing.prepare(b"".join(rest), list(map(len, rest)))).data)
            start = end = batch.end
        elif batch.next_seq <= cut:
            end = batch.end
        else:
            out.copy(source, start, end)
            start = end
            out.put(encode_rows(framing, batch.number, batch.seq, _rows_before(batch.rows, batch.seq, cut)).data)
        batches += 1
    out.copy(source, start, end)
    next_seq = scan.next_seq
    if next_seq < cut and batches:  # the rows of a torn tail that its repair would keep
        kept = scan.tail(tools.boot).kept
        next_seq = scan.next_seq
        rows = _rows_before(kept, next_seq - sum(map(events_in, kept)), cut)
        if rows:
            out.put(encode_rows(framing, batches, next_seq - sum(map(events_in, kept)), rows).data)
            batches += 1
    if next_seq < cut or not batches:
        raise StoreError(
            f"{source.path} has {next_seq} events, fewer than the {cut} to fork",
            code="store.gap",
            hint="flush the source first, or fork at an earlier event",
            details={"expected": next_seq, "cut": cut},
        )
    return batches, 0 if scan.epoch is None else scan.epoch.epoch


def _rows_before(rows: list[bytes], seq: int, cut: int) -> list[bytes]:
    """The rows of events below ``cut``; a packed row that the cut goes through is taken apart."""
    before: list[bytes] = []
    for row in rows:
        count = events_in(row)
        if seq + count <= cut:
            before.append(row)
        else:
            before.extend(line + b"\n" for line in expand_row(row)[: max(0, cut - seq)])
        seq += count
    return before
