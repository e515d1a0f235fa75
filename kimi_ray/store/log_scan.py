"""Reading a whole log with every checksum, and the Tail rule: what is torn, what is corrupt.

G is the end of the unbroken run of verifying batches from the start of the file. What lies after G is *torn* (a write
that a crash cut short) or *corrupt* (bytes that were whole once):

- a verifying batch after G, or a closed row that counts more events than there are: corrupt (a closed row that counts
  no more is the end of a closing batch that was cut short itself);
- a full-length bad batch while the machine has not been restarted since the newest grant: corrupt, for the page cache
  loses nothing when only a process dies; likewise a bad first batch, which was synced before the log became visible;
- anything else is torn, zeros and garbage too: rows that verify are kept, for their acknowledgement may have been
  lost.

``LogScan`` is what both encodings share; ``plain_framing`` and ``zstd_framing`` say what a batch is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json

from kimi_ray.errors import LogError, StoreError
from kimi_ray.store.batch_rows import (
    CLOSED_START,
    EPOCH_START,
    EpochRow,
    parse_closed_row,
    parse_epoch_row,
    split_rows,
)
from kimi_ray.store.window import ReadAt, Window

LOG_VERSION = 1
LOG_ENCODING = 1


@dataclass(frozen=True, slots=True)
class ScannedBatch:
    """A batch whose every checksum is right. ``payload`` is its rows, storage rows too, each with its newline.

    ``end`` is where the next batch starts in the file; ``only_events``: no row is packed or one of the store's own.
    """

    number: int
    seq: int
    next_seq: int
    offset: int
    end: int
    payload: bytes
    only_events: bool

    @property
    def rows(self) -> list[bytes]:
        """The rows apart, each with its newline."""
        return split_rows(self.payload)


@dataclass(frozen=True, slots=True)
class Tail:
    """What lies after G. ``size`` 0: nothing. ``kept`` are rows that go on in the log; ``unborn``: it never came to be.

    ``torn_bytes`` is how much of it a repair moves aside for good.
    """

    offset: int
    size: int
    torn_bytes: int = 0
    kept: list[bytes] = field(default_factory=list[bytes])
    unborn: bool = False


def corrupt(file: str, offset: int, seq: int, why: str) -> StoreError:
    """``store.corrupt`` {file, offset, seq}."""
    return StoreError(
        f"{file} is damaged at byte {offset} (seq {seq}): {why}",
        code="store.corrupt",
        hint="`kimi-ray sessions salvage` makes a new session of everything that verifies",
        details={"file": file, "offset": offset, "seq": seq},
    )


def parse_header(line: bytes, file: str) -> dict[str, Any]:
    """The header object of a log's first line.

    Raises:
        LogError: ``log.version_unsupported`` before anything else is looked at.
        StoreError: ``store.corrupt`` when the line is not a header.
    """
    try:
        value: Any = from_json(line)
    except ValueError:
        raise corrupt(file, 0, 0, "the first line is not JSON") from None
    if not isinstance(value, dict):
        raise corrupt(file, 0, 0, "the first line is not a header")
    header = cast("dict[str, Any]", value)
    version = header.get("version")
    for what, found, known in (("version", version, LOG_VERSION), ("encoding", header.get("enc"), LOG_ENCODING)):
        if isinstance(found, int | float) and not isinstance(found, bool) and found != known:
            newer = found > known
            raise LogError(
                f"{file} has log {what} {found}; this program reads {what} {known}",
                code="log.version_unsupported",
                hint="upgrade the program" if newer else f"no program reads this {what} any more",
                details={"file": file, "version": version, what: found},
            )
    if header.get("type") != "log" or type(version) is not int:
        raise corrupt(file, 0, 0, "the first line is not a header")
    return header


class LogScan(ABC):
    """One pass over a log, from byte 0, a batch at a time; memory is bounded by the largest batch."""

    def __init__(self, read: ReadAt, size: int, file: str) -> None:
        """
        Args:
            read: Reads at an offset.
            size: Where the log ends.
            file: Its name, for errors.
        """
        self.window = Window(read, size)
        self.file = file
        self.header_line: bytes | None = None
        self.header: dict[str, Any] = {}
        self.good = 0
        """G: the end of the last verifying batch (or of the header, where that verifies alone)."""
        self.batches_read = 0
        self.next_seq: int = 0
        self.epoch: EpochRow | None = None
        self.closed = False

    def __iter__(self) -> Iterator[ScannedBatch]:
        """The verifying batches in order; after the last one the attributes describe the log up to G."""
        offset = self.read_header()
        if offset is None:
            return
        while offset < self.window.size:
            batch = self.next_batch(offset)
            if batch is None:
                return
            if not batch.only_events:
                self.account(batch.payload)
            offset = self.good = batch.end
            self.batches_read += 1
            self.next_seq = batch.next_seq
            yield batch

    def finish(self) -> LogScan:
        """Run to the end without looking at the rows."""
        for _ in self:
            pass
        return self

    @abstractmethod
    def read_header(self) -> int | None:
        """Read the header line; returns where the batches start, or None when the file has no header."""

    @abstractmethod
    def next_batch(self, offset: int) -> ScannedBatch | None:
        """The batch that starts here and continues the log, or None."""

    @abstractmethod
    def tail(self, boot: str) -> Tail:
        """Judge what lies after G, by the Tail rule. Call it after the iteration ended; kept rows are counted then.

        Args:
            boot: The present boot id of the machine.

        Raises:
            StoreError: ``store.corrupt`` {file, offset, seq}.
        """

    @abstractmethod
    def encode_kept(self, kept: list[bytes]) -> bytes:
        """What a repair writes at ``tail.offset`` in place of the tail."""

    def account(self, payload: bytes) -> None:
        """Follow the grants in these rows."""
        for row in split_rows(payload):
            if row.startswith(EPOCH_START):
                found = parse_epoch_row(row)
                if found is not None:
                    self.epoch, self.closed = found, False
            elif row.startswith(CLOSED_START):
                closed = parse_closed_row(row)
                if closed is not None and self.epoch is not None and closed[0] == self.epoch.epoch:
                    self.closed = True

    def same_boot(self, boot: str) -> bool:
        """Whether the machine is known to have run on since the newest grant, so that nothing written can be lost."""
        return self.epoch is not None and bool(boot) and self.epoch.boot == boot
