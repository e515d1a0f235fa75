"""Reading a log beside its writer: a cursor with a long poll, and the messages as they once were."""

from __future__ import annotations

import asyncio
from collections import deque

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.events import CORE, SURFACE_TYPES, SessionEvent, read_stored, type_key
from kimi_ray.hosts.specs import EventPage
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.log import Message, Surface, derive_messages
from kimi_ray.store.seam import Stream

RECENT_EVENTS = 512
"""Events of a followed log that stay in memory; older ones are read from the store."""

_DURABLE_POLL_S = 0.01

_KNOWN = {type_key(entry.name): entry.name for entry in CORE}
_PASSED = frozenset(key for key, name in _KNOWN.items() if name not in SURFACE_TYPES)


class _Tail:
    """The newest events of a living log that somebody follows."""

    def __init__(self, agent: LiveAgent) -> None:
        self.agent = agent
        self.events: deque[SessionEvent] = deque(maxlen=RECENT_EVENTS)
        self.grown = asyncio.Event()
        agent.journal.log.observe(self._take)

    def _take(self, event: SessionEvent) -> None:
        self.events.append(event)
        self.grown.set()


class LogReader:
    """Serves cursors on the logs of one host.

    Args:
        store: Where older events are.
    """

    def __init__(self, store: StoreCalls) -> None:
        self._store = store
        self._tails: dict[Stream, _Tail] = {}

    def forget(self, stream: Stream) -> None:
        """The log does not live here any more."""
        self.wake(stream)
        self._tails.pop(stream, None)

    def wake(self, stream: Stream) -> None:
        """Whoever waits for events of this log looks again: its agent takes nothing any more."""
        tail = self._tails.get(stream)
        if tail is not None:
            tail.grown.set()

    async def read(
        self, stream: Stream, agent: LiveAgent | None, from_seq: int, max_events: int, max_bytes: int, wait_s: float
    ) -> EventPage:
        """A page from ``from_seq``; waits up to ``wait_s`` while a living log has nothing there yet."""
        if agent is None:
            page = await self._store.read_from(stream, from_seq, max_events, max_bytes)
            return EventPage(page.first_seq, page.lines, page.next_seq, page.next_seq, None)
        tail = self._tails.get(stream)
        if tail is None or tail.agent is not agent:
            self.wake(stream)  # who waits for the agent's life before
            tail = self._tails[stream] = _Tail(agent)
        if wait_s > 0:
            await _until_durable(agent, tail, from_seq, wait_s)
        elif agent.journal.durable_seq < agent.journal.log.next_seq:
            await agent.journal.flush()
        end = agent.journal.durable_seq
        lines: list[bytes] = []
        if from_seq < end:
            if tail.events and tail.events[0].seq <= from_seq:
                size = 0
                for event in tail.events:
                    if event.seq < from_seq:
                        continue
                    size += len(event.line)
                    if event.seq >= end or len(lines) >= max_events or (lines and size > max_bytes):
                        break
                    lines.append(event.line)
            else:
                page = await self._store.read_from(stream, from_seq, max_events, max_bytes)
                lines = list(page.lines[: end - from_seq])
        return EventPage(from_seq, tuple(lines), agent.journal.log.next_seq, end, agent.epoch, agent.began)

    async def messages_at(self, stream: Stream, at: int) -> list[Message]:
        """The messages that the surface showed when ``at`` was the next seq."""
        surface, seq = Surface(), 0
        while seq < at:
            page = await self._store.read_from(stream, seq, min(2_000, at - seq))
            if not page.lines:
                break
            for event in read_stored(page.lines, seq, _KNOWN, _PASSED):
                plan = surface.check(event)
                if plan is not None:
                    surface.apply(plan)
                event.unload()
            seq += len(page.lines)
        return derive_messages(surface)


async def _until_durable(agent: LiveAgent, tail: _Tail, seq: int, wait_s: float) -> None:
    """Wait until the event ``seq`` is durable; no writer is hurried for it."""
    try:
        async with asyncio.timeout(wait_s):
            while agent.journal.durable_seq <= seq and not agent.closed:
                if agent.journal.log.next_seq <= seq:
                    tail.grown.clear()
                    await tail.grown.wait()
                else:
                    await asyncio.sleep(_DURABLE_POLL_S)
    except TimeoutError:
        pass
