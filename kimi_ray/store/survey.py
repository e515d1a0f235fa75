"""What a log is, found by reading all of it and writing nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from kimi_ray.store.batch_rows import EVENT_START, STORAGE_STARTS, EpochRow, expand_row, split_rows
from kimi_ray.store.framing import Framing
from kimi_ray.store.fs import Fs
from kimi_ray.store.layout import not_found
from kimi_ray.store.log_files import open_log
from kimi_ray.store.log_scan import Tail
from kimi_ray.store.seam import LogView, Stream

_TURN = b'"type":"turn/'
_TURN_ROW = re.compile(rb'\{"seq":\d+,"time":-?\d+,"type":"turn/(?:start|end)"')
_CHUNK_ROW = re.compile(rb'\{"seq":\d+,"time":-?\d+,"type":"assistant/chunk"')


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
            torn_bytes=self.tail.torn_bytes,
        )


class OpenTurn:
    """Collects the rows of the turn that is open at the end, without streamed chunks, which close nothing."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._last = b""
        self._open = False

    @property
    def rows(self) -> list[bytes]:
        """What has to be known to close the turn; the last row is always the log's last event."""
        return [*self._kept, self._last] if self._last else self._kept

    def feed(self, payload: bytes) -> None:
        """Follow rows in order; the cost is one search, unless a turn is open."""
        start = _last_turn_row(payload)
        if start >= 0:
            payload = payload[start:]
            self._open = b"turn/start" in payload[: payload.find(_TURN) + 24]
            self._kept.clear()
            self._last = b""
        if not self._open:
            return
        for row in split_rows(payload):
            if row.startswith(STORAGE_STARTS):
                continue
            if not row.startswith(EVENT_START) or _CHUNK_ROW.match(row):
                self._last = row
            else:
                self._last = b""
                self._kept.append(row)


def _last_turn_row(payload: bytes) -> int:
    """Where the last ``turn/start`` or ``turn/end`` row starts, or -1."""
    at = len(payload)
    while (at := payload.rfind(_TURN, 0, at)) >= 0:
        start = payload.rfind(b"\n", 0, at) + 1
        if _TURN_ROW.match(payload, start):
            return start
    return -1


def survey(fs: Fs, directory: str, framing: Framing, stream: Stream, boot: str, *, size: int | None = None) -> Survey:
    """Read a log with every checksum.

    Args:
        fs: The files.
        directory: The agent's.
        framing: The encoding of its log.
        stream: Its name, for errors.
        boot: The present boot id of the machine.
        size: Read only this far (a live log's written size); None takes the whole file.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``.
        OSError: As the file system gave it.
    """
    try:
        source = open_log(fs, directory, framing, size=size)
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(stream) from None
    with source:
        scan = framing.scan(source.read, source.size, source.path)
        turn = OpenTurn()
        for batch in scan:
            turn.feed(batch.payload)
        tail = scan.tail(boot)
        if tail.unborn:
            raise not_found(stream).with_details(unborn=True)
        turn.feed(b"".join(tail.kept))
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
