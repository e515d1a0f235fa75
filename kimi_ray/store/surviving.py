"""Every row of a damaged log that verifies, wherever it stands: what ``salvage`` is made of.

A batch row verifies by itself, and names the checksum of each row after it, so the damage of one row costs that row.
Where no batch row verifies, the next one is looked for.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from kimi_ray.errors import KimiRayError
from kimi_ray.store.batch_rows import BatchRow, expand_row, is_storage_row, split_rows
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_read import Found, find_batch, read_header_line, seq_of
from kimi_ray.store.log_scan import corrupt, parse_header
from kimi_ray.store.seam import SurvivingPage


def surviving_page(source: LogSource, cursor: int, limit: int) -> SurvivingPage:
    """The events of the next batches that are found from byte ``cursor`` on.

    Raises:
        OSError: As the file system gave it.
    """
    damage: list[dict[str, Any]] = []
    header_line = read_header_line(source)
    header: dict[str, Any] | None = None
    try:
        header = None if header_line is None else parse_header(header_line, source.path)
    except KimiRayError as error:
        if cursor == 0:
            damage.append(error.to_data())
    offset = cursor or len(header_line or b"")
    events: list[tuple[int, bytes]] = []
    while len(events) < limit:
        found = find_batch(source, offset)
        if found is None:
            if offset < source.size:
                damage.append(corrupt(source.path, offset, -1, "no batch row verifies").to_data())
            return SurvivingPage(header, tuple(events), None, tuple(damage))
        if found.offset > offset:
            damage.append(corrupt(source.path, offset, found.row.seq, "no batch row verifies").to_data())
        _take(source, found, events, damage)
        offset = min(found.end, source.size)
        if found.end > source.size or source.read(found.end - 1, 1) != b"\n":
            offset = found.start  # its length cannot be trusted: look right after the batch row
    return SurvivingPage(header, tuple(events), offset, tuple(damage))


def _take(source: LogSource, found: Found, events: list[tuple[int, bytes]], damage: list[dict[str, Any]]) -> None:
    row: BatchRow = found.row
    rows = split_rows(source.read(found.start, min(row.size, source.size - found.start)))
    expected = row.row_crcs[1:] if row.number == 0 else row.row_crcs
    seq, at = row.seq, found.start
    for line, crc in zip(rows, expected, strict=False):
        if b"%08x" % crc32(line) != crc:
            damage.append(corrupt(source.path, at, seq, "a row does not verify").to_data())
            seq += 1
        elif not is_storage_row(line):
            for event in expand_row(line):
                seq = seq_of(event)
                events.append((seq, event))
                seq += 1
        at += len(line)
    if len(rows) < len(expected):
        damage.append(corrupt(source.path, at, seq, f"{len(expected) - len(rows)} rows are missing").to_data())
