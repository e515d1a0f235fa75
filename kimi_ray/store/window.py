"""A log read through one buffer, at any offset, with memory bounded by the largest thing asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: fewer bytes only at the end."""


class Window:
    """Bytes of a log. ``size`` is where the log ends; nothing after it is ever seen."""

    __slots__ = ("_ahead", "_base", "_buffer", "_read", "size")

    def __init__(self, read: ReadAt, size: int, ahead: int = 1 << 20) -> None:
        """
        Args:
            read: Reads at an offset.
            size: Where the log ends.
            ahead: How many bytes are read at once, at least.
        """
        self._read = read
        self._ahead = ahead
        self._base = 0
        self._buffer = b""
        self.size = size

    def buffer_at(self, offset: int, size: int) -> tuple[bytes, int]:
        """The buffer and the place of ``offset`` in it, with ``size`` bytes after that, or all there are."""
        at = offset - self._base
        if at < 0 or at + size > len(self._buffer):
            wanted = max(0, min(self.size - offset, max(size, self._ahead)))
            if at < 0 or at + min(size, wanted) > len(self._buffer):
                self._buffer = self._read(offset, wanted) if wanted else b""
                self._base, at = offset, 0
        return self._buffer, at

    def bytes_at(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes at ``offset``; fewer only at the end."""
        buffer, at = self.buffer_at(offset, size)
        return buffer[at : at + size]

    def line_at(self, offset: int, limit: int | None = None) -> bytes | None:
        """The line at ``offset`` with its newline; None when there is none within the log, or within ``limit``."""
        most = self.size - offset if limit is None else min(limit, self.size - offset)
        size = min(1 << 12, most)
        while size > 0:
            buffer, at = self.buffer_at(offset, size)
            end = buffer.find(b"\n", at)
            if end >= 0:
                return buffer[at : end + 1]
            have = len(buffer) - at
            if have >= most or have < size:  # the latter: the file was cut while it was read
                return None
            size = min(max(have * 4, size * 4), most)
        return None

    def occurrences(self, needle: bytes, start: int, end: int) -> Iterator[int]:
        """Offsets in ``start`` .. ``end - 1`` where ``needle`` begins, in order."""
        base = start
        step = max(self._ahead, 2 * len(needle))
        while base < end:
            data = self.bytes_at(base, min(step, end - base + len(needle) - 1))
            at = data.find(needle)
            while 0 <= at < end - base:
                yield base + at
                at = data.find(needle, at + 1)
            if len(data) < len(needle):
                return
            base += len(data) - len(needle) + 1

    def occurrences_before(self, needle: bytes, end: int) -> Iterator[int]:
        """Offsets below ``end`` where ``needle`` begins, the last one first."""
        step = 1 << 16
        while end > 0:
            start = max(0, end - step)
            data = self._read(start, min(self.size, end + len(needle) - 1) - start)
            at = data.rfind(needle, 0, end - start + len(needle) - 1)
            while at >= 0:
                yield start + at
                at = data.rfind(needle, 0, at + len(needle) - 1)
            end = start
            step = min(step * 4, 16 << 20)
