"""A new log from the beginning of another: whole batches are copied as they are, nothing is decoded twice.

Only the first batch is encoded anew, because its checksums cover the header, and the batch that the cut goes through.
The copy's own first row is an epoch row above every copied one.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from pydantic_core import to_json

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.batch_rows import EpochRow, encode_epoch_row, encode_rows, expand_row
from kimi_ray.store.fs import Fs, pwrite_all
from kimi_ray.store.layout import LOG_NAME
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_scan import LogScan, ScannedBatch
from kimi_ray.store.seam import Stream
from kimi_ray.store.stream_log import LogTools, StreamLog

_CHUNK = 1 << 20


class _Out:
    """A file written from its beginning."""

    def __init__(self, fs: Fs, fd: int) -> None:
        self._fs = fs
        self._fd = fd
        self.size = 0

    def put(self, data: bytes) -> None:
        pwrite_all(self._fs, self._fd, data, self.size)
        self.size += len(data)


def fork_log(
    tools: LogTools, source: LogSource, cut: int, target: Stream, header: dict[str, Any], directory: str, nonce: str
) -> StreamLog:
    """Create the log ``target`` with the first ``cut`` events of ``source``, granted to ``nonce``. Blocking.

    Raises:
        StoreError: ``store.gap`` {expected} when the source has fewer events, ``store.exists``, ``store.corrupt``.
        OSError: As the file system gave it.
    """
    fs = tools.fs
    tools.directories.ensure(directory)
    path = f"{directory}/{LOG_NAME}"
    temporary = f"{path}.tmp-{new_ulid()}"
    fd = fs.open(temporary, os.O_RDWR | os.O_CREAT)
    try:
        out = _Out(fs, fd)
        batches, epoch = _copy(source, out, cut, header)
        row = EpochRow(epoch + 1, cut, nonce, tools.boot, tools.mode)
        out.put(encode_rows(batches, cut, [encode_epoch_row(row)]))
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
    log = StreamLog(tools, target, directory, header)
    log.born = True
    log.size = log.synced = out.size
    log.next_seq = log.durable_seq = cut
    log.batches = batches + 1
    log.reserve(row.epoch, nonce)
    return log


def _copy(source: LogSource, out: _Out, cut: int, header: dict[str, Any]) -> tuple[int, int]:
    """Write the copied batches; returns how many, and the newest epoch that was seen."""
    scan = LogScan(source.read, source.size, source.path)
    header_line = to_json(header) + b"\n"
    batches = start = end = 0
    for batch in scan:
        if batch.number > 0 and batch.seq >= cut:
            break
        if batch.number == 0:
            out.put(encode_rows(0, 0, _rows_before(batch, cut), header_line=header_line))
            start = end = scan.good
        elif batch.next_seq <= cut:
            end = scan.good
        else:
            _copy_range(source, out, start, end)
            start = end
            out.put(encode_rows(batch.number, batch.seq, _rows_before(batch, cut)))
        batches += 1
    _copy_range(source, out, start, end)
    if scan.next_seq < cut:
        raise StoreError(
            f"{source.path} has {scan.next_seq} events, fewer than the {cut} to fork",
            code="store.gap",
            hint="flush the source first, or fork at an earlier event",
            details={"expected": scan.next_seq, "cut": cut},
        )
    return batches, 0 if scan.epoch is None else scan.epoch.epoch


def _copy_range(source: LogSource, out: _Out, start: int, end: int) -> None:
    while start < end:
        data = source.read(start, min(_CHUNK, end - start))
        out.put(data)
        start += len(data)


def _rows_before(batch: ScannedBatch, cut: int) -> list[bytes]:
    rows: list[bytes] = []
    seq = batch.seq
    for row in batch.rows:
        lines = expand_row(row)
        if seq + len(lines) <= cut:
            rows.append(row)
        else:
            rows.extend(line + b"\n" for line in lines[: max(0, cut - seq)])
        seq += len(lines)
    return rows
