"""Reading logs of a home for the commands: pages, the newest events, those that come; never a whole log for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.store.open import ReadStore

_PAGE_EVENTS = 2000
_NO_SEQ = 1 << 62


def is_live(home: str, session_id: str) -> bool:
    """Whether a living process holds the claim of a session."""
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.layout import Layout
    from kimi_ray.store.owners import is_held, read_owner

    fs = RealFs()
    layout = Layout(fs, home)
    owner = read_owner(fs, layout.owner_file(session_id))
    return owner is not None and bool(owner.writer) and is_held(fs, f"{layout.writers}/{owner.writer}.lock")


async def next_seq(store: ReadStore, stream: Stream) -> int:
    """The seq after the last stored event; reads the end of the file only."""
    return (await store.read_from(stream, _NO_SEQ, 0)).next_seq


async def lines_from(store: ReadStore, stream: Stream, seq: int, until: int | None = None) -> AsyncIterator[bytes]:
    """Canonical lines from a seq on, up to what is stored now, or to ``until``."""
    while until is None or seq < until:
        limit = _PAGE_EVENTS if until is None else min(_PAGE_EVENTS, until - seq)
        page = await store.read_from(stream, seq, limit)
        for line in page.lines:
            yield line
        seq += len(page.lines)
        if not page.lines or seq >= page.next_seq:
            return


async def newest_lines(
    store: ReadStore, stream: Stream, count: int, end: int, wanted: Callable[[bytes], bool] | None = None
) -> list[bytes]:
    """The last ``count`` lines before ``end``, or the last that are ``wanted``; read from the end, page by page."""
    page = count if wanted is None else _PAGE_EVENTS
    found: list[bytes] = []
    while end > 0 and len(found) < count:
        start = max(0, end - page)
        lines = [line async for line in lines_from(store, stream, start, end)]
        found = [*(lines if wanted is None else filter(wanted, lines)), *found]
        end = start
    return found[len(found) - count :] if len(found) > count else found


async def follow(store: ReadStore, stream: Stream, seq: int, *, every_s: float = 0.2) -> AsyncIterator[bytes]:
    """Lines from a seq on, and those that come, until the caller stops."""
    while True:
        page = await store.read_from(stream, seq, _PAGE_EVENTS)
        for line in page.lines:
            yield line
        seq += len(page.lines)
        if not page.lines:
            await asyncio.sleep(every_s)


async def tree_lines(
    store: ReadStore,
    session_id: str,
    newest: int,
    wanted: Callable[[bytes], bool] | None = None,
    *,
    follow: bool,
    every_s: float = 0.2,
) -> AsyncIterator[tuple[str, bytes]]:
    """The newest events of all agents of a session by time, as (agent id, line), and with ``follow`` those that come,
    of new agents too, until the caller stops; of ``wanted`` ones alone."""
    from kimi_ray.events import parse_event

    places: dict[str, int] = {}
    first: list[tuple[int, str, int, bytes]] = []
    for log in await store.list(session_id):
        if log.header is None:
            continue
        agent_id = log.stream.agent_id
        end = places[agent_id] = await next_seq(store, log.stream)
        for line in await newest_lines(store, log.stream, newest, end, wanted):
            event = parse_event(line)
            first.append((event.time, agent_id, event.seq, line))
    for _, agent_id, _, line in sorted(first)[max(0, len(first) - newest) :]:
        yield agent_id, line
    while follow:
        came: list[tuple[int, str, int, bytes]] = []
        for log in await store.list(session_id):
            if log.header is None:
                continue
            agent_id = log.stream.agent_id
            page = await store.read_from(log.stream, places.get(agent_id, 0), _PAGE_EVENTS)
            places[agent_id] = page.first_seq + len(page.lines)
            came += [
                (parse_event(line).time, agent_id, seq, line) for seq, line in enumerate(page.lines, page.first_seq)
            ]
        for _, agent_id, _, line in sorted(came):
            if wanted is None or wanted(line):
                yield agent_id, line
        if not came:
            await asyncio.sleep(every_s)
