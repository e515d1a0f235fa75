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
    offset = cursor or (0 if header is None else probe.body())
    taken = _Taken(source.path, damage)
    while len(taken.events) < limit:
        found = probe.first(offset, source.size)
        end = source.size if found is None else found.offset
        if end > offset:
            loose = probe.loose(offset, end)
            for at, row in loose:
                taken.row(at, row)
            if found is not None or not _kept(framing, source, boot, taken):
                seq = -1 if found is None else found.seq
                why = "no batch row verifies here" if loose else "no batch verifies here"
                damage.append(corrupt(source.path, offset, seq, why).to_data())
        if found is None:
            return SurvivingPage(header, tuple(taken.events), None, tuple(damage))
        offset = taken.batch(probe, found, source.size)
    return SurvivingPage(header, tuple(taken.events), offset, tuple(damage))


class _Taken:
    """The events of a page, and what was passed over."""

    def __init__(self, file: str, damage: list[dict[str, Any]]) -> None:
        self.events: list[tuple[int, bytes]] = []
        self._file = file
        self._damage = damage
        self._seq = 0

    def batch(self, probe: Probe, found: Found, size: int) -> int:
        """Take the rows of a batch; returns where to look for the next one."""
        rows = probe.rows(found)
        self._seq, at = found.seq, found.start
        for at, row in rows.rows:
            if row is None:
                self._passed(at, "a row does not verify")
                self._seq += 1
            else:
                self.row(at, row)
        if rows.missing:
            self._passed(at, f"{rows.missing} more rows of a batch do not verify")
        if rows.whole or found.end == size or probe.at(found.end) is not None:
            return found.end
        return max(found.start, found.offset + 1)  # bytes may have gone or come: its length leads nowhere

    def row(self, at: int, row: bytes) -> None:
        """Take one row that verifies."""
        if is_storage_row(row):
            return
        try:
            lines = expand_row(row)
        except KimiRayError as error:
            self._passed(at, error.message)
            self._seq += events_in(row)
            return
        first = seq_of(lines[0]) if lines and lines[0].startswith(EVENT_START) else -1
        if first < 0:
            self._passed(at, "a row is no event")
            return
        self.events.extend(enumerate(lines, first))
        self._seq = first + len(lines)

    def _passed(self, at: int, why: str) -> None:
        self._damage.append(corrupt(self._file, at, self._seq, why).to_data())


def _kept(framing: Framing, source: LogSource, boot: str, taken: _Taken) -> bool:
    """Take what a repair of a torn tail would keep; whether that is all that is wrong."""
    if framing.covers_header:
        return False
    tail = judge(framing, source, boot)
    if tail.error is not None or not tail.kept:
        return False
    taken.events.extend(enumerate(tail.kept, tail.next_seq))
    return True
