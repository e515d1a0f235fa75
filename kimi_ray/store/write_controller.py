"""The write controller: keeps the events of one live log until they are durable, and says when they go.

Three seqs cut the log: everything below ``durable_seq`` is safe and forgotten here; from there to ``written_seq`` the
store has it but did not sync; from there to ``next_seq`` it is only here. Written is not durable, so all of the last
two parts is retained and can be sent again.

* The first unsent event opens a window that later events do not push back; at its end they are offered as one batch.
* What was only written is synced ``sync_interval_ms`` later, or by the next ``flush``.
* ``flush`` goes at once. Its target is fixed when it is called.
* A refused batch pauses the log: its events stay in order, a new event opens a new window, a flush tries at once and
  once more; while anybody waits for room it is tried again every ``backoff_max_ms``. A lost call does not pause it: the
  sender tries for as long as there is something to send.
* ``store.fenced`` and ``store.conflict`` end the controller; nothing is sent after that.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from kimi_ray.errors import KimiRayError, StoreError, error_from_data
from kimi_ray.events import SessionEvent
from kimi_ray.store.blob_outbox import PendingBlob
from kimi_ray.store.bounded_call import DISK_ERRORS, can_be_sent_again
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.clock import Alarm, Clock
from kimi_ray.store.flush_waiters import FlushWaiters, fresh, late
from kimi_ray.store.host_budget import RoomWaits
from kimi_ray.store.reserve import ends_a_turn
from kimi_ray.store.seam import AppendResult, Batch, Stream
from kimi_ray.store.sender import Sender
from kimi_ray.store.writer_settings import WriterSettings

State = Literal["idle", "window", "writing", "flushing", "paused", "fenced", "failed", "closing", "closed"]

_TERMINAL: Final = frozenset({"store.fenced", "store.conflict", "store.deleted"})
_MAX_GAPS: Final = 5
"""In a row; a store that names ever new seqs is broken, not restarted."""


class WriteController:
    """Writes one live log. Not for threads: it belongs to the event loop of its log.

    Args:
        stream: The log's address.
        epoch: The grant under which it writes.
        nonce: The writer that the grant was given to.
        first_seq: The seq of the first event that will be enqueued: the grant's ``next_seq``.
        sender: The host's sender for the log's shard.
        clock: The sender's when None.
        settings: The sender's when None.
        on_fenced: Called once, soon after the store said that another writer has the log.
        on_failure: Called with each failure that no flush saw.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        epoch: int,
        nonce: str,
        first_seq: int,
        sender: Sender,
        clock: Clock | None = None,
        settings: WriterSettings | None = None,
        on_fenced: Callable[[KimiRayError], None] | None = None,
        on_failure: Callable[[KimiRayError], None] | None = None,
    ) -> None:
        self.stream, self.epoch, self.nonce = stream, epoch, nonce
        self._sender = sender
        self._clock = clock or sender.clock
        self._settings = settings or sender.settings
        self._budget = sender.budget
        self._outbox = sender.outbox
        self._on_fenced = on_fenced
        self._on_failure = on_failure
        self._window_s = self._settings.write_window_ms / 1000

        self._durable = self._written = self._next_seq = first_seq
        self._events: list[SessionEvent] = []
        self._event_bytes = 0
        self._bytes = 0
        self._in_flight: Batch | None = None
        self._waiters = FlushWaiters()
        self._room = RoomWaits(self._clock)

        self._window_at: float | None = None
        self._sync_at: float | None = None
        self._hold_at: float | None = None
        self._due = False
        self._sync_due = False
        self._paused = False
        self._retried = False
        self._attempts = 0
        self._gaps = 0
        self._alarm: Alarm | None = None
        self._alarm_at = 0.0

        self._blobs: deque[tuple[int, PendingBlob]] = deque()
        self._blobs_attached = 0
        self._blobs_done = 0

        self._end: KimiRayError | None = None
        self._last_error: KimiRayError | None = None
        self._closing = False
        self._closed = False
        self._discarded = 0
        sender.attach(self)

    @property
    def next_seq(self) -> int:
        """The seq of the next event to be enqueued."""
        return self._next_seq

    @property
    def written_seq(self) -> int:
        """Everything below was written by the store, as far as it said."""
        return self._written

    @property
    def durable_seq(self) -> int:
        """Everything below is durable."""
        return self._durable

    @property
    def pending_bytes(self) -> int:
        """Retained bytes: events and blobs that are not durable."""
        return self._bytes

    @property
    def error(self) -> KimiRayError | None:
        """What ended the controller, else the last failure since the store last took a batch."""
        return self._end or self._last_error

    @property
    def state(self) -> State:
        """The state in one word."""
        if self._closed:
            return "closed"
        if self._end is not None:
            return "fenced" if self._end.code == "store.fenced" else "failed"
        if self._closing:
            return "closing"
        if self._waiters:
            return "flushing"
        if self._in_flight is not None:
            return "writing"
        if self._paused:
            return "paused"
        return "idle" if self._window_at is None and not self._due else "window"

    def enqueue(self, event: SessionEvent) -> None:
        """Take over one event; the log's observer. Never waits, never refuses for lack of room.

        Raises:
            StoreError: ``store.closed``; ``store.conflict`` for an event that is not the next one, which also ends
                the controller, as the log would be stored with a hole. After ``store.fenced`` events are ignored.
        """
        if event.seq != self._next_seq or self._end is not None or self._closed:
            self._refuse_event(event)
            return
        self._next_seq += 1
        self._events.append(event)
        size = len(event.line) + 1
        self._event_bytes += size
        self._bytes += size
        self._budget.retained += size
        if self._window_at is None and not self._due:
            self._paused = False
            self._window_at = at = self._clock.now() + self._window_s
            self._wake_at(at)

    def attach_blob(self, digest: str, data: bytes) -> None:
        """Store ``data`` before any event that is enqueued from now on; a flush from now on covers it.

        Args:
            digest: ``sha256:<hex>`` of ``data``.

        Raises:
            StoreError: ``store.closed`` or what ended the controller.
        """
        self._raise_if_over()
        blob = self._outbox.attach(digest, data, self)
        if blob is None:
            return
        self._blobs.append((self._next_seq, blob))
        self._blobs_attached += 1
        self._bytes += len(data)
        self._budget.retained += len(data)

    async def flush(self) -> None:
        """Return when every event enqueued and every blob attached before the call is durable.

        Raises:
            KimiRayError: ``store.unavailable`` after ``store_timeout_s`` (the events stay and go on being sent),
                ``store.fenced``, ``store.closed``, or why the store refused them twice.
        """
        self._raise_if_over()
        if self._next_seq <= self._durable and not self._blobs:
            return
        await self._durable_through(self._next_seq, self._settings.store_timeout_s)

    async def wait_for_room(self, *, closing: bool = False) -> None:
        """Wait while this log or the host retains more than it may.

        Args:
            closing: For a bracket that ends a step or turn: it may use ``closing_reserve_bytes`` more.

        Raises:
            StoreError: ``store.unavailable`` after ``store_timeout_s``, ``store.closed`` when the controller is closed
                meanwhile, or what ended it.
        """
        reserve = self._settings.closing_reserve_bytes if closing else 0
        limit = self._settings.log_max_bytes + reserve
        budget = self._budget
        if self._bytes < limit and budget.retained < budget.limit + reserve and self._end is None:
            return
        deadline = self._clock.now() + self._settings.store_timeout_s
        while True:
            self._raise_if_over()
            if self._bytes < limit:
                if budget.retained < budget.limit + reserve:
                    return
                await self._for_room(deadline, host=True)
            else:
                await self._for_room(deadline, host=False)

    async def close(self, timeout_s: float | None = None, *, force: bool = False) -> int:
        """Make everything durable and detach. The grant itself is closed by its owner, afterwards. Idempotent.

        Args:
            timeout_s: Seconds to wait; ``close_timeout_s`` when None.
            force: Discard what is not durable by then.

        Returns:
            How many events were discarded: 0 unless forced, fenced or failed.

        Raises:
            KimiRayError: Without ``force``, why the log is not durable, naming it. It then stays open, its events
                retained, unless the store refused them for good.
        """
        limit_s = self._settings.close_timeout_s if timeout_s is None else timeout_s
        deadline = self._clock.now() + limit_s
        self._closing = True
        self._room.interrupt(StoreError(f"{self.stream} is being closed", code="store.closed"))
        try:
            while not self._closed and self._end is None and (self._durable < self._next_seq or self._blobs):
                left = deadline - self._clock.now()
                if left <= 0:
                    raise self._late(f"not durable through seq {self._next_seq - 1}", limit_s)
                await self._durable_through(self._next_seq, left)
        except KimiRayError as error:
            if self._end is None and not force:
                raise error.with_details(stream=str(self.stream), retained_events=len(self._events)) from None
            if self._end is not None and self.state != "fenced" and not force:
                self._detach()
                raise
        finally:
            self._closing = False
        self._detach()
        return self._discarded

    def try_again(self) -> None:
        """Send what is not durable now, also when the log is paused."""
        if self._durable < self._next_seq or self._blobs:
            self._due = self._due or self._written < self._next_seq or bool(self._blobs)
            self._sync_due = self._durable < self._next_seq
            self._request()

    def head_bytes(self) -> int:
        """Bytes of the first event that would be cut, 0 without one."""
        index = self._written - self._durable
        return len(self._events[index].line) + 1 if index < len(self._events) else 0

    def cut(self) -> Batch | None:
        """The next batch: everything unsent, up to ``batch_max_bytes`` and up to the first event whose blob is missing.

        An empty batch asks the store to sync what it has written.
        """
        if self._in_flight is not None or self._end is not None or self._closed or self._hold_at is not None:
            return None
        events = self._events
        begin = self._written - self._durable
        stop = len(events) if not self._blobs else self._blobs[0][0] - self._durable
        end = self._fitting(begin, stop)
        if end <= begin and not (self._written > self._durable and (self._sync_due or self._waiters)):
            return None
        sent = events if begin == 0 and end == len(events) else events[begin:end]
        rows = pack_rows(sent)
        self._in_flight = batch = Batch(
            stream=self.stream,
            epoch=self.epoch,
            nonce=self.nonce,
            first_seq=self._written,
            payload=b"".join([row for row, _ in rows]),
            row_bytes=tuple([len(row) for row, _ in rows]),
            row_events=tuple([count for _, count in rows]),
            closing=self._event_bytes <= self._settings.closing_reserve_bytes and (self._closing or ends_a_turn(sent)),
        )
        self._due = max(begin, end) < len(events)
        self._sync_due = False
        self._window_at = None
        return batch

    def answered(self, result: AppendResult, *, sync: bool) -> None:
        """The store's answer to the batch in flight."""
        batch, self._in_flight = self._in_flight, None
        if batch is None or self._end is not None or self._closed:
            return
        if result.error is not None:
            self._batch_refused(batch, error_from_data(result.error), sync=sync)
        elif result.written > self._next_seq or result.durable > self._next_seq or result.written < self._durable:
            self._finish(
                StoreError(
                    f"{self.stream}: the store is at seq {result.written}, this writer made {self._durable} durable "
                    f"and is at {self._next_seq}",
                    code="store.conflict",
                    details={"written": result.written, "durable": self._durable, "next": self._next_seq},
                )
            )
        elif result.written < batch.next_seq or (sync and result.durable < batch.next_seq):
            self._failure(
                StoreError(
                    f"{self.stream}: the store took a batch through seq {batch.next_seq} and answered "
                    f"written {result.written}, durable {result.durable}",
                    code="store.bad_answer",
                    details={"written": result.written, "durable": result.durable, "sent": batch.next_seq},
                )
            )
        else:
            self._taken(result)
        self._request()

    def lost(self, error: KimiRayError) -> None:
        """The outcome of the batch in flight is unknown: everything that is not durable will be sent again."""
        self._in_flight = None
        if self._end is None and not self._closed:
            self._last_error = error
            self._send_all_again()
            self._request()

    def refused(self, error: KimiRayError) -> None:
        """The batch in flight failed with its whole call."""
        self._in_flight = None
        if self._end is None and not self._closed:
            self._failure(error)
            self._request()

    def blob_durable(self) -> None:
        """A blob of this log is durable."""
        blobs = self._blobs
        freed = 0
        while blobs and blobs[0][1].durable:
            freed += len(blobs.popleft()[1].data)
            self._blobs_done += 1
        if freed:
            self._release(freed)
        self._waiters.resolve(self._durable, self._blobs_done)
        self._request()

    def blob_failed(self, error: KimiRayError) -> None:
        """A blob of this log was refused."""
        self._failure(error)
        self._request()

    # Sending

    def _request(self) -> None:
        """Ask to be heard if there is something to send."""
        if self._in_flight is not None or self._hold_at is not None or self._end is not None or self._closed:
            return
        urgent = bool(self._waiters) or self._sync_due
        if not urgent and not self._due:
            return
        for _, blob in self._blobs:
            self._outbox.request(blob)
        if urgent:
            self._sender.urge(self)
        else:
            self._sender.offer(self)

    def _fitting(self, begin: int, stop: int) -> int:
        """The end of the batch that begins at ``begin``: it fits ``batch_max_bytes``, or is one larger event."""
        limit = self._settings.batch_max_bytes
        if self._event_bytes <= limit:
            return stop
        size, end = 0, begin
        while end < stop:
            size += len(self._events[end].line) + 1
            if size > limit and end > begin:
                break
            end += 1
        return end

    def _taken(self, result: AppendResult) -> None:
        self._written = max(result.written, result.durable)
        self._retried = self._paused = False
        self._attempts = self._gaps = 0
        self._last_error = None
        if result.durable > self._durable:
            self._forget_through(result.durable)
        if self._written == self._durable:
            self._sync_at = None
        elif self._sync_at is None and not self._sync_due:
            self._sync_at = at = self._clock.now() + self._settings.sync_interval_ms / 1000
            self._wake_at(at)
        self._waiters.resolve(self._durable, self._blobs_done)

    def _forget_through(self, seq: int) -> None:
        count = seq - self._durable
        if count == len(self._events):
            freed = self._event_bytes
            self._events.clear()
        else:
            freed = sum([len(event.line) for event in self._events[:count]]) + count
            del self._events[:count]
        self._durable = seq
        self._event_bytes -= freed
        self._release(freed)

    def _release(self, size: int) -> None:
        self._bytes -= size
        self._budget.release(size)
        if self._room and self._bytes < self._settings.log_max_bytes + self._settings.closing_reserve_bytes:
            self._room.wake()

    # Failing

    def _batch_refused(self, batch: Batch, error: KimiRayError, *, sync: bool) -> None:
        expected = error.details.get("expected")
        if (
            error.code == "store.gap"
            and type(expected) is int
            and expected != batch.first_seq
            and self._gaps < _MAX_GAPS
        ):
            self._gaps += 1
            if self._durable <= expected <= self._next_seq:
                # The store came back without what it had written but not synced.
                self._written = expected
                self._due = True
                self._sync_due = sync
                return
            error = StoreError(
                f"{self.stream}: the store expects seq {expected}; acknowledged was {self._durable}, "
                f"and what came before is not retained",
                code="store.conflict",
                hint="the store lost acknowledged events: check its disk, then resume the session from what is stored",
                details={"expected": expected, "durable": self._durable, "next": self._next_seq},
            )
        if can_be_sent_again(error) and error.code not in _TERMINAL and error.code not in DISK_ERRORS:
            self._last_error = error
            self._send_all_again()
            pause = min(self._settings.backoff_initial_ms * 2 ** min(self._attempts, 32), self._settings.backoff_max_ms)
            self._attempts += 1
            self._hold_at = at = self._clock.now() + pause / 1000 * (0.8 + 0.4 * random.random())
            self._wake_at(at)
        else:
            self._failure(error)

    def _send_all_again(self) -> None:
        self._written = self._durable
        self._due = self._durable < self._next_seq or bool(self._blobs)
        self._sync_due = False
        self._sync_at = None

    def _failure(self, error: KimiRayError) -> None:
        """Try once more at once for those who wait, else pause."""
        if error.code in _TERMINAL:
            self._finish(error)
            return
        self._last_error = error
        self._send_all_again()
        if self._waiters and not self._retried:
            self._retried = True
            return
        seen = self._waiters.reject(error)
        self._retried = False
        self._due = False
        self._window_at = None
        self._paused = True
        self._budget.paused(self)
        if not seen and self._on_failure is not None:
            asyncio.get_running_loop().call_soon(self._on_failure, error)

    def _finish(self, error: KimiRayError) -> None:
        """Nothing is sent any more."""
        if self._end is not None:
            return
        self._end = error
        lost = {"stream": str(self.stream), "lost_from": self._durable, "lost_events": len(self._events)}
        error.with_details(**lost)
        self._discard()
        seen = self._waiters.reject(error)
        self._room.interrupt(error)
        loop = asyncio.get_running_loop()
        if error.code == "store.fenced" and self._on_fenced is not None:
            loop.call_soon(self._on_fenced, error)
        elif not seen and self._on_failure is not None:
            loop.call_soon(self._on_failure, error)

    def _detach(self) -> None:
        if not self._closed:
            self._closed = True
            self._discard()
            self._waiters.reject(StoreError(f"{self.stream} was closed", code="store.closed"))

    def _discard(self) -> None:
        """Let go of everything retained, and of the sender."""
        self._sender.detach(self)
        self._budget.forget(self)
        for _, blob in self._blobs:
            self._outbox.drop(blob, self)
        self._discarded += len(self._events)
        self._events.clear()
        self._blobs.clear()
        self._event_bytes = 0
        self._window_at = self._sync_at = self._hold_at = None
        self._due = self._sync_due = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._release(self._bytes)

    def _refuse_event(self, event: SessionEvent) -> None:
        if self._closed:
            raise StoreError(f"{self.stream} is closed; event {event.seq} is not stored", code="store.closed")
        if self._end is not None:
            self._discarded += 1
            return
        error = StoreError(
            f"{self.stream}: event {event.seq} was enqueued where {self._next_seq} belongs",
            code="store.conflict",
            details={"seq": event.seq, "expected": self._next_seq},
        )
        self._finish(error)
        raise error

    def _raise_if_over(self) -> None:
        if self._end is not None:
            raise fresh(self._end)
        if self._closed:
            raise StoreError(f"{self.stream} is closed", code="store.closed")

    async def _durable_through(self, target: int, timeout_s: float) -> None:
        deadline = self._clock.now() + timeout_s
        future = self._waiters.add(target, self._blobs_attached, deadline, timeout_s)
        self._wake_at(deadline)
        self._request()
        await future

    def _late(self, what: str, timeout_s: float) -> StoreError:
        details = {"stream": str(self.stream), "durable": self._durable, "next": self._next_seq}
        cause = self._last_error or self._sender.last_error
        return late(f"{self.stream}: {what} within {timeout_s:g} s", details, cause)

    async def _for_room(self, deadline: float, *, host: bool) -> None:
        left = deadline - self._clock.now()
        if left <= 0:
            raise self._late("no room for more events", self._settings.store_timeout_s)
        # Room comes from durability, so it does not wait for a window or for the sync interval; and it may be paused
        # logs that fill the host.
        self.try_again()
        if host:
            self._budget.wake_paused()
        await self._room.wait(min(left, self._settings.backoff_max_ms / 1000), self._budget if host else None)

    def _wake_at(self, at: float) -> None:
        """Have ``_wake`` called at ``at`` or before. One alarm serves all deadlines and is moved only to be earlier."""
        if self._alarm is not None:
            if self._alarm_at <= at:
                return
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._clock.call_later(max(at - self._clock.now(), 0.0), self._wake)

    def _wake(self) -> None:
        self._alarm = None
        now = self._clock.now()
        if self._window_at is not None and self._window_at <= now:
            self._window_at = None
            self._due = True
        if self._sync_at is not None and self._sync_at <= now:
            self._sync_at = None
            self._sync_due = True
        if self._hold_at is not None and self._hold_at <= now:
            self._hold_at = None
        next_deadline = self._waiters.expire(
            now, lambda waiter: self._late(f"not durable through seq {waiter.target - 1}", waiter.timeout_s)
        )
        ahead = [at for at in (self._window_at, self._sync_at, self._hold_at, next_deadline) if at is not None]
        if ahead:
            self._wake_at(min(ahead))
        self._request()
