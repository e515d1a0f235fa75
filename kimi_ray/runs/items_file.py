"""Reading an items file: JSON Lines, CSV with a header, or a text file with an item on each line."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kimi_ray.errors import LogError, RunError
from kimi_ray.events.json_rule import decode, thaw

_CELL_CHARS = 64 << 20

Located = tuple[str | dict[str, Any], str]
"""An item's data and where it stands."""


def read_items(path: str | os.PathLike[str], *, stdin: BinaryIO | None = None) -> tuple[list[Any], list[str]]:
    """The items of a file and, for messages, where each one stands.

    ``.jsonl`` and ``.ndjson``: a JSON object or string on each line. ``.csv``: the first row names the columns, all
    values are strings. ``.txt``: each line is an item. Blank lines are skipped. ``-`` is standard input: JSON Lines if
    its first line that is not blank begins with ``{`` or ``"``, else text.

    Args:
        path: The file, or ``-``.
        stdin: What ``-`` reads; None is the process's standard input.

    Returns:
        The data of the items and their sources, to be given to ``prepare_items``.

    Raises:
        RunError: ``items.not_found``, ``items.unreadable``, ``items.unknown_format``, ``items.empty``,
            ``items.bad_json`` {file, line}, ``items.bad_item`` {file, line}.
    """
    name = os.fspath(path)
    text = _read_text(name, stdin)
    if name == "-":
        name = "standard input"
        lines = _json_lines if text.lstrip()[:1] in ("{", '"') else _text_lines
    else:
        lines = _format_of(name)
    located = list(lines(text, name))
    if not located:
        raise RunError(
            f"{name} has no items", code="items.empty", hint="give at least one", details={"file": name, "items": 0}
        )
    return [data for data, _ in located], [source for _, source in located]


def _format_of(name: str) -> Callable[[str, str], Iterator[Located]]:
    suffix = Path(name).suffix.lower()
    formats = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows, ".txt": _text_lines}
    if suffix in formats:
        return formats[suffix]
    raise RunError(
        f"{name} is not named .jsonl, .csv or .txt",
        code="items.unknown_format",
        hint="rename it, or pipe it in with --items -",
        details={"file": name},
    )


def _read_text(name: str, stdin: BinaryIO | None) -> str:
    try:
        raw = (stdin or sys.stdin.buffer).read() if name == "-" else Path(name).expanduser().read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"the items file {name} does not exist",
            code="items.not_found",
            hint=f"paths are relative to {Path.cwd()}",
            details={"file": name},
        ) from None
    except OSError as error:
        raise RunError(
            f"the items file {name} cannot be read: {error.strerror}",
            code="items.unreadable",
            hint="give a readable file, not a directory",
            details={"file": name},
        ) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _bad_line(name, line, f"byte {error.start} is not UTF-8", "save the file as UTF-8") from None


def _json_lines(text: str, name: str) -> Iterator[Located]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = thaw(decode(line.strip().encode()))
        except LogError as error:
            raise RunError(
                f"{name} line {number}: {error.message}",
                code="items.bad_json",
                hint="each line is one JSON object or string",
                details={"file": name, "line": number},
            ) from None
        if not isinstance(data, str | dict):
            raise _bad_line(
                name, number, f"a JSON {type(data).__name__} is not an item", "each line is one JSON object or string"
            )
        yield data, f"{name} line {number}"


def _text_lines(text: str, name: str) -> Iterator[Located]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield line.removesuffix("\r"), f"{name} line {number}"


def _csv_rows(text: str, name: str) -> Iterator[Located]:
    before = csv.field_size_limit(_CELL_CHARS)
    try:
        yield from _csv_records(text, name)
    finally:
        csv.field_size_limit(before)


def _csv_records(text: str, name: str) -> Iterator[Located]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    started = 1
    try:
        for cells in reader:
            line, started = started, reader.line_num + 1
            if not cells:
                continue
            if columns is None:
                columns = [cell.strip() for cell in cells]
                if "" in columns or len(set(columns)) != len(columns):
                    raise _bad_line(name, line, f"the header {columns} has an empty or repeated name", "name each once")
                continue
            if len(cells) != len(columns):
                raise _bad_line(
                    name,
                    line,
                    f"{len(cells)} cells under {len(columns)} columns",
                    "quote cells that hold a comma or a line break",
                )
            yield dict(zip(columns, cells, strict=True)), f"{name} line {line}"
    except csv.Error as error:
        raise _bad_line(name, reader.line_num, f"not CSV: {error}", "check the quotes") from None


def _bad_line(name: str, line: int, what: str, hint: str) -> RunError:
    return RunError(
        f"{name} line {line}: {what}", code="items.bad_item", hint=hint, details={"file": name, "line": line}
    )
