"""Listing sessions from their documents: newest first, nobody hidden by a damaged one."""

from __future__ import annotations

from typing import Any

from kimi_ray.app import SessionList, summary_of
from kimi_ray.session import new_document
from kimi_ray.store.seam import Document


def document(session_id: str, updated_at: int, **changes: Any) -> Document:
    value = new_document(session_id, workspace_id="w", cwd="/x", now=updated_at, metadata={"a": 1}, tags={"k": "v"})
    return Document(session_id, changes.pop("workspace_id", "w"), 1, {**value, **changes})


def listing(*documents: Document) -> SessionList:
    async def read() -> list[Document]:
        return list(documents)

    return SessionList(read)


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
    assert await sessions.count() == 3 and await sessions.count(archived=None) == 4
    found = await sessions.get("c")
    assert found is not None and (found.title, found.metadata, found.tags) == ("C", {"a": 1}, {"k": "v"})
    assert await sessions.get("nobody") is None


async def test_a_damaged_document_is_a_row_with_an_error() -> None:
    broken = Document("bad", "w", 0, {"error": {"code": "store.corrupt", "message": "m", "retryable": False}})
    strange = document("odd", 5, title=7)
    rows = {row.id: row for row in await listing(document("a", 1), broken, strange).list_recent(archived=None)}
    assert set(rows) == {"a", "bad", "odd"}
    assert rows["bad"].error is not None and rows["bad"].error["code"] == "store.corrupt"
    assert rows["odd"].error is not None and rows["odd"].error["code"] == "session.bad_document"
    assert rows["a"].error is None


def test_keys_of_a_later_version_are_left_out() -> None:
    assert summary_of(document("a", 1, goal="x")).id == "a"
