"""What a log is, found by reading all of it and writing nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from kimi_ray.store.batch_rows import EpochRow, expand_row
from kimi_ray.store.fs import Fs
from kimi_ray.store.layout import not_found
from kimi_ray.store.log_files import open_log
from kimi_ray.store.log_scan import LogScan, Tail
from kimi_ray.store.seam import LogView, Stream

_TURN = b'"type":"turn/'
_TURN_START = b'"type":"turn/start"'
_TYPE_WITHIN = 80


@dataclass(frozen=True, slots=True)
class Survey:
    """A log as found. ``open_turn`` holds the rows since a ``turn/start`` that no ``turn/end`` follows."""

    header: dict[str, Any]
    next_seq: int
    epoch: EpochRow | None
    closed: bool
    tail: Tail
    open_turn: list[bytes]

    def view(self) -> LogView:
        """The view that ``inspect`` gives."""
        closers = closers_of(self.open_turn)
        return LogView(
            header=self.header,
            next_seq=self.next_seq + len(closers),
            epoch=self.epoch.epoch if self.epoch is not None else 0,
            closers=tuple(closers),
            cut=self.next_seq,
            torn_bytes=self.tail.size - sum(map(len, self.tail.kept)) if self.tail.size else 0,
        )


class OpenTurn:
    """Collects the rows of the turn that is open at the end."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self._open = False

    def feed(self, rows: Iterable[bytes]) -> None:
        """Follow rows in order."""
        for row in rows:
            if row.find(_TURN, 0, _TYPE_WITHIN) >= 0 and row.startswith(b'{"seq":'):
                self._open = row.find(_TURN_START, 0, _TYPE_WITHIN) >= 0
                self.rows = [row] if self._open else []
            elif self._open:
                self.rows.append(row)


def survey(fs: Fs, directory: str, stream: Stream, boot: str, *, size: int | None = None) -> Survey:
    """Read a log with every checksum.

    Args:
        size: Read only this far (a live log's written size); None takes the whole file.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``.
        OSError: As the file system gave it.
    """
    try:
        source = open_log(fs, directory, size=size)
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(stream) from None
    with source:
        scan = LogScan(source.read, source.size, source.path)
        turn = OpenTurn()
        for batch in scan:
            turn.feed(batch.rows)
        tail = scan.tail(boot)
        if tail.unborn:
            raise not_found(stream).with_details(unborn=True)
        turn.feed(tail.kept)
        return Survey(scan.header, scan.next_seq, scan.epoch, scan.closed, tail, turn.rows)


def closers_of(open_turn: list[bytes]) -> list[dict[str, Any]]:
    """The events that close the open turn, seq and time set."""
    if not open_turn:
        return []
    from kimi_ray.log.repair import interrupted_turn_closers

    events: list[dict[str, Any]] = [from_json(line) for row in open_turn for line in expand_row(row)]
    return interrupted_turn_closers(events)


def closer_rows(closers: Iterable[dict[str, Any]]) -> list[bytes]:
    """Closers as stored rows."""
    return [to_json(closer) + b"\n" for closer in closers]
