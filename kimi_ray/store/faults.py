"""A file system that fails on purpose, for tests: by rule, by a byte budget, by short writes, by slow syncs.

It can be steered while it is in use: in the process by its attributes, from outside by a control file.
"""

from __future__ import annotations

import contextlib
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
    """Fail calls of ``operation`` whose path contains ``path``: after ``skip`` of them, ``count`` times (0: always).

    With ``seconds`` above 0 it is over that long after the first call that it failed. ``operation`` may be ``write``:
    every call that changes something or makes it durable, as on a disk that was mounted read-only.
    """

    operation: str
    error: int
    skip: int = 0
    count: int = 1
    path: str = ""
    seen: int = field(default=0)
    seconds: float = 0.0
    until: float = field(default=0.0)

    def hits(self, operation: str, path: str) -> bool:
        """Whether this call fails; counts it."""
        if (operation != self.operation and not (self.operation == "write" and operation in WRITES)) or (
            self.path not in path
        ):
            return False
        self.seen += 1
        nth = self.seen - self.skip
        if nth < 1 or (self.count and nth > self.count):
            return False
        if self.seconds:
            now = time.monotonic()
            self.until = self.until or now + self.seconds
            return now < self.until
        return True


WRITES = frozenset(
    {
        "create", "pwrite", "truncate", "allocate", "utime", "fsync", "fdatasync", "sync_dir", "rename", "link",
        "unlink", "mkdir", "rmdir",
    }
)  # fmt: skip
"""Operations that change a file system; ``create`` is an ``open`` that may make the file."""


class FaultyFs:
    """Wraps another ``Fs``.

    Args:
        inner: The files underneath.
        rules: What fails.
        budget: Bytes that may still be written before the disk is full (a write past it takes what fits); None is
            unlimited. Assign ``budget`` to free space. What is cut off or deleted while it is set is given back.
        short_write: At most so many bytes are taken by one write; None takes all.
        sync_delay_s: Seconds that each sync takes in addition.
        control: A file that may hold a specification (``fs_from_spec``); while it is there it counts instead of
            ``rules``, ``budget``, ``short_write`` and ``sync_delay_s``. It is looked at before each call.
    """

    def __init__(
        self,
        inner: Fs | None = None,
        *,
        rules: list[Rule] | None = None,
        budget: int | None = None,
        short_write: int | None = None,
        sync_delay_s: float = 0.0,
        control: str | None = None,
    ) -> None:
        self.inner: Fs = inner if inner is not None else RealFs()
        self.rules = rules if rules is not None else []
        self.budget = budget
        self.short_write = short_write
        self.sync_delay_s = sync_delay_s
        self.control = control
        self.calls: dict[str, int] = {}
        self._seen_control: tuple[int, int] | None = None
        self._own = (self.rules, budget, short_write, sync_delay_s)
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def _check(self, operation: str, path: str) -> None:
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            if self.control is not None:
                self._obey(self.control)
            for rule in self.rules:
                if rule.hits(operation, path):
                    raise OSError(rule.error, os.strerror(rule.error), path)

    def _obey(self, control: str) -> None:
        try:
            facts = os.stat(control)
        except FileNotFoundError:
            if self._seen_control is not None:
                self._seen_control = None
                self.rules, self.budget, self.short_write, self.sync_delay_s = self._own
            return
        seen = (facts.st_mtime_ns, facts.st_ino)
        if seen != self._seen_control:
            self._seen_control = seen
            with open(control, encoding="utf-8") as file:
                options = _options(file.read().strip())
            self.rules = options.get("rules", [])
            self.budget = options.get("budget")
            self.short_write = options.get("short_write")
            self.sync_delay_s = options.get("sync_delay_s", 0.0)

    def _refund(self, size: int) -> None:
        with self._lock:
            if self.budget is not None and size > 0:
                self.budget += size

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

    def copy_range(self, source: int, offset: int, target: int, at: int, size: int) -> int:
        """See ``Fs.copy_range``; it counts as a read and a write."""
        self._check("pread", self._name(source))
        path = self._name(target)
        self._check("pwrite", path)
        wanted = min(size, max(0, self.inner.fstat(source).st_size - offset))
        if self.short_write is not None:
            wanted = min(wanted, self.short_write)
        taken = self._spend(wanted, path)
        return self.inner.copy_range(source, offset, target, at, taken) if taken else 0

    def truncate(self, fd: int, size: int) -> None:
        """See ``Fs.truncate``."""
        self._check("truncate", self._name(fd))
        before = self.inner.fstat(fd).st_size if self.budget is not None else 0
        self.inner.truncate(fd, size)
        self._refund(before - size)

    def allocate(self, fd: int, size: int) -> None:
        """See ``Fs.allocate``."""
        self._check("allocate", self._name(fd))
        if self.budget is not None:
            wanted = max(0, size - self.inner.fstat(fd).st_size)
            with self._lock:
                if self.budget < wanted:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name(fd))
                self.budget -= wanted
        self.inner.allocate(fd, size)

    def utime(self, path: str) -> None:
        """See ``Fs.utime``."""
        self._check("utime", path)
        self.inner.utime(path)

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
        size = 0
        if self.budget is not None:
            with contextlib.suppress(OSError):
                facts = self.inner.stat(path)
                size = facts.st_size if facts.st_nlink == 1 else 0
        self.inner.unlink(path)
        self._refund(size)

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

    Parts are joined with ``,``: ``enospc_after=BYTES``, ``short_write=BYTES``, ``sync_delay_ms=MS``,
    ``control=PATH`` (see ``FaultyFs``), and any number of ``fail=OPERATION:ERRNO[:SKIP[:COUNT[:PATH]]]``, for example
    ``enospc_after=1000000,fail=fdatasync:EIO:10:1``. COUNT 0 means for ever, and ``5s`` for five seconds from the first
    failure on; PATH is a part of the path; the operation ``write`` stands for all that change something.

    Raises:
        ConfigError: ``config.invalid``.
    """
    if not text.strip():
        return RealFs()
    return FaultyFs(**_options(text))


def _options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    rules: list[Rule] = []
    try:
        for part in text.split(",") if text else ():
            name, _, value = part.strip().partition("=")
            if name == "enospc_after":
                options["budget"] = int(value)
            elif name == "short_write":
                options["short_write"] = max(1, int(value))
            elif name == "sync_delay_ms":
                options["sync_delay_s"] = float(value) / 1000
            elif name == "control":
                options["control"] = value
            elif name == "fail":
                rules.append(_rule(value))
            else:
                raise ValueError(f"unknown part {name!r}")
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"the fault specification {text!r} cannot be used: {error}",
            code="config.invalid",
            hint="for example enospc_after=1000000,fail=fdatasync:EIO:10:1",
        ) from error
    return {**options, "rules": rules}


def _rule(value: str) -> Rule:
    operation, code, *rest = value.split(":", 4)
    count = rest[1] if len(rest) > 1 else "1"
    rule = Rule(
        operation, int(getattr(errno, code)), int(rest[0]) if rest else 0, path=rest[2] if len(rest) > 2 else ""
    )
    if count.endswith("s"):
        rule.count, rule.seconds = 0, float(count[:-1])
    else:
        rule.count = int(count)
    return rule
