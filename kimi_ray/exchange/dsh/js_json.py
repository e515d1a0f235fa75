"""JSON as the harness reads it: the rules of JavaScript's ``JSON.parse``, and what they made of the text.

Numbers are doubles, a repeated key keeps its first place and its last value, a lone surrogate is a character like any
other, bytes that are not UTF-8 have become U+FFFD before the parser sees them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from json import decoder
from math import copysign, isfinite
from typing import Any, Final, NoReturn, cast

MAX_SAFE_INTEGER: Final = 2**53 - 1
"""The largest integer that JavaScript counts exactly."""
_EXACT_IN_64_BITS: Final = 2**63

# The one piece of the parser that is worth using apart; it has no stub.
_scan_string = cast("Callable[[str, int, bool], tuple[str, int]]", getattr(decoder, "scanstring"))  # noqa: B009

_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_BLANK = re.compile(r"[ \t\n\r]*")


@dataclass(slots=True)
class Parsed:
    """A value and what was lost on the way to it, by rule."""

    value: Any
    notes: Counter[str] = field(default_factory=Counter[str])


def parse_bytes(line: bytes) -> Parsed:
    """The value of a line of a file.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError:
        found = parse_text(line.decode(errors="replace"))
        found.notes["invalid_utf8"] += 1
        return found
    return parse_text(text)


def parse_text(text: str) -> Parsed:
    """The value of a text.

    Raises:
        ValueError: it is not JSON.
    """
    reader = _Reader()
    try:
        return Parsed(reader.decode(text), reader.notes)
    except RecursionError:
        deep = _Reader()
        return Parsed(_parse_deep(text, deep), deep.notes)


class _Reader(json.JSONDecoder):
    """Python's parser under JavaScript's rules."""

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()
        super().__init__(
            object_pairs_hook=self._pairs,
            parse_int=self.integer,
            parse_float=self.fraction,
            parse_constant=_no_constant,
            strict=True,
        )

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            self.notes["duplicate_key"] += len(pairs) - len(made)
        return made

    def integer(self, text: str) -> int | float:
        """An integer literal as a double, kept as an int where that is the same number."""
        if len(text) <= 17:
            value = int(text)
            if value == 0 and text[0] == "-":
                return -0.0
            if -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
                return value
        self.notes["big_integer"] += 1
        return whole(float(text))

    def fraction(self, text: str) -> int | float:
        """A literal with a fraction or an exponent."""
        return whole(float(text))


def whole(value: float) -> int | float:
    """A double as JavaScript would print it: an int where it is one, but for -0."""
    if not isfinite(value) or not value.is_integer() or abs(value) >= _EXACT_IN_64_BITS:
        return value
    return value if value == 0 and copysign(1.0, value) < 0 else int(value)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def is_number(value: Any) -> bool:
    """``typeof value === 'number'``."""
    return type(value) is int or type(value) is float


def is_safe_integer(value: Any) -> bool:
    """``Number.isSafeInteger``; -0 is one."""
    if type(value) is int:
        return -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER
    return type(value) is float and value == 0


def shown(value: Any) -> str:
    """A value as a template string of JavaScript shows it, for messages."""
    if value is None:
        return "null"
    if value is True or value is False:
        return str(value).lower()
    if type(value) is float and value == 0:
        return "0"
    if isinstance(value, dict):
        return "[object Object]"
    if isinstance(value, list):
        return ",".join("" if item is None else shown(item) for item in cast("list[Any]", value))
    return str(value)


def _parse_deep(text: str, numbers: _Reader) -> Any:
    """The same without recursion, for nesting that Python's parser does not follow."""
    place = _BLANK.match(text, 0).end()  # pyright: ignore[reportOptionalMemberAccess]  it matches the empty text
    stack: list[tuple[Any, str | None]] = []
    while True:
        value, place, opened = _atom(text, place, numbers)
        if opened:
            place, key = _enter(text, place, value)
            if key is not _EMPTY:
                stack.append((value, key))
                continue
        # A value is whole: put it where it belongs, and close what it was the last of.
        while stack:
            container, key = stack.pop()
            if key is None:
                container.append(value)
            else:
                numbers.notes["duplicate_key"] += key in container
                container[key] = value
            place = _skip(text, place)
            closer = "]" if key is None else "}"
            found = text[place : place + 1]
            if found == ",":
                place = _skip(text, place + 1)
                if key is not None:
                    key, place = _key(text, place)
                stack.append((container, key))
                break
            if found != closer:
                raise ValueError(f"expected , or {closer} at {place}")
            place, value = place + 1, container
        else:
            if _skip(text, place) != len(text):
                raise ValueError(f"more than one value, at {place}")
            numbers.notes += Counter()  # drops zeros
            return value


_EMPTY: Any = object()


def _atom(text: str, place: int, numbers: _Reader) -> tuple[Any, int, bool]:
    first = text[place : place + 1]
    if first == "{":
        return {}, place + 1, True
    if first == "[":
        return [], place + 1, True
    if first == '"':
        value, place = _scan_string(text, place + 1, True)
        return value, place, False
    for word, value in (("null", None), ("true", True), ("false", False)):
        if text.startswith(word, place):
            return value, place + len(word), False
    found = _NUMBER.match(text, place)
    if found is None:
        raise ValueError(f"no value at {place}")
    plain = found[2] is None and found[3] is None
    return numbers.integer(found[0]) if plain else numbers.fraction(found[0]), found.end(), False


def _enter(text: str, place: int, container: Any) -> tuple[int, Any]:
    place = _skip(text, place)
    closer = "}" if type(container) is dict else "]"
    if text[place : place + 1] == closer:
        return place + 1, _EMPTY
    if closer == "]":
        return place, None
    key, place = _key(text, place)
    return place, key


def _key(text: str, place: int) -> tuple[str, int]:
    if text[place : place + 1] != '"':
        raise ValueError(f"expected a key at {place}")
    key, place = _scan_string(text, place + 1, True)
    place = _skip(text, place)
    if text[place : place + 1] != ":":
        raise ValueError(f"expected : at {place}")
    return key, _skip(text, place + 1)


def _skip(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    return place if found is None else found.end()
