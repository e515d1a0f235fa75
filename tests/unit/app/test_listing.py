"""``SessionList`` over a store process: what it asks and what it refuses; summaries of odd documents."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kimi_ray.app import SessionList, SessionQuery, SessionSummary, summary_of
from kimi_ray.app.listing import Listing
from kimi_ray.errors import ConfigError
from kimi_ray.session import new_document
from kimi_ray.store.seam import Document
from kimi_ray.store.session_index_query import SessionPage, count_of, page_of
from kimi_ray.store.session_index_rows import row_of


def document(session_id: str, updated_at: int, **changes: Any) -> Document:
    value = new_document(session_id, workspace_id="w", cwd="/x", now=updated_at, metadata={"a": 1}, tags={"k": "v"})
    return Document(session_id, changes.pop("workspace_id", "w"), 1, {**value, **changes})


class Documents:
    """A store that reads its documents each time."""

    def __init__(self, *documents: Document) -> None:
        self._rows = [row_of(one) for one in documents]
        self.aliases: list[bool] = []

    async def query_sessions(self, query: SessionQuery, *, aliases: bool = False) -> SessionPage:
        self.aliases.append(aliases)
        return page_of(self._rows, query)

    async def count_sessions(self, query: SessionQuery, *, aliases: bool = False) -> int:
        self.aliases.append(aliases)
        return count_of(self._rows, query)

    async def get_session_summary(self, session_id: str) -> SessionSummary | None:
        return next((row.to_summary() for row in self._rows if row.id == session_id), None)


def listing(*documents: Document) -> SessionList:
    return SessionList(cast("Listing", Documents(*documents)))


async def test_newest_first_filtered_and_bounded() -> None:
    sessions = listing(
        document("a", 10),
        document("b", 30, archived=True),
        document("c", 20, title="C", last_prompt="p", last_turn_reason="failed"),
        document("d", 20, workspace_id="other"),
    )
    assert [row.id for row in await sessions.list_recent()] == ["d", "c", "a"]
    assert [row.id for row in await sessions.list_recent(2)] == ["d", "c"]
    assert [row.id for row in await sessions.list_recent(archived=None)] == ["b", "d", "c", "a"]
    assert [row.id for row in await sessions.list_recent(archived=True)] == ["b"]
    assert [row.id for row in await sessions.list_recent(workspace_id="other")] == ["d"]
    assert [row.id for row in await sessions.list_recent(workspace_ids=["other", "w"], limit=2)] == ["d", "c"]
    assert [row.id for row in await sessions.list_recent(workspace_id="w", workspace_ids=["other"])] == []
    assert [row.id for row in await sessions.list_recent(text="c")] == ["c"]
    assert [row.id for row in await sessions.list_recent(since=20, tags={"k": "v"})] == ["d", "c"]
    assert await sessions.list_recent(tags={"k": "w"}) == []
    assert await sessions.count() == 3 and await sessions.count(archived=None) == 4
    found = await sessions.get("c")
    assert found is not None and (found.title, found.metadata, found.tags) == ("C", {"a": 1}, {"k": "v"})
    assert await sessions.get("nobody") is None


async def test_pages_go_on_in_both_directions() -> None:
    sessions = listing(*(document(f"s{number}", number // 2) for number in range(7)))
    first = await sessions.page(3)
    assert ([one.id for one in first.items], first.next_cursor) == (["s6", "s5", "s4"], "s4")
    second = await sessions.page(4, after="s4")
    assert ([one.id for one in second.items], second.next_cursor) == (["s3", "s2", "s1", "s0"], None)
    newer = await sessions.page(2, before="s2")
    assert ([one.id for one in newer.items], newer.next_cursor) == (["s4", "s3"], "s4")
    assert [one.id for one in await sessions.list_recent(before="s1", after="s5")] == ["s4", "s3", "s2"]
    assert (await sessions.page(after="nobody")) == SessionPage()


async def test_a_workspace_stands_for_its_directory_and_ids_for_themselves() -> None:
    documents = Documents()
    sessions = SessionList(cast("Listing", documents))
    await sessions.list_recent(workspace_id="w")
    await sessions.list_recent(workspace_ids=["w"])
    await sessions.count()
    assert documents.aliases == [True, False, False]


@pytest.mark.parametrize(
    ("key", "filters"),
    [("limit", {"limit": 0}), ("since", {"since": "yesterday"}), ("tags.k", {"tags": {"k": 1}}), ("x", {"x": 1})],
)
async def test_bad_arguments_are_named(key: str, filters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        await listing().page(**filters)
    assert caught.value.code == "request.invalid" and caught.value.details == {"key": key} and caught.value.hint


async def test_a_damaged_document_is_a_row_with_an_error() -> None:
    broken = Document("bad", "w", 0, {"error": {"code": "store.corrupt", "message": "m", "retryable": False}})
    strange = document("odd", 5, title=7)
    for archived in (None, True, False):
        found = await listing(document("a", 1), broken, strange).list_recent(archived=archived)
        rows = {row.id: row for row in found}
        assert set(rows) == {"a", "bad", "odd"} - ({"a"} if archived else set[str]())
        assert rows["bad"].error is not None and rows["bad"].error["code"] == "store.corrupt"
        assert rows["odd"].error is not None and rows["odd"].error["code"] == "session.bad_document"


def test_lineage_in_old_and_new_documents() -> None:
    assert summary_of(document("a", 1, goal="x")).id == "a"
    assert summary_of(document("a", 1, forked_from="s")).forked_from == "s"
    source = {"session_id": "s", "agent_id": "main", "at": "3"}
    fork = summary_of(document("a", 1, forked_from=source, fork_group="g", fork_index=2, archived_at=5))
    assert (fork.forked_from, fork.fork_group, fork.fork_index, fork.archived_at) == ("s", "g", 2, 5)
    child = {"parent_session_id": "p", "child_session_kind": "child"}
    assert summary_of(document("a", 1, custom=child)).parent_session_id == "p"
    assert row_of(document("a", 1, custom=child)).child_of == "p"
    for change in ({"child_session_kind": "fork"}, {"child_session_kind": None}, {"parent_session_id": 1}):
        not_child = {**child, **change}
        assert row_of(document("a", 1, custom=not_child)).child_of is None
    old = document("a", 1, agents={"main": {}, "agent-1": {}})
    del old.value["agent_count"]
    assert summary_of(old).agent_count == 2


def test_a_summary_survives_its_row() -> None:
    for one in (document("a", 1, title="T", archived=True), document("b", 2**80), document("c", -1)):
        assert row_of(one).to_summary() == summary_of(one)
