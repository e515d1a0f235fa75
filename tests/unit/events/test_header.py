"""The header: version first, nothing coerced, nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import LogError
from kimi_ray.events import LogHeader, ParentRef, WriterRef, decode, encode, parse_header

GOOD: dict[str, Any] = {
    "type": "log",
    "version": 1,
    "enc": 1,
    "session_id": "session_1",
    "agent_id": "main",
    "created_at": 1_700_000_000_000,
    "origin": "main",
    "delegation_depth": 0,
    "labels": {"a": "b"},
    "writer": {"name": "kimi_ray", "version": "0.1.0"},
}


def test_a_header_comes_back_as_it_was_written() -> None:
    assert parse_header(GOOD).to_data() == GOOD
    assert list(parse_header(GOOD).to_data()) == list(GOOD)
    full = LogHeader(
        session_id="s",
        agent_id="agent-1",
        created_at=0,
        cwd="/x",
        parent=ParentRef(session_id="p", agent_id="main"),
        seed_length=0,
        origin="fork",
        delegation_depth=2,
        profile="coder",
        run_id="r",
        item_id="i",
        repeat=0,
        attempt=1,
        fork_group="g",
        fork_index=0,
        writer=WriterRef(name="w", version="1"),
    )
    assert parse_header(decode(encode(full.to_data()))) == full
    assert list(full.to_data())[:8] == [
        "type", "version", "enc", "session_id", "agent_id", "created_at", "cwd", "parent",
    ]  # fmt: skip


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).map(lambda s: "x_" + s),
        st.none() | st.integers() | st.lists(st.none()),
        max_size=4,
    )
)
def test_unknown_keys_are_kept_also_null_ones_and_nested_ones(extra: dict[str, Any]) -> None:
    parent = {"session_id": "p", "agent_id": "main", **extra}
    value = {**GOOD, "writer": {**GOOD["writer"], **extra}, "parent": parent, **extra}
    again = parse_header(value).to_data()
    assert again == value
    assert parse_header(again) == parse_header(value)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"version": 2}, "upgrade"),
        ({"version": 0}, "no upgrade path"),
        ({"enc": 2}, "upgrade"),
        ({"version": 99, "session_id": None, "created_at": "x"}, "upgrade"),
        ({"version": 2, "type": "something-new"}, "upgrade"),
    ],
)
def test_another_version_is_refused_before_anything_else(change: dict[str, Any], hint: str) -> None:
    with pytest.raises(LogError) as caught:
        parse_header({**GOOD, **change})
    assert caught.value.code == "log.version_unsupported"
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "change",
    [
        {"type": "event"},
        {"type": None},
        {"version": "1"},
        {"version": True},
        {"version": 1.0},
        {"version": None},
        {"enc": "1"},
        {"session_id": 5},
        {"session_id": None},
        {"agent_id": None},
        {"created_at": "5"},
        {"created_at": 5.0},
        {"created_at": True},
        {"created_at": -1},
        {"origin": "elsewhere"},
        {"delegation_depth": -1},
        {"delegation_depth": "0"},
        {"labels": {"a": 1}},
        {"labels": None},
        {"parent": {"session_id": "s"}},
        {"parent": "s"},
        {"seed_length": -1},
        {"writer": {}},
        {"writer": "kimi"},
        {"repeat": "1"},
    ],
)
def test_a_wrong_header_is_refused_by_name_and_nothing_is_coerced(change: dict[str, Any]) -> None:
    with pytest.raises(LogError) as caught:
        parse_header({**GOOD, **change})
    assert caught.value.code == "log.bad_header"


@pytest.mark.parametrize("key", ["type", "version", "session_id", "agent_id", "created_at", "writer"])
def test_what_every_header_has_must_be_there(key: str) -> None:
    with pytest.raises(LogError, match=r"log\.bad_header"):
        parse_header({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize("value", [None, [], "log", 1, [["type", "log"]]])
def test_what_is_no_object_is_no_header(value: Any) -> None:
    with pytest.raises(LogError, match=r"log\.bad_header"):
        parse_header(value)


def test_a_header_is_one_canonical_line() -> None:
    line = encode(parse_header(GOOD).to_data())
    assert b"\n" not in line and json.loads(line) == GOOD
