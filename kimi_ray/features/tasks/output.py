"""What a background task has written: the newest part in memory, and how much there was."""

from __future__ import annotations

from collections import deque

RING_BYTES = 1 << 20
"""Kept of a task's output while the agent lives."""
TAIL_BYTES = 4 << 10
"""Kept of it in the log."""


class OutputRing:
    """The last ``limit`` bytes of a text that grows."""

    __slots__ = ("_limit", "_parts", "_size", "total")

    def __init__(self, limit: int = RING_BYTES) -> None:
        self._limit = limit
        self._parts: deque[bytes] = deque()
        self._size = 0
        self.total = 0
        """Bytes written in all."""

    def write(self, text: str) -> None:
        """Append."""
        data = text.encode("utf-8", "replace")
        if not data:
            return
        self.total += len(data)
        self._parts.append(data[-self._limit :])
        self._size += len(self._parts[-1])
        while self._size - len(self._parts[0]) >= self._limit:
            self._size -= len(self._parts.popleft())
        if len(self._parts) > 1 << 12:
            # a program that prints a character at a time costs no more than one that prints pages
            joined = b"".join(self._parts)[-self._limit :]
            self._parts = deque([joined])
            self._size = len(joined)

    def tail(self, limit: int) -> str:
        """The last ``limit`` bytes or less, whole characters."""
        wanted: deque[bytes] = deque()
        size = 0
        for part in reversed(self._parts):
            wanted.appendleft(part)
            size += len(part)
            if size >= min(limit, self._limit):
                break
        return tail_of(b"".join(wanted), min(limit, self._limit))


def tail_of(data: bytes, limit: int) -> str:
    """The end of encoded text: at most ``limit`` bytes, no torn character at its start."""
    cut = data[-limit:] if limit else b""
    if len(cut) < len(data):
        skip = 0
        while skip < min(3, len(cut)) and 0x80 <= cut[skip] < 0xC0:
            skip += 1
        cut = cut[skip:]
    return cut.decode("utf-8", "replace")
