"""Zstandard frames of a compressed log: found by their structure alone, decoded one by one.

A log is a plain concatenation of frames: the header line, then one frame for each batch that was made durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kimi_ray.exchange.dsh.errors import Refusal, corrupt

MAGIC: Final = b"\x28\xb5\x2f\xfd"
_RESERVED_BITS: Final = 0x18
_RLE, _RESERVED_TYPE = 1, 3


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a complete frame lies."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FrameScan:
    """The complete frames, and where the last, incomplete one starts.

    ``stopped`` is what the scan ran into instead: bytes that are no frame, where ``stopped_at`` begins them.
    """

    frames: tuple[Frame, ...]
    torn_start: int | None = None
    stopped: Refusal | None = None
    stopped_at: int = 0


def scan_frames(data: bytes, start: int = 0, *, most: int | None = None) -> FrameScan:
    """Find frames without decoding them.

    Args:
        data: The file.
        start: Where the first frame begins.
        most: Stop after so many.
    """
    frames: list[Frame] = []
    place = start
    while place < len(data) and (most is None or len(frames) < most):
        try:
            end = _frame_end(data, place)
        except Refusal as refusal:
            return FrameScan(tuple(frames), None, refusal.placed(frame=len(frames)), place)
        if end is None:
            return FrameScan(tuple(frames), place)
        frames.append(Frame(place, end))
        place = end
    return FrameScan(tuple(frames))


def _frame_end(data: bytes, start: int) -> int | None:
    """The end of the frame at ``start``, or None when the data ends inside of it."""
    size = len(data)
    if size - start < len(MAGIC):
        return None
    if data[start : start + 4] != MAGIC:
        raise corrupt(f"corrupt Zstandard session log: invalid frame magic at byte {start}", byte=start)
    place = start + 4
    if place == size:
        return None
    descriptor = data[place]
    place += 1
    if descriptor & _RESERVED_BITS:
        raise corrupt(f"corrupt Zstandard session log: reserved frame-header bit at byte {place - 1}", byte=place - 1)
    single, content_flag, dictionary_flag = descriptor & 0x20, descriptor >> 6, descriptor & 3
    content_bytes = (1 if single else 0) if content_flag == 0 else 1 << content_flag
    place += (0 if single else 1) + (4 if dictionary_flag == 3 else dictionary_flag) + content_bytes
    while True:
        if size - place < 3:
            return None
        block = int.from_bytes(data[place : place + 3], "little")
        kind = block >> 1 & 3
        if kind == _RESERVED_TYPE:
            raise corrupt(f"corrupt Zstandard session log: reserved block type at byte {place}", byte=place)
        place += 3 + (1 if kind == _RLE else block >> 3)
        if place > size:
            return None
        if block & 1:
            break
    if descriptor & 0x04:
        place += 4
    return None if place > size else place


def decode_frame(data: bytes, frame: Frame, number: int) -> bytes:
    """The text of a complete frame, checked against its checksum; ``number`` counts the frames, for refusals.

    Raises:
        Refusal: ``corrupt``.
    """
    text = _decoded(data[frame.start : frame.end], whole=True)
    if text is None:
        raise corrupt(
            f"corrupt Zstandard session log: frame at byte {frame.start} failed validation",
            byte=frame.start,
            frame=number,
        )
    return text


def decode_torn(data: bytes, start: int) -> bytes:
    """What can be read of the incomplete frame at ``start``; nothing when it is damaged as well."""
    return _decoded(data[start:], whole=False) or b""


def _decoded(frame: bytes, *, whole: bool) -> bytes | None:
    import zstandard

    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        text = reader.decompress(frame)
    except zstandard.ZstdError:
        return None
    return text if reader.eof or not whole else None


def verified_frame_after(data: bytes, start: int) -> int | None:
    """Where a frame begins behind ``start`` that is complete and passes its checksum, or None.

    It tells damage in the middle of a log from what somebody put behind its end.
    """
    place = start
    while True:
        place = data.find(MAGIC, place)
        if place < 0:
            return None
        found = scan_frames(data, place, most=1)
        if found.frames and _verifies(data, found.frames[0]):
            return place
        place += 1


def is_frame_without_magic(data: bytes, start: int) -> bool:
    """Whether the bytes at ``start`` are a whole frame but for a damaged magic number: then they are no garbage."""
    mended = MAGIC + data[start + 4 :]
    found = scan_frames(mended, most=1)
    return bool(found.frames) and _verifies(mended, found.frames[0])


def _verifies(data: bytes, frame: Frame) -> bool:
    has_checksum = bool(data[frame.start + 4] & 0x04)
    return has_checksum and bool(_decoded(data[frame.start : frame.end], whole=True))
