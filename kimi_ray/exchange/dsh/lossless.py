"""Where our JSON rule is narrower than JavaScript's: values brought into it, each change counted by its rule.

``lone_surrogate``: a half of a surrogate pair becomes U+FFFD. ``negative_zero``: -0 becomes 0. ``not_finite``: a number
beyond all doubles becomes null. ``big_integer``: an integer beyond 64 bits becomes the nearest double. ``nesting``:
what lies deeper than an event may becomes its own JSON text.
"""

from __future__ import annotations

import json
from collections import Counter
from math import inf, isfinite
from typing import Any, Final, cast

from kimi_ray.events.json_rule import MAX_DEPTH

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_DATA_DEPTH: Final = MAX_DEPTH - 1
"""An event's data is one level below its envelope, which counts when the event is read."""


def within_rule(value: Any, counts: Counter[str]) -> Any:
    """A copy of a parsed JSON value that our rule allows.

    Args:
        value: What a JSON parser made.
        counts: Where each change is counted.
    """
    if not _is_container(value):
        return _scalar(value, counts)
    root: Any = {} if _is_object(value) else []
    stack: list[tuple[Any, Any, int]] = [(value, root, 1)]
    while stack:
        source, target, depth = stack.pop()
        into_object = _is_object(source)
        pairs: Any = source.items() if into_object else enumerate(source)
        for key, item in pairs:
            if not _is_container(item):
                made: Any = _scalar(item, counts)
            elif depth >= _DATA_DEPTH:
                made = _scalar(text_of(item), counts)
                counts["nesting"] += 1
            else:
                made = {} if _is_object(item) else []
                stack.append((item, made, depth + 1))
            if into_object:
                target[_free(_scalar(key, counts), target)] = made
            else:
                target.append(made)
    return root


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


def _free(key: str, target: Any) -> str:
    """A key that is not taken: two that differed only in a half of a pair stay two."""
    while key in target:
        key += "\ufffd"
    return key


def _scalar(value: Any, counts: Counter[str]) -> Any:
    if type(value) is str:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            counts["lone_surrogate"] += 1
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return value
    if type(value) is float:
        if not isfinite(value):
            counts["not_finite"] += 1
            return None
        if value == 0 and str(value)[0] == "-":
            counts["negative_zero"] += 1
            return 0
    elif type(value) is int and not _INT_MIN <= value <= _INT_MAX:
        counts["big_integer"] += 1
        return _scalar(_as_double(value), counts)
    return value


def _as_double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def text_of(value: Any) -> str:
    """JSON text of a value of any depth."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return "".join(_pieces(value))


def _pieces(value: Any) -> list[str]:
    out: list[str] = []
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, _Literal):
            out.append(item)
        elif isinstance(item, dict):
            inner: list[Any] = [_Literal("{")]
            for at, (key, one) in enumerate(cast("dict[str, Any]", item).items()):
                inner += [_Literal(("," if at else "") + json.dumps(key, ensure_ascii=False) + ":"), one]
            stack.extend(reversed([*inner, _Literal("}")]))
        elif isinstance(item, list):
            inner = [_Literal("[")]
            for at, one in enumerate(cast("list[Any]", item)):
                inner += [_Literal(","), one] if at else [one]
            stack.extend(reversed([*inner, _Literal("]")]))
        else:
            out.append(json.dumps(item, ensure_ascii=False))
    return out


class _Literal(str):
    """A piece of JSON text that is written as it is."""

    __slots__ = ()
