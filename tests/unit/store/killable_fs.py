"""A file system whose process can be killed: its descriptors close at once, and what it still tries fails."""

from __future__ import annotations

import errno
import os
import threading

from kimi_ray.store.faults import FaultyFs
from kimi_ray.store.fs import FILE_MODE


class KillableFs(FaultyFs):
    """``kill`` is SIGKILL as far as files are concerned: locks are free, nothing is flushed."""

    def __init__(self, **how: object) -> None:
        super().__init__(**how)  # type: ignore[arg-type]
        self.dead = False
        self._open: set[int] = set()
        self._guard = threading.Lock()

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
