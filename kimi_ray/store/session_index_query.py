"""A question to the index, and its answer from rows in memory: the one rule that SQL and scans both follow."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field

from kimi_ray.settings import Settings
from kimi_ray.store.session_index_rows import ARCHIVED, NOT_ARCHIVED, IndexRow, SessionSummary, bounded, folded

MAX_LIMIT = 100_000


class SessionQuery(Settings):
    """Which sessions. Every filter that is given must hold."""

    workspace_ids: tuple[str, ...] | None = None
    """Sessions of any of these; None is all."""
    archived: bool | None = False
    """Those that are not archived (False), that are (True), or both (None)."""
    child_of: str | None = None
    """Children of this session (``create_child``; a fork is none)."""
    forked_from: str | None = None
    """Forks of this session."""
    fork_group: str | None = None
    """Forks that were made together."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Sessions that have all of these."""
    run_id: str | None = None
    """Sessions of a run."""
    text: str | None = None
    """Part of the title or the last prompt, in any case."""
    since: int | None = None
    """Something happened at or after this time, in epoch milliseconds."""
    before: str | None = None
    """A session id: only newer ones, those next to it."""
    after: str | None = None
    """A session id: only older ones."""
    limit: int = Field(default=20, ge=1, le=MAX_LIMIT)
    """At most so many."""


class SessionPage(Settings):
    """Some sessions, the newest first."""

    items: tuple[SessionSummary, ...] = ()
    next_cursor: str | None = None
    """What to give as ``after`` for the older ones (with ``before``: as ``before`` for the newer ones), or None."""


class IndexStatus(Settings):
    """How the index is."""

    state: str
    """``uninitialized``, ``preparing``, ``ready`` or ``degraded``; when not ``ready``, documents are read instead."""
    generation: int = 0
    """How often it was built; 0: never."""
    reason: str | None = None
    """Why it is degraded."""
    degraded_count: int = 0
    """How often it was, in this process."""
    pending: int = 0
    """Written documents that wait for the index; reads have them already."""
    sessions: int | None = None
    """Sessions in it, when it is ready."""


def matches(row: IndexRow, query: SessionQuery) -> bool:
    """Whether a session is asked for, cursors aside."""
    return (
        (query.workspace_ids is None or row.workspace_id in query.workspace_ids)
        and (query.archived is None or row.archived != (NOT_ARCHIVED if query.archived else ARCHIVED))
        and (query.child_of is None or row.child_of == query.child_of)
        and (query.forked_from is None or row.forked_from == query.forked_from)
        and (query.fork_group is None or row.fork_group == query.fork_group)
        and (query.run_id is None or row.run_id == query.run_id)
        and (query.since is None or row.updated_at >= bounded(query.since))
        and (not query.tags or query.tags.items() <= dict(row.tags).items())
        and (not query.text or folded(query.text) in row.search)
    )


Key = tuple[int, str]


def between(key: Key, newer_than: Key | None, older_than: Key | None) -> bool:
    """Whether a place in the listing lies inside the cursors, both exclusive."""
    return (newer_than is None or key > newer_than) and (older_than is None or key < older_than)


def backwards(query: SessionQuery) -> bool:
    """Whether the page ends at its cursor (``before`` alone) instead of beginning there."""
    return query.before is not None and query.after is None


def cut_page(rows: Iterable[IndexRow], query: SessionQuery) -> tuple[list[IndexRow], str | None]:
    """The page's rows, newest first, out of all candidates; and the cursor that goes on."""
    if backwards(query):
        nearest = heapq.nsmallest(query.limit + 1, rows, key=_key)
        kept = nearest[: query.limit][::-1]
        return kept, kept[0].id if len(nearest) > query.limit else None
    nearest = heapq.nlargest(query.limit + 1, rows, key=_key)
    kept = nearest[: query.limit]
    return kept, kept[-1].id if len(nearest) > query.limit else None


def page_of(rows: Sequence[IndexRow], query: SessionQuery) -> SessionPage:
    """The answer from all rows there are."""
    keys: list[Key | None] = []
    for cursor in (query.before, query.after):
        found = None if cursor is None else next((row.key for row in rows if row.id == cursor), None)
        if cursor is not None and found is None:
            return SessionPage()
        keys.append(found)
    newer_than, older_than = keys
    chosen = (row for row in rows if matches(row, query) and between(row.key, newer_than, older_than))
    kept, cursor = cut_page(chosen, query)
    return SessionPage(items=tuple(row.to_summary() for row in kept), next_cursor=cursor)


def count_of(rows: Iterable[IndexRow], query: SessionQuery) -> int:
    """How many of all rows are asked for; cursors and limit do not count."""
    return sum(matches(row, query) for row in rows)


def _key(row: IndexRow) -> Any:
    return row.key
