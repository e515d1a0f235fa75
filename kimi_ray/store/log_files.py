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
from kimi_ray.store.directories import Directories
from kimi_ray.store.framing import Framing
from kimi_ray.store.fs import Fs, exists, io_error, names_in, pwrite_all, read_file, replace_file, write_file
from kimi_ray.store.layout import REDO_NAME
from kimi_ray.store.log_scan import LogScan, Tail, parse_header

_CHUNK = 1 << 20


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

    def copy(self, offset: int, size: int, target: int, at: int) -> int:
        """Copy to the descriptor ``target``; returns how many bytes, 0 only at the end.

        Raises:
            OSError: As the file system gave it.
        """
        redo = self._redo
        plain = size if redo is None else min(size, redo.offset - offset)
        if plain > 0:
            return self._fs.copy_range(self._fd, offset, target, at, plain)
        data = self.read(offset, min(size, _CHUNK))
        pwrite_all(self._fs, target, data, at)
        return len(data)

    def close(self) -> None:
        """Give the descriptor back."""
        self._fs.close(self._fd)

    def __enter__(self) -> LogSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_log(fs: Fs, directory: str, framing: Framing, *, size: int | None = None, repaired: bool = True) -> LogSource:
    """Open the log of an agent directory for reading.

    Args:
        fs: The files.
        directory: The agent's.
        framing: The encoding of its log.
        size: Read only this far (a live log's written size); None takes the whole file and a pending repair.
        repaired: Whether to show a pending repair as done.

    Raises:
        LogError: ``log.version_unsupported`` when there is a repair pending that another version decided.
        StoreError: ``store.corrupt`` when the pending repair is damaged.
        OSError: ``FileNotFoundError`` when there is none.
    """
    path = f"{directory}/{framing.log_name}"
    fd = fs.open(path, os.O_RDONLY)
    try:
        source = LogSource(fs, path, fd, fs.fstat(fd).st_size if size is None else size)
        if size is not None or not repaired or not exists(fs, f"{directory}/{REDO_NAME}"):
            return source
        check_version(source, framing)
        return LogSource(fs, path, fd, source.size, read_redo(fs, directory))
    except BaseException:
        fs.close(fd)
        raise


def check_version(source: LogSource, framing: Framing) -> None:
    """Refuse the log of another version before anything else of it, or beside it, is looked at.

    Raises:
        LogError: ``log.version_unsupported``.
    """
    line = framing.probe(source.read, source.size).header_line()
    if line is not None:
        with contextlib.suppress(StoreError):
            parse_header(line, source.path)


def create_log(fs: Fs, directories: Directories, path: str, content: bytes, *, sync: bool) -> None:
    """A new log with this content: temporary file, sync, link, directory sync. Visible whole or not at all.

    Raises:
        OSError: ``FileExistsError`` when there is one.
    """
    directory = path.rsplit("/", 1)[0]
    directories.ensure(directory)
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


def apply_redo(fs: Fs, directories: Directories, path: str, redo: Redo, *, sync: bool) -> None:
    """Carry out a decided repair of the log at ``path``; may be repeated from any point."""
    directory = path.rsplit("/", 1)[0]
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


def repair_tail(fs: Fs, directories: Directories, source: LogSource, scan: LogScan, tail: Tail, *, sync: bool) -> int:
    """Move a torn tail aside and keep its rows that go on in the log; returns the new size of the log."""
    directory = source.path.rsplit("/", 1)[0]
    kept = scan.encode_kept(tail.kept)
    offset = tail.offset
    epoch = scan.epoch.epoch if scan.epoch is not None else 0
    moved = source.read(offset, tail.size)
    aside = _free_name(fs, directory, f"wire.tail-{epoch}-{offset}")
    head = to_json({"offset": offset, "aside": aside, "moved": len(moved), "crc": crc32(moved + kept)})
    replace_file(fs, f"{directory}/{REDO_NAME}", b"%s\n%s%s" % (head, moved, kept), sync=sync, unique=new_ulid())
    directories.sync(directory)
    apply_redo(fs, directories, source.path, Redo(offset, aside, moved, kept), sync=sync)
    return offset + len(kept)


def set_unborn_aside(fs: Fs, directories: Directories, path: str) -> None:
    """Rename a log that never came to be (no verifying first row), so that a new one can take its place."""
    directory = path.rsplit("/", 1)[0]
    fs.rename(path, f"{directory}/{_free_name(fs, directory, 'wire.tail-0-0')}")
    directories.sync(directory)


def _free_name(fs: Fs, directory: str, name: str) -> str:
    taken = set(names_in(fs, directory))
    number = 0
    free = name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def clear_leftovers(fs: Fs, directory: str) -> None:
    """Remove temporary files of a process that died while creating or repairing here."""
    for name in names_in(fs, directory):
        if ".tmp-" in name:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{directory}/{name}")


def sync_found(fs: Fs, directories: Directories, path: str) -> None:
    """First touch: what was found may only be page cache; make it durable before anything is promised."""
    if not exists(fs, path):
        return
    fd = fs.open(path, os.O_RDWR)
    try:
        fs.fsync(fd)
    except OSError as error:
        raise io_error(error, path) from error
    finally:
        fs.close(fd)
    directories.sync(path.rsplit("/", 1)[0])
