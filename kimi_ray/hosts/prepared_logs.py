"""Logs between the store and their agent: read once, reserved for one agent, published to it or rolled back.

Bringing a log into memory is the dear part of bringing an agent to life. So a log that came to nothing (the agent could
not be built) and one that was just given back wait here for the next agent, as long as their bytes have room. What
waits is as good as read: the next grant follows the last one directly and counts the same events only if nobody wrote
in between.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kimi_ray.agent.fold import AgentFold
from kimi_ray.errors import LogError
from kimi_ray.log import EventLog
from kimi_ray.store.seam import Stream, WriterGrant

MAX_BYTES = 8 << 20
PATIENCE_S = 60.0
_EVENT_BYTES = 400
"""What an event costs in memory beside its line; a prompt or a turn in the fold is about as large."""
_ID_BYTES = 64
"""What an id that is known, and no more, costs at most."""
_LOG_BYTES = 4096
"""What a log costs that has none."""

ReadLog = Callable[[Stream, WriterGrant], Awaitable[tuple[EventLog, AgentFold]]]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A log that waits: everything in it is stored, and ``epoch`` was the newest grant when it was."""

    log: EventLog
    fold: AgentFold
    epoch: int
    size: int


class Preparation:
    """A log that is reserved for one agent and refuses every append until it is published."""

    def __init__(self, stream: Stream, grant: WriterGrant, log: EventLog, fold: AgentFold) -> None:
        """``PreparedLogs.prepare`` makes it."""
        self.stream = stream
        self.log = log
        self.fold = fold
        self.grant = grant
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        log.reserve()

    def settle(self) -> None:
        """Whoever waits for the log may go on."""
        if not self.settled.done():
            self.settled.set_result(None)


class PreparedLogs:
    """The logs of one host that are on their way.

    Args:
        read: Reads a log under its grant.
        max_bytes: How much may wait; what waited longest goes first.
        patience_s: How long ``prepare`` waits for a log that is reserved.
    """

    def __init__(self, read: ReadLog, *, max_bytes: int = MAX_BYTES, patience_s: float = PATIENCE_S) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._ready: OrderedDict[Stream, _Ready] = OrderedDict()
        self._bytes = 0
        self._reserved: dict[Stream, asyncio.Future[None]] = {}

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the logs that wait."""
        return self._bytes

    async def prepare(self, stream: Stream, grant: WriterGrant) -> Preparation:
        """Reserve a log under its grant, read unless it waits here. One at a time: others wait for the first.

        Raises:
            KimiRayError: what reading raised; the next one in the queue then reads for itself. ``log.reserved`` when
                the one before is neither published nor rolled back in time.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                while (taken := self._reserved.get(stream)) is not None:
                    await asyncio.shield(taken)
        except TimeoutError:
            raise LogError(
                f"{stream} is reserved for another agent that does not come to life",
                code="log.reserved",
                hint="close the agent, then ask again",
                retryable=True,
            ) from None
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reserved[stream] = began
        try:
            found = self._take(stream, grant)
            log, fold = await self._read(stream, grant) if found is None else (found.log, found.fold)
            preparation = Preparation(stream, grant, log, fold)
        except BaseException:
            del self._reserved[stream]
            began.set_result(None)
            raise
        self._reserved[stream] = preparation.settled
        began.set_result(None)
        return preparation

    def publish(self, preparation: Preparation) -> None:
        """The log is its agent's from here on. Idempotent."""
        if not preparation.settled.done():
            preparation.log.publish()
            self._settle(preparation)

    def rollback(self, preparation: Preparation, *, closed: bool) -> None:
        """The agent came to nothing. Idempotent, and nothing for a log that was published.

        Args:
            preparation: The reservation to give up.
            closed: Whether the grant was given back, so that the log is as it was read: it then waits here again.
        """
        if preparation.settled.done():
            return
        self._settle(preparation)
        if closed and preparation.log.next_seq == preparation.grant.next_seq:
            self.keep(preparation.stream, preparation.log, preparation.fold, preparation.grant.epoch)

    def keep(self, stream: Stream, log: EventLog, fold: AgentFold, epoch: int) -> None:
        """A log was given back, everything in it stored: it waits for its next agent. The object itself is detached."""
        size = _LOG_BYTES + _EVENT_BYTES * (len(log.surface) + len(fold.prompts) + len(fold.turns))
        size += _ID_BYTES * (len(fold.ended) + len(fold.call_ids))
        size += sum(len(node.line) for node in log.surface) + sum(len(turn.text) for turn in fold.turns.values())
        self._drop(stream)
        if size > self._max_bytes:
            return
        self._ready[stream] = _Ready(log.successor(), fold, epoch, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._ready)))

    def _take(self, stream: Stream, grant: WriterGrant) -> _Ready | None:
        ready = self._ready.get(stream)
        self._drop(stream)
        if ready is None or ready.epoch + 1 != grant.epoch or ready.log.next_seq != grant.next_seq:
            return None
        return ready

    def _drop(self, stream: Stream) -> None:
        ready = self._ready.pop(stream, None)
        if ready is not None:
            self._bytes -= ready.size

    def _settle(self, preparation: Preparation) -> None:
        if self._reserved.get(preparation.stream) is preparation.settled:
            del self._reserved[preparation.stream]
        preparation.settle()
