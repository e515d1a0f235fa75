"""A disk in memory that loses what was not synced: sectors one by one, directory entries one by one.

``Disk`` is what survives; ``LossyFs`` is one process's view of it. After ``crash`` the disk holds, for each file, its
last synced bytes with a random choice of the sectors written since, and for each directory its last synced entries
with a random choice of the changes since. A rename is one change.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

SECTOR = 512


class File:
    def __init__(self) -> None:
        self.data = bytearray()
        self.safe = b""
        self.pending: list[tuple[int, bytes | None]] = []
        self.links = 0
        self.locks: dict[int, int] = {}


class Directory:
    def __init__(self) -> None:
        self.names: dict[str, File | Directory] = {}
        self.safe: dict[str, File | Directory] = {}
        self.pending: list[dict[str, File | Directory | None]] = []

    def change(self, **names: File | Directory | None) -> None:
        self.pending.append(names)
        _apply(self.names, names)


def _apply(names: dict[str, Any], change: dict[str, Any]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    def __init__(self) -> None:
        self.root = Directory()

    def crash(self, seed: int | None) -> None:
        """Power cut. ``None`` keeps everything that was written: only the process died."""
        dice = random.Random(seed)

        def visit(directory: Directory) -> None:
            if seed is not None:
                for change in directory.pending:
                    if dice.random() < 0.5:
                        _apply(directory.safe, change)
                directory.names = dict(directory.safe)
            directory.safe, directory.pending = dict(directory.names), []
            for node in directory.names.values():
                if isinstance(node, Directory):
                    visit(node)
                else:
                    self._settle(node, None if seed is None else dice)

        visit(self.root)

    @staticmethod
    def _settle(file: File, dice: random.Random | None) -> None:
        if dice is not None:
            data = bytearray(file.safe)
            for offset, written in file.pending:
                if written is None:
                    if dice.random() < 0.5:
                        del data[offset:]
                    continue
                start = offset
                while start < offset + len(written):
                    end = min((start // SECTOR + 1) * SECTOR, offset + len(written))
                    if dice.random() < 0.5:
                        _put(data, start, written[start - offset : end - offset])
                    start = end
            file.data = data
        file.safe, file.pending = bytes(file.data), []
        file.locks.clear()


def _put(data: bytearray, offset: int, what: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(what)] = what


class LossyFs:
    """Dies after ``calls`` changing calls: from then on every call fails."""

    def __init__(self, disk: Disk, calls: int = 10**9) -> None:
        self.disk = disk
        self.left = calls
        self.made = 0
        self.dead = False
        self._files: dict[int, File] = {}
        self._next = 100
        self._lock = threading.RLock()

    def kill(self) -> None:
        with self._lock:
            self.dead = True

    def _change(self) -> None:
        self.made += 1
        self.left -= 1
        if self.left < 0:
            self.dead = True
        self._alive()

    def _alive(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "dead")

    def _find(self, path: str) -> File | Directory:
        self._alive()
        node: File | Directory = self.disk.root
        for name in path.strip("/").split("/"):
            if not name:
                continue
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "missing", path)
            node = node.names[name]
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        above, _, name = path.rstrip("/").rpartition("/")
        node = self._find(above)
        assert isinstance(node, Directory)
        return node, name

    def _locked(self, work: Callable[[], Any]) -> Any:
        with self._lock:
            return work()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        with self._lock:
            parent, name = self._parent(path)
            node = parent.names.get(name)
            if node is None:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(errno.ENOENT, "missing", path)
                self._change()
                node = File()
                parent.change(**{name: node})
            assert isinstance(node, File)
            if flags & os.O_TRUNC and node.data:
                node.pending.append((0, None))
                del node.data[:]
            self._next += 1
            self._files[self._next] = node
            return self._next

    def close(self, fd: int) -> None:
        with self._lock:
            self._files.pop(fd).locks.pop(fd, None)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        with self._lock:
            self._alive()
            return bytes(self._files[fd].data[offset : offset + size])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        with self._lock:
            file = self._files[fd]
            taken = bytes(data)
            if self.left == 0:  # dying: half of it
                taken = taken[: len(taken) // 2]
                _put(file.data, offset, taken)
                file.pending.append((offset, taken))
            self._change()
            _put(file.data, offset, taken)
            file.pending.append((offset, taken))
            return len(taken)

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._change()
            file = self._files[fd]
            del file.data[size:]
            file.pending.append((size, None))

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._change()
            file = self._files[fd]
            file.safe, file.pending = bytes(file.data), []

    fdatasync = fsync

    def sync_dir(self, path: str) -> None:
        with self._lock:
            self._change()
            node = self._find(path)
            assert isinstance(node, Directory)
            node.safe, node.pending = dict(node.names), []

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._change()
            (parent, old), (other, new) = self._parent(source), self._parent(target)
            assert parent is other
            parent.change(**{old: None, new: parent.names[old]})

    def link(self, source: str, target: str) -> None:
        with self._lock:
            self._change()
            (parent, old), (other, new) = self._parent(source), self._parent(target)
            if new in other.names:
                raise FileExistsError(errno.EEXIST, "exists", target)
            other.change(**{new: parent.names[old]})

    def unlink(self, path: str) -> None:
        with self._lock:
            self._change()
            parent, name = self._parent(path)
            if name not in parent.names:
                raise FileNotFoundError(errno.ENOENT, "missing", path)
            parent.change(**{name: None})

    rmdir = unlink

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._change()
            parent, name = self._parent(path)
            if name in parent.names:
                raise FileExistsError(errno.EEXIST, "exists", path)
            parent.change(**{name: Directory()})

    def listdir(self, path: str) -> list[str]:
        with self._lock:
            node = self._find(path)
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            return list(node.names)

    def stat(self, path: str) -> os.stat_result:
        with self._lock:
            return self._facts(self._find(path))

    def fstat(self, fd: int) -> os.stat_result:
        with self._lock:
            self._alive()
            return self._facts(self._files[fd])

    @staticmethod
    def _facts(node: File | Directory) -> os.stat_result:
        kind = stat.S_IFREG if isinstance(node, File) else stat.S_IFDIR
        size = len(node.data) if isinstance(node, File) else 0
        now = time.time()
        return os.stat_result((kind | 0o600, id(node), 1, 1, 0, 0, size, now, now, now))

    def flock(self, fd: int, operation: int) -> None:
        with self._lock:
            self._alive()
            locks = self._files[fd].locks
            locks.pop(fd, None)
            kind = operation & ~fcntl.LOCK_NB
            if kind == fcntl.LOCK_UN:
                return
            if any(fcntl.LOCK_EX in (kind, other) for other in locks.values()):
                raise BlockingIOError(errno.EAGAIN, "held")
            locks[fd] = kind

    def free_space(self, path: str) -> int:
        return 1 << 40

    def fs_type(self, path: str) -> str:
        return "ext4"
