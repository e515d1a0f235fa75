"""Blobs on their way to the store: each content once, durable before the events that refer to it are sent."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from kimi_ray.errors import KimiRayError
from kimi_ray.store.bounded_call import DISK_ERRORS, Backoff, BoundedCall, can_be_sent_again
from kimi_ray.store.clock import Clock
from kimi_ray.store.writer_settings import WriterSettings

BlobTransport = Callable[[dict[str, bytes]], Awaitable[None]]
"""Stores content by digest; durable when it returns."""


class BlobOwner(Protocol):
    """A log that waits for a blob."""

    def blob_durable(self) -> None:
        """One of its blobs is durable."""
        ...

    def blob_failed(self, error: KimiRayError) -> None:
        """One of its blobs was refused; it stays pending until it is asked for again."""
        ...


class PendingBlob:
    """Content that is not durable yet, shared by all logs that attached it."""

    __slots__ = ("data", "digest", "durable", "owners")

    def __init__(self, digest: str, data: bytes) -> None:
        self.digest = digest
        self.data = data
        self.durable = False
        self.owners: dict[BlobOwner, None] = {}


class BlobOutbox:
    """Sends requested blobs, one call in flight, and remembers what is durable.

    Args:
        transport: Reaches the store.
        clock: Time-outs, pauses and the age of what is remembered.
        settings: The bounds.
    """

    def __init__(self, transport: BlobTransport, clock: Clock, settings: WriterSettings) -> None:
        self._transport = transport
        self._clock = clock
        self._settings = settings
        self._known: OrderedDict[str, float] = OrderedDict()
        self._pending: dict[str, PendingBlob] = {}
        self._queue: dict[str, PendingBlob] = {}
        self._in_flight: dict[str, PendingBlob] = {}
        self._call: BoundedCall[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._closed = False
        self._backoff = Backoff(
            clock, settings.backoff_initial_ms / 1000, settings.backoff_max_ms / 1000, self._schedule
        )

    def attach(self, digest: str, data: bytes, owner: BlobOwner) -> PendingBlob | None:
        """Note that ``owner`` needs this content; None when it is known to be durable. Nothing is sent yet."""
        known_at = self._known.get(digest)
        if known_at is not None:
            if self._clock.now() - known_at < self._settings.known_blob_ttl_s:
                self._known.move_to_end(digest)
                return None
            del self._known[digest]
        blob = self._pending.get(digest)
        if blob is None:
            blob = self._pending[digest] = PendingBlob(digest, data)
        blob.owners[owner] = None
        return blob

    def request(self, blob: PendingBlob) -> None:
        """Send it with the next call. Idempotent."""
        if blob.durable or blob.digest in self._in_flight or blob.digest in self._queue:
            return
        self._queue[blob.digest] = blob
        self._schedule()

    def drop(self, blob: PendingBlob, owner: BlobOwner) -> None:
        """``owner`` waits no longer; content that nobody waits for is not sent."""
        blob.owners.pop(owner, None)
        if not blob.owners and not blob.durable:
            self._queue.pop(blob.digest, None)
            if blob.digest not in self._in_flight:
                self._pending.pop(blob.digest, None)

    async def close(self) -> None:
        """Give up what is in flight. Idempotent."""
        self._closed = True
        self._backoff.stop()
        if self._call is not None:
            self._call.abandon()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._closed or self._call is not None or self._backoff.pausing or not self._queue:
            return
        size = 0
        while self._queue:
            digest, blob = next(iter(self._queue.items()))
            size += len(blob.data)
            if self._in_flight and size > self._settings.call_max_bytes:
                break
            self._in_flight[digest] = self._queue.pop(digest)
        content = {digest: blob.data for digest, blob in self._in_flight.items()}
        self._call = BoundedCall(
            lambda: self._transport(content),
            timeout_s=self._settings.call_timeout_s,
            clock=self._clock,
            on_done=self._stored,
            on_failed=self._failed,
        )
        self._tasks.add(self._call.task)
        self._call.task.add_done_callback(self._tasks.discard)

    def _landed(self) -> list[PendingBlob]:
        self._call = None
        blobs = list(self._in_flight.values())
        self._in_flight = {}
        return blobs

    def _stored(self, _: None) -> None:
        blobs = self._landed()
        self._backoff.succeeded()
        now = self._clock.now()
        owners: dict[BlobOwner, None] = {}
        for blob in blobs:
            blob.durable = True
            self._pending.pop(blob.digest, None)
            self._known[blob.digest] = now
            owners.update(blob.owners)
            blob.owners.clear()
        while len(self._known) > self._settings.known_blobs:
            self._known.popitem(last=False)
        for owner in owners:
            owner.blob_durable()
        self._schedule()

    def _failed(self, error: KimiRayError) -> None:
        blobs = self._landed()
        wanted = {blob.digest: blob for blob in blobs if blob.owners}
        for blob in blobs:
            if not blob.owners:
                self._pending.pop(blob.digest, None)
        if can_be_sent_again(error) and error.code not in DISK_ERRORS:
            self._queue = {**wanted, **self._queue}
            self._backoff.pause()
            return
        owners: dict[BlobOwner, None] = {}
        for blob in wanted.values():
            owners.update(blob.owners)
        for owner in owners:
            owner.blob_failed(error)
        self._schedule()
