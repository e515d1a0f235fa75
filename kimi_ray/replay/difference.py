"""The first place where two requests differ, and what stands there in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, cast

from kimi_ray.log import Message

ABSENT: Final = "(nothing)"
"""What stands on the side that has nothing there."""

SHOWN_CHARS = 400
"""How much of a long text is shown, from a little before the first difference."""

_LEAD_CHARS = 60
_SENT = ("role", "content")
"""What of a message a model is told."""

_MISSING: Final = object()

Found = tuple[str, Any, Any]
"""A path such as ``messages[3].content[0].text``, and the two values there."""


def first_difference(
    recorded: Any, replayed: Any, path: str = "", *, ignored: Sequence[str] = (), skipped: list[str] | None = None
) -> Found | None:
    """The first difference of two JSON values, in the order of the first one's keys; None for equal ones.

    Numbers are equal by value; True and 1 are not.

    Args:
        recorded: The one.
        replayed: The other.
        path: Where they stand.
        ignored: Paths at which, and inside of which, they may differ.
        skipped: Gets those of them at which they do.
    """
    if ignored and _is_ignored(path, ignored):
        if skipped is not None and first_difference(recorded, replayed) is not None:
            skipped.append(path)
        return None
    if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        one, other = cast("Mapping[str, Any]", recorded), cast("Mapping[str, Any]", replayed)
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{path}.{key}" if path else key
            here, there = one.get(key, _MISSING), other.get(key, _MISSING)
            found = first_difference(here, there, inner, ignored=ignored, skipped=skipped)
            if found is not None:
                return found
        return None
    if isinstance(recorded, list | tuple) and isinstance(replayed, list | tuple):
        first, second = cast("Sequence[Any]", recorded), cast("Sequence[Any]", replayed)
        for index in range(max(len(first), len(second))):
            here, there = _at(first, index), _at(second, index)
            found = first_difference(here, there, f"{path}[{index}]", ignored=ignored, skipped=skipped)
            if found is not None:
                return found
        return None
    if (
        recorded is not _MISSING
        and replayed is not _MISSING
        and isinstance(recorded, bool) == isinstance(replayed, bool)
    ):
        if recorded == replayed:
            return None
    elif recorded is replayed:
        return None
    return path, *_shown(recorded, replayed)


def messages_difference(
    recorded: Sequence[Message],
    replayed: Sequence[Message],
    start: int = 0,
    *,
    ignored: Sequence[str] = (),
    skipped: list[str] | None = None,
) -> Found | None:
    """The first difference of two conversations in what a model is told: roles and contents, not ids and sources.

    Args:
        recorded: The one.
        replayed: The other.
        start: So many messages at the beginning are known to be equal.
        ignored: See ``first_difference``.
        skipped: See ``first_difference``.
    """
    for index in range(start, max(len(recorded), len(replayed))):
        one, other = _at(recorded, index), _at(replayed, index)
        if one is other:
            continue
        found = first_difference(_sent(one), _sent(other), f"messages[{index}]", ignored=ignored, skipped=skipped)
        if found is not None:
            return found
    return None


def _is_ignored(path: str, ignored: Iterable[str]) -> bool:
    return any(path == field or path.startswith((f"{field}.", f"{field}[")) for field in ignored)


def _sent(message: Any) -> Any:
    if message is _MISSING:
        return _MISSING
    return {key: message[key] for key in _SENT if key in message}


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else _MISSING


def _shown(recorded: Any, replayed: Any) -> tuple[Any, Any]:
    """Both values; of long texts the part where they begin to differ."""
    if isinstance(recorded, str) and isinstance(replayed, str):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(recorded, replayed, strict=False)))
        start = max(0, same - _LEAD_CHARS) if max(len(recorded), len(replayed)) > SHOWN_CHARS else 0
        return _part(recorded, start), _part(replayed, start)
    return _whole(recorded), _whole(replayed)


def _part(text: str, start: int) -> str:
    shown = text[start : start + SHOWN_CHARS]
    return ("... " if start else "") + shown + (" ..." if start + SHOWN_CHARS < len(text) else "")


def _whole(value: Any) -> Any:
    return ABSENT if value is _MISSING else value
