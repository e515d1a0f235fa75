"""Floors: the least that the same work costs on this machine, measured in the same run.

``plain_writes`` is the durable work alone: the very bytes that a run stored, appended and synced turn by turn by one
loop. ``bare_calls`` (in ``kimi_ray.actors``) is the calling alone: as many empty actor calls as there were turns.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredStream:
    """One log as a run left it: its bytes, and how many pieces of it were made durable one after the other."""

    data: bytes
    flushes: int


def plain_writes(streams: Sequence[StoredStream], directory: str | None = None) -> float:
    """Seconds that one plain loop takes to append the same bytes to as many files, one fdatasync for each flush.

    Args:
        streams: What the run stored.
        directory: A directory on the same disk; a temporary one is made in it and removed.
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
                        os.fdatasync(file)
            return time.perf_counter() - began
        finally:
            for file in files:
                os.close(file)
    finally:
        shutil.rmtree(place)
