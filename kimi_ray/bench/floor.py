"""Floors: the least that the same work costs on this machine, measured in the same run.

``plain_writes`` is the durable work alone: the very bytes that a run stored, appended and synced turn by turn by one
loop. ``bare_calls`` (in ``kimi_ray.actors``) is the calling alone: as many empty actor calls as there were turns.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredStream:
    """One log as a run left it: its bytes, and how many pieces of it were made durable one after the other."""

    data: bytes
    flushes: int


def plain_writes(streams: Sequence[StoredStream], directory: str | None = None, *, sync_delay_s: float = 0.0) -> float:
    """Seconds that one plain loop takes to append the same bytes to as many files, one fdatasync for each flush.

    Args:
        streams: What the run stored.
        directory: A directory on the same disk; a temporary one is made in it and removed.
        sync_delay_s: Seconds that each sync takes in addition, as injected into the store.
    """
    place = tempfile.mkdtemp(prefix="kimi-ray-floor-", dir=directory)
    try:
        files = [
            os.open(os.path.join(place, str(n)), os.O_CREAT | os.O_WRONLY | os.O_APPEND) for n in range(len(streams))
        ]
        try:
            rounds = max((stream.flushes for stream in streams), default=0)
            began = time.perf_counter()
            for turn in range(rounds):
                for file, stream in zip(files, streams, strict=True):
                    if turn < stream.flushes:
                        size = len(stream.data)
                        piece = stream.data[size * turn // stream.flushes : size * (turn + 1) // stream.flushes]
                        os.write(file, piece)
                        time.sleep(sync_delay_s)
                        os.fdatasync(file)
            return time.perf_counter() - began
        finally:
            for file in files:
                os.close(file)
    finally:
        shutil.rmtree(place)


def read_once(paths: Sequence[str]) -> float:
    """Seconds that one plain loop takes to read files from beginning to end, with a CRC-32 over their bytes."""
    began = time.perf_counter()
    for path in paths:
        crc = 0
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    return time.perf_counter() - began


def plain_copy(paths: Sequence[str], directory: str | None = None) -> float:
    """Seconds that one plain loop takes to copy files, each synced once; the copies are removed."""
    place = tempfile.mkdtemp(prefix="kimi-ray-floor-", dir=directory)
    try:
        began = time.perf_counter()
        for number, path in enumerate(paths):
            with open(path, "rb", buffering=0) as source, open(os.path.join(place, str(number)), "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
        return time.perf_counter() - began
    finally:
        shutil.rmtree(place)
