"""A file system whose process can be killed: its descriptors close at once, and what it still tries fails."""

from __future__ import annotations

import errno
import os
import threading

from kimi_ray.store.faults import FaultyFs
from kimi_ray.store.fs import FILE_MODE


class KillableFs(FaultyFs):
    """``kill`` is SIGKILL as far as files are concerned: locks are free, nothing is flushed."""

    def __init__(self, *, syncs: bool = True) -> None:
        super().__init__()
        self.syncs = syncs  # without them, tests that cut no power are faster
        self.dead = False
        self._open: set[int] = set()
        self._guard = threading.Lock()

    def fsync(self, fd: int) -> None:
        if self.syncs:
            super().fsync(fd)
        else:
            self._check("fsync", self._name(fd))

    def fdatasync(self, fd: int) -> None:
        if self.syncs:
            super().fdatasync(fd)
        else:
            self._check("fdatasync", self._name(fd))

    def sync_dir(self, path: str) -> None:
        if self.syncs:
            super().sync_dir(path)
        else:
            self._check("sync_dir", path)

    def kill(self) -> None:
        with self._guard:
            self.dead = True
            for fd in self._open:
                self.inner.close(fd)
            self._open.clear()

    def _check(self, operation: str, path: str) -> None:
        if self.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super()._check(operation, path)

    def open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        with self._guard:
            fd = super().open(path, flags, mode)
            self._open.add(fd)
            return fd

    def close(self, fd: int) -> None:
        with self._guard:
            if fd in self._open:
                self._open.discard(fd)
                super().close(fd)
