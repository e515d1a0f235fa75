"""Damage in the log of a database that nobody has open, which SQLite would take for its end.

SQLite reads its log (``-wal``) as far as the checksums go and forgets the rest: right for a write that a power cut
tore, wrong for a bit that flipped in what was acknowledged. The two are told apart as by the Tail rule of JSONL: while
the machine has not been restarted since, nothing that was written is lost, so a frame that is there in full and does
not verify was damaged, if a commit follows that does. After a restart the end of the log is what verifies.

Frames behind the last commit say nothing: SQLite writes pages of a transaction before its commit, and when it fails (on
a full disk) or is rolled back they stay, of the same age as what is committed over the first of them later.
"""

from __future__ import annotations

import os
import struct
import sys
import time

from kimi_ray.errors import StoreError
from kimi_ray.store.fs import RealFs, io_errors, names_in
from kimi_ray.store.owners import is_held
from kimi_ray.store.sqlite.database_file import DatabaseFile
from kimi_ray.store.sqlite.schema import PAGE_SIZE

_HEADER = 32
_FRAME_HEADER = 24
_FRAME = _FRAME_HEADER + PAGE_SIZE
SMALLEST_WAL = _HEADER + _FRAME
"""Bytes of a log with one frame."""
_MAGIC = 0x377F0682
_MASK = 0xFFFF_FFFF
_AT_ONCE = 256

Sum = tuple[int, int]


def check_wal(file: DatabaseFile, writer: str | None) -> None:
    """Refuse a log with damage that SQLite would not tell.

    Nothing is looked at while another process may write the home: then the log is in use, and its end is known.

    Args:
        file: The database.
        writer: The lock of this process, which is no other.

    Raises:
        StoreError: ``store.corrupt`` {file, offset}.
    """
    if file.wal_bytes() < SMALLEST_WAL or _is_in_use(file.home, writer):
        return
    with io_errors(file.wal):
        facts = os.stat(file.wal)
        if facts.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 1:
            return
        offset = damaged_at(file.wal)
    if offset is not None:
        raise StoreError(
            f"{file.wal} is damaged at byte {offset}: what was committed there and later would be lost",
            code="store.corrupt",
            hint="restore the file from a backup; without it, or cut off there, the database opens as it was before",
            details={"file": file.wal, "offset": offset, "rowid": -1, "seq": -1},
        )


def _is_in_use(home: str, writer: str | None) -> bool:
    fs = RealFs()
    directory = f"{home}/writers"
    return any(
        is_held(fs, f"{directory}/{name}") for name in names_in(fs, directory) if name.removesuffix(".lock") != writer
    )


def damaged_at(path: str) -> int | None:
    """The offset of the first damage in a log of which all was written, or None.

    Raises:
        OSError: As the file system gave it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _Log(fd, os.fstat(fd).st_size).damaged_at()
    finally:
        os.close(fd)


class _Log:
    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._count = (size - _HEADER) // _FRAME
        self._whole = _HEADER + self._count * _FRAME == size
        self._base = -1
        self._frames = b""
        header = os.pread(fd, _HEADER, 0)
        magic, _, _, _, self._salt1, self._salt2, first, second = struct.unpack(">8I", header)
        known = magic & ~1 == _MAGIC
        self._order = (">" if magic & 1 else "<") if known else ("<" if sys.byteorder == "little" else ">")
        self._start: Sum = (first, second)
        self._header_is_whole = known and self._sum((0, 0), header[:24]) == self._start

    def damaged_at(self) -> int | None:
        if not self._header_is_whole:
            return 0
        at: Sum = self._start
        ended = True
        for number in range(self._count):
            frame = self._frame(number)
            computed = self._chained(at, frame)
            if self._is_ours(frame) and computed == _stored(frame):
                at, ended = computed, _is_commit(frame)
                continue
            damaged = self._is_committed_after(number, computed) or self._is_last_commit(number, frame, ended)
            return _HEADER + number * _FRAME if damaged else None
        return None

    def _is_committed_after(self, number: int, computed: Sum) -> bool:
        """Whether a commit after this frame verifies, from what is stored before it or would be."""
        before = [computed, _stored(self._frame(number))]
        for later in range(number + 1, self._count):
            frame = self._frame(later)
            verifies = self._is_ours(frame) and any(self._chained(start, frame) == _stored(frame) for start in before)
            if verifies and _is_commit(frame):
                return True
            if not self._is_ours(frame) and later > number + 1:
                return False
            before = [_stored(frame)]
        return False

    def _is_last_commit(self, number: int, frame: bytes, ended: bool) -> bool:
        """The last frame of a log that nothing older follows was written in full, whatever one of its salts says.

        It was a commit if it says so, or if one is missing; else it may be what a failed transaction left.
        """
        salts = (_word(frame, 8) == self._salt1) + (_word(frame, 12) == self._salt2)
        return self._whole and number == self._count - 1 and salts > 0 and (_is_commit(frame) or not ended)

    def _is_ours(self, frame: bytes) -> bool:
        return _word(frame, 8) == self._salt1 and _word(frame, 12) == self._salt2

    def _chained(self, start: Sum, frame: bytes) -> Sum:
        return self._sum(self._sum(start, frame[:8]), frame[_FRAME_HEADER:])

    def _sum(self, start: Sum, data: bytes) -> Sum:
        first, second = start
        words = iter(struct.unpack(f"{self._order}{len(data) // 4}I", data))
        for one, other in zip(words, words, strict=True):
            first = (first + one + second) & _MASK
            second = (second + other + first) & _MASK
        return first, second

    def _frame(self, number: int) -> bytes:
        if not self._base <= number < self._base + _AT_ONCE or self._base < 0:
            self._base = number
            self._frames = os.pread(self._fd, _AT_ONCE * _FRAME, _HEADER + number * _FRAME)
        start = (number - self._base) * _FRAME
        return self._frames[start : start + _FRAME]


def _is_commit(frame: bytes) -> bool:
    """The last frame of a transaction says how large the database is then."""
    return _word(frame, 4) != 0


def _stored(frame: bytes) -> Sum:
    return _word(frame, 16), _word(frame, 20)


def _word(frame: bytes, offset: int) -> int:
    return int.from_bytes(frame[offset : offset + 4], "big")
