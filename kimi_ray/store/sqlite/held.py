"""A log as this process holds it: whose grant is in force, and how far it is written and durable."""

from __future__ import annotations

import threading

from kimi_ray.store.seam import Stream
from kimi_ray.store.sqlite.schema import Head


class HeldLog:
    """The memory of one stream; the database decides, this only answers faster. See ``stream_table.HeldLog``."""

    __slots__ = ("_commit", "_durable", "closed", "dropped", "epoch", "granted_here", "lock", "nonce", "removed",
                 "stream", "written")  # fmt: skip

    def __init__(self, stream: Stream, head: Head | None) -> None:
        """``head`` is None for a log that is still to be made."""
        self.stream = stream
        self.lock = threading.Lock()
        self.closed = head is None or head.closed
        self.dropped = self.removed = False
        self.granted_here = False
        self.epoch = 0 if head is None else head.epoch
        self.nonce = "" if head is None else head.nonce
        self.written = 0 if head is None else head.next_seq
        self._durable = 0
        self._commit = 0

    def granted(self, head: Head) -> None:
        """A grant was committed and synced, and so is all that was there."""
        self.closed, self.granted_here = False, True
        self.epoch, self.nonce = head.epoch, head.nonce
        self.written = self._durable = head.next_seq

    def wrote(self, written: int, *, commit: int, synced: int) -> None:
        """All below ``written`` is in the commit of that number or an earlier one; ``synced`` is the last durable."""
        if self._commit <= synced:
            self._durable = max(self._durable, self.written if self._commit else 0)
        self.written = max(self.written, written)
        self._commit = commit

    def durable(self, synced: int) -> int:
        """The seq below which all is durable, when the commit ``synced`` is the last durable one."""
        if 0 < self._commit <= synced:
            self._durable = self.written
        return self._durable
