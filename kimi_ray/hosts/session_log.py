"""What a session writes into its main agent's log: ``subagent/*``, ``swarm/*``, scores, in few calls.

Entries are handed over at most twice a second and kept here until they are durable there. If main's host is lost in
between, main is brought back and what its log already has is not written again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic_core import from_json, to_json

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.ports import Peer, is_lost
from kimi_ray.hosts.specs import EventPage, LogEntry
from kimi_ray.store.seam import Stream

SPACING_S = 0.5
_CALL_ENTRIES = 2000
_CALL_S = 60.0
_TRIES = 5
_READ_EVENTS = 5000
_READ_BYTES = 8 << 20


class SessionLog:
    """The session's pen for one stream.

    Args:
        stream: Main's log.
        peer: The host that holds it now.
        recover: Brings the agent back after its host was lost (or finds it alive); ``peer`` then gives the new one.
        claim: The session's claim; when another one is in force, what is pending is dropped.
        spacing_s: Least time between two hand-overs that nobody awaits.
    """

    def __init__(
        self,
        stream: Stream,
        peer: Callable[[], Peer],
        recover: Callable[[], Awaitable[None]],
        *,
        claim: str | None = None,
        spacing_s: float = SPACING_S,
    ) -> None:
        self._stream = stream
        self._peer = peer
        self._recover = recover
        self._claim = claim
        self._spacing_s = spacing_s
        self._pending: list[LogEntry] = []
        self._durable_seq: int | None = None
        self._lock = asyncio.Lock()
        self._lazy: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.last_error: KimiRayError | None = None

    def add(self, entries: list[LogEntry]) -> None:
        """Write these soon, behind all earlier ones."""
        if not entries:
            return
        self._pending.extend(entries)
        if self._lazy is None or self._lazy.done():
            self._wake.clear()
            self._lazy = asyncio.get_running_loop().create_task(self._hand_over_lazily(), name="session log")

    async def flush(self) -> tuple[int, int]:
        """Hand over everything; durable when it returns. Gives main's position ``(seq, epoch)``.

        Raises:
            KimiRayError: what the host raised; the entries are kept.
        """
        return await asyncio.shield(asyncio.ensure_future(self._hand_over()))

    def abandon(self) -> None:
        """Drop what was not handed over, and stop: the log has another writer's session behind it."""
        self._pending.clear()
        if self._lazy is not None:
            self._lazy.cancel()

    async def close(self) -> None:
        """Hand over what is left and stop. Raises as ``flush``."""
        self._wake.set()
        if self._lazy is not None:
            await self._lazy
        if self._pending:
            await self.flush()

    async def _hand_over_lazily(self) -> None:
        while self._pending:
            try:
                async with asyncio.timeout(self._spacing_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if not self._pending:
                return
            try:
                await self._hand_over()
            except Exception as failure:  # noqa: BLE001  kept: the next entry, flush or close tries again
                error = self.last_error = noted(failure, "writing the session's events")
                if error.code == "session.fenced":
                    self._pending.clear()
                return

    async def _hand_over(self) -> tuple[int, int]:
        async with self._lock:
            for attempt in range(_TRIES):
                try:
                    return await self._hand_over_once()
                except KimiRayError as error:
                    if attempt == _TRIES - 1 or not (is_lost(error.code) or error.code == "agent.not_found"):
                        raise
                    await self._recover()
                    await self._drop_what_is_there()
            raise AssertionError

    async def _hand_over_once(self) -> tuple[int, int]:
        peer = self._peer()
        if self._durable_seq is None:
            self._durable_seq = (await self._flushed(peer))[0]
        while True:
            batch = self._pending[:_CALL_ENTRIES]
            if batch:
                await peer.call("record", self._stream, batch, self._claim, timeout_s=_CALL_S, group="control")
            position = await self._flushed(peer)
            self._durable_seq = position[0]
            del self._pending[: len(batch)]
            if not self._pending:
                return position

    async def _flushed(self, peer: Peer) -> tuple[int, int]:
        positions: list[tuple[int, int]] = await peer.call("flush", [self._stream], timeout_s=_CALL_S, group="store")
        return positions[0]

    async def _drop_what_is_there(self) -> None:
        """After a loss: entries whose answer was lost but which are in the log are done."""
        seq = self._durable_seq
        if seq is None or not self._pending:
            return
        peer = self._peer()
        found = Counter[bytes]()
        while True:
            page: EventPage = await peer.call(
                "read_events", self._stream, seq, _READ_EVENTS, _READ_BYTES, 0.0, timeout_s=_CALL_S, group="wait"
            )
            for line in page.lines:
                event: dict[str, Any] = from_json(line)
                found[to_json([event["type"], event["data"]])] += 1
            if not page.lines or page.first_seq + len(page.lines) >= page.next_seq:
                break
            seq = page.first_seq + len(page.lines)
        left: list[LogEntry] = []
        for entry in self._pending:
            said = to_json([entry.type, entry.data])
            if found[said]:
                found[said] -= 1
            else:
                left.append(entry)
        self._pending = left
