"""The page on durability claims what can be checked: formats, settings, codes, files, and the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from kimi_ray.bench.loss import CASES
from kimi_ray.config import RuntimeConfig
from kimi_ray.events import LogHeader, WriterRef, parse_event, parse_header
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.batch_rows import expand_row, parse_batch_row, parse_closed_row, parse_epoch_row
from kimi_ray.store.framing import framing_of
from kimi_ray.store.seam import StoreOptions
from kimi_ray.store.sqlite.schema import APPLICATION_ID, FORMAT, TABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "durability.md").read_text()
RECOVERY = (ROOT / "docs" / "recovery.md").read_text()


def block(kind: str) -> bytes:
    found = re.search(rf"^```{re.escape(kind)}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, kind
    return found[1].encode()


def section(title: str, page: str = PAGE) -> str:
    found = re.search(rf"^#+ {re.escape(title)}.*?\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def names_of_tests() -> set[str]:
    return {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }


def crc(data: bytes) -> str:
    """CRC-32 as the page tells it, without the program's help: reflected, polynomial 0xEDB88320."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return f"{value ^ 0xFFFFFFFF:08x}"


def test_the_example_is_right_by_the_rules_of_the_page() -> None:
    lines = block("wire.jsonl").splitlines(keepends=True)
    header, rest = lines[0], lines[1:]
    number = seq = 0
    while rest:
        row, rest = rest[0], rest[1:]
        facts: dict[str, Any] = from_json(row)
        assert list(facts) == ["batch", "seq", "bytes", "crc", "self"]
        assert (facts["batch"], facts["seq"]) == (number, seq)
        zeroed = row.replace(f'"self":"{facts["self"]}"'.encode(), b'"self":"00000000"')
        assert facts["self"] == crc(zeroed)
        covered = [header] if number == 0 else []
        rows: list[bytes] = []
        while sum(map(len, rows)) < facts["bytes"]:
            rows.append(rest.pop(0))
        assert sum(map(len, rows)) == facts["bytes"]
        assert facts["crc"] == [crc(line) for line in (*covered, *rows)]
        for line in rows:
            value: dict[str, Any] = from_json(line)
            if "epoch" in value or "closed" in value:
                assert value["seq"] == seq
            elif "seq0" in value:
                assert value["seq0"] == seq
                seq += len(value["data"]["texts"])
            else:
                assert value["seq"] == seq
                seq += 1
        number += 1
    assert seq == 5


def test_the_example_is_what_the_program_reads() -> None:
    data = block("wire.jsonl")
    scan = framing_of("none").scan(lambda offset, size: data[offset : offset + size], len(data), "example")
    batches = list(scan)
    assert (scan.good, scan.next_seq, scan.closed, len(batches)) == (len(data), 5, True, 3)
    header = parse_header(from_json(data.split(b"\n", 1)[0]))
    assert (header.session_id, header.origin) == ("session_A", "main")
    lines = data.splitlines(keepends=True)
    epoch = parse_epoch_row(lines[2])
    assert epoch is not None and (epoch.epoch, epoch.mode) == (1, "disk")
    assert parse_batch_row(lines[1]) is not None
    assert parse_closed_row(lines[-1]) == (1, 5)


def test_the_packed_row_of_the_example_is_the_events_beside_it() -> None:
    packed = next(line for line in block("wire.jsonl").splitlines(keepends=True) if b'"text-chunks"' in line)
    events = block("events").splitlines()
    assert expand_row(packed) == events
    assert [parse_event(line).seq for line in events] == [2, 3, 4]


@pytest.mark.parametrize("page", [PAGE, RECOVERY], ids=["durability", "recovery"])
def test_every_test_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", page))
    assert sorted(named - names_of_tests()) == []


def test_every_failure_point_names_a_test() -> None:
    rows = [line for line in section("Every failure point").splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 40
    assert [row for row in rows if not re.search(r"`test_\w+`", row)] == []


@pytest.mark.parametrize("page", [PAGE, RECOVERY], ids=["durability", "recovery"])
def test_every_code_that_is_named_is_explained(page: str) -> None:
    families = "log|store|session|limit|tool|turn|workdir|config|run|agent"
    named = set(re.findall(rf"`((?:{families})\.[a-z][a-z_]*)`", page)) - {"store.json"}
    explained = set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    assert sorted(named - explained) == []
    assert named


def test_every_setting_that_is_named_exists_and_has_the_default_of_the_page() -> None:
    named = set(re.findall(r"`([a-z_]+_(?:ms|s|bytes))`", PAGE))
    assert sorted(named - set(RuntimeConfig.model_fields)) == []
    for name, value in re.findall(r"`([a-z_]+_(?:ms|s|bytes))` \((\d+)", PAGE):
        default = RuntimeConfig.model_fields[name].default
        assert int(value) == (default >> 20 if name.endswith("_bytes") else default), name


def test_keys_of_the_header_stand_in_their_order() -> None:
    text = section("The header")
    places = [text.index(f"`{name}`") for name in LogHeader.model_fields]
    assert places == sorted(places)


async def test_small_files_have_the_keys_of_the_page(tmp_path: Path) -> None:
    home = str(tmp_path)
    store = await open_store_for_writing(home, StoreOptions())
    grant = await store.open_session("s", "n", workspace_id="w")
    await store.write_document("s", {"title": "t"}, grant=grant.grant, nonce="n", revision=0)
    header = LogHeader(session_id="s", agent_id="a", created_at=0, writer=WriterRef(name="test", version="0"))
    await store.open_writer(header.to_data(), "n2")
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", section("Small files"), re.MULTILINE))
    places = {
        "store.json": "store.json",
        "state.json": "sessions/w/s/state.json",
        "owners/<session>": "owners/s",
        "writers/<ulid>.lock": "writers/*.lock",
        "reserved/<session>.<agent>": "reserved/s.a",
    }
    assert rows.keys() == places.keys()
    for name, pattern in places.items():
        (path,) = tmp_path.glob(pattern)
        keys = list(from_json(path.read_bytes()))
        told = re.findall(r"`(\w+)`", rows[name].split(":")[0] if name.startswith("writers") else rows[name])
        assert keys[: len(told)] == told, name
        assert (path.read_bytes()[-1:] == b"\n") is (not name.startswith("reserved")), name
    await store.close()


def test_tables_of_sqlite_are_those_of_the_schema() -> None:
    text = section("SQLite")
    tables = [re.match(r"CREATE TABLE (\w+)", table)[1] for table in TABLES]  # type: ignore[index]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == tables
    assert f"0x{APPLICATION_ID:08X}" in text
    assert f"`user_version` {FORMAT}" in text


def test_every_measured_case_is_in_the_table() -> None:
    text = section("What can be lost, and how much")
    assert [name for name in (case.name for case in CASES) if f"| {name} |" not in text] == []


def test_every_command_that_is_named_exists() -> None:
    import typer

    from kimi_ray.cli.app import app

    group: Any = typer.main.get_command(app)
    for page in (PAGE, RECOVERY):
        for words in re.findall(r"`kimi-ray ([a-z-]+(?: [a-z-]+)?)", page):
            found = group
            for word in words.split():
                commands = getattr(found, "commands", None)
                if commands is None:
                    break
                assert word in commands, words
                found = commands[word]
