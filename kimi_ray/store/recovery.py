"""First touch of a stored log by a writing process: finish a decided repair, judge the tail, repair it, sync."""

from __future__ import annotations

from kimi_ray.errors import StoreError
from kimi_ray.store.fs import exists, io_errors
from kimi_ray.store.layout import Layout, deleted, not_found
from kimi_ray.store.log_files import (
    apply_redo,
    check_version,
    clear_leftovers,
    open_log,
    read_redo,
    repair_tail,
    set_unborn_aside,
    sync_found,
)
from kimi_ray.store.seam import Stream
from kimi_ray.store.stream_log import LogTools, StreamLog
from kimi_ray.store.turns import turn_opens


def touch(tools: LogTools, layout: Layout, stream: Stream) -> StreamLog:
    """The state of a stored log, its tail repaired, everything found in it durable. Blocking.

    Raises:
        StoreError: ``store.not_found``, ``store.deleted``, ``store.corrupt``, and what a file call gives.
    """
    check_not_removed(layout, stream.session_id)
    directory = layout.agent_dir(stream)
    if directory is None:
        raise not_found(stream)
    with io_errors(directory):
        try:
            return _touch(tools, stream, directory)
        except FileNotFoundError:
            check_not_removed(layout, stream.session_id)  # what is gone may have gone with its session
            raise


def touch_or_reserved(tools: LogTools, layout: Layout, stream: Stream) -> StreamLog:
    """``touch``, or the state of a log that waits for its first batch since before a restart of the store.

    Raises:
        StoreError: as ``touch``.
    """
    try:
        return touch(tools, layout, stream)
    except StoreError as error:
        reserved = tools.reservations.find(stream) if error.code == "store.not_found" else None
        if reserved is None:
            raise
    directory = layout.place(stream.session_id, reserved.workspace_id)
    log = StreamLog(tools, stream, f"{directory}/agents/{stream.agent_id}", reserved.header)
    log.reserve(reserved.epoch, reserved.nonce)
    log.granted_here = False  # by a process before this one
    return log


def check_not_removed(layout: Layout, session_id: str) -> None:
    """Refuse a removed session.

    Raises:
        StoreError: ``store.deleted``.
    """
    tombstone = layout.tombstone(session_id)
    with io_errors(tombstone):
        if exists(layout.fs, tombstone):
            raise deleted(session_id)


def _touch(tools: LogTools, stream: Stream, directory: str) -> StreamLog:
    fs, directories, durable, framing = tools.fs, tools.directories, tools.durable, tools.framing
    path = f"{directory}/{framing.log_name}"
    try:
        with open_log(fs, directory, framing, repaired=False) as source:
            check_version(source, framing)
    except FileNotFoundError:
        clear_leftovers(fs, directory)
        raise not_found(stream) from None
    clear_leftovers(fs, directory)
    redo = read_redo(fs, directory)
    if redo is not None:
        apply_redo(fs, directories, path, redo, sync=durable)
    if durable:
        sync_found(fs, directories, path)  # before the tail is judged: a power cut must not take back what was judged
    with open_log(fs, directory, framing) as source:
        scan = framing.scan(source.read, source.size, source.path)
        turn_from: int | None = None
        for batch in scan:
            opens = turn_opens(batch.payload)
            if opens is not None:
                turn_from = batch.offset if opens else None
        tail = scan.tail(tools.boot)
        opens = turn_opens(b"".join(tail.kept))
        if opens is not None:
            turn_from = tail.offset if opens else None
        if tail.unborn:
            set_unborn_aside(fs, directories, path)
            raise not_found(stream)
        size = source.size
        batches = scan.batches_read
        if tail.size:
            size = repair_tail(fs, directories, source, scan, tail, sync=durable)
            batches += 1 if tail.kept else 0
    log = StreamLog(tools, stream, directory, scan.header)
    log.born = True
    log.size = log.synced = size
    log.next_seq = log.durable_seq = scan.next_seq
    log.batches = batches
    log.closed = scan.closed
    log.turn_from = turn_from
    if scan.epoch is not None:
        log.epoch, log.nonce = scan.epoch.epoch, scan.epoch.writer
    return log
