"""Projections of stored logs: only what a checkpoint has not seen is read; one that is stale costs a whole read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent
from kimi_ray.log.projection_units import TodosProjection, ToolsProjection, UsageProjection
from kimi_ray.log.projections import Projection, Projections
from kimi_ray.session.log_reader import PAGE_BYTES, PAGE_EVENTS, LogReader
from kimi_ray.session.prompt_text import last_prompt, title_from_prompt
from kimi_ray.store.seam import Stream


@dataclass(frozen=True, slots=True)
class TitleProjection:
    """The title that the first prompt with words suggests, redacted as in a session's document; None until there is."""

    key: str = "title"
    version: int = 1
    types: frozenset[str] = frozenset({"prompt/submitted"})

    def start(self) -> None:
        """See ``Projection``."""

    def apply(self, state: str | None, event: SessionEvent) -> str | None:
        """See ``Projection``."""
        content = event.data["content"]
        if state is not None or not isinstance(content, list | tuple):
            return state
        return title_from_prompt(last_prompt(content))  # pyright: ignore[reportUnknownArgumentType]

    def value(self, state: str | None) -> str | None:
        """See ``Projection``."""
        return state


STANDARD_PROJECTIONS: tuple[Projection, ...] = (
    UsageProjection(),
    TodosProjection(),
    TitleProjection(),
    ToolsProjection(),
)
"""Usage, todos, title, tool statistics."""


async def project(
    reader: LogReader,
    stream: Stream,
    units: Iterable[Projection] = STANDARD_PROJECTIONS,
    rows: Mapping[str, Any] | None = None,
) -> Projections:
    """Fold a log as far as it is stored now.

    Args:
        reader: The store, or ``ColdReader`` of an open home.
        stream: The log.
        units: What to fold.
        rows: An earlier ``checkpoint()`` to go on from. It is a cache: one that cannot be used is passed over.

    Returns:
        The projections at the end of the log: ``snapshot()`` for the values, ``checkpoint()`` to keep.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``; LogError: ``log.*``.
    """
    known = tuple(units)
    try:
        return await _fold(reader, stream, Projections(known, rows))
    except LogError as error:
        if error.code != "log.stale_checkpoint":
            raise
        return await _fold(reader, stream, Projections(known))


class AgentProjections:
    """Projections over the log of a living agent, for the services of a Feature. A service of the Agent scope.

    Args:
        journal: The agent's.
        reader: The store.
        stream: The agent's log.
    """

    def __init__(self, journal: Journal, reader: LogReader, stream: Stream) -> None:
        self._journal = journal
        self._reader = reader
        self._stream = stream

    async def follow(self, *units: Projection, rows: Mapping[str, Any] | None = None) -> Projections:
        """Fold all that the log has, and every event that comes from here on: ``snapshot()`` is always of now.

        Keep a ``checkpoint()`` only once a flush of the journal behind it has returned.

        Args:
            units: What to fold.
            rows: An earlier ``checkpoint()`` to go on from, as for ``project``.

        Raises:
            StoreError: The log cannot be flushed or read; LogError: ``log.*``.
        """
        log = self._journal.log
        fresh: list[SessionEvent] = []
        stop = log.observe(fresh.append)
        try:
            await self._journal.flush()
            found = await project(self._reader, self._stream, units, rows)
            for event in fresh:
                if event.seq >= found.next_seq:
                    found.apply(event)
            found.follow(log)
        finally:
            stop()
        return found


async def _fold(reader: LogReader, stream: Stream, found: Projections) -> Projections:
    end: int | None = None
    while end is None or found.next_seq < end:
        page = await reader.read_from(stream, found.next_seq, PAGE_EVENTS, PAGE_BYTES)
        end = page.next_seq if end is None else end
        if not page.lines:
            break
        found.feed(page.lines[: end - found.next_seq])
    found.snapshot()  # says that the log has lost its end, if it has
    return found
