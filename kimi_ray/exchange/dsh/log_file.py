"""The two file formats: plain JSONL and JSONL in Zstandard frames. Bytes in, header and events out."""

from __future__ import annotations

from typing import Any

from kimi_ray.exchange.dsh.errors import Refusal, corrupt
from kimi_ray.exchange.dsh.frames import (
    MAGIC,
    FrameScan,
    decode_frame,
    decode_torn,
    is_frame_without_magic,
    scan_frames,
    verified_frame_after,
)
from kimi_ray.exchange.dsh.header import listed_header, parse_header_line
from kimi_ray.exchange.dsh.line_scan import LineScan
from kimi_ray.exchange.dsh.model import JsonObject, Stored


def read_plain(data: bytes) -> Stored:
    """A plain log.

    Raises:
        Refusal: why the original does not read it.
    """
    header_bytes = data.find(b"\n") + 1
    header = parse_header_line(data[:header_bytes])
    scan = LineScan(header_bytes)
    scan.feed(data[header_bytes:])
    torn = len(data) - scan.committed
    return Stored(header, scan.events, {"torn": torn} if torn else {}, scan.notes)


def read_compressed(data: bytes) -> Stored:
    """A compressed log.

    Where it loses less than the original: bytes behind the last good frame that are no frame are set aside, unless
    they show that what was committed is damaged (a good frame follows, or only a magic number is broken). Where it is
    stricter: an incomplete frame with a good one behind it is damage, not a torn tail.

    Raises:
        Refusal: why the original does not read it.
    """
    found = scan_frames(data)
    tail = _tail(data, found)
    if not found.frames:
        raise corrupt("empty or header-less Zstandard session log", byte=0)
    record = decode_frame(data, found.frames[0], 0)
    if not record.endswith(b"\n") or record.index(b"\n") != len(record) - 1:
        raise corrupt("corrupt Zstandard session log: first frame is not exactly one header line", byte=0, frame=0)
    header = parse_header_line(record)
    scan = LineScan(len(record))
    bad: dict[str, Any] = {}
    for number, frame in enumerate(found.frames[1:], 1):
        place: dict[str, Any] = {"byte": frame.start, "frame": number}
        scan.feed(decode_frame(data, frame, number), **place)
        # A record may go on in the next frame; what counts is whether all frames together end with one.
        bad = {} if scan.committed == scan.scanned else bad or place
    if bad:
        message = "corrupt Zstandard session log: complete frame contains a torn JSONL record"
        if scan.issue is None:
            raise corrupt(message, **bad)
        why = scan.issue.message.removeprefix("corrupt session log: ")
        raise corrupt(f"{message} ({why})", **bad, **{key: scan.issue.at[key] for key in ("line", "seq")})
    if found.torn_start is not None:
        scan.feed(decode_torn(data, found.torn_start), byte=found.torn_start, frame=len(found.frames))
    return Stored(header, scan.events, tail, scan.notes)


def _tail(data: bytes, found: FrameScan) -> dict[str, int]:
    """What is behind the complete frames, by kind; refuses what proves damage."""
    if found.torn_start is not None:
        after = verified_frame_after(data, found.torn_start + 1)
        if after is not None:
            raise corrupt(
                f"corrupt Zstandard session log: the frame at byte {found.torn_start} is damaged, "
                f"a good one follows at byte {after}",
                byte=found.torn_start,
                frame=len(found.frames),
            )
        return {"torn": len(data) - found.torn_start}
    if found.stopped is None:
        return {}
    at = found.stopped_at
    damaged = (
        not found.frames
        or data[at : at + 4] == MAGIC
        or is_frame_without_magic(data, at)
        or verified_frame_after(data, at) is not None
    )
    if damaged:
        raise found.stopped
    return {"garbage": len(data) - at}


def list_plain(data: bytes) -> JsonObject | None:
    """The header of a plain log as a listing shows it, or None."""
    end = data.find(b"\n")
    return None if end < 0 else listed_header(data[: end + 1])


def list_compressed(data: bytes) -> JsonObject | None:
    """The header of a compressed log as a listing shows it, or None."""
    found = scan_frames(data, most=1)
    if not found.frames:
        return None
    try:
        return listed_header(decode_frame(data, found.frames[0], 0))
    except Refusal:
        return None
