"""What DeepSeek Harness itself wrote and what its own reader gave: the importer says the same, artifact by artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.exchange.dsh import read_source
from tests.unit.exchange.conftest import FIXTURES

INDEX: list[dict[str, Any]] = json.loads((FIXTURES / "index.json").read_text())


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["name"])
def test_counts_tails_repairs_and_refusals(entry: dict[str, Any], untouched: Callable[[Path], Any]) -> None:
    root = FIXTURES / entry["root"]
    before = untouched(root)
    found = {reading.id: reading for reading in read_source(str(root))}
    assert untouched(root) == before

    listed = [reading.header for reading in found.values() if reading.header is not None]
    assert sorted(listed, key=lambda header: header["id"]) == sorted(entry["list"], key=lambda header: header["id"])

    reading = found[entry["id"]]
    data = reading.to_data()
    assert set(data) == {"id", "header", "stored", "after_repair", "repairs", "error"}
    assert data["stored"] == entry.get("readFrom0_count")
    assert data["after_repair"] == entry.get("inspect", {}).get("count") == entry.get("load", {}).get("count")
    refused = entry.get("inspect_error")
    if refused is None:
        assert data["error"] is None
        tail = entry["inspect"]["tail"]
        assert reading.events[len(reading.events) - len(tail) :] == tail
    else:
        assert data["error"]["class"] == ("corrupt" if refused["name"] == "Error" else "unsupported")
        wanted = refused["message"].replace("<root>", str(root))
        assert data["error"]["message"] == wanted
        assert data["error"]["at"]["file"] == reading.source


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["name"])
def test_the_events_are_those_that_load_returned(entry: dict[str, Any]) -> None:
    expected = FIXTURES / f"{entry['name']}.load.events.json"
    if "load_error" in entry:
        assert not expected.exists()
        return
    reading = next(one for one in read_source(str(FIXTURES / entry["root"])) if one.id == entry["id"])
    assert reading.events == json.loads(expected.read_text())
    assert [closer["type"] for closer in reading.closers or []] == [
        event["type"] for event in reading.events[len(reading.stored or []) :]
    ]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.after-load.*")), ids=lambda path: path.name)
def test_what_its_repair_left_needs_no_repair(path: Path) -> None:
    (reading,) = read_source(str(path))
    if reading.error is None:
        assert reading.closers == [] and reading.set_aside == {}
        assert reading.id == reading.header["id"]  # type: ignore[index]
    else:
        assert "empty" in path.name or "version" in path.name or "unknown-event" in path.name


def test_plain_compressed_and_database_say_the_same() -> None:
    """The three full stores were written by one program run thrice: only times and message ids differ."""

    def shape(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: shape(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [shape(item) for item in value]
        return "" if key in ("time", "id") else value

    shapes = []
    for name in ("jsonl-none-full", "jsonl-zstd-full", "sqlite-full"):
        found = {reading.id: reading for reading in read_source(str(FIXTURES / name))}
        shapes.append([shape(found["full"].events), shape(found["child"].events)])
    assert shapes[0] == shapes[1] == shapes[2]
