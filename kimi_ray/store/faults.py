"""A file system that fails on purpose, for tests: by rule, by a byte budget, by short writes, by slow syncs."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.errors import ConfigError
from kimi_ray.store.fs import FILE_MODE, Fs, RealFs


@dataclass(slots=True)
class Rule:
    """Fail calls of ``operation`` whose path contains ``path``: after ``skip`` of them, ``count`` times (0: always)."""

    operation: str
    error: int
    skip: int = 0
    count: int = 1
    path: str = ""
    seen: int = field(default=0)

    def hits(self, operation: str, path: str) -> bool:
        """Whether this call fails; counts it."""
        if operation != self.operation or self.path not in path:
            return False
        self.seen += 1
        nth = self.seen - self.skip
        return nth >= 1 and (self.count == 0 or nth <= self.count)


class FaultyFs:
    """Wraps another ``Fs``.

    Args:
        inner: The files underneath.
        rules: What fails.
        budget: Bytes that may still be written before the disk is full (a write past it takes what fits); None is
            unlimited. Assign ``budget`` to free space.
        short_write: At most so many bytes are taken by one write; None takes all.
        sync_delay_s: Seconds that each sync takes in addition.
    """

    def __init__(
        self,
        inner: Fs | None = None,
        *,
        rules: list[Rule] | None = None,
        budget: int | None = None,
        short_write: int | None = None,
        sync_delay_s: float = 0.0,
    ) -> None:
        self.inner: Fs = inner if inner is not None else RealFs()
        self.rules = rules if rules is not None else []
        self.budget = budget
        self.short_write = short_write
        self.sync_delay_s = sync_delay_s
        self.calls: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def _check(self, operation: str, path: str) -> None:
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            for rule in self.rules:
                if rule.hits(operation, path):
                    raise OSError(rule.error, os.strerror(rule.error), path)

    def _spend(self, wanted: int, path: str) -> int:
        with self._lock:
            if self.budget is None:
                return wanted
            taken = min(wanted, self.budget)
            if taken == 0 and wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self.budget -= taken
            return taken

    def _name(self, fd: int) -> str:
        return self._paths.get(fd, "")

    def open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        """See ``Fs.open``."""
        self._check("open", path)
        if flags & os.O_CREAT:
            self._check("create", path)
        fd = self.inner.open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """See ``Fs.close``."""
        self._paths.pop(fd, None)
        self.inner.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """See ``Fs.pread``."""
        self._check("pread", self._name(fd))
        return self.inner.pread(fd, size, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """See ``Fs.pwrite``."""
        path = self._name(fd)
        self._check("pwrite", path)
        wanted = len(data) if self.short_write is None else min(len(data), self.short_write)
        taken = self._spend(wanted, path)
        return self.inner.pwrite(fd, memoryview(data)[:taken], offset)

    def truncate(self, fd: int, size: int) -> None:
        """See ``Fs.truncate``."""
        self._check("truncate", self._name(fd))
        self.inner.truncate(fd, size)

    def fsync(self, fd: int) -> None:
        """See ``Fs.fsync``."""
        time.sleep(self.sync_delay_s)
        self._check("fsync", self._name(fd))
        self.inner.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        """See ``Fs.fdatasync``."""
        time.sleep(self.sync_delay_s)
        self._check("fdatasync", self._name(fd))
        self.inner.fdatasync(fd)

    def sync_dir(self, path: str) -> None:
        """See ``Fs.sync_dir``."""
        time.sleep(self.sync_delay_s)
        self._check("sync_dir", path)
        self.inner.sync_dir(path)

    def rename(self, source: str, target: str) -> None:
        """See ``Fs.rename``."""
        self._check("rename", target)
        self.inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """See ``Fs.link``."""
        self._check("link", target)
        self.inner.link(source, target)

    def unlink(self, path: str) -> None:
        """See ``Fs.unlink``."""
        self._check("unlink", path)
        self.inner.unlink(path)

    def mkdir(self, path: str) -> None:
        """See ``Fs.mkdir``."""
        self._check("mkdir", path)
        self.inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        """See ``Fs.rmdir``."""
        self._check("rmdir", path)
        self.inner.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """See ``Fs.listdir``."""
        self._check("listdir", path)
        return self.inner.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        """See ``Fs.stat``."""
        self._check("stat", path)
        return self.inner.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """See ``Fs.fstat``."""
        self._check("fstat", self._name(fd))
        return self.inner.fstat(fd)

    def flock(self, fd: int, operation: int) -> None:
        """See ``Fs.flock``."""
        self._check("flock", self._name(fd))
        self.inner.flock(fd, operation)

    def free_space(self, path: str) -> int:
        """See ``Fs.free_space``."""
        return self.inner.free_space(path) if self.budget is None else self.budget

    def fs_type(self, path: str) -> str:
        """See ``Fs.fs_type``."""
        return self.inner.fs_type(path)


def fs_from_spec(text: str) -> Fs:
    """A file system from a line of text; empty text is the real one.

    Parts are joined with ``,``: ``enospc_after=BYTES``, ``short_write=BYTES``, ``sync_delay_ms=MS``, and any number of
    ``fail=OPERATION:ERRNO[:SKIP[:COUNT[:PATH]]]``, for example ``enospc_after=1000000,fail=fdatasync:EIO:10:1``.
    COUNT 0 means for ever; PATH is a part of the path.

    Raises:
        ConfigError: ``config.invalid``.
    """
    if not text.strip():
        return RealFs()
    options: dict[str, Any] = {}
    rules: list[Rule] = []
    try:
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name == "enospc_after":
                options["budget"] = int(value)
            elif name == "short_write":
                options["short_write"] = max(1, int(value))
            elif name == "sync_delay_ms":
                options["sync_delay_s"] = float(value) / 1000
            elif name == "fail":
                operation, code, *rest = value.split(":", 4)
                skip, count = int(rest[0]) if rest else 0, int(rest[1]) if len(rest) > 1 else 1
                rules.append(Rule(operation, int(getattr(errno, code)), skip, count, rest[2] if len(rest) > 2 else ""))
            else:
                raise ValueError(f"unknown part {name!r}")
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"the fault specification {text!r} cannot be used: {error}",
            code="config.invalid",
            hint="for example enospc_after=1000000,fail=fdatasync:EIO:10:1",
        ) from error
    return FaultyFs(rules=rules, **options)
