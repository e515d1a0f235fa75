"""What goes to stdout and stderr: text made safe for a terminal, tables, one JSON document, errors."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from kimi_ray.errors import KimiRayError

# C0 but tab and newline, DEL, C1, and the marks that turn the direction of text around.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_GAP = "  "
_ELLIPSIS = "…"
_MIN_CELL = 8


def safe(text: str) -> str:
    """Text of a model, a file or a tool as it may be shown: a terminal cannot take any of it for a command.

    Control characters (but tab and newline) and direction marks become ``\\x1b``, ``\\u202e`` and the like.
    """
    return _UNSAFE.sub(_visible, text.replace("\r\n", "\n"))


def one_line(text: str, width: int | None = None) -> str:
    """Safe text on one line, cut to a width in columns."""
    flat = " ".join(safe(text[: 8 * width] if width else text).split())
    return flat if width is None else clip(flat, width)


def clip(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis, in at most ``width`` columns."""
    if columns(text) <= width:
        return text
    kept, used = "", 0
    for char in text:
        used += _char_columns(char)
        if used > width - 1:
            break
        kept += char
    return kept + _ELLIPSIS


def columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return len(text) if text.isascii() else sum(map(_char_columns, text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, right: str = "") -> str:
    """Rows under a head, in columns as wide as needed; the widest are cut when the whole would not fit.

    Args:
        head: The columns' names.
        rows: Their cells, safe text on one line.
        width: Columns of the terminal; None cuts nothing.
        right: A letter for each column: ``r`` sets it to the right.
    """
    widths = [max([columns(name), *(columns(row[at]) for row in rows)]) for at, name in enumerate(head)]
    if width is not None:
        while sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > _MIN_CELL:
            widths[widths.index(max(widths))] -= 1
    return "\n".join(_row(cells, widths, right) for cells in (head, *rows))


def terminal_width(stream: TextIO) -> int | None:
    """The columns of the terminal behind a stream, or None when it is a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def counted(number: int, what: str) -> str:
    """``1 agent``, ``2 agents``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def clock_time(at: int, form: str) -> str:
    """Epoch milliseconds as local time in a ``strftime`` form; a time that no calendar has is shown as its number.

    A log may hold any: imported ones have what another program wrote.
    """
    try:
        return datetime.fromtimestamp(at / 1000).astimezone().strftime(form)
    except (ValueError, OverflowError, OSError):
        return str(at)


def say(text: str = "") -> None:
    """A line of a command's answer, on stdout."""
    print(text)


def tell(text: str = "") -> None:
    """A line about the work, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout, on one line, in UTF-8 whatever the terminal's encoding.

    What UTF-8 cannot hold (a file's name may) becomes U+FFFD.
    """
    try:
        document = to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:
        document = to_json(_whole_characters(value), inf_nan_mode="null")
    out = sys.stdout
    if isinstance(out, io.TextIOBase):
        out.flush()
        cast("Any", out).buffer.write(document + b"\n")
    else:
        out.write(document.decode() + "\n")
    out.flush()


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str | Path):
        return _SURROGATE.sub("\ufffd", str(value))
    if isinstance(value, BaseModel):
        return _whole_characters(value.model_dump())
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_whole_characters(one) for one in cast("list[Any]", value)]
    return value


def print_error(error: KimiRayError, *, as_json: bool) -> None:
    """An error as people read it on stderr, or as a document on stdout."""
    if as_json:
        print_json({"error": error.to_data()})
        return
    tell(f"error: {safe(error.message)}")
    tell(f"code: {error.code}")
    if error.hint:
        tell(f"hint: {safe(error.hint)}")


def silence_stdout() -> None:
    """The reader of our output is gone: nothing more is to be written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _char_columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def _row(cells: Sequence[str], widths: Sequence[int], right: str) -> str:
    shown: list[str] = []
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        text = clip(cell, width)
        pad = " " * (width - columns(text))
        shown.append(pad + text if right[at : at + 1] == "r" else text + pad)
    return _GAP.join(shown).rstrip()
