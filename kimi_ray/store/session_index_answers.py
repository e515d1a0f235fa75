"""Answers from the index's tables, with what is still on its way into them folded in."""

from __future__ import annotations

from sqlite3 import Connection

from kimi_ray.store.session_index_mirror import Changes
from kimi_ray.store.session_index_query import Key, SessionPage, SessionQuery, between, cut_page, matches
from kimi_ray.store.session_index_rows import IndexRow, SessionSummary
from kimi_ray.store.session_index_sql import count_rows, read_row, read_rows


def page(connection: Connection, query: SessionQuery, pending: Changes) -> SessionPage:
    """The sessions that are asked for; those of ``pending`` as they are there."""
    keys: list[Key | None] = []
    for cursor in (query.before, query.after):
        row = None if cursor is None else _find(connection, cursor, pending)
        if cursor is not None and row is None:
            return SessionPage()
        keys.append(None if row is None else row.key)
    newer_than, older_than = keys
    found = read_rows(connection, query, newer_than, older_than, query.limit + 1 + len(pending))
    rows = [row for row in found if row.id not in pending]
    rows += [
        row
        for row in pending.values()
        if row is not None and matches(row, query) and between(row.key, newer_than, older_than)
    ]
    kept, cursor = cut_page(rows, query)
    return SessionPage(items=tuple(row.to_summary() for row in kept), next_cursor=cursor)


def count(connection: Connection, query: SessionQuery, pending: Changes) -> int:
    """How many sessions are asked for, cursors and limit aside."""
    known = count_rows(connection, query)
    if not pending:
        return known
    waiting = sum(row is not None and matches(row, query) for row in pending.values())
    return known - count_rows(connection, query, among=pending) + waiting


def find(connection: Connection, session_id: str, pending: Changes) -> SessionSummary | None:
    """One session, or None."""
    row = _find(connection, session_id, pending)
    return None if row is None else row.to_summary()


def _find(connection: Connection, session_id: str, pending: Changes) -> IndexRow | None:
    return pending[session_id] if session_id in pending else read_row(connection, session_id)
