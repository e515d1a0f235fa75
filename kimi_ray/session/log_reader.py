"""Reading whole logs for a plan or a comparison: the little that is asked of a store, live or cold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from kimi_ray.errors import StoreError, error_from_data
from kimi_ray.events import LogHeader, parse_header
from kimi_ray.log.slicing import LogScanner
from kimi_ray.session.refusals import no_agent, no_session
from kimi_ray.store.seam import ListedLog, Page, Stream

PAGE_EVENTS = 8_000
PAGE_BYTES = 4 << 20


class LogReader(Protocol):
    """Pages of a log, and a session's logs. The store's calls satisfy it; ``ColdReader`` is for an open home."""

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``Store.read_from``."""
        ...

    async def list_logs(self, session_id: str) -> list[ListedLog]:
        """See ``Store.list_logs``, of one session."""
        ...


class _ReadStore(Protocol):
    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page: ...

    async def list(self, session_id: str | None = None) -> list[ListedLog]: ...


class ColdReader:
    """A home opened by ``open_store`` as a ``LogReader``."""

    def __init__(self, store: _ReadStore) -> None:
        self._store = store

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``LogReader``."""
        return await self._store.read_from(stream, seq, limit, max_bytes)

    async def list_logs(self, session_id: str) -> list[ListedLog]:
        """See ``LogReader``."""
        return await self._store.list(session_id)


def header_of(logs: Mapping[str, ListedLog], stream: Stream) -> LogHeader:
    """The header of a log among those that its session has, by agent.

    Raises:
        SessionError: ``session.not_found`` when it has none at all; AgentError: ``agent.not_found``; KimiRayError: why
            the header cannot be read.
    """
    if not logs:
        raise no_session(stream.session_id)
    log = logs.get(stream.agent_id)
    if log is None:
        raise no_agent(stream)
    if log.header is None:
        unknown = StoreError(f"the log of {stream} cannot be read", code="store.corrupt")
        raise unknown if log.error is None else error_from_data(log.error)
    return parse_header(log.header)


async def pages(reader: LogReader, stream: Stream, until: int | None = None) -> AsyncGenerator[tuple[bytes, ...]]:
    """The lines of a log from its first one, up to what was stored when the reading began, or to ``until``.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``.
    """
    seq, end = 0, until
    while end is None or seq < end:
        page = await reader.read_from(
            stream, seq, PAGE_EVENTS if end is None else min(PAGE_EVENTS, end - seq), PAGE_BYTES
        )
        end = page.next_seq if end is None else min(end, page.next_seq)
        if not page.lines:
            return
        yield page.lines[: end - seq]
        seq += len(page.lines)


async def scan(reader: LogReader, stream: Stream, scanner: LogScanner) -> LogScanner:
    """Feed a log to a scanner until it knows its slice, or the log ends.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``; LogError: ``log.*``.
    """
    until = scanner.where.number if scanner.where.kind == "seq" else None
    lines = pages(reader, stream, until)
    try:
        async for page in lines:
            if scanner.feed(page):
                break
            await asyncio.sleep(0)
    finally:
        await lines.aclose()
    scanner.finish()
    return scanner
