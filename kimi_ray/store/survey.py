"""What a log is, found by reading all of it and writing nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from kimi_ray.store.batch_rows import EpochRow, expand_row
from kimi_ray.store.framing import Framing
from kimi_ray.store.fs import Fs
from kimi_ray.store.layout import not_found
from kimi_ray.store.log_files import LogSource, open_log
from kimi_ray.store.log_scan import Tail, corrupt
from kimi_ray.store.seam import LogView, Stream
from kimi_ray.store.turns import OpenTurn


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


@dataclass(frozen=True, slots=True)
class KnownLog:
    """A log as the process that writes it knows it.

    ``turn_from`` is a place in the file at or before the batch in which the open turn starts; None: no turn is open.
    """

    header: dict[str, Any]
    next_seq: int
    epoch: EpochRow
    closed: bool
    turn_from: int | None
    size: int
    """Of the file, as far as it is written."""


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


def survey_known(framing: Framing, source: LogSource, known: KnownLog) -> Survey:
    """What a log is that this process has read or written whole: only its open turn is read.

    Raises:
        StoreError: ``store.corrupt`` when that does not verify any more.
        OSError: As the file system gave it.
    """
    turn = OpenTurn()
    if known.turn_from is not None:
        probe = framing.probe(source.read, source.size)
        offset = max(known.turn_from, probe.body())
        while offset < source.size:
            found = probe.at(offset)
            payload = None if found is None else probe.rows(found).payload
            if found is None or payload is None:
                raise corrupt(source.path, offset, found.seq if found is not None else -1, "a batch does not verify")
            turn.feed(payload)
            offset = found.end
    return Survey(known.header, known.next_seq, known.epoch, known.closed, Tail(source.size, 0), turn.rows)


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
