"""Every row of a damaged log that verifies, wherever it stands: what ``salvage`` is made of.

In the plain encoding a batch row verifies by itself, and names the checksum of each row after it, so the damage of one
row costs that row; with Zstandard it costs the frame. Where no batch is found, the next one is looked for. An old batch
that stands in the file again is given again: only its reader knows whether the first copy was whole.
"""

from __future__ import annotations

from typing import Any

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.batch_rows import EVENT_START, events_in, expand_row, is_storage_row, seq_of
from kimi_ray.store.framing import Found, Framing, Probe
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.log_read import judge
from kimi_ray.store.log_scan import corrupt, parse_header
from kimi_ray.store.seam import SurvivingPage

Events = list[tuple[int, bytes]]


def surviving_page(framing: Framing, source: LogSource, cursor: int, limit: int, boot: str) -> SurvivingPage:
    """The events of the next batches that are found from byte ``cursor`` on.

    Raises:
        LogError: ``log.version_unsupported``.
        OSError: As the file system gave it.
    """
    damage: list[dict[str, Any]] = []
    probe = framing.probe(source.read, source.size)
    header: dict[str, Any] | None = None
    try:
        line = probe.header_line()
        header = None if line is None else parse_header(line, source.path)
        if line is None and cursor == 0:
            damage.append(corrupt(source.path, 0, 0, "there is no header").to_data())
    except StoreError as error:
        if cursor == 0:
            damage.append(error.to_data())
    offset = cursor or probe.body()
    events: Events = []
    while len(events) < limit:
        found = probe.first(offset, source.size)
        if found is None:
            _end(framing, source, boot, offset, events, damage)
            return SurvivingPage(header, tuple(events), None, tuple(damage))
        if found.offset > offset:
            damage.append(corrupt(source.path, offset, found.seq, "no batch verifies here").to_data())
        complete = _take(probe, source, found, events, damage)
        # where rows are damaged the length cannot be trusted: the next batch is looked for right after the batch row
        offset = found.end if complete else max(found.start, found.offset + 1)
    return SurvivingPage(header, tuple(events), offset, tuple(damage))


def _take(probe: Probe, source: LogSource, found: Found, events: Events, damage: list[dict[str, Any]]) -> bool:
    """Take the rows of a batch; whether they end where the batch should."""
    rows = probe.rows(found)
    seq, at = found.seq, found.start
    for at, row in rows.rows:
        if row is None:
            damage.append(corrupt(source.path, at, seq, "a row does not verify").to_data())
            seq += 1
        elif not is_storage_row(row):
            try:
                lines = expand_row(row)
            except KimiRayError as error:
                damage.append(corrupt(source.path, at, seq, error.message).to_data())
                seq += events_in(row)
                continue
            first = seq_of(lines[0]) if lines and lines[0].startswith(EVENT_START) else -1
            if first < 0:
                damage.append(corrupt(source.path, at, seq, "a row is no event").to_data())
                continue
            events.extend(enumerate(lines, first))
            seq = first + len(lines)
    if rows.missing:
        damage.append(corrupt(source.path, at, seq, f"{rows.missing} rows of a batch are missing").to_data())
    return not rows.missing


def _end(
    framing: Framing, source: LogSource, boot: str, offset: int, events: Events, damage: list[dict[str, Any]]
) -> None:
    """What stands after the last batch: rows that a repair of the torn tail would keep, or nothing that verifies."""
    if offset >= source.size:
        return
    tail = judge(framing, source, boot) if not framing.covers_header else None
    if tail is not None and tail.error is None and tail.kept:
        events.extend(enumerate(tail.kept, tail.next_seq))
        return
    damage.append(corrupt(source.path, offset, -1, "no batch verifies here").to_data())
