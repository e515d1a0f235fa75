"""The reserve: space on the disk that is kept for the last words of turns and logs.

``<home>/reserve`` is a file of zeros, really allocated. When the disk is full, what ends a turn, a grant or a session
may still be written: the file is cut by as much as that needs. Ordinary events never get it; they wait with their agent
until there is space again, and then the file grows back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.events import SessionEvent
from kimi_ray.store.fs import FULL, Fs
from kimi_ray.store.seam import StoreOptions

R = TypeVar("R")

RESERVE_BYTES = 4 << 20
_SLACK = 64 << 10
"""Besides the bytes of a write: the blocks and directory entries that it takes."""
_LEFT_OVER = (0, 4 << 10, 16 << 10, 32 << 10)
_TRIES = 4
_LOOK_EVERY_S = 1.0
_ENDS = frozenset({"turn/end", "prompt/completed"})
_LAST_WORDS = 8


class Reserve:
    """The reserve of one home. Blocking and thread-safe; several processes may use one home.

    Args:
        fs: The files.
        home: Where it is.
        size: Its size in bytes; 0: there is none.
        clock: Seconds, for how often a missing part is looked after.
    """

    def __init__(
        self, fs: Fs, home: str, *, size: int = RESERVE_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fs = fs
        self._home = home
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._whole = size == 0
        self.path = f"{home}/reserve"

    def keep(self) -> None:
        """Make it, or what is missing of it, when there is space for that and as much again. Cheap when it is whole."""
        if self._whole or self._clock() < self._look_at:
            return
        with self._lock:
            self._look_at = self._clock() + _LOOK_EVERY_S
            # A disk that has no space for it now may have some later: nothing depends on it until then.
            with contextlib.suppress(OSError):
                self._grow()

    def _grow(self) -> None:
        fs = self._fs
        if fs.free_space(self._home) < 2 * self._size:
            return
        fd = fs.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            if fs.fstat(fd).st_size < self._size:
                fs.allocate(fd, self._size)
            self._whole = True
        finally:
            fs.close(fd)

    def give(self, wanted: int) -> bool:
        """Free space for a write of so many bytes; whether there was any left to free."""
        return self._cut(wanted) > 0

    def _cut(self, wanted: int) -> int:
        """Free space; the size before, 0 when there was nothing to free."""
        if self._size == 0:
            return 0
        with self._lock, contextlib.suppress(OSError):
            self._whole = False
            self._look_at = self._clock() + _LOOK_EVERY_S
            fd = self._fs.open(self.path, os.O_RDWR)
            try:
                have = self._fs.fstat(fd).st_size
                if have:
                    self._fs.truncate(fd, max(0, have - wanted - _SLACK))
                return have
            finally:
                self._fs.close(fd)
        return 0

    def _take_back(self, size: int) -> None:
        """Grow to about ``size`` again: what the write did not need is not for others."""
        with self._lock, contextlib.suppress(OSError):
            fd = self._fs.open(self.path, os.O_RDWR)
            try:
                for less in _LEFT_OVER:
                    if size - less <= self._fs.fstat(fd).st_size:
                        return
                    with contextlib.suppress(OSError):
                        self._fs.allocate(fd, size - less)
                        return
            finally:
                self._fs.close(fd)

    def spend(self, wanted: int, work: Callable[[], R]) -> R:
        """Do ``work``, which writes about ``wanted`` bytes; on a full disk again, with space from the reserve.

        Raises:
            OSError, StoreError: What ``work`` raises once the reserve is used up, or for another reason.
        """
        had = 0
        for _ in range(_TRIES):
            try:
                done = work()
            except (OSError, StoreError) as error:
                have = self._cut(wanted) if is_full(error) else 0
                if have == 0:
                    raise
                had = had or have
            else:
                if had:
                    self._take_back(had - wanted)
                return done
        return work()


def reserve_of(fs: Fs, home: str, options: StoreOptions) -> Reserve:
    """The reserve that a store with these options keeps; ``extra["reserve_bytes"]`` is for tests."""
    size = 0 if options.durability == "none" else int(options.extra.get("reserve_bytes", RESERVE_BYTES))
    return Reserve(fs, home, size=size)


def ends_a_turn(events: Sequence[SessionEvent]) -> bool:
    """Whether the end of a turn or prompt is among the last of these events."""
    return any(event.type in _ENDS for event in events[-_LAST_WORDS:])


def is_full(error: OSError | KimiRayError) -> bool:
    """Whether the disk is full, or this user's share of it."""
    return error.errno in FULL if isinstance(error, OSError) else error.code == "store.disk_full"
