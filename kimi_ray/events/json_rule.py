"""The JSON rule: what may become an event's data, checked at the source in one iterative walk.

``freeze`` checks and copies at once: the result shares nothing mutable with the caller and cannot be changed. It
accepts exactly ``str, bool, None, int`` in -2^63..2^63-1, finite ``float`` (not -0.0), ``list`` and ``dict`` with str
keys, by ``type(x) is``; everything else is refused by name and place.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, NoReturn, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import LogError

MAX_DEPTH = 64
MAX_VALUES = 8 << 20
"""Values in one piece of data: an event of 16 MiB cannot hold more, while a list that holds itself twice, forty levels
deep, is a few bytes in memory and a million million values when written out."""
_INT_MIN = -(2**63)
_INT_MAX = 2**63 - 1


class FrozenDict(dict[str, Any]):
    """A JSON object inside an event: a dict that cannot be changed."""

    __slots__ = ()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("the data of an event cannot be changed; copy it with kimi_ray.events.thaw")

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return (freeze, (dict(self),))


class FrozenList(list[Any]):
    """A JSON array inside an event: a list that cannot be changed."""

    __slots__ = ()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("the data of an event cannot be changed; copy it with kimi_ray.events.thaw")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # pyright: ignore[reportAssignmentType]
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[Any, tuple[list[Any]]]:
        return (freeze, (list(self),))


def _refused(what: str, path: str) -> LogError:
    return LogError(
        f"{what} at {path or 'the top'} cannot be stored as JSON",
        code="log.not_json",
        hint="store str, bool, None, int below 2^63, finite float, list, or dict with str keys",
        details={"at": path, "found": what},
    )


def _place(path: tuple[Any, ...] | None) -> str:
    parts: list[str] = []
    while path is not None:
        path, key = cast("tuple[tuple[Any, ...] | None, Any]", path)
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).lstrip(".")


def _check_text(text: str, path: tuple[Any, ...] | None) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(f"a lone surrogate (index {error.start})", _place(path)) from None


def freeze(value: Any) -> Any:
    """A checked, unchangeable copy of ``value``.

    Raises:
        LogError: ``log.not_json`` naming the place and what was found.
    """
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict or kind is list or kind is FrozenDict or kind is FrozenList:
        made = _freeze_plain(value, kind, 1, [MAX_VALUES])
        if made is not _BROKEN:
            return made
    # The slower walk says what is wrong, and where; it also takes the few things that are sound but unusual.
    return _freeze_slowly(value)


def _freeze_plain(value: Any, kind: type, depth: int, room: list[int]) -> Any:
    """``freeze`` for what almost every event holds; ``_BROKEN`` for whatever it does not know to be sound.

    The depth bounds the recursion, so a cycle ends it; ``room`` are the values that may still come.
    """
    room[0] -= len(value)
    if depth > MAX_DEPTH or room[0] < 0:
        return _BROKEN
    made: Any
    inner: Any
    if kind is dict or kind is FrozenDict:
        made = FrozenDict(value)
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                return _BROKEN
            inner = type(item)  # pyright: ignore[reportUnknownVariableType]
            if inner is str:
                if not item.isascii() and _has_surrogate(item):
                    return _BROKEN
            elif inner is int:
                if not _INT_MIN <= item <= _INT_MAX:
                    return _BROKEN
            elif inner in _CONTAINERS:
                frozen = _freeze_plain(item, inner, depth + 1, room)
                if frozen is _BROKEN:
                    return _BROKEN
                _PUT_KEY(made, key, frozen)
            elif not _is_sound(item, inner):
                return _BROKEN
        return made
    made = FrozenList(value)
    for index, item in enumerate(value):
        inner = type(item)  # pyright: ignore[reportUnknownVariableType]
        if inner in _CONTAINERS:
            frozen = _freeze_plain(item, inner, depth + 1, room)
            if frozen is _BROKEN:
                return _BROKEN
            _PUT_INDEX(made, index, frozen)
        elif inner is str:
            if not item.isascii() and _has_surrogate(item):
                return _BROKEN
        elif not _is_sound(item, inner):
            return _BROKEN
    return made


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _freeze_slowly(value: Any) -> Any:
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is not dict and kind is not list and kind is not FrozenDict and kind is not FrozenList:
        _scalar(value, kind, None)
        return value
    root: Any = FrozenDict() if kind in (dict, FrozenDict) else FrozenList()
    # (source, target, path, depth); `ancestors` is kept exact by pushing a leave mark behind each container
    stack: list[tuple[Any, Any, tuple[Any, ...] | None, int]] = [(value, root, None, 1)]
    ancestors: set[int] = set()
    values = 0
    put: Callable[[Any, str, Any], None] = dict.__setitem__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    add: Callable[[Any, Any], None] = list.append  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    while stack:
        source, target, path, depth = stack.pop()
        if target is None:
            ancestors.discard(source)
            continue
        if depth > MAX_DEPTH:
            raise _refused(f"nesting above {MAX_DEPTH}", _place(path))
        mark = id(source)
        if mark in ancestors:
            raise _refused("a cycle", _place(path))
        values += len(source)
        if values > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES} values", _place(path))
        opened = False
        pairs: Any = source.items() if type(target) is FrozenDict else enumerate(source)
        into_dict = type(target) is FrozenDict
        for key, item in pairs:
            if into_dict:
                if type(key) is not str:
                    raise _refused(f"a key of type {type(key).__name__}", _place(path))
                if not key.isascii():
                    _check_text(key, (path, key))
            kind = type(item)  # pyright: ignore[reportUnknownVariableType]
            if kind is str:
                if not item.isascii():
                    _check_text(item, (path, key))
                made: Any = item
            elif kind is dict or kind is FrozenDict or kind is list or kind is FrozenList:
                made = FrozenDict() if kind is dict or kind is FrozenDict else FrozenList()
                if item:
                    if not opened:
                        opened = True
                        ancestors.add(mark)
                        stack.append((mark, None, None, 0))
                    stack.append((item, made, (path, key), depth + 1))
                elif depth >= MAX_DEPTH:
                    raise _refused(f"nesting above {MAX_DEPTH}", _place((path, key)))
            else:
                if kind is not bool and item is not None:
                    _scalar(item, kind, (path, key))
                made = item
            if into_dict:
                put(target, key, made)
            else:
                add(target, made)
    return root


def _scalar(value: Any, kind: type, path: tuple[Any, ...] | None) -> None:
    if kind is int:
        if not _INT_MIN <= value <= _INT_MAX:
            raise _refused("an int outside -2^63..2^63-1", _place(path))
    elif kind is float:
        if not isfinite(value):
            raise _refused(f"the float {value}", _place(path))
        if value == 0.0 and str(value)[0] == "-":
            raise _refused("the float -0.0", _place(path))
    elif kind is str:
        _check_text(value, path)
    elif kind is not bool and value is not None:
        raise _refused(f"a value of type {kind.__name__}", _place(path))


def thaw(value: Any) -> Any:
    """A plain, changeable deep copy of frozen data."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [thaw(item) for item in cast("list[Any]", value)]
    return value


def encode(value: Any) -> bytes:
    """The canonical bytes of checked JSON: compact, keys in their order, UTF-8."""
    return to_json(value)


def decode(line: bytes) -> Any:
    """Parse stored JSON under the same rule; a duplicate key or a number out of range is refused.

    Raises:
        LogError: ``log.not_json``.
    """
    value = decode_plain(line)
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    return freeze_checked(value) if kind is dict or kind is list else value


def decode_plain(line: bytes) -> Any:
    """``decode`` into plain containers, for a reader that keeps nothing of them.

    Raises:
        LogError: ``log.not_json``.
    """
    try:
        value = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise LogError(f"a line is not JSON: {error}", code="log.not_json", details={"bytes": len(line)}) from None
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if not _is_sound_within(value, kind, 1):
        freeze(value)  # says what is wrong, and where
    # A duplicate key vanishes in parsing, and so does any other spelling than ours: canonical bytes come out equal.
    if to_json(value) != line:
        _refuse_duplicates(line)
    return value


def freeze_checked(value: Any) -> Any:
    """``freeze`` for containers that ``decode_plain`` made."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    into_dict = kind is dict
    made: Any = FrozenDict(value) if into_dict else FrozenList(value)
    put = _PUT_KEY if into_dict else _PUT_INDEX
    pairs: Any = value.items() if into_dict else enumerate(value)
    for key, item in pairs:
        inner: Any = type(item)  # pyright: ignore[reportUnknownVariableType]
        if inner is dict or inner is list:
            put(made, key, freeze_checked(item))
    return made


def _is_sound_within(value: Any, kind: type, depth: int) -> bool:
    """Whether what a JSON parser made obeys the rule: its numbers and its depth can break it, nothing else can."""
    if kind is dict or kind is list:
        if depth > MAX_DEPTH:
            return False
        items: Any = value.values() if kind is dict else value
        for item in items:
            inner: Any = type(item)  # pyright: ignore[reportUnknownVariableType]
            if inner is str:
                continue
            if inner is dict or inner is list:
                if not _is_sound_within(item, inner, depth + 1):
                    return False
            elif not _is_sound(item, inner):
                return False
        return True
    return kind is str or _is_sound(value, kind)


_BROKEN: Any = object()
_CONTAINERS = frozenset({dict, list, FrozenDict, FrozenList})
_PUT_KEY: Any = dict[str, Any].__setitem__
_PUT_INDEX: Any = list[Any].__setitem__


def _is_sound(value: Any, kind: type) -> bool:
    """Whether a scalar other than a string obeys the rule."""
    if kind is int:
        return _INT_MIN <= value <= _INT_MAX
    if kind is float:
        return isfinite(value) and (value != 0.0 or str(value)[0] != "-")
    return kind is bool or value is None


def _refuse_duplicates(line: bytes) -> None:
    import json

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise LogError(f"the key {twice!r} stands twice in one object", code="log.not_json", details={"key": twice})
        return dict(found)

    json.loads(line, object_pairs_hook=pairs)
