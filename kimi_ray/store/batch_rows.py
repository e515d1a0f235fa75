"""Plain JSONL framing: a header line, then batches of rows, each led by a row of checksums.

::

    {"type":"log","version":1,...}
    {"batch":0,"seq":0,"bytes":412,"crc":["<header>","<row>","<row>"],"self":"9f01c2aa"}
    {"epoch":1,"seq":0,"writer":"<nonce>","boot":"<boot id>","mode":"disk"}
    {"seq":0,"time":...}
    {"batch":1,"seq":1,"bytes":77,"crc":["<row>"],"self":"..."}
    ...

``crc`` holds the CRC-32 of each row's bytes with its newline (the first batch's list starts with the header line's),
``bytes`` the length of the rows after the batch row, ``self`` the CRC-32 of the batch row written with eight zeros in
that place. Epoch and closed rows are ordinary rows that consume no seq. Everything here is pure; ``log_scan`` reads
whole files with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import unpack
from typing import Any, cast
from zlib import crc32

from pydantic_core import from_json, to_json

BATCH_START = b'{"batch":'
EVENT_START = b'{"seq":'
EPOCH_START = b'{"epoch":'
CLOSED_START = b'{"closed":'
STORAGE_STARTS = (BATCH_START, EPOCH_START, CLOSED_START)

_CRC_LIST = re.compile(rb'"[0-9a-f]{8}"(?:,"[0-9a-f]{8}")*')
_NAMED_SEQ = re.compile(rb'\{(?:"(?:epoch|closed)":\d+,"seq"|"seq"|"type":"[a-z-]+-chunks","seq0"):(0|[1-9]\d*)')
_GAPS = re.compile(rb'\{"type":"[a-z-]+-chunks","seq0":\d+,"time0":-?\d+,"data":\{[^\[]*"dt":\[([^\]]*)\]')
_SELF_ZERO = b'00000000"}\n'
_BATCH_ROW = re.compile(
    rb'\{"batch":(0|[1-9][0-9]*),"seq":(0|[1-9][0-9]*),"bytes":(0|[1-9][0-9]*),"crc":\[([^\]]*)\],"self":"[0-9a-f]{8}"\}\n'
)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch row whose own checksum is right. ``crcs`` is the text between the brackets."""

    number: int
    seq: int
    size: int
    crcs: bytes

    @property
    def row_crcs(self) -> list[bytes]:
        """One eight-digit text per covered line."""
        return [text[1:-1] for text in self.crcs.split(b",")] if self.crcs else []

    @property
    def crc_values(self) -> list[int]:
        """One checksum per covered line; none when the text between the brackets is not such a list."""
        if not _CRC_LIST.fullmatch(self.crcs):
            return []
        raw = bytes.fromhex(self.crcs.replace(b'"', b"").replace(b",", b"").decode())
        return list(unpack(f">{len(raw) // 4}I", raw))


@dataclass(frozen=True, slots=True)
class EpochRow:
    """A grant as the log records it. ``boot`` is the kernel's boot id at that time."""

    epoch: int
    seq: int
    writer: str
    boot: str
    mode: str


def encode_epoch_row(row: EpochRow) -> bytes:
    """The stored line of a grant."""
    return (
        to_json({"epoch": row.epoch, "seq": row.seq, "writer": row.writer, "boot": row.boot, "mode": row.mode}) + b"\n"
    )


def encode_closed_row(epoch: int, seq: int) -> bytes:
    """The stored line that ends a grant."""
    return b'{"closed":%d,"seq":%d}\n' % (epoch, seq)


def encode_batch_row(number: int, seq: int, size: int, crcs: Iterable[int]) -> bytes:
    """A batch row over lines with these checksums."""
    texts = '","'.join([f"{crc:08x}" for crc in crcs])
    row = f'{{"batch":{number},"seq":{seq},"bytes":{size},"crc":["{texts}"],"self":"'.encode()
    own = crc32(_SELF_ZERO, crc32(row))
    return b'%s%08x"}\n' % (row, own)


def encode_batch(
    number: int, seq: int, payload: bytes, row_sizes: Sequence[int], *, header_line: bytes | None = None
) -> bytes:
    """A whole batch: its row and its payload.

    Args:
        number: The index of the batch in the log.
        seq: The seq of the first event in it, or of the next one when it holds none.
        payload: The rows, each with its newline.
        row_sizes: Their lengths in bytes.
        header_line: The header with its newline, for batch 0 only; the result then starts with it.
    """
    crcs: list[int] = [] if header_line is None else [crc32(header_line)]
    start = 0
    for size in row_sizes:
        end = start + size
        crcs.append(crc32(payload[start:end]))
        start = end
    row = encode_batch_row(number, seq, start, crcs)
    return row + payload if header_line is None else header_line + row + payload


def encode_rows(number: int, seq: int, rows: Sequence[bytes], *, header_line: bytes | None = None) -> bytes:
    """``encode_batch`` for rows that are apart."""
    return encode_batch(number, seq, b"".join(rows), [len(row) for row in rows], header_line=header_line)


def parse_batch_row(line: bytes) -> BatchRow | None:
    """The batch row in this line (with its newline), or None when it is not one or its checksum is wrong."""
    if not line.startswith(BATCH_START):
        return None
    if b"%08x" % crc32(_SELF_ZERO, crc32(line[:-11])) != line[-11:-3]:
        return None
    found = _BATCH_ROW.fullmatch(line)
    if found is None:
        return None
    number, seq, size, crcs = found.groups()
    return BatchRow(int(number), int(seq), int(size), crcs)


def split_rows(payload: bytes) -> list[bytes]:
    """Complete lines, each with its newline; a rest without one is left out."""
    if b"\r" not in payload:
        rows = payload.splitlines(keepends=True)
        if rows and not rows[-1].endswith(b"\n"):
            rows.pop()
        return rows
    rows = payload.split(b"\n")
    rows.pop()
    return [row + b"\n" for row in rows]


def crcs_of(rows: Iterable[bytes]) -> list[int]:
    """Their checksums."""
    return list(map(crc32, rows))


def payload_verifies(row: BatchRow, payload: bytes, header_line: bytes | None) -> bool:
    """Whether this is exactly the payload that the batch row describes."""
    if len(payload) != row.size or payload[-1:] != b"\n":
        return False
    rows = split_rows(payload)
    if header_line is not None:
        rows.insert(0, header_line)
    return crcs_of(rows) == row.crc_values


def verified_prefix(row: BatchRow, payload: bytes, header_line: bytes | None) -> list[bytes]:
    """The rows of a damaged or cut batch that verify, up to the first that does not.

    Later rows may verify too, but a log has no gaps: they belong to a salvage, not to a repair.
    """
    expected = row.row_crcs
    if header_line is not None:
        if not expected or b"%08x" % crc32(header_line) != expected[0]:
            return []
        expected = expected[1:]
    kept: list[bytes] = []
    for line, crc in zip(split_rows(payload[: row.size]), expected, strict=False):
        if b"%08x" % crc32(line) != crc:
            break
        kept.append(line)
    return kept


def parse_epoch_row(line: bytes) -> EpochRow | None:
    """The grant in this line, or None."""
    value = _object(line)
    if value is None:
        return None
    epoch, seq = value.get("epoch"), value.get("seq")
    if not isinstance(epoch, int) or not isinstance(seq, int):
        return None
    return EpochRow(epoch, seq, str(value.get("writer", "")), str(value.get("boot", "")), str(value.get("mode", "")))


def parse_closed_row(line: bytes) -> tuple[int, int] | None:
    """``(epoch, seq)`` of a closed row, or None."""
    value = _object(line)
    if value is None:
        return None
    epoch, seq = value.get("closed"), value.get("seq")
    return (epoch, seq) if isinstance(epoch, int) and isinstance(seq, int) else None


def is_storage_row(row: bytes) -> bool:
    """Whether a row is the store's own (it consumes no seq)."""
    return row.startswith(STORAGE_STARTS)


def expand_row(row: bytes) -> list[bytes]:
    """The canonical lines, without newline, of the events in one stored row; none for a storage row."""
    if row.startswith(EVENT_START):
        return [row[:-1]]
    if row.startswith(STORAGE_STARTS):
        return []
    from kimi_ray.store.chunk_rows import unpack_row

    return unpack_row(row[:-1])


def expand_rows(rows: Iterable[bytes], *, chunks: bool = True) -> list[bytes]:
    """``expand_row`` over many rows; without ``chunks`` an event of a packed row is an empty line."""
    lines: list[bytes] = []
    for row in rows:
        if row.startswith(EVENT_START):
            lines.append(row[:-1])
        elif not chunks:
            lines.extend([b""] * events_in(row))
        else:
            lines.extend(expand_row(row))
    return lines


def expand_payload(payload: bytes, *, chunks: bool = True) -> list[bytes]:
    """The canonical lines, without newline, of the events in these rows; ``chunks`` as in ``expand_rows``."""
    if census(payload)[1]:
        return payload[:-1].split(b"\n") if payload else []
    return expand_rows(split_rows(payload), chunks=chunks)


def census(payload: bytes) -> tuple[int, bool]:
    """How many events these rows hold, and whether each row is one event: no packed row, none of the store's own."""
    rows = payload.count(b"\n")
    if payload.count(b'\n{"seq":') + payload.startswith(EVENT_START) == rows:
        return rows, True
    return sum(map(events_in, split_rows(payload))), False


def count_events(payload: bytes) -> int:
    """How many events these rows hold."""
    return census(payload)[0]


def events_in(row: bytes) -> int:
    """How many events one stored row holds, by a look at it: a packed row has one more than gaps between members."""
    if row.startswith(EVENT_START):
        return 1
    if row.startswith(STORAGE_STARTS):
        return 0
    found = _GAPS.match(row)
    return 1 if found is None else found[1].count(b",") + 2


def named_seq(payload: bytes) -> int | None:
    """The seq that the first of these rows names (a storage row that of the next event), or None when it names none."""
    found = _NAMED_SEQ.match(payload)
    return None if found is None else int(found[1])


def seq_of(line: bytes) -> int:
    """The seq of a canonical line, or -1."""
    digits = line[7 : line.find(b",")]
    return int(digits) if digits.isdigit() else -1


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value: Any = from_json(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
