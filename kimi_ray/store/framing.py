"""How rows become the bytes of a log file, and are found in them again: the seam between the two encodings.

A log file is a header line and *batches* of rows, each of which verifies by itself: in the plain encoding
(``plain_framing``) lines led by a row of checksums, in the Zstandard encoding (``zstd_framing``) standard frames. All
that reads or writes such a file goes through a ``Framing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kimi_ray.store.batch_rows import BatchRow
from kimi_ray.store.log_scan import LogScan
from kimi_ray.store.window import ReadAt


@dataclass(frozen=True, slots=True)
class Encoded:
    """Bytes to be written, and how many batches they are."""

    data: bytes
    batches: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows encoded as far as that does not depend on their place in the log, so that it can be done beforehand.

    ``crcs`` are the checksums of the rows (plain), ``frames`` the compressed rows (Zstandard).
    """

    payload: bytes
    crcs: tuple[int, ...] = ()
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A batch at its place in the file. ``number`` is -1 where the encoding does not store it.

    ``start`` is where its rows start, ``end`` where the next batch starts. ``row`` and ``payload`` are what the
    encoding has at hand: the plain one has the batch row, which verifies alone; the other all rows.
    """

    offset: int
    start: int
    end: int
    seq: int
    number: int = -1
    row: BatchRow | None = None
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows of a found batch, each with its offset in the file; None stands for one that does not verify."""

    rows: list[tuple[int, bytes | None]]
    missing: int = 0
    """Rows that the batch names and the file does not have."""
    payload: bytes | None = None
    """All rows, when everything verifies."""

    @property
    def whole(self) -> bool:
        """Whether everything verifies."""
        return self.payload is not None


class Probe(Protocol):
    """Looks for batches anywhere in a log without reading what is before. A batch that is found verifies, or in the
    plain encoding its batch row does.
    """

    def header_line(self) -> bytes | None:
        """The header with its newline, or None when the file has none that can be read."""
        ...

    def body(self) -> int:
        """Where the batches start."""
        ...

    def at(self, offset: int) -> Found | None:
        """The batch that starts here."""
        ...

    def first(self, start: int, end: int) -> Found | None:
        """The first batch that starts in ``start`` .. ``end - 1``."""
        ...

    def before(self, end: int) -> Found | None:
        """The last batch that starts before ``end``."""
        ...

    def rows(self, found: Found) -> FoundRows:
        """The rows of a batch."""
        ...

    def loose(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """Rows that verify where no batch was found, each with its offset."""
        ...


class Framing(Protocol):
    """One encoding of log files. Stateless, thread-safe."""

    @property
    def compression(self) -> str:
        """Its name in ``store.json``."""
        ...

    @property
    def log_name(self) -> str:
        """The name of a log file."""
        ...

    @property
    def covers_header(self) -> bool:
        """Whether the checksums of batch 0 cover the header line, so that another header needs another batch 0."""
        ...

    def prepare(self, payload: bytes, row_sizes: Sequence[int]) -> Prepared:
        """The part of ``encode`` that takes time and needs no place in the log."""
        ...

    def encode(self, number: int, seq: int, prepared: Prepared) -> Encoded:
        """Rows as batches.

        Args:
            number: The index of the first batch in the log.
            seq: The seq of the first event in it, or of the next one when it holds none.
            prepared: The rows.
        """
        ...

    def begin(self, header_line: bytes, storage_row: bytes, prepared: Prepared) -> Encoded:
        """The beginning of a log: its header, the row of its first grant, and rows."""
        ...

    def header(self, header_line: bytes) -> bytes:
        """The bytes of a header alone, where ``covers_header`` is false."""
        ...

    def scan(self, read: ReadAt, size: int, file: str) -> LogScan:
        """One pass over a log with every checksum."""
        ...

    def probe(self, read: ReadAt, size: int) -> Probe:
        """A look at parts of a log."""
        ...


def framing_of(compression: str) -> Framing:
    """The encoding that ``store.json`` names.

    Raises:
        StoreError: ``store.backend_unavailable``.
    """
    if compression == "none":
        from kimi_ray.store.plain_framing import PlainFraming

        return PlainFraming()
    if compression == "zstd":
        from kimi_ray.store.zstd_framing import ZstdFraming

        return ZstdFraming()
    from kimi_ray.store.reader import unavailable

    raise unavailable("jsonl", compression)


def encode_rows(framing: Framing, number: int, seq: int, rows: Sequence[bytes]) -> Encoded:
    """``encode`` for rows that are apart."""
    return framing.encode(number, seq, framing.prepare(b"".join(rows), [len(row) for row in rows]))
