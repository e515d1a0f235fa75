"""Items files: what each format means, and every bad line by its number."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import RunError
from kimi_ray.runs import prepare_items, read_items


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(code: str, path: Any, line: int | None = None, **how: Any) -> RunError:
    with pytest.raises(RunError) as error:
        read_items(path, **how)
    assert error.value.code == code
    assert error.value.details.get("line") == line
    if line is not None:
        assert f"line {line}" in error.value.message
    return error.value


def test_json_lines(tmp_path: Path) -> None:
    file = put(tmp_path / "i.jsonl", '\ufeff{"a": 1, "b": "x y"}\r\n\n"just text"\n  {"a": null}')
    data, sources = read_items(file)
    assert data == [{"a": 1, "b": "x y"}, "just text", {"a": None}]
    assert sources == [f"{file} line 1", f"{file} line 3", f"{file} line 4"]


def test_bad_json_in_line_seven(tmp_path: Path) -> None:
    lines = [json.dumps({"n": n}) for n in range(10)]
    lines[6] = '{"n": 6'
    error = refused("items.bad_json", put(tmp_path / "i.jsonl", "\n".join(lines)), 7)
    assert error.details["file"].endswith("i.jsonl")


@pytest.mark.parametrize(
    "line", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e400}', '{"a": "\\ud800"}', "{} {}", "nope"]
)
def test_json_that_would_lose_something(tmp_path: Path, line: str) -> None:
    refused("items.bad_json", put(tmp_path / "i.jsonl", f'"fine"\n{line}\n'), 2)


@pytest.mark.parametrize("line", ["3", "[1]", "null", "true"])
def test_json_that_is_no_item(tmp_path: Path, line: str) -> None:
    refused("items.bad_item", put(tmp_path / "i.jsonl", f"{line}\n"), 1)


def test_csv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    file = put(tmp_path / "i.csv", 'name, text\r\na,"one, ""two""\nthree"\r\n\r\nb,\r\n')
    data, sources = read_items(file)
    assert data == [{"name": "a", "text": 'one, "two"\nthree'}, {"name": "b", "text": ""}]
    assert sources == [f"{file} line 2", f"{file} line 5"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a,b\n1,2\n1,2,3\n", 3),
        ("a,b\n1\n", 2),
        ("a,a\n1,2\n", 1),
        ("a,,b\n1,2,3\n", 1),
        ('a\n"open\n', 2),
        ('a\n"x"y\n', 2),
    ],
)
def test_bad_csv_names_its_line(tmp_path: Path, text: str, line: int) -> None:
    refused("items.bad_item", put(tmp_path / "i.csv", text), line)


def test_a_cell_of_five_million_characters(tmp_path: Path) -> None:
    csv.field_size_limit(before := 100_000)
    data, _ = read_items(put(tmp_path / "i.csv", f"text\n{'x' * 5_000_000}\n"))
    assert len(data[0]["text"]) == 5_000_000
    assert csv.field_size_limit() == before


def test_text_lines(tmp_path: Path) -> None:
    data, sources = read_items(put(tmp_path / "i.txt", "one \r\n\n  \n{{item}}\x0bstill\x85two"))
    assert data == ["one ", "{{item}}\x0bstill\x85two"]
    assert sources[1].endswith("line 4")


@pytest.mark.parametrize(
    ("piped", "expected"),
    [
        (b'\n{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (b'"x"\n', ["x"]),
        (b"plain\nlines\n", ["plain", "lines"]),
    ],
)
def test_standard_input(piped: bytes, expected: list[Any]) -> None:
    assert read_items("-", stdin=io.BytesIO(piped))[0] == expected


def test_standard_input_with_a_bad_line() -> None:
    assert "standard input line 2" in refused("items.bad_json", "-", 2, stdin=io.BytesIO(b"{}\n{")).message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused("items.not_found", tmp_path / "no.jsonl")
    refused("items.not_found", put(tmp_path / "f", "x") / "below.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    refused("items.unreadable", tmp_path / "d.jsonl")
    refused("items.unknown_format", put(tmp_path / "i.xlsx", "x"))
    refused("items.bad_item", put(tmp_path / "i.txt", b"fine\n\xff\n"), 2)


@pytest.mark.parametrize(("name", "text"), [("i.jsonl", "\n \n"), ("i.csv", "a,b\n"), ("i.csv", ""), ("i.txt", "\n")])
def test_files_without_items(tmp_path: Path, name: str, text: str) -> None:
    refused("items.empty", put(tmp_path / name, text))


@given(
    st.lists(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), st.text(st.characters(codec="utf-8"))))
)
def test_what_json_wrote_is_read_back(data: list[dict[str, str]]) -> None:
    piped = "\n".join(json.dumps(one) for one in data).encode()
    if not data:
        return
    assert read_items("-", stdin=io.BytesIO(piped))[0] == data


def test_sources_reach_the_errors_of_preparation(tmp_path: Path) -> None:
    data, sources = read_items(put(tmp_path / "i.jsonl", '{"id": "x"}\n\n{"id": "x"}\n'))
    with pytest.raises(RunError) as error:
        prepare_items(data, sources=sources, id_column="id")
    assert error.value.details["second"].endswith("i.jsonl line 3")
