"""A machine in memory: a disk that loses what was not synced, and the processes that use it through ``Fs``.

``Disk`` is the machine, ``SimulatedFs`` one process on it. What the simulation promises (``test_simulated_fs.py``):

- A process that dies loses nothing that it wrote; its descriptors close, its locks are free.
- A power cut keeps, for each file, what was synced, and of each 512-byte sector written since: the new content, the old
  one, or, where the file had none, zeros or garbage. The size is one that the file had since, with or without its data.
- A directory keeps what was synced; each later change is kept or lost by itself. A rename is one change.
- A failed sync leaves the written pages in the cache, marked clean: the next sync succeeds without them.
- Calls fail by rule, writes are short, the disk fills up, becomes read-only, a directory vanishes.
- Time and boot ids are the machine's own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import threading
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.store.faults import Rule
from kimi_ray.store.fs import FILE_MODE

SECTOR = 512
_FIRST_FD = 100
_TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Change:
    """A write since the last sync, or, with no data, a truncation to ``offset``."""

    offset: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        """Do it to ``content``."""
        if self.data is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
            return
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def size_after(self, size: int) -> int:
        """The size of a file of ``size`` bytes afterwards."""
        return self.offset if self.data is None else max(size, self.offset + len(self.data))


@dataclass(eq=False, slots=True)
class File:
    """``cached`` is what processes read, ``durable`` what the platter holds, ``dirty`` what a sync would add to it."""

    number: int
    cached: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: list[Change] = field(default_factory=list[Change])
    locks: dict[int, int] = field(default_factory=dict[int, int])
    changed: float = 0.0

    def change(self, change: Change, now: float) -> None:
        """Write into the cache."""
        change.apply(self.cached)
        self.dirty.append(change)
        self.changed = now

    def sync(self) -> None:
        """Everything dirty reaches the platter, and nothing else."""
        if self.dirty:
            content = bytearray(self.durable)
            for change in self.dirty:
                change.apply(content)
            self.durable = bytes(content)
            self.dirty.clear()

    def cut(self, dice: random.Random) -> None:
        """A power cut: what the platter holds is all there is."""
        if self.dirty:
            self.durable = self._survivors(dice)
            self.dirty.clear()
        self.cached = bytearray(self.durable)

    def _survivors(self, dice: random.Random) -> bytes:
        journaled = dice.choice((0, len(self.dirty), dice.randint(0, len(self.dirty))))
        size = lowest = len(self.durable)
        for change in self.dirty[:journaled]:
            size = change.size_after(size)
            lowest = min(lowest, size)
        content = bytearray(self.durable[:lowest].ljust(size, b"\0"))
        keep = dice.choice((0.0, 0.5, 0.5, 0.9, 1.0))
        for sector, versions in self._versions().items():
            start = sector * SECTOR
            new = dice.choice(versions) if dice.random() < 0.2 else versions[-1]
            if dice.random() >= keep:
                if start < lowest or dice.random() < 0.5:
                    continue
                new = dice.randbytes(SECTOR)
            new = new[: max(0, size - start)]
            content[start : start + len(new)] = new
        return bytes(content)

    def _versions(self) -> dict[int, list[bytes]]:
        content = bytearray(self.durable)
        found: dict[int, list[bytes]] = {}
        for change in self.dirty:
            change.apply(content)
            if change.data:
                for sector in range(change.offset // SECTOR, (change.offset + len(change.data) - 1) // SECTOR + 1):
                    found.setdefault(sector, []).append(bytes(content[sector * SECTOR : (sector + 1) * SECTOR]))
        return found


@dataclass(eq=False, slots=True)
class Directory:
    """``names`` is what processes see, ``durable`` what was synced, ``dirty`` the changes since, in order."""

    number: int
    names: dict[str, File | Directory] = field(default_factory=dict[str, "File | Directory"])
    durable: dict[str, File | Directory] = field(default_factory=dict[str, "File | Directory"])
    dirty: list[dict[str, File | Directory | None]] = field(default_factory=list[dict[str, "File | Directory | None"]])
    changed: float = 0.0

    def change(self, names: dict[str, File | Directory | None], now: float) -> None:
        """Add and remove names, at once."""
        _apply(self.names, names)
        self.dirty.append(names)
        self.changed = now

    def sync(self) -> None:
        """What processes see is what stays."""
        self.durable = dict(self.names)
        self.dirty.clear()

    def cut(self, dice: random.Random) -> None:
        """A power cut: every change since the last sync is kept or lost by itself."""
        keep = dice.choice((0.0, 0.5, 0.5, 1.0))
        for names in self.dirty:
            if dice.random() < keep:
                _apply(self.durable, names)
        self.dirty.clear()
        self.names = dict(self.durable)


def _apply(names: dict[str, Any], change: dict[str, Any]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """The machine.

    Attributes:
        boots: Power cuts so far.
        now: Seconds since the epoch; every changing call lets a millisecond pass.
        capacity: Bytes that all files together may hold; None is unlimited.
        read_only: Every change is refused, as after a remount.
        kind: The name of the file system.
    """

    def __init__(self) -> None:
        self._number = 1
        self.root = Directory(1)
        self.boots = 0
        self.now = 1_800_000_000.0
        self.capacity: int | None = None
        self.read_only = False
        self.kind = "ext4"
        self.fds = _FIRST_FD
        self.lock = threading.RLock()

    @property
    def boot_id(self) -> str:
        """The kernel's boot id: another one after each power cut."""
        return f"boot-{self.boots}"

    def new_number(self) -> int:
        """An inode number."""
        self._number += 1
        return self._number

    def crash(self, seed: int | None) -> None:
        """The end of all processes: by a power cut with this seed, or, with ``None``, by their own death only."""
        if seed is None:
            return
        dice = random.Random(seed)
        self.boots += 1

        def visit(node: File | Directory) -> None:
            node.cut(dice)
            if isinstance(node, Directory):
                for name in sorted(node.names):  # only what is still there
                    visit(node.names[name])
            else:
                node.locks.clear()

        visit(self.root)

    def paths(self) -> dict[str, File | Directory]:
        """Everything by its path."""
        found: dict[str, File | Directory] = {}

        def visit(directory: Directory, path: str) -> None:
            for name, node in directory.names.items():
                found[f"{path}/{name}"] = node
                if isinstance(node, Directory):
                    visit(node, f"{path}/{name}")

        visit(self.root, "")
        return found

    def fingerprint(self) -> dict[str, tuple[bytes, float]]:
        """Content and time of change of every file, times of change of every directory."""
        return {
            path: (bytes(node.cached) if isinstance(node, File) else b"", node.changed)
            for path, node in self.paths().items()
        }

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(len(node.cached) for node in self.paths().values() if isinstance(node, File))

    def vanish(self, path: str) -> None:
        """A directory or file disappears with all below it; who has a file open may go on."""
        above, _, name = path.rstrip("/").rpartition("/")
        parent = self.root if not above else self.paths()[above]
        assert isinstance(parent, Directory)
        parent.change({name: None}, self.now)
        parent.sync()

    def clone(self) -> Disk:
        """A copy of the machine without its processes."""
        copy = Disk()
        copy._number, copy.boots, copy.now, copy.fds = self._number, self.boots, self.now, self.fds
        copy.capacity, copy.read_only, copy.kind = self.capacity, self.read_only, self.kind
        known: dict[int, File | Directory] = {}

        def twin(node: File | Directory) -> File | Directory:
            found = known.get(node.number)
            if found is not None:
                return found
            if isinstance(node, File):
                made = File(node.number, bytearray(node.cached), node.durable, list(node.dirty), {}, node.changed)
                known[node.number] = made
                return made
            new = known[node.number] = Directory(node.number, changed=node.changed)
            new.names = {name: twin(child) for name, child in node.names.items()}
            new.durable = {name: twin(child) for name, child in node.durable.items()}
            new.dirty = [
                {name: None if child is None else twin(child) for name, child in names.items()} for names in node.dirty
            ]
            return new

        root = twin(self.root)
        assert isinstance(root, Directory)
        copy.root = root
        return copy


@dataclass(slots=True)
class _Open:
    file: File
    path: str
    writable: bool


class SimulatedFs:
    """One process. It dies before its changing call number ``calls`` (from 0); what it still tries fails with ``EIO``.

    Attributes:
        made: Changing calls so far.
        left: Changing calls until it dies; assign it to count from now on.
        rules: What fails. A failed ``fsync`` or ``fdatasync`` marks the dirty pages clean without writing them.
        short_write: At most so many bytes are taken by one write; None takes all.
        fails_at: The changing call of this number fails once with ``EIO``; ``failed`` is then its name.
    """

    def __init__(self, disk: Disk, calls: int = 10**9) -> None:
        self.disk = disk
        self.left = calls
        self.made = 0
        self.dead = False
        self.rules: list[Rule] = []
        self.short_write: int | None = None
        self.fails_at: int | None = None
        self.failed = ""
        self._files: dict[int, _Open] = {}

    def kill(self) -> None:
        """SIGKILL: descriptors close, locks are free, nothing is flushed."""
        with self.disk.lock:
            self.dead = True
            for fd, opened in self._files.items():
                opened.file.locks.pop(fd, None)
            self._files.clear()

    # -- what every call passes --------------------------------------------------------------------------------------

    def _check(self, operation: str, path: str) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the process is dead", path)
        for rule in self.rules:
            if rule.hits(operation, path):
                raise OSError(rule.error, os.strerror(rule.error), path)

    def _change(self, operation: str, path: str) -> float:
        """Count a changing call; returns the time."""
        if not self.dead:
            self.made += 1
            self.left -= 1
            if self.left < 0:
                self.kill()
            elif self.made - 1 == self.fails_at:
                self.failed = operation
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self._check(operation, path)
        if self.disk.read_only and operation not in ("fsync", "fdatasync", "sync_dir"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        self.disk.now += _TICK_S
        return self.disk.now

    def _find(self, path: str) -> File | Directory:
        node: File | Directory = self.disk.root
        for name in path.split("/"):
            if not name:
                continue
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            found = node.names.get(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            node = found
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        above, _, name = path.rstrip("/").rpartition("/")
        node = self._find(above)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
        return node, name

    def _opened(self, fd: int) -> _Open:
        found = self._files.get(fd)
        if found is None:
            raise OSError(errno.EIO if self.dead else errno.EBADF, "no open file")
        return found

    # -- files -------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        """See ``Fs.open``."""
        with self.disk.lock:
            self._check("open", path)
            parent, name = self._parent(path)
            node = parent.names.get(name)
            writable = bool(flags & (os.O_WRONLY | os.O_RDWR))
            if node is None:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
                now = self._change("create", path)
                node = File(self.disk.new_number(), changed=now)
                parent.change({name: node}, now)
            elif isinstance(node, Directory):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path)
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "file exists", path)
            elif flags & os.O_TRUNC and node.cached:
                node.change(Change(0, None), self._change("truncate", path))
            elif writable and self.disk.read_only:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            self.disk.fds += 1
            self._files[self.disk.fds] = _Open(node, path, writable)
            return self.disk.fds

    def close(self, fd: int) -> None:
        """See ``Fs.close``."""
        with self.disk.lock:
            opened = self._files.pop(fd, None)
            if opened is not None:
                opened.file.locks.pop(fd, None)
            elif not self.dead:
                raise OSError(errno.EBADF, "no open file")

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """See ``Fs.pread``."""
        with self.disk.lock:
            opened = self._opened(fd)
            self._check("pread", opened.path)
            return bytes(opened.file.cached[offset : offset + size])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """See ``Fs.pwrite``; a process that dies here has written half."""
        with self.disk.lock:
            opened = self._opened(fd)
            if not opened.writable:
                raise OSError(errno.EBADF, "not open for writing", opened.path)
            taken = bytes(data)
            if self.left == 0:
                opened.file.change(Change(offset, taken[: len(taken) // 2]), self.disk.now)
            now = self._change("pwrite", opened.path)
            if self.short_write is not None:
                taken = taken[: self.short_write]
            if self.disk.capacity is not None:
                more = max(0, offset + len(taken) - len(opened.file.cached))
                taken = taken[: len(taken) - max(0, more - max(0, self.disk.capacity - self.disk.used))]
                if not taken and len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), opened.path)
            if taken:
                opened.file.change(Change(offset, taken), now)
            return len(taken)

    def copy_range(self, source: int, offset: int, target: int, at: int, size: int) -> int:
        """See ``Fs.copy_range``."""
        return self.pwrite(target, self.pread(source, size, offset), at)

    def truncate(self, fd: int, size: int) -> None:
        """See ``Fs.truncate``."""
        with self.disk.lock:
            opened = self._opened(fd)
            opened.file.change(Change(size, None), self._change("truncate", opened.path))

    def allocate(self, fd: int, size: int) -> None:
        """See ``Fs.allocate``; the zeros take no memory where there is no capacity to take them from."""
        if self.disk.capacity is not None:
            self.pwrite(fd, bytes(size - self.fstat(fd).st_size), self.fstat(fd).st_size)

    def utime(self, path: str) -> None:
        """See ``Fs.utime``."""
        with self.disk.lock:
            self._find(path).changed = self._change("utime", path)

    def fsync(self, fd: int) -> None:
        """See ``Fs.fsync``."""
        self._sync(fd, "fsync")

    def fdatasync(self, fd: int) -> None:
        """See ``Fs.fdatasync``."""
        self._sync(fd, "fdatasync")

    def _sync(self, fd: int, operation: str) -> None:
        with self.disk.lock:
            opened = self._opened(fd)
            try:
                self._change(operation, opened.path)
            except OSError:
                if not self.dead:
                    opened.file.dirty.clear()
                raise
            opened.file.sync()

    def flock(self, fd: int, operation: int) -> None:
        """See ``Fs.flock``."""
        with self.disk.lock:
            opened = self._opened(fd)
            self._check("flock", opened.path)
            locks = opened.file.locks
            kind = operation & ~fcntl.LOCK_NB
            others = [other for holder, other in locks.items() if holder != fd]
            if kind != fcntl.LOCK_UN and (others if kind == fcntl.LOCK_EX else fcntl.LOCK_EX in others):
                if not operation & fcntl.LOCK_NB:
                    raise OSError(errno.EDEADLK, "a simulated process cannot wait for a lock", opened.path)
                raise BlockingIOError(errno.EAGAIN, "held", opened.path)
            locks.pop(fd, None)
            if kind != fcntl.LOCK_UN:
                locks[fd] = kind

    def fstat(self, fd: int) -> os.stat_result:
        """See ``Fs.fstat``."""
        with self.disk.lock:
            opened = self._opened(fd)
            self._check("fstat", opened.path)
            return _facts(opened.file)

    # -- names -------------------------------------------------------------------------------------------------------

    def sync_dir(self, path: str) -> None:
        """See ``Fs.sync_dir``."""
        with self.disk.lock:
            self._change("sync_dir", path)
            node = self._find(path)
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            node.sync()

    def rename(self, source: str, target: str) -> None:
        """See ``Fs.rename``; only within one directory."""
        with self.disk.lock:
            now = self._change("rename", target)
            (parent, old), (other, new) = self._parent(source), self._parent(target)
            assert parent is other, "the store renames within a directory only"
            if old not in parent.names:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", source)
            parent.change({old: None, new: parent.names[old]}, now)

    def link(self, source: str, target: str) -> None:
        """See ``Fs.link``."""
        with self.disk.lock:
            now = self._change("link", target)
            node, (other, new) = self._find(source), self._parent(target)
            if new in other.names:
                raise FileExistsError(errno.EEXIST, "file exists", target)
            other.change({new: node}, now)

    def unlink(self, path: str) -> None:
        """See ``Fs.unlink``."""
        with self.disk.lock:
            self._remove("unlink", path, File)

    def rmdir(self, path: str) -> None:
        """See ``Fs.rmdir``."""
        with self.disk.lock:
            self._remove("rmdir", path, Directory)

    def _remove(self, operation: str, path: str, kind: type[File] | type[Directory]) -> None:
        now = self._change(operation, path)
        node = self._find(path)
        parent, name = self._parent(path)
        if not isinstance(node, kind):
            number = errno.EISDIR if isinstance(node, Directory) else errno.ENOTDIR
            raise OSError(number, os.strerror(number), path)
        if isinstance(node, Directory) and node.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        parent.change({name: None}, now)

    def mkdir(self, path: str) -> None:
        """See ``Fs.mkdir``."""
        with self.disk.lock:
            now = self._change("mkdir", path)
            parent, name = self._parent(path)
            if name in parent.names:
                raise FileExistsError(errno.EEXIST, "file exists", path)
            parent.change({name: Directory(self.disk.new_number(), changed=now)}, now)

    def listdir(self, path: str) -> list[str]:
        """See ``Fs.listdir``."""
        with self.disk.lock:
            self._check("listdir", path)
            node = self._find(path)
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            return list(node.names)

    def stat(self, path: str) -> os.stat_result:
        """See ``Fs.stat``."""
        with self.disk.lock:
            self._check("stat", path)
            return _facts(self._find(path))

    # -- the file system ---------------------------------------------------------------------------------------------

    def free_space(self, path: str) -> int:
        """See ``Fs.free_space``."""
        return 1 << 40 if self.disk.capacity is None else max(0, self.disk.capacity - self.disk.used)

    def fs_type(self, path: str) -> str:
        """See ``Fs.fs_type``."""
        return self.disk.kind


def _facts(node: File | Directory) -> os.stat_result:
    kind = stat.S_IFREG if isinstance(node, File) else stat.S_IFDIR
    size = len(node.cached) if isinstance(node, File) else 0
    when, nanoseconds = node.changed, int(node.changed * 1e9)
    times = (int(when),) * 3 + (when,) * 3 + (nanoseconds,) * 3
    return os.stat_result((kind | FILE_MODE, node.number, 1, 1, 0, 0, size, *times))
