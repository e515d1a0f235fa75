"""Every file call of the store, behind one object that a faulty or simulated one can replace.

Paths are ``str``, files are integer descriptors, errors are ``OSError`` exactly as the kernel gives them;
``io_errors`` turns them into ``StoreError`` at the edge of an operation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator
from typing import Protocol, cast

from kimi_ray.errors import StoreError

FILE_MODE = 0o600
DIR_MODE = 0o700
_CHUNK = 1 << 20
_COPY_AT_ONCE = 64 << 20
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)


class Fs(Protocol):
    """The file calls that the store makes. All are blocking: call them from a thread."""

    def open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        """A descriptor, never inherited by child processes."""
        ...

    def close(self, fd: int) -> None:
        """Release the descriptor (and its lock)."""
        ...

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """At most ``size`` bytes at ``offset``; shorter only at the end of the file."""
        ...

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset``; returns how many bytes were taken, which may be fewer than given."""
        ...

    def copy_range(self, source: int, offset: int, target: int, at: int, size: int) -> int:
        """Copy from one file to another, without moving the bytes where the file system can; returns how many, which
        may be fewer, and 0 only at the end of the source."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Cut or extend the file to ``size`` bytes."""
        ...

    def allocate(self, fd: int, size: int) -> None:
        """Extend the file to ``size`` bytes of zeros that really have their place on the disk."""
        ...

    def utime(self, path: str) -> None:
        """Set the time of the last modification to now."""
        ...

    def fsync(self, fd: int) -> None:
        """Make data and metadata durable."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Make data, and the size needed to read it, durable."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the entries of a directory durable."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically replace ``target``."""
        ...

    def link(self, source: str, target: str) -> None:
        """A second name; fails when ``target`` exists."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name."""
        ...

    def mkdir(self, path: str) -> None:
        """A new directory, mode 0700."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, unordered."""
        ...

    def stat(self, path: str) -> os.stat_result:
        """Facts about a path (links are followed)."""
        ...

    def fstat(self, fd: int) -> os.stat_result:
        """Facts about an open file."""
        ...

    def flock(self, fd: int, operation: int) -> None:
        """``fcntl.flock``; a held lock with ``LOCK_NB`` raises ``BlockingIOError``."""
        ...

    def free_space(self, path: str) -> int:
        """Bytes that this user may still write on the file system of ``path``."""
        ...

    def fs_type(self, path: str) -> str:
        """The kernel's name of the file system of ``path`` (``ext4``, ``nfs4``); empty when unknown."""
        ...


class RealFs:
    """The operating system's files."""

    def open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        """See ``Fs.open``."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """See ``Fs.close``."""
        os.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """See ``Fs.pread``."""
        data = os.pread(fd, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size and (more := os.pread(fd, size - got, offset + got)):
            parts.append(more)
            got += len(more)
        return b"".join(parts)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """See ``Fs.pwrite``."""
        return os.pwrite(fd, data, offset)

    def copy_range(self, source: int, offset: int, target: int, at: int, size: int) -> int:
        """See ``Fs.copy_range``."""
        if hasattr(os, "copy_file_range"):
            try:
                return os.copy_file_range(source, target, min(size, _COPY_AT_ONCE), offset, at)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
        return os.pwrite(target, os.pread(source, min(size, _CHUNK), offset), at)

    def truncate(self, fd: int, size: int) -> None:
        """See ``Fs.truncate``."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """See ``Fs.allocate``."""
        os.posix_fallocate(fd, 0, size)

    def utime(self, path: str) -> None:
        """See ``Fs.utime``."""
        os.utime(path)

    def fsync(self, fd: int) -> None:
        """See ``Fs.fsync``."""
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        """See ``Fs.fdatasync``."""
        os.fdatasync(fd)

    def sync_dir(self, path: str) -> None:
        """See ``Fs.sync_dir``."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """See ``Fs.rename``."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """See ``Fs.link``."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """See ``Fs.unlink``."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """See ``Fs.mkdir``."""
        os.mkdir(path, DIR_MODE)

    def rmdir(self, path: str) -> None:
        """See ``Fs.rmdir``."""
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """See ``Fs.listdir``."""
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        """See ``Fs.stat``."""
        return os.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """See ``Fs.fstat``."""
        return os.fstat(fd)

    def flock(self, fd: int, operation: int) -> None:
        """See ``Fs.flock``."""
        fcntl.flock(fd, operation)

    def free_space(self, path: str) -> int:
        """See ``Fs.free_space``."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def fs_type(self, path: str) -> str:
        """See ``Fs.fs_type``: the mount of the path's device, from ``/proc/self/mountinfo``."""
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        real = os.path.realpath(path)
        found, longest = "", -1
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
                for line in table:
                    left, _, right = line.partition(" - ")
                    fields = left.split()
                    point = fields[4].replace("\\040", " ")
                    inside = real == point or real.startswith(point.rstrip("/") + "/")
                    if inside and fields[2] == wanted and len(point) > longest:
                        found, longest = right.split(maxsplit=1)[0], len(point)
        except FileNotFoundError:
            return ""
        return found


FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def io_error(error: OSError, path: str) -> StoreError:
    """The ``StoreError`` of a failed file call: ``store.disk_full``, ``.permission_denied`` or ``.io_failed``."""
    number = error.errno or 0
    details = {"path": path, "errno": errno.errorcode.get(number, str(number))}
    if number in FULL:
        return StoreError(
            f"no space left for {path}",
            code="store.disk_full",
            hint="free space on the file system of the home; what was not stored is kept and sent again",
            details=details,
            retryable=True,
        )
    if number in _DENIED:
        return StoreError(
            f"not allowed to write or read {path}: {error.strerror}",
            code="store.permission_denied",
            hint="give this user read and write access to the home",
            details=details,
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return StoreError(
            f"too many open files: {path} cannot be opened",
            code="store.io_failed",
            hint="raise the limit of open files (ulimit -n)",
            details=details,
            retryable=True,
        )
    return StoreError(
        f"a file call on {path} failed: {error.strerror or error}",
        code="store.io_failed",
        hint="check the disk and the kernel log",
        details=details,
        retryable=True,
    )


@contextlib.contextmanager
def io_errors(path: str) -> Generator[None]:
    """Re-raise every ``OSError`` of the block as the ``StoreError`` that ``io_error`` gives.

    Args:
        path: What to name when the error itself names no path.
    """
    try:
        yield
    except OSError as error:
        named = cast("object", error.filename)
        raise io_error(error, named if isinstance(named, str) else path) from error


def pwrite_all(fs: Fs, fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write everything or raise ``OSError``; a file system that takes nothing counts as full."""
    taken = fs.pwrite(fd, data, offset)
    if taken == len(data):
        return
    view = memoryview(data)
    while taken < len(view):
        more = fs.pwrite(fd, view[taken:], offset + taken)
        if more == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken += more


def read_file(fs: Fs, path: str) -> bytes:
    """The whole content of a file."""
    fd = fs.open(path, os.O_RDONLY)
    try:
        size = fs.fstat(fd).st_size
        return fs.pread(fd, size, 0)
    finally:
        fs.close(fd)


def write_file(fs: Fs, path: str, data: bytes, *, sync: bool) -> None:
    """A new file with this content, synced on request; nothing is left behind when it fails."""
    fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            pwrite_all(fs, fd, data, 0)
            if sync:
                fs.fsync(fd)
        finally:
            fs.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(path)
        raise


def replace_file(fs: Fs, path: str, data: bytes, *, sync: bool, unique: str) -> None:
    """Atomically replace ``path``: temporary file, sync, rename. The caller syncs the directory.

    Args:
        unique: Part of the temporary name; two writers of one path must differ in it.
    """
    temporary = f"{path}.tmp-{unique}"
    write_file(fs, temporary, data, sync=sync)
    try:
        fs.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise


def exists(fs: Fs, path: str) -> bool:
    """Whether the path exists; a path below a regular file does not."""
    try:
        fs.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def names_in(fs: Fs, path: str) -> list[str]:
    """Sorted names in a directory; empty when it does not exist."""
    try:
        return sorted(fs.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_locked(fs: Fs, path: str) -> bool:
    """Whether somebody has a file locked for himself; one that is not there is not locked.

    Raises:
        OSError: As the file system gave it.
    """
    try:
        fd = fs.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fs.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        fs.close(fd)
    return False


def wait_for_lock(fs: Fs, fd: int, operation: int, within_s: float, pause_s: float) -> None:
    """``flock`` an open file, trying again every ``pause_s`` seconds.

    Raises:
        OSError: As the file system gave it; ``BlockingIOError`` when others hold it for ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            fs.flock(fd, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause_s)
