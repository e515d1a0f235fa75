"""A bounded cache of open log files: append is open, write, close, with the close put off while there is room."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict

from kimi_ray.store.fs import Fs


class Descriptor:
    """An open file that is in use; ``fd`` stays valid until it is given back."""

    __slots__ = ("dropped", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.dropped = False


class Descriptors:
    """Open files by path, least recently used closed first; one in use is never closed. Thread-safe."""

    def __init__(self, fs: Fs, limit: int | None = None) -> None:
        """
        Args:
            fs: The files.
            limit: How many stay open; None takes a quarter of the process's soft limit, at most 512.
        """
        self._fs = fs
        self._limit = limit or max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._entries: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, path: str) -> Descriptor:
        """A descriptor for reading and writing; give it back with ``give_back``.

        Raises:
            OSError: When the file cannot be opened.
        """
        with self._lock:
            entry = self._entries.get(path)
            if entry is None:
                entry = self._entries[path] = Descriptor(self._fs.open(path, os.O_RDWR))
                self._shrink(entry)
            else:
                self._entries.move_to_end(path)
            entry.users += 1
            return entry

    def give_back(self, entry: Descriptor) -> None:
        """End one use."""
        with self._lock:
            entry.users -= 1
            if entry.dropped and entry.users == 0:
                self._fs.close(entry.fd)

    def drop(self, path: str) -> None:
        """Close the file of ``path`` as soon as nobody uses it; the next ``take`` opens it anew."""
        with self._lock:
            entry = self._entries.pop(path, None)
            if entry is None:
                return
            entry.dropped = True
            if entry.users == 0:
                self._fs.close(entry.fd)

    def close(self) -> None:
        """Close everything."""
        for path in list(self._entries):
            self.drop(path)

    def _shrink(self, keep: Descriptor) -> None:
        if len(self._entries) <= self._limit:
            return
        for path, entry in list(self._entries.items()):
            if entry.users == 0 and entry is not keep:
                del self._entries[path]
                self._fs.close(entry.fd)
                if len(self._entries) <= self._limit:
                    return
