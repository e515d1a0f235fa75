"""Zstandard frames as a log holds them: standard ones, with content checksum and content size, one after another.

``measure`` finds where a frame ends without decompressing it. It is stricter than the standard, for it only has to
know what ``compress`` writes: no dictionary, no frame without size or checksum, no bit set that means nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

import zstandard

MAGIC = b"\x28\xb5\x2f\xfd"
MAX_CONTENT = 256 << 20
"""No frame of a log holds more."""
FRAME_CONTENT = 4 << 20
"""Rows of one frame, in bytes; a single larger row has a frame to itself."""
_BLOCK_MAX = 1 << 17
_PIECE = 1 << 12
_HEADER_MOST = 14  # magic, descriptor, window, content size
_PLACES_MOST = 300
_MEANINGLESS = 0b0001_1011  # unused bit, reserved bit, dictionary id
_CHECKSUM = 0b0000_0100
_SINGLE_SEGMENT = 0b0010_0000


class Measure(NamedTuple):
    """A frame's beginning that is well formed. ``whole``: the data has all of its ``length`` bytes; otherwise
    ``length`` is how many are needed to see further.
    """

    length: int
    whole: bool
    content: int = 0


def measure(data: bytes | bytearray, at: int = 0) -> Measure | None:
    """The length of the frame at ``at``, or None when none starts there."""
    end = len(data)
    if not (data.startswith(MAGIC, at) or (end - at < len(MAGIC) and MAGIC.startswith(data[at:end]))):
        return None
    if end - at < 5:
        return Measure(5, False)
    descriptor = data[at + 4]
    if descriptor & _MEANINGLESS or not descriptor & _CHECKSUM:
        return None
    single = bool(descriptor & _SINGLE_SEGMENT)
    width = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    start = at + (5 if single else 6)
    pos = start + width
    if width == 0:
        return None
    if end < pos + 3:
        return Measure(pos + 3 - at, False)
    content = int.from_bytes(data[start:pos], "little") + (256 if width == 2 else 0)
    if not 0 < content <= MAX_CONTENT:
        return None
    blocks = 0
    while True:
        if end < pos + 3:
            return Measure(pos + 3 - at, False)
        head = data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16
        size, kind = head >> 3, head >> 1 & 3
        if kind == 3 or size > _BLOCK_MAX:
            return None
        blocks += 1
        pos += 3 + (1 if kind == 1 else size)
        if head & 1:
            break
    if content > blocks * _BLOCK_MAX:
        return None
    return Measure(pos + 4 - at, pos + 4 <= end, content)


def one_bit_from_whole(codec: Codec, data: bytes) -> bool:
    """Whether one flipped bit in a magic number, frame header or block header makes ``data`` one whole frame.

    A flipped length makes a whole frame look like a cut one; this tells them apart.
    """
    copy = bytearray(data)
    for place in (*range(min(len(data), _HEADER_MOST)), *_block_headers(data)):
        for bit in range(8):
            copy[place] ^= 1 << bit
            found = measure(copy)
            if (
                found is not None
                and found.whole
                and found.length == len(copy)
                and codec.decompress(bytes(copy)) is not None
            ):
                return True
            copy[place] ^= 1 << bit
    return False


def _block_headers(data: bytes) -> list[int]:
    """Places of the bytes of block headers, as far as one leads to the next."""
    if len(data) < _HEADER_MOST:
        return []
    single = bool(data[4] & _SINGLE_SEGMENT)
    pos = (5 if single else 6) + (1 if single else 0, 2, 4, 8)[data[4] >> 6]
    places: list[int] = []
    while pos + 3 <= len(data) and len(places) < _PLACES_MOST:
        places += [pos, pos + 1, pos + 2]
        head = data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16
        if head & 1:
            break
        pos += 3 + (1 if head >> 1 & 3 == 1 else head >> 3)
    return places


class Codec:
    """Compresses and decompresses; each thread has its own contexts, used again and again."""

    def __init__(self, level: int = 3) -> None:
        """
        Args:
            level: Of compression, 1 to 22.
        """
        self._level = level
        self._local = threading.local()

    def compress(self, content: bytes | memoryview) -> bytes:
        """One frame."""
        tool: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if tool is None:
            tool = zstandard.ZstdCompressor(level=self._level, write_checksum=True, write_content_size=True)
            self._local.compressor = tool
        return tool.compress(content)

    def decompress(self, frame: bytes | memoryview) -> bytes | None:
        """The content of one measured frame, or None when it is damaged."""
        try:
            return self._decompressor().decompress(frame)
        except zstandard.ZstdError:
            return None

    def beginning(self, cut: bytes) -> bytes:
        """What can be decompressed of a frame that ends early; nothing of it is verified."""
        reader = self._decompressor().decompressobj()
        out: list[bytes] = []
        with contextlib.suppress(zstandard.ZstdError):
            for at in range(0, len(cut), _PIECE):
                out += [reader.decompress(cut[at : at + _PIECE])]
        return b"".join(out)

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        tool: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if tool is None:
            tool = self._local.decompressor = zstandard.ZstdDecompressor()
        return tool


def split_content(payload: bytes, row_sizes: Sequence[int]) -> list[bytes]:
    """Rows as the contents of frames, each of whole rows."""
    if len(payload) <= FRAME_CONTENT or len(row_sizes) <= 1:
        return [payload] if payload else []
    parts: list[bytes] = []
    start = end = 0
    for size in row_sizes:
        if end > start and end + size - start > FRAME_CONTENT:
            parts.append(payload[start:end])
            start = end
        end += size
    parts.append(payload[start:end])
    return parts
