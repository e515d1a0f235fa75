"""One stream as the writing process knows it: admission, writing, syncing, and what a failed write or sync means.

Every method that changes something holds ``lock``; all are blocking and run in threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from kimi_ray.errors import StoreError
from kimi_ray.store.admission import checked_payload, rows_after_overlap
from kimi_ray.store.batch_rows import EpochRow, encode_closed_row, encode_epoch_row
from kimi_ray.store.descriptors import Descriptors
from kimi_ray.store.directories import Directories
from kimi_ray.store.framing import Encoded, Framing, Prepared, encode_rows
from kimi_ray.store.fs import Fs, exists, io_error, io_errors, pwrite_all
from kimi_ray.store.layout import deleted
from kimi_ray.store.log_files import create_log, open_log
from kimi_ray.store.log_read import read_page
from kimi_ray.store.refusals import already_exists, grant_fenced
from kimi_ray.store.reservations import Reservation, Reservations
from kimi_ray.store.reserve import Reserve
from kimi_ray.store.seam import Batch, Stream, WriterGrant
from kimi_ray.store.turns import turn_opens

MAX_UNSYNCED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class LogTools:
    """What every stream of a store shares."""

    fs: Fs
    directories: Directories
    descriptors: Descriptors
    reservations: Reservations
    mode: str
    boot: str
    framing: Framing
    reserve: Reserve

    @property
    def durable(self) -> bool:
        """Whether acknowledged means synced."""
        return self.mode == "disk"


class StreamLog:
    """The state of one stream for writing.

    Attributes:
        size: Bytes written; ``synced`` of them durable.
        next_seq: The seq after the last written event; everything below ``durable_seq`` is durable.
        turn_from: A place in the file at or before the batch in which the open turn starts; None: no turn is open.
        born: Whether the file exists; a new log is only a reservation until its first batch.
    """

    __slots__ = (
        "_staged_turn",
        "_truncate_to",
        "batches",
        "born",
        "closed",
        "directory",
        "dropped",
        "durable_seq",
        "epoch",
        "granted_here",
        "header",
        "lock",
        "next_seq",
        "nonce",
        "path",
        "poisoned",
        "removed",
        "size",
        "stream",
        "sync_lock",
        "sync_running",
        "synced",
        "tools",
        "turn_from",
        "unsynced",
        "unsynced_bytes",
        "waiters",
    )

    def __init__(self, tools: LogTools, stream: Stream, directory: str, header: dict[str, Any]) -> None:
        self.tools = tools
        self.stream = stream
        self.directory = directory
        self.path = f"{directory}/{tools.framing.log_name}"
        self.header = header
        self.lock = threading.RLock()
        self.sync_lock = threading.RLock()  # taken before `lock`: one sync at a time, for a failure is told only once
        self.born = False
        self.size = self.synced = 0
        self.next_seq = self.durable_seq = 0
        self.batches = 0
        self.epoch = 0
        self.nonce = ""
        self.closed = True
        self.granted_here = False
        self.unsynced: list[bytes] = []
        self.unsynced_bytes = 0
        self.poisoned: StoreError | None = None
        self.removed = self.dropped = False
        self.sync_running = False
        self.waiters: list[tuple[int, Any]] = []
        self.turn_from: int | None = None
        self._staged_turn: bool | None = None
        self._truncate_to: int | None = None

    # -- grants ------------------------------------------------------------------------------------------------------

    def reserve(self, epoch: int, nonce: str) -> None:
        """Take note of a grant; that of a log that does not exist yet is stored with its first batch."""
        self.epoch, self.nonce, self.closed, self.granted_here = epoch, nonce, False, True

    def grant(self, nonce: str) -> WriterGrant | None:
        """A new grant, durable when this returns; the present one again when ``nonce`` holds it.

        Returns:
            None when this object was dropped meanwhile: the stream must be loaded again.
        """
        with self.sync_lock, self.lock:
            self._check_usable()
            if self.dropped:
                return None
            if self.nonce == nonce and not self.closed:
                self.granted_here = True
                return WriterGrant(self.epoch, self.next_seq, self.header)
            epoch = self.epoch + 1
            if self.born:
                row = EpochRow(epoch, self.next_seq, nonce, self.tools.boot, self.tools.mode)
                self._write_storage_row(encode_epoch_row(row))
            else:
                workspace = self.directory.rsplit("/", 4)[-4]
                with io_errors(self.path):
                    self.tools.reservations.keep(self.stream, Reservation(epoch, nonce, workspace, self.header))
            self.reserve(epoch, nonce)
            return WriterGrant(epoch, self.next_seq, self.header)

    def close(self, epoch: int, nonce: str) -> None:
        """End this grant with a closed row, durable; another's grant is left alone."""
        with self.sync_lock, self.lock:
            if self.closed or (epoch, nonce) != (self.epoch, self.nonce) or self.removed:
                return
            if self.born:
                self._check_usable()
                self._write_storage_row(encode_closed_row(epoch, self.next_seq))
            else:
                self.tools.reservations.drop(self.stream)
            self.closed, self.granted_here = True, False

    def _write_storage_row(self, row: bytes) -> None:
        self.sync()  # a row that outlives what stands before it would make a torn log a corrupt one
        encoded = encode_rows(self.tools.framing, self.batches, self.next_seq, [row])
        self._append(encoded, self.next_seq, closing=True)
        self.sync()

    # -- appending ---------------------------------------------------------------------------------------------------

    def write(self, batches: list[Batch]) -> list[StoreError | None]:
        """Write what is new in these batches, in order; one answer each. All new bytes go out in one write."""
        framing = self.tools.framing
        early = [self._prepare(batch) for batch in batches]  # it takes time: before the lock
        with self.lock:
            answers: list[StoreError | None] = [None] * len(batches)
            staged: list[bytes] = []
            waiting: list[int] = []
            number, seq = self.batches, self.next_seq
            closing = False
            for index, batch in enumerate(batches):
                try:
                    self._check_batch(batch)
                    if batch.first_seq < seq and staged:
                        self._flush(staged, seq, number, waiting, answers, closing=closing)
                        number, seq = self.batches, self.next_seq
                    payload, row_bytes = self._fresh(batch, seq)
                except StoreError as error:
                    answers[index] = error
                    continue
                if not row_bytes:
                    continue
                whole = early[index] if row_bytes is batch.row_bytes else None
                prepared = framing.prepare(payload, row_bytes) if whole is None else whole
                closing = closing or batch.closing
                self._stage_turn(payload)
                if not self.born:
                    try:
                        self._create(prepared, batch.next_seq, closing=closing)
                    except StoreError as error:
                        answers[index] = error
                    number, seq = self.batches, self.next_seq
                    continue
                encoded = framing.encode(number, seq, prepared)
                staged.append(encoded.data)
                waiting.append(index)
                number, seq = number + encoded.batches, batch.next_seq
            self._flush(staged, seq, number, waiting, answers, closing=closing)
            return answers

    def _stage_turn(self, payload: bytes) -> None:
        opens = turn_opens(payload)
        if opens is not None:
            self._staged_turn = opens

    def _settle_turn(self, opens: bool | None, offset: int) -> None:
        if opens is not None:
            self.turn_from = offset if opens else None

    def _prepare(self, batch: Batch) -> Prepared | None:
        """A batch that will most likely be written whole."""
        if batch.first_seq < self.next_seq or batch.epoch != self.epoch or self.closed:
            return None
        return self.tools.framing.prepare(bytes(batch.payload), batch.row_bytes)

    def _flush(
        self,
        staged: list[bytes],
        seq: int,
        number: int,
        waiting: list[int],
        answers: list[StoreError | None],
        *,
        closing: bool,
    ) -> None:
        if not staged:
            return
        try:
            self._append(Encoded(b"".join(staged), number - self.batches), seq, closing=closing)
        except StoreError as error:
            for index in waiting:
                answers[index] = error
        staged.clear()
        waiting.clear()

    def _check_usable(self) -> None:
        if self.removed:
            raise deleted(self.stream.session_id)
        if self.poisoned is not None:
            self._write_again(self.poisoned)

    def _failed(self, error: OSError) -> StoreError:
        """The error of a file call; a file that is gone because its session was removed meanwhile says so."""
        if isinstance(error, FileNotFoundError):
            if self.removed:
                return deleted(self.stream.session_id)
            home = self.directory.rsplit("/", 5)[0]
            with contextlib.suppress(OSError):
                if exists(self.tools.fs, f"{home}/tombstones/{self.stream.session_id}"):
                    return deleted(self.stream.session_id)
        return io_error(error, self.path)

    def _check_batch(self, batch: Batch) -> None:
        self._check_usable()
        if batch.epoch != self.epoch or batch.nonce != self.nonce or self.closed:
            raise grant_fenced(batch, self.epoch, self.nonce)

    def _fresh(self, batch: Batch, next_seq: int) -> tuple[bytes, tuple[int, ...]]:
        """Payload and row lengths of what is not stored yet."""
        payload = checked_payload(batch, next_seq)
        if batch.first_seq == next_seq:
            return payload, batch.row_bytes
        rows = rows_after_overlap(batch, payload, next_seq, self.read_lines)
        return b"".join(row for row, _ in rows), tuple(len(row) for row, _ in rows)

    def read_lines(self, start: int, end: int) -> list[bytes]:
        """Stored canonical lines ``start`` .. ``end - 1``."""
        lines: list[bytes] = []
        framing = self.tools.framing
        try:
            source = open_log(self.tools.fs, self.directory, framing, size=self.size)
        except OSError as error:
            raise self._failed(error) from error
        with source:
            while start + len(lines) < end:
                wanted = end - start - len(lines)
                page = read_page(framing, source, start + len(lines), wanted, 8 << 20, next_seq=self.next_seq)
                if page is None or not page.lines:
                    raise StoreError(
                        f"{self.stream} ends before seq {end}",
                        code="store.io_failed",
                        details={"path": self.path, "expected": end},
                    )
                lines.extend(page.lines)
        return lines

    def _create(self, prepared: Prepared, next_seq: int, *, closing: bool) -> None:
        tools = self.tools
        epoch_row = encode_epoch_row(EpochRow(self.epoch, 0, self.nonce, tools.boot, tools.mode))
        encoded = tools.framing.begin(to_json(self.header) + b"\n", epoch_row, prepared)
        opens, self._staged_turn = self._staged_turn, None

        def create() -> None:
            create_log(tools.fs, tools.directories, self.path, encoded.data, sync=tools.durable)

        try:
            self._spend(len(encoded.data), create, closing=closing)
        except FileExistsError:
            raise already_exists(self.stream) from None
        except OSError as error:
            raise self._failed(error) from error
        tools.reservations.drop(self.stream)
        self.born = True
        self.size = self.synced = len(encoded.data)
        self.next_seq = self.durable_seq = next_seq
        self.batches = encoded.batches
        self._settle_turn(opens, 0)

    def _append(self, encoded: Encoded, next_seq: int, *, closing: bool) -> None:
        """Write at the end or leave the file as it was."""
        tools, data = self.tools, encoded.data
        opens, self._staged_turn = self._staged_turn, None
        try:
            self._spend(len(data), lambda: self._write_at_end(data), closing=closing)
        except OSError as error:
            raise self._failed(error) from error
        self._settle_turn(opens, self.size)
        self.size += len(data)
        self.batches += encoded.batches
        self.next_seq = next_seq
        if tools.durable:
            self.unsynced.append(data)
            self.unsynced_bytes += len(data)
        else:
            self.synced, self.durable_seq = self.size, next_seq

    def _spend(self, size: int, write: Callable[[], None], *, closing: bool) -> None:
        """Write; what ends something may use the reserve."""
        reserve = self.tools.reserve
        if closing:
            reserve.spend(size, write)
        else:
            write()
            reserve.keep()

    def _write_at_end(self, data: bytes) -> None:
        tools = self.tools
        descriptor = tools.descriptors.take(self.path)
        fd = descriptor.fd
        try:
            if self._truncate_to is not None:
                tools.fs.truncate(fd, self._truncate_to)
                self._truncate_to = None
            try:
                pwrite_all(tools.fs, fd, data, self.size)
            except OSError:
                self._truncate_to = self.size
                with contextlib.suppress(OSError):
                    tools.fs.truncate(fd, self.size)
                    self._truncate_to = None
                raise
        finally:
            tools.descriptors.give_back(descriptor)

    # -- syncing -----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything durable that is written when this starts; other threads may write meanwhile.

        A failed sync means that the outcome is unknown: the bytes are written again through a new descriptor. If that
        fails too the stream is poisoned: nothing is acknowledged before they were written again and synced, which
        every use of the stream tries first.

        Raises:
            StoreError: ``store.poisoned``.
        """
        tools = self.tools
        with self.sync_lock:
            with self.lock:
                if self.poisoned is not None:
                    self._write_again(self.poisoned)
                size, seq, count = self.size, self.next_seq, len(self.unsynced)
                if size <= self.synced:
                    return
                try:
                    descriptor = tools.descriptors.take(self.path)
                except OSError as error:
                    raise self._failed(error) from error
            try:
                try:
                    tools.fs.fdatasync(descriptor.fd)
                    self._check_place(descriptor.fd)
                finally:
                    tools.descriptors.give_back(descriptor)
            except OSError as error:
                with self.lock:
                    self._write_again(error)
                return
            with self.lock:
                self.unsynced_bytes -= size - self.synced
                self.synced, self.durable_seq = size, seq
                del self.unsynced[:count]

    def _check_place(self, fd: int) -> None:
        """Whether the synced file is still the one that others find: its directory may have been taken away."""
        if self.tools.fs.stat(self.path).st_ino != self.tools.fs.fstat(fd).st_ino:
            raise OSError(errno.ENOENT, "another file is in its place", self.path)

    def _write_again(self, cause: OSError | StoreError) -> None:
        """Cut the file back to what is durable for sure and write all that came after once more."""
        tools = self.tools
        tools.descriptors.drop(self.path)
        try:
            fd = tools.fs.open(self.path, os.O_RDWR)
            try:
                if tools.fs.fstat(fd).st_size < self.synced:
                    raise OSError(errno.ESTALE, "it is shorter than what was synced", self.path)
                try:
                    tools.fs.truncate(fd, self.synced)
                    tools.fs.fsync(fd)
                    pwrite_all(tools.fs, fd, b"".join(self.unsynced), self.synced)
                    tools.fs.fsync(fd)
                except OSError:
                    # Bytes that may never reach the disk must not be found by the next process: it would take them.
                    with contextlib.suppress(OSError):
                        tools.fs.truncate(fd, self.synced)
                    raise
            finally:
                tools.fs.close(fd)
        except OSError as error:
            gone = self._failed(error)
            if gone.code == "store.deleted":
                raise gone from error
            self.poisoned = StoreError(
                f"{self.path} could not be synced, nor written again: {error.strerror}",
                code="store.poisoned",
                hint="what was acknowledged is on the disk, what was not is kept and written again when the disk works",
                details={
                    "path": self.path,
                    "errno": errno.errorcode.get(error.errno or 0, str(error.errno)),
                    "synced": self.synced,
                    "first": cause.details["first"] if isinstance(cause, StoreError) else str(cause),
                    "second": str(error),
                },
                retryable=True,
            )
            raise self.poisoned from error
        self.poisoned = None
        self.synced, self.durable_seq = self.size, self.next_seq
        self.unsynced.clear()
        self.unsynced_bytes = 0
