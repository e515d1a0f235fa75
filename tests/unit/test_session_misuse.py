"""What callers say of sessions and forks that cannot be: refused by name, before anything happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.forks import fork_spec
from kimi_ray.session import checked_metadata, checked_tags, new_document
from kimi_ray.session.document_value import MAX_METADATA_BYTES, with_patch
from kimi_ray.session.fork_point import parse_fork_point
from kimi_ray.session_lifecycle import checked_id
from tests.unit.runtime_fixtures import running
from tests.unit.test_runtime_fork_faults import Accident

STRANGE: list[Any] = [0, -1, True, 1.5, b"x", object(), [], (), {}, "a/b", "", "a\n", "\ud800", "ü", "x" * 129]


def named(value: Any) -> str:
    """The same in each process that shares the tests, so without an address."""
    return "object()" if type(value) is object else ascii(value)


def told(error: KimiRayError) -> None:
    """An error can be printed and written down whatever it is about."""
    json.dumps(error.to_data()).encode()
    str(error).encode()


@pytest.mark.parametrize("strange", [*STRANGE, None], ids=named)
def test_what_is_no_id_is_a_bad_id(strange: Any) -> None:
    with pytest.raises(SessionError) as refused:
        checked_id(strange)
    assert refused.value.code == "session.bad_id"
    told(refused.value)


@pytest.mark.parametrize("strange", [*STRANGE, None], ids=named)
@pytest.mark.parametrize("name", ["session_id", "new_session", "agent_id", "workdir"])
def test_arguments_of_a_fork(name: str, strange: Any) -> None:
    if (name, strange) == ("new_session", None):
        return
    given: dict[str, Any] = {"session_id": "s", "count": 1, name: strange}
    with pytest.raises(KimiRayError) as refused:
        fork_spec(**given)
    assert refused.value.code in ("session.bad_id", "request.invalid")
    told(refused.value)


@pytest.mark.parametrize("at", ["\ud800", "9" * 100_000, b"0", 1.5, object(), ["0"], ""], ids=lambda at: named(at)[:20])
def test_what_is_no_point_is_told_briefly(at: Any) -> None:
    with pytest.raises(KimiRayError) as refused:
        parse_fork_point(at)
    assert refused.value.code == "request.invalid"
    assert len(refused.value.message) < 1000
    told(refused.value)


@pytest.mark.parametrize("strange", ["", "ab", 0, 1, True, b"", b"x", [], [1], ["ab"], (), object(), 1.5], ids=named)
def test_metadata_and_tags_are_mappings(strange: Any) -> None:
    for check in (checked_metadata, checked_tags):
        with pytest.raises(SessionError) as refused:
            check(strange)
        assert refused.value.code == "session.bad_metadata"
        told(refused.value)
    for name in ("metadata", "tags"):
        given: dict[str, Any] = {"session_id": "s", "count": 1, name: strange}
        with pytest.raises(SessionError):
            fork_spec(**given)


@pytest.mark.parametrize(
    "tags",
    [{"\ud800": "x"}, {"x": "\ud800"}, {"x": "y" * MAX_METADATA_BYTES}, {str(n): "z" * 8 for n in range(100_000)}],
    ids=["key", "text", "large", "many"],
)
def test_tags_can_be_stored_and_are_small(tags: dict[str, str]) -> None:
    with pytest.raises(SessionError) as refused:
        checked_tags(tags)
    assert refused.value.code == "session.bad_metadata"
    told(refused.value)


def test_metadata_that_grows_by_changes_has_the_same_bound() -> None:
    value = new_document("s", workspace_id="w", cwd=None, now=0)
    part = "x" * (MAX_METADATA_BYTES * 2 // 3)
    with_patch(value, {"metadata": {"a": part}}, now=1)
    for patch in ({"metadata": {"b": part}}, {"tags": {"b": "y"}, "metadata": {"b": part}}):
        before = dict(value)
        with pytest.raises(SessionError) as refused:
            with_patch(value, patch, now=2)
        assert refused.value.code == "session.bad_metadata"
        assert value == before
    value["custom"]["b"] = part  # an imported one, or an older version's
    assert with_patch(value, {"metadata": {"b": "smaller"}}, now=3)


async def test_what_a_session_has_is_no_reason_to_refuse_its_forks(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        full = {"a": "x" * (MAX_METADATA_BYTES - len(b'{"a":""}'))}
        await workspace.create_session("source", model=model, profile="bare", metadata=full)
        child = await workspace.create_child("source", model=model)
        assert (await child.metadata())["custom"]["parent_session_id"] == "source"
        with pytest.raises(SessionError) as refused:
            await workspace.fork("source", metadata={"b": "y"}, model=model)
        assert refused.value.code == "session.bad_metadata"
        assert len(await runtime.sessions.list_recent()) == 2


@pytest.mark.parametrize("method", ["fork_agent", "update_document"])
async def test_what_comes_together_with_a_close_finds_it_closed(tmp_path: Path, method: str) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("source", model=model, profile="bare")
        Accident(runtime, method, 0, False, session.close)
        with pytest.raises(SessionError) as refused:
            await (session.fork_agent() if method == "fork_agent" else session.update(title="late"))
        assert refused.value.code == "session.closed"


@pytest.mark.parametrize("ids", ["source", b"ab", None, 5], ids=named)
async def test_many_ids_are_a_collection(tmp_path: Path, ids: Any) -> None:
    async with running(tmp_path) as (runtime, _, _model):
        with pytest.raises(KimiRayError) as refused:
            await runtime.archive_many(ids)
        assert refused.value.code == "request.bad_argument"


async def test_one_that_is_no_id_does_not_hinder_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        await runtime.workspace(tmp_path / "work").create_session("source", model=model, profile="bare")
        strange: list[Any] = [None, "source", 7]
        told_of = await runtime.archive_many(strange)
        assert [one.ok for one in told_of] == [False, True, False]
        for concurrency in (0, "2", None, 1.5):
            given: Any = concurrency
            with pytest.raises(KimiRayError) as refused:
                await runtime.archive_many(["source"], concurrency=given)
            assert refused.value.code == "request.out_of_range"
