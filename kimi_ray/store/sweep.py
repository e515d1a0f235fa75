"""Mark and sweep of blobs: what nobody refers to and nobody touched for the grace goes.

The mark reads bytes, not events: every ``sha256:<64 hex>`` keeps its blob that stands in a log, a document, a torn tail
that was moved aside, a repair or a creation that is under way, or a reservation, verifying or not. Where rows are
compressed or in a database they are read as far as they verify, and their files' plain bytes besides.

What is missed between mark and sweep is young: storing a blob, or asking whether it is stored, makes it so before the
answer (``blobs``), a host takes a blob for stored for at most ``known_blob_ttl_s`` (6 h) after that, and the grace is
24 h. A grace below ``MIN_GRACE_S`` is for homes in which nobody writes.

Where something cannot be read, or vanished while it was (a session that is removed while a fork of it is being made),
nothing is deleted: the report says why, and the next sweep does it.
"""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.blobs import Blobs
from kimi_ray.store.fs import Fs, io_error, names_in
from kimi_ray.store.seam import ListedLog, Stream, SurvivingPage, SweepReport
from kimi_ray.store.zstd_frames import MAGIC, Codec, measure

MIN_GRACE_S = 12 * 3600.0
"""Twice the longest time for which a host takes a blob for stored."""

_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")
_PLACES = ("sessions", "reserved")
_DATABASES = ("shards",)
_PAGE_EVENTS = 2_000
_CHUNK = 4 << 20
_OVERLAP = 128
_WHOLE = 256 << 20
_ROUNDS = 3

Run = Callable[..., Awaitable[Any]]
"""Runs blocking work in a thread of the store."""


class Everything(Protocol):
    """What a sweep reads (blocking), of unpublished sessions too."""

    def all_logs(self) -> list[ListedLog]:
        """Headers of all logs."""
        ...

    def surviving(self, stream: Stream, cursor: int, limit: int) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        ...


async def sweep_blobs(reader: Everything, blobs: Blobs, run: Run, *, grace_s: float, dry_run: bool) -> SweepReport:
    """See ``Store.sweep_blobs``."""
    began = time.time()
    marks = _Marks()
    # A log that is copied while its source is removed is in no single listing: look until nothing new is there.
    for _ in range(_ROUNDS):
        fresh = [row.stream for row in await run(reader.all_logs) if row.stream not in marks.streams]
        if not fresh and marks.streams:
            break
        await run(mark_files, blobs.fs, blobs.home, marks.named, marks.blocked)
        for stream in fresh:
            await _mark(reader, run, stream, marks)
    if marks.damage:
        # A damaged row of a database is in no page of events. The file holds what was removed too: only then.
        await run(mark_files, blobs.fs, blobs.home, marks.named, marks.blocked, _DATABASES)
    swept = await run(blobs.sweep, marks.named, began - grace_s, dry_run or bool(marks.blocked))
    held_back = bool(marks.blocked) and not dry_run
    return SweepReport(
        logs=len(marks.streams),
        kept=swept.kept,
        young=swept.young,
        deleted=0 if held_back else swept.deleted,
        deleted_bytes=0 if held_back else swept.deleted_bytes,
        dry_run=dry_run,
        held_back=swept.deleted if held_back else 0,
        problems=(*marks.blocked, *marks.damage),
    )


class _Marks:
    """What was found so far. ``blocked`` are reasons to delete nothing."""

    def __init__(self) -> None:
        self.named: set[str] = set()
        self.streams: set[Stream] = set()
        self.blocked: list[dict[str, object]] = []
        self.damage: list[dict[str, object]] = []


async def _mark(reader: Everything, run: Run, stream: Stream, marks: _Marks) -> None:
    marks.streams.add(stream)
    cursor: int | None = 0
    try:
        while cursor is not None:
            page: SurvivingPage = await run(reader.surviving, stream, cursor, _PAGE_EVENTS)
            marks.damage.extend(page.damage)
            for _, line in page.events:
                marks.named.update(digests_in(line))
            cursor = page.cursor
    except KimiRayError as error:
        marks.blocked.append(error.to_data())


def digests_in(data: bytes) -> list[str]:
    """Every digest that stands in these bytes."""
    return [found.decode() for found in _DIGEST.findall(data)] if b"sha256:" in data else []


def mark_files(
    fs: Fs, home: str, named: set[str], blocked: list[dict[str, object]], places: tuple[str, ...] = _PLACES
) -> None:
    """Add every digest that stands in a file of these places to ``named``, and what cannot be read to ``blocked``.

    Files that go away meanwhile are no problem: a log is replaced only by one that says the same, and a removed session
    is seen by whoever lists the logs.
    """
    codec = Codec()
    todo = [f"{home}/{place}" for place in places]
    while todo:
        path = todo.pop()
        try:
            mode = fs.stat(path).st_mode
            if stat.S_ISDIR(mode):
                todo.extend(f"{path}/{name}" for name in names_in(fs, path))
            elif stat.S_ISREG(mode):
                _mark_file(fs, path, named, codec)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            blocked.append(io_error(error, path).to_data())


def _mark_file(fs: Fs, path: str, named: set[str], codec: Codec) -> None:
    fd = fs.open(path, 0)
    try:
        size = fs.fstat(fd).st_size
        offset, rest = 0, b""
        compressed = False
        while offset < size:
            data = fs.pread(fd, _CHUNK, offset)
            if not data:
                break
            compressed = compressed or MAGIC in data
            named.update(digests_in(rest + data))
            rest = data[-_OVERLAP:]
            offset += len(data)
        if compressed and size <= _WHOLE:
            _mark_frames(fs.pread(fd, size, 0), named, codec)
    finally:
        fs.close(fd)


def _mark_frames(data: bytes, named: set[str], codec: Codec) -> None:
    """The digests in whatever can be decompressed, whole frames and the beginnings of others."""
    at = data.find(MAGIC)
    while at >= 0:
        found = measure(data, at)
        if found is not None:
            frame = data[at : at + found.length] if found.whole else data[at:]
            content = codec.decompress(frame) if found.whole else None
            named.update(digests_in(codec.beginning(frame) if content is None else content))
            at += found.length - 1 if found.whole and content is not None else 0
        at = data.find(MAGIC, at + 1)


def check_grace(grace_s: float, writers: int) -> None:
    """Refuse a grace that writers could be overtaken by.

    Args:
        grace_s: The grace, in seconds.
        writers: How many processes have sessions of this home open for writing.

    Raises:
        StoreError: ``store.grace_too_short``.
    """
    if grace_s < MIN_GRACE_S and writers:
        who = "another process writes" if writers == 1 else f"{writers} processes write"
        raise StoreError(
            f"a grace of {grace_s / 3600:g} h is too short while {who} in this home",
            code="store.grace_too_short",
            hint=f"give {MIN_GRACE_S / 3600:g} h or more, or end what runs there first",
            details={"grace_s": grace_s, "minimum_s": MIN_GRACE_S, "writers": writers},
        )
