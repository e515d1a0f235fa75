"""The files of one log directory: opening, creating, moving a torn tail aside.

A repair is one atomic step by a redo file: ``wire.redo`` holds the bytes to move and the rows to keep; once it is
durable the repair is decided, and whoever comes next finishes it. Readers see the log as it will be, writing nothing.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from pydantic_core import from_json, to_json

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.batch_rows import count_events, encode_rows
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, exists, io_error, names_in, pwrite_all, read_file, replace_file, write_file
from kimi_ray.store.layout import LOG_NAME, REDO_NAME
from kimi_ray.store.log_scan import LogScan, Tail


@dataclass(frozen=True, slots=True)
class Redo:
    """A decided repair: bytes from ``offset`` on go to the file ``aside``; ``kept`` takes their place."""

    offset: int
    aside: str
    moved: bytes
    kept: bytes


class LogSource:
    """A log opened for reading, with a pending repair shown as done."""

    __slots__ = ("_fd", "_fs", "_redo", "path", "size")

    def __init__(self, fs: Fs, path: str, fd: int, size: int, redo: Redo | None = None) -> None:
        self._fs = fs
        self._fd = fd
        self._redo = redo
        self.path = path
        self.size = size if redo is None else redo.offset + len(redo.kept)

    def read(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes at ``offset``."""
        redo = self._redo
        if redo is None:
            return self._fs.pread(self._fd, size, offset)
        head = self._fs.pread(self._fd, min(size, redo.offset - offset), offset) if offset < redo.offset else b""
        at = max(0, offset - redo.offset)
        return head + redo.kept[at : at + size - len(head)]

    def close(self) -> None:
        """Give the descriptor back."""
        self._fs.close(self._fd)

    def __enter__(self) -> LogSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_log(fs: Fs, directory: str, *, size: int | None = None) -> LogSource:
    """Open the log of an agent directory for reading.

    Args:
        size: Read only this far (a live log's written size); None takes the whole file and a pending repair.

    Raises:
        OSError: ``FileNotFoundError`` when there is none.
    """
    path = f"{directory}/{LOG_NAME}"
    redo = None if size is not None else read_redo(fs, directory)
    fd = fs.open(path, os.O_RDONLY)
    try:
        return LogSource(fs, path, fd, fs.fstat(fd).st_size if size is None else size, redo)
    except OSError:
        fs.close(fd)
        raise


def create_log(fs: Fs, directories: Directories, directory: str, content: bytes, *, sync: bool) -> None:
    """A new log with this content: temporary file, sync, link, directory sync. Visible whole or not at all.

    Raises:
        OSError: ``FileExistsError`` when there is one.
    """
    directories.ensure(directory)
    path = f"{directory}/{LOG_NAME}"
    temporary = f"{path}.tmp-{new_ulid()}"
    write_file(fs, temporary, content, sync=sync)
    try:
        fs.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
    directories.sync(directory)


def read_redo(fs: Fs, directory: str) -> Redo | None:
    """The pending repair of a log, or None."""
    try:
        data = read_file(fs, f"{directory}/{REDO_NAME}")
    except FileNotFoundError:
        return None
    line, _, rest = data.partition(b"\n")
    try:
        head: dict[str, Any] = from_json(line)
        moved, crc = int(head["moved"]), int(head["crc"])
        redo = Redo(int(head["offset"]), str(head["aside"]), rest[:moved], rest[moved:])
    except (ValueError, KeyError, TypeError):
        redo, crc = None, 0
    if redo is None or crc32(rest) != crc:
        raise StoreError(
            f"{directory}/{REDO_NAME} is damaged",
            code="store.corrupt",
            hint="move the file away; the log beside it is complete up to its torn tail",
            details={"file": f"{directory}/{REDO_NAME}", "offset": 0, "seq": -1},
        )
    return redo


def apply_redo(fs: Fs, directories: Directories, directory: str, redo: Redo, *, sync: bool) -> None:
    """Carry out a decided repair; may be repeated from any point."""
    path = f"{directory}/{LOG_NAME}"
    aside = f"{directory}/{redo.aside}"
    write_file(fs, aside, redo.moved, sync=sync)
    directories.sync(directory)
    fd = fs.open(path, os.O_RDWR)
    try:
        fs.truncate(fd, redo.offset)
        pwrite_all(fs, fd, redo.kept, redo.offset)
        if sync:
            fs.fsync(fd)
    finally:
        fs.close(fd)
    fs.unlink(f"{directory}/{REDO_NAME}")
    directories.sync(directory)


def repair_tail(
    fs: Fs, directories: Directories, directory: str, source: LogSource, scan: LogScan, tail: Tail, *, sync: bool
) -> int:
    """Move a torn tail aside and keep its rows that verify; returns the new size of the log."""
    header = scan.header_line if scan.batches_read == 0 else None
    kept = b""
    if tail.kept:
        seq = scan.next_seq - count_events(tail.kept, b"".join(tail.kept))
        kept = encode_rows(scan.batches_read, seq, tail.kept, header_line=header)
    offset = tail.offset
    epoch = scan.epoch.epoch if scan.epoch is not None else 0
    moved = source.read(offset, tail.size)
    name = f"wire.tail-{epoch}-{offset}"
    taken = set(names_in(fs, directory))
    number = 0
    aside = name
    while aside in taken:
        number += 1
        aside = f"{name}-{number}"
    head = to_json({"offset": offset, "aside": aside, "moved": len(moved), "crc": crc32(moved + kept)})
    replace_file(fs, f"{directory}/{REDO_NAME}", b"%s\n%s%s" % (head, moved, kept), sync=sync, unique=new_ulid())
    directories.sync(directory)
    apply_redo(fs, directories, directory, Redo(offset, aside, moved, kept), sync=sync)
    return offset + len(kept)


def set_unborn_aside(fs: Fs, directories: Directories, directory: str) -> None:
    """Rename a log that never came to be (no verifying first row), so that a new one can take its place."""
    taken = set(names_in(fs, directory))
    number = 0
    while f"wire.tail-0-{number}" in taken:
        number += 1
    fs.rename(f"{directory}/{LOG_NAME}", f"{directory}/wire.tail-0-{number}")
    directories.sync(directory)


def clear_leftovers(fs: Fs, directory: str) -> None:
    """Remove temporary files of a process that died while creating or repairing here."""
    for name in names_in(fs, directory):
        if ".tmp-" in name:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{directory}/{name}")


def sync_found(fs: Fs, directories: Directories, directory: str) -> None:
    """First touch: what was found may only be page cache; make it durable before anything is promised."""
    path = f"{directory}/{LOG_NAME}"
    if not exists(fs, path):
        return
    fd = fs.open(path, os.O_RDWR)
    try:
        fs.fsync(fd)
    except OSError as error:
        raise io_error(error, path) from error
    finally:
        fs.close(fd)
    directories.sync(directory)
