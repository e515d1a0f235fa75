"""The sender: one per host and store shard, through which the batches of all its logs travel together.

A log asks to be heard: ``urge`` when somebody awaits its durability, ``offer`` when a window is over. Whenever a call
is free, the sender cuts one batch from each that asked and sends them as one call, synced if they were urged. While it
is in flight, more gather: group commit comes by itself. Urged and offered batches never share a call, since a synced
call would pay a sync for every background batch in it; the two kinds take turns. Logs whose flushes keep step would
append while the store is idle, and wait while it works; so a call that is large enough (``call_soon_bytes``) leaves
before the other logs of the same pass have been heard, and what waits leaves before answers are delivered.

A lost call (dead actor, time-out) is followed by a pause and then by new batches cut from what the logs retain; the
store skips what it has already. This goes on for as long as anything is retained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.blob_outbox import BlobOutbox, BlobTransport
from kimi_ray.store.bounded_call import Backoff, BoundedCall, can_be_sent_again
from kimi_ray.store.clock import Clock, LoopClock
from kimi_ray.store.host_budget import HostBudget
from kimi_ray.store.seam import AppendResult, Batch, Stream
from kimi_ray.store.writer_settings import WriterSettings

Transport = Callable[[list[Batch], bool], Awaitable[list[AppendResult]]]
"""Reaches ``Store.append(batches, sync=...)`` of the shard."""


class Source(Protocol):
    """A log as the sender sees it."""

    @property
    def stream(self) -> Stream:
        """Its address."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Bytes that it retains: about what it would cut."""
        ...

    def head_bytes(self) -> int:
        """Bytes of the first event that it would cut, 0 without one."""
        ...

    def cut(self) -> Batch | None:
        """The next batch, from now on in flight; None when there is nothing to send."""
        ...

    def answered(self, result: AppendResult, *, sync: bool) -> None:
        """The store's answer to the batch in flight."""
        ...

    def lost(self, error: KimiRayError) -> None:
        """The outcome of the batch in flight is unknown, and the store may come back."""
        ...

    def refused(self, error: KimiRayError) -> None:
        """The call failed in a way that sending again does not mend."""
        ...

    async def close(self, timeout_s: float | None = None, *, force: bool = False) -> int:
        """Drain and detach."""
        ...


class _Call:
    __slots__ = ("batches", "bounded", "sources", "sync")

    def __init__(self, sources: list[Source], batches: list[Batch], sync: bool) -> None:
        self.sources = sources
        self.batches = batches
        self.sync = sync
        self.bounded: BoundedCall[list[AppendResult]] | None = None


class Sender:
    """Collects, sends, and sends again. Lives on one event loop.

    Args:
        transport: Sends batches to the shard.
        transport_blobs: Sends blobs to it.
        settings: Bounds and time-outs.
        clock: The loop's own when None.
        budget: Shared by all senders of a host; a new one when None.
    """

    def __init__(
        self,
        transport: Transport,
        transport_blobs: BlobTransport,
        *,
        settings: WriterSettings | None = None,
        clock: Clock | None = None,
        budget: HostBudget | None = None,
    ) -> None:
        self.settings = settings or WriterSettings()
        self.clock: Clock = clock or LoopClock()
        self.budget = budget or HostBudget(self.settings.host_max_bytes)
        self.outbox = BlobOutbox(transport_blobs, self.clock, self.settings)
        self._transport = transport
        self._sources: dict[Source, None] = {}
        self._urged: dict[Source, None] = {}
        self._offered: dict[Source, None] = {}
        self._calls: set[_Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._urged_bytes = 0
        self._urged_last = False
        self._scheduled = False
        self._closed = False
        self._last_error: KimiRayError | None = None
        self._backoff = Backoff(
            self.clock, self.settings.backoff_initial_ms / 1000, self.settings.backoff_max_ms / 1000, self._schedule
        )
        self._calls_made = self._batches_sent = self._calls_lost = 0

    @property
    def last_error(self) -> KimiRayError | None:
        """Why the last call was lost; None once one was answered."""
        return self._last_error

    def stats(self) -> dict[str, Any]:
        """Counters: calls, batches, lost calls, attached logs, retained bytes of the host."""
        return {
            "calls": self._calls_made,
            "batches": self._batches_sent,
            "calls_lost": self._calls_lost,
            "logs": len(self._sources),
            "retained_bytes": self.budget.retained,
        }

    def attach(self, source: Source) -> None:
        """A log begins to send through here.

        Raises:
            StoreError: ``store.closed``.
        """
        if self._closed:
            raise StoreError(f"{source.stream}: the sender is closed", code="store.closed")
        self._sources[source] = None

    def detach(self, source: Source) -> None:
        """The log sends nothing any more. Idempotent."""
        self._sources.pop(source, None)
        self._urged.pop(source, None)
        self._offered.pop(source, None)

    def urge(self, source: Source) -> None:
        """Somebody waits until the log is durable: its next batch goes with a synced call."""
        if source not in self._urged:
            self._offered.pop(source, None)
            self._urged[source] = None
            self._urged_bytes += source.pending_bytes
            if self._urged_bytes >= self.settings.call_soon_bytes:
                self._pump()
            else:
                self._schedule()

    def offer(self, source: Source) -> None:
        """The log has something to write and nobody waits."""
        if source not in self._urged and source not in self._offered:
            self._offered[source] = None
            self._schedule()

    async def close(self, timeout_s: float | None = None, *, force: bool = False) -> int:
        """Drain and detach every log, then stop.

        Args:
            timeout_s: Seconds for the whole; ``close_timeout_s`` when None.
            force: Discard what is not durable by then.

        Returns:
            How many events were discarded.

        Raises:
            StoreError: ``store.unavailable`` naming the streams that are not durable; the sender then goes on.
        """
        sources = list(self._sources)
        outcomes = await asyncio.gather(
            *(source.close(timeout_s, force=force) for source in sources), return_exceptions=True
        )
        discarded = 0
        streams: list[str] = []
        causes: dict[str, Any] = {}
        for source, outcome in zip(sources, outcomes, strict=True):
            if isinstance(outcome, int):
                discarded += outcome
            elif isinstance(outcome, KimiRayError):
                streams.append(str(source.stream))
                causes[str(source.stream)] = outcome.to_data()
            else:
                raise outcome
        if streams:
            raise StoreError(
                f"{len(streams)} logs are not durable: {', '.join(streams[:5])}{' ...' if len(streams) > 5 else ''}",
                code="store.unavailable",
                hint="close again when the store is back, or close with force to discard what it did not take",
                details={"streams": streams, "causes": causes},
                retryable=True,
            )
        self._closed = True
        self._backoff.stop()
        for call in self._calls:
            if call.bounded is not None:
                call.bounded.abandon()
        await self.outbox.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        return discarded

    def _schedule(self) -> None:
        # Through call_soon: every task that became ready with this one flushes first, and all go in one call.
        if not self._scheduled and not self._closed:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        while not self._closed and not self._backoff.pausing and len(self._calls) < self.settings.calls_in_flight:
            urged = bool(self._urged) and not (self._urged_last and self._offered)
            call = self._collect(self._urged if urged else self._offered, sync=urged)
            if call is not None:
                self._urged_last = urged
                self._start(call)
            elif not self._urged and not self._offered:
                return

    def _collect(self, lane: dict[Source, None], *, sync: bool) -> _Call | None:
        settings = self.settings
        call = _Call([], [], sync)
        size = 0
        if sync:
            self._urged_bytes = 0
        while lane and len(call.batches) < settings.call_max_streams:
            source = next(iter(lane))
            if call.batches and (
                size + settings.batch_max_bytes > settings.call_max_bytes
                or size + source.head_bytes() > settings.call_max_bytes
            ):
                break
            del lane[source]
            batch = source.cut()
            if batch is not None:
                call.sources.append(source)
                call.batches.append(batch)
                size += len(batch.payload)
        return call if call.batches else None

    def _start(self, call: _Call) -> None:
        self._calls.add(call)
        self._calls_made += 1
        self._batches_sent += len(call.batches)
        call.bounded = BoundedCall(
            lambda: self._transport(call.batches, call.sync),
            timeout_s=self.settings.call_timeout_s,
            clock=self.clock,
            on_done=lambda results: self._answered(call, results),
            on_failed=lambda error: self._failed(call, error),
        )
        self._tasks.add(call.bounded.task)
        call.bounded.task.add_done_callback(self._tasks.discard)

    def _answered(self, call: _Call, results: list[AppendResult]) -> None:
        self._calls.discard(call)
        self._backoff.succeeded()
        self._last_error = None
        if self._urged:
            self._pump()
        fits = len(results) == len(call.batches) and all(
            result.stream == batch.stream for result, batch in zip(results, call.batches, strict=True)
        )
        if fits:
            for source, result in zip(call.sources, results, strict=True):
                source.answered(result, sync=call.sync)
        else:
            error = StoreError(
                f"the store answered {len(results)} results for {len(call.batches)} batches, or for other streams",
                code="store.bad_answer",
                details={"asked": len(call.batches), "answered": len(results)},
            )
            for source in call.sources:
                source.refused(error)
        self._schedule()

    def _failed(self, call: _Call, error: KimiRayError) -> None:
        self._calls.discard(call)
        self._calls_lost += 1
        self._last_error = error
        if can_be_sent_again(error):
            self._backoff.pause()
            for source in call.sources:
                source.lost(error)
        else:
            for source in call.sources:
                source.refused(error)
            self._schedule()
