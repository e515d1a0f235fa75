"""Reading a log from a driver, event by event, wherever its agent lives, and on when it moves. Brings nobody to life.

Only durable events are given out: what a follower has seen no crash of a process takes back, and the next writer goes
on behind it. So no event comes twice, and none is missed, whatever happens to the hosts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from kimi_ray.errors import KimiRayError, LogError
from kimi_ray.events import SessionEvent, parse_event
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import EventPage
from kimi_ray.store.seam import Page, Stream

COLD_PAUSE_S = 1.0
"""How often a log that nobody writes is looked at by who follows it, seconds."""

_PAGE_EVENTS = 1000
_PAGE_BYTES = 4 << 20
_FOLLOW_S = 20.0
_MARGIN_S = 15.0
_PAUSE_S = 0.02
_BUSY = ("infra.pending_limit", "infra.object_store_full", "store.busy")
_NOT_HERE = ("session.not_live", "agent.not_found")


class SessionPlace:
    """Where a session lives, as the registry said it lately: many agents are looked for at once."""

    def __init__(self, courier: Courier, session_id: str) -> None:
        self._courier = courier
        self._session_id = session_id
        self._asked_at: float | None = None
        self._name: str | None = None
        self._asking = asyncio.Lock()

    async def name(self) -> str | None:
        """The session's host, or None when it is not live."""
        async with self._asking:
            now = time.monotonic()
            if self._asked_at is None or now - self._asked_at > COLD_PAUSE_S / 2:
                self._name = await self._courier.registry.find_session(self._session_id)
                self._asked_at = now
            return self._name


async def patiently(ask: Callable[[], Awaitable[Any]], within_s: float | None = None) -> Any:
    """What ``ask`` answers; while its callee has no room for one more call it waits and asks again.

    Args:
        ask: Makes the call.
        within_s: How long that may go on, seconds; None for as long as somebody follows.

    Raises:
        KimiRayError: what was answered, or that there still is no room.
    """
    until = None if within_s is None else time.monotonic() + within_s
    pause_s = _PAUSE_S
    while True:
        try:
            return await ask()
        except KimiRayError as error:
            if error.code not in _BUSY or (until is not None and time.monotonic() + pause_s > until):
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, COLD_PAUSE_S)


async def host_of(courier: Courier, stream: Stream, place: SessionPlace) -> str | None:
    """The host on which an agent lives now, or None; its session is not brought back for the question."""
    name = await place.name()
    if name is None:
        return None
    try:
        return await courier.cluster.peer(name).call(
            "find_agent", stream.session_id, stream.agent_id, timeout_s=_MARGIN_S, group="control"
        )
    except KimiRayError as error:
        if not is_lost(error.code) and error.code not in _NOT_HERE:
            raise
        return None


async def follow_log(
    courier: Courier,
    stream: Stream,
    from_seq: int,
    *,
    follow: bool,
    place: SessionPlace | None = None,
    cold_pause_s: Callable[[], float] = lambda: COLD_PAUSE_S,
) -> AsyncGenerator[SessionEvent]:
    """The events of a log from a seq on; with ``follow`` also those to come, until the loop is left.

    Raises:
        LogError: ``log.rewound`` {seq, end, epoch}: events that were given out are not in the log any more (a power cut
            without ``durability="disk"``); go on from ``end``.
        StoreError: ``store.not_found``, ``store.deleted`` when the log is not there, or not any more.
    """
    at = place or SessionPlace(courier, stream.session_id)
    within_s = None if follow else _FOLLOW_S
    seq, epoch, pause_s = from_seq, -1, _PAUSE_S
    host: str | None = await patiently(lambda: host_of(courier, stream, at), within_s)
    while True:
        asked_at, wait_s = time.monotonic(), _FOLLOW_S if follow else 0.0
        page: EventPage | None = None
        if host is not None:
            page = await patiently(partial(_live_page, courier, host, stream, seq, wait_s), within_s)
        if page is None or page.epoch is None:
            # Not there any more, or cold: the store has it all.
            host = None
            stored: Page = await patiently(
                partial(courier.store.read_from, stream, seq, _PAGE_EVENTS, _PAGE_BYTES), within_s
            )
            page = EventPage(seq, stored.lines, stored.next_seq, stored.next_seq, None)
        began = page.began if page.epoch is not None and epoch not in (-1, page.epoch) else page.durable_seq
        if seq > from_seq and began < seq:
            raise LogError(
                f"{stream} lost events: {seq} were seen, and its next writer began at {began}",
                code="log.rewound",
                hint=f"go on from {began}",
                details={"stream": str(stream), "seq": seq, "end": began, "epoch": page.epoch},
            )
        epoch = page.epoch if page.epoch is not None else epoch
        for line in page.lines:
            yield parse_event(line, at=seq)
            seq += 1
        if page.lines and seq < page.durable_seq:
            continue
        if not follow:
            return
        was_there = host is not None
        if not was_there:
            host = await patiently(lambda: host_of(courier, stream, at), within_s)
        if host is None:
            await asyncio.sleep(cold_pause_s())
        elif page.lines or (was_there and time.monotonic() - asked_at >= wait_s / 2):
            pause_s = _PAUSE_S
        else:
            # It is being closed there, or its session does not know yet that it is gone. Nothing is missed by the
            # pause: the next page begins at the same seq.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, COLD_PAUSE_S)


async def _live_page(courier: Courier, host: str, stream: Stream, seq: int, wait_s: float) -> EventPage | None:
    """A page from the host of the agent; None when it cannot be reached."""
    try:
        return await courier.cluster.peer(host).call(
            "read_events", stream, seq, _PAGE_EVENTS, _PAGE_BYTES, wait_s, timeout_s=wait_s + _MARGIN_S, group="wait"
        )
    except KimiRayError as error:
        if not is_lost(error.code) and error.code != "store.fenced":
            raise
        return None
