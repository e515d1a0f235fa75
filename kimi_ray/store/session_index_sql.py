"""The index's tables, and questions to them. One row a session; every read is one statement or a few.

Times are found by ``by_time``; the set of workspaces, children, forks and runs by their own indexes. Text and tags are
looked at row by row, in the order of the listing, until the page is full.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from itertools import islice
from sqlite3 import Connection
from typing import Any

from kimi_ray.store.session_index_query import Key, SessionQuery, backwards
from kimi_ray.store.session_index_rows import ARCHIVED, NOT_ARCHIVED, IndexRow, bounded, folded

SCHEMA = 1
"""Number of these tables: an index with another is made anew."""

TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, workspace_id TEXT NOT NULL, revision INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    archived INTEGER NOT NULL, cwd TEXT, child_of TEXT, forked_from TEXT, fork_group TEXT, run_id TEXT,
    tags TEXT NOT NULL, search TEXT NOT NULL, summary BLOB NOT NULL, digest BLOB NOT NULL, stamp INTEGER NOT NULL
);
CREATE INDEX by_time ON sessions (updated_at, id, archived);
CREATE INDEX by_workspace ON sessions (workspace_id, updated_at, id, archived);
CREATE INDEX by_archived ON sessions (archived, workspace_id);
CREATE INDEX by_stamp ON sessions (id, stamp, digest);
CREATE INDEX by_child ON sessions (child_of, updated_at, id) WHERE child_of IS NOT NULL;
CREATE INDEX by_source ON sessions (forked_from, updated_at, id) WHERE forked_from IS NOT NULL;
CREATE INDEX by_group ON sessions (fork_group, updated_at, id) WHERE fork_group IS NOT NULL;
CREATE INDEX by_run ON sessions (run_id, updated_at, id) WHERE run_id IS NOT NULL;
CREATE TABLE gone (id TEXT PRIMARY KEY, stamp INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX by_place ON sessions (workspace_id, cwd) WHERE cwd IS NOT NULL;
"""

_COLUMNS = (
    "id, workspace_id, revision, updated_at, archived, cwd, child_of, forked_from, fork_group, run_id, tags, search,"
    " summary"
)
_SINGLE = ("child_of", "forked_from", "fork_group", "run_id")
_MERGED = 16
"""Up to so many workspaces are read one by one and merged; more are picked out of all."""

_PLACES = """
WITH RECURSIVE pairs (one, cwd) AS (
    SELECT * FROM (SELECT workspace_id, cwd FROM sessions WHERE cwd IS NOT NULL ORDER BY workspace_id, cwd LIMIT 1)
    UNION ALL
    SELECT next.workspace_id, next.cwd FROM pairs JOIN sessions AS next ON next.rowid = COALESCE(
        (SELECT rowid FROM sessions WHERE workspace_id = pairs.one AND cwd > pairs.cwd
            ORDER BY workspace_id, cwd LIMIT 1),
        (SELECT rowid FROM sessions WHERE workspace_id > pairs.one AND cwd IS NOT NULL
            ORDER BY workspace_id, cwd LIMIT 1)
    )
) SELECT one, cwd FROM pairs
"""
"""Jumps from pair to pair instead of reading every session."""

UPSERT = (
    f"INSERT INTO sessions ({_COLUMNS}, digest, stamp) VALUES ({', '.join('?' * 15)}) ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in [*_COLUMNS.split(", ")[1:], "digest", "stamp"])
)
UPSERT_NEWER = f"{UPSERT} WHERE excluded.revision >= sessions.revision"
"""As ``UPSERT``, unless what is there is newer."""


def values_of(row: IndexRow, stamp: int) -> tuple[Any, ...]:
    """The parameters of ``UPSERT``."""
    return (
        row.id, row.workspace_id, row.revision, row.updated_at, row.archived, row.cwd, row.child_of, row.forked_from,
        row.fork_group, row.run_id, json.dumps(row.tags), row.search, row.summary, row.digest, stamp,
    )  # fmt: skip


def _row(found: tuple[Any, ...]) -> IndexRow:
    tags: tuple[tuple[str, str], ...] = tuple((key, value) for key, value in json.loads(found[10]))
    row = IndexRow(*found[:10], tags=tags, search=found[11], summary=found[12])
    if row.digest != found[13]:
        raise ValueError(f"the row of {row.id} does not verify")
    return row


def read_row(connection: Connection, session_id: str) -> IndexRow | None:
    """The row of a session, or None."""
    found = connection.execute(
        f"SELECT {_COLUMNS}, digest FROM sessions WHERE id = ?", (_bindable(session_id),)
    ).fetchone()
    return None if found is None else _row(found)


def read_rows(
    connection: Connection, query: SessionQuery, newer_than: Key | None, older_than: Key | None, limit: int
) -> list[IndexRow]:
    """The first rows that are asked for: newest first, or with ``before`` alone the oldest first."""
    way = "ASC" if backwards(query) else "DESC"
    parts: list[list[IndexRow]] = []
    ids = query.workspace_ids
    for group in [ids] if ids is None or len(ids) > _MERGED else [(one,) for one in dict.fromkeys(ids)]:
        where, values = _conditions(query, group)
        for sign, key in ((">", newer_than), ("<", older_than)):
            if key is not None:
                where.append(f"(updated_at, id) {sign} (?, ?)")
                values += key
        statement = (
            f"SELECT {_COLUMNS}, digest FROM sessions WHERE {' AND '.join(where) or '1'}"
            f" ORDER BY updated_at {way}, id {way} LIMIT ?"
        )
        parts.append([_row(found) for found in connection.execute(statement, (*values, limit))])
    merged = heapq.merge(*parts, key=lambda row: row.key, reverse=way == "DESC")
    return list(islice(merged, limit))


def count_rows(connection: Connection, query: SessionQuery, among: Iterable[str] | None = None) -> int:
    """How many rows are asked for; of all, or ``among`` some ids."""
    where, values = _conditions(query, query.workspace_ids)
    if among is not None:
        where.append("id IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(list(among)))
    statement = f"SELECT COUNT(*) FROM sessions WHERE {' AND '.join(where) or '1'}"
    return int(connection.execute(statement, values).fetchone()[0])


def read_ids_ending(connection: Connection, end: str, limit: int) -> list[str]:
    """Session ids that end in a text, in any case."""
    end = _bindable(end).lower()
    rows = connection.execute(
        "SELECT id FROM sessions WHERE substr(lower(id), -length(?1)) = ?1 ORDER BY id LIMIT ?2", (end, limit)
    )
    return [str(found) for (found,) in rows]


def read_places(connection: Connection) -> list[tuple[str, str]]:
    """``(workspace id, directory)`` of sessions, each pair once."""
    return [(str(one), str(cwd)) for one, cwd in connection.execute(_PLACES)]


def _conditions(query: SessionQuery, workspace_ids: tuple[str, ...] | None) -> tuple[list[str], list[Any]]:
    where: list[str] = []
    values: list[Any] = []
    if workspace_ids is not None and len(workspace_ids) == 1:
        where.append("workspace_id = ?")
        values.append(_bindable(workspace_ids[0]))
    elif workspace_ids is not None:
        where.append("workspace_id IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(workspace_ids))
    if query.archived is not None:
        where.append("archived != ?")
        values.append(NOT_ARCHIVED if query.archived else ARCHIVED)
    for name in _SINGLE:
        wanted = getattr(query, name)
        if wanted is not None:
            where.append(f"{name} = ?")
            values.append(_bindable(wanted))
    if query.since is not None:
        where.append("updated_at >= ?")
        values.append(bounded(query.since))
    if query.text:
        where.append("instr(search, ?) > 0")
        values.append(folded(query.text))
    for key, value in query.tags.items():
        where.append(
            "EXISTS (SELECT 1 FROM json_each(sessions.tags) WHERE json_extract(value, '$[0]') = ?"
            " AND json_extract(value, '$[1]') = ?)"
        )
        values += [_bindable(key), _bindable(value)]
    return where, values


def _bindable(text: str) -> str:
    return text.encode(errors="replace").decode()
