"""Pages, cursors and filters: SQL, the scan, and what waits in the mirror give one answer."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_ray.store.seam import Document
from kimi_ray.store.session_index_answers import count, find, page
from kimi_ray.store.session_index_file import IndexFile
from kimi_ray.store.session_index_query import SessionQuery, count_of, page_of
from kimi_ray.store.session_index_rows import IndexRow, row_of
from tests.unit.store_index.index_home import opened

IDS = [f"session_{letter}" for letter in "ABCDefghIJ"]
WORDS = ["alpha", "Straße", "İx", "a%b_c", "", "\x00nul", "\ud800"]


def document(session_id: str, at: int, revision: int = 1, workspace_id: str = "w", **changes: Any) -> Document:
    value: dict[str, Any] = {"created_at": 1, "updated_at": at, "archived": False, "custom": {}, "tags": {}, **changes}
    return Document(session_id, workspace_id, revision, value)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    custom: dict[str, Any] = {}
    if draw(st.booleans()):
        custom["parent_session_id"] = draw(st.sampled_from(IDS))
    if draw(st.booleans()):
        custom["child_session_kind"] = draw(st.sampled_from(["child", "other"]))
    changes: dict[str, Any] = {"custom": custom, "archived": draw(st.booleans())}
    changes["title"] = draw(st.sampled_from([*WORDS[:6], None, 7]))  # 7: no title, so its row is an error
    changes["last_prompt"] = draw(st.sampled_from([*WORDS[:6], None]))
    changes["tags"] = draw(st.dictionaries(st.sampled_from(["k", "'\"]"]), st.sampled_from(["v", "ü"]), max_size=2))
    if draw(st.booleans()):
        changes["forked_from"] = draw(st.sampled_from([IDS[0], {"session_id": IDS[0], "agent_id": "main"}]))
        changes["fork_group"] = draw(st.sampled_from(["g", "h"]))
    if draw(st.booleans()):
        custom["run_id"] = draw(st.sampled_from(["run_1", "run_2"]))
    at = draw(st.sampled_from([1, 1, 1, 2, 3, 2**80]))
    return document(draw(st.sampled_from(IDS)), at, workspace_id=draw(st.sampled_from("uvw")), **changes)


queries = st.builds(
    SessionQuery,
    workspace_ids=st.none() | st.lists(st.sampled_from("uvwx"), max_size=3).map(tuple) | st.just(tuple("uvw" * 8)),
    archived=st.sampled_from([None, True, False]),
    child_of=st.none() | st.none() | st.sampled_from(IDS),
    forked_from=st.none() | st.none() | st.just(IDS[0]),
    fork_group=st.none() | st.none() | st.sampled_from("gh"),
    tags=st.just(dict[str, str]())
    | st.dictionaries(st.sampled_from(["k", "'\"]"]), st.sampled_from(["v", "ü"]), max_size=2),
    run_id=st.none() | st.none() | st.sampled_from(["run_1", "run_2"]),
    text=st.none() | st.none() | st.sampled_from([*WORDS, "STRASSE", "ALPHA", "i\u0307x", "l"]),
    since=st.none() | st.none() | st.sampled_from([0, 2, 3, 2**70]),
    before=st.none() | st.none() | st.sampled_from([*IDS, "nobody"]),
    after=st.none() | st.none() | st.sampled_from([*IDS, "nobody"]),
    limit=st.sampled_from([1, 2, 3, 100]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(documents(), max_size=12),
    st.lists(documents(), max_size=4),
    st.sets(st.sampled_from(IDS), max_size=2),
    st.lists(queries, min_size=1, max_size=6),
)
def test_sql_and_memory_agree(
    tmp_path_factory: Any, stored: list[Document], waiting: list[Document], removed: set[str], asked: list[SessionQuery]
) -> None:
    file = IndexFile(str(tmp_path_factory.mktemp("index")), "h")
    file.open()
    try:
        inside = {one.session_id: row_of(one) for one in stored}
        pending: dict[str, IndexRow | None] = {one.session_id: row_of(one) for one in waiting}
        pending |= dict.fromkeys(removed)
        file.record(inside)
        truth = [row for row in {**inside, **pending}.values() if row is not None]
        for query in asked:
            with file.read() as connection:
                assert page(connection, query, pending) == page_of(truth, query), query
                assert count(connection, query, pending) == count_of(truth, query), query
        for one in IDS:
            with file.read() as connection:
                found = find(connection, one, pending)
            assert found == next((row.to_summary() for row in truth if row.id == one), None)
    finally:
        file.close()


def independent(rows: list[IndexRow], query: SessionQuery) -> list[str]:
    """Pages by walking a sorted list, written without the rules of the index."""
    order = sorted(rows, key=lambda row: (row.updated_at, row.id))[::-1]
    ids = [row.id for row in order]
    if any(one is not None and one not in ids for one in (query.before, query.after)):
        return []
    first = 0 if query.after is None else ids.index(query.after) + 1
    last = len(ids) if query.before is None else ids.index(query.before)
    window = ids[first:last]
    return window[-query.limit :] if query.after is None and query.before is not None else window[: query.limit]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=10),
    st.none() | st.sampled_from(IDS),
    st.none() | st.sampled_from(IDS),
    st.integers(1, 12),
)
def test_cursors_by_a_second_rule(times: list[int], before: str | None, after: str | None, limit: int) -> None:
    rows = [row_of(document(one, at)) for one, at in zip(IDS, times, strict=False)]
    query = SessionQuery(before=before, after=after, limit=limit)
    assert [one.id for one in page_of(rows, query).items] == independent(rows, query)


async def test_a_thousand_equal_times_have_neither_gaps_nor_repeats(tmp_path: Path) -> None:
    async with opened(tmp_path) as home:
        await home.write("s-first", at=5)
        index = await home.ready()
        for number in range(1000):  # some of them are still in the mirror while the first pages are read
            index.record(document(f"s{number:04}", 5, workspace_id="uvw"[number % 3]))
        for size in (7, 100, 1000):
            seen: list[str] = []
            cursor: str | None = None
            while True:
                found = await home.service.query_sessions(SessionQuery(limit=size, after=cursor))
                seen += [one.id for one in found.items]
                cursor = found.next_cursor
                if cursor is None:
                    break
                assert len(found.items) == size
            assert seen == ["s-first", *(f"s{number:04}" for number in range(1000))][::-1]
        backwards: list[str] = []
        cursor = "s-first"
        while cursor is not None:
            found = await home.service.query_sessions(SessionQuery(limit=64, before=cursor))
            backwards += [one.id for one in found.items][::-1]
            cursor = found.next_cursor
        assert backwards == seen[:-1][::-1]
        three = await home.service.query_sessions(SessionQuery(limit=10, workspace_ids=("u", "v", "w")))
        assert [one.id for one in three.items] == seen[:10]  # the limit counts after the merge
        await home.ready()  # all are in the file now; their documents never were


def test_questions_use_their_indexes(tmp_path: Path) -> None:
    file = IndexFile(str(tmp_path), "h")
    file.open()
    plans: list[str] = []
    with file.read() as connection:
        for query in (
            SessionQuery(), SessionQuery(workspace_ids=("w",)), SessionQuery(child_of="x", archived=None),
            SessionQuery(fork_group="g"), SessionQuery(run_id="r"), SessionQuery(forked_from="f"),
        ):  # fmt: skip
            statements: list[str] = []
            connection.set_trace_callback(statements.append)
            page(connection, query, {})
            connection.set_trace_callback(None)
            rows = connection.execute(f"EXPLAIN QUERY PLAN {statements[-1]}").fetchall()
            plans.append(" / ".join(str(row[3]) for row in rows))
    file.close()
    assert all("TEMP B-TREE" not in plan for plan in plans), plans
    for plan, name in zip(plans, ("time", "workspace", "child", "group", "run", "source"), strict=True):
        assert f"by_{name}" in plan, plans


def test_full_disk(tmp_path: Path) -> None:
    file = IndexFile(str(tmp_path), "h")
    file.open()
    with file.write() as (connection, _):
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    rows = {f"s{number}": row_of(document(f"s{number}", number, title="x" * 900)) for number in range(200)}
    try:
        file.record(rows)
    except sqlite3.OperationalError as error:
        assert "full" in str(error)
    else:
        raise AssertionError("it fitted")
    with file.read() as connection:
        assert count(connection, SessionQuery(archived=None), {}) == 0
    file.close()
