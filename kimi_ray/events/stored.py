"""Reading many stored lines at once: the same rules as for one, at the price of a few looks at the bytes.

A slice of lines is parsed, and held to the JSON rule, as one array. Canonical bytes come out of the encoder as they
went in, so a duplicate key or a foreign spelling shows in one comparison; of what is left only numbers and depth can
break the rule. Whatever does not pass is read again line by line, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from pydantic_core import from_json, to_json

from kimi_ray.events.envelope import SessionEvent, glance, stored_event
from kimi_ray.events.json_rule import MAX_DEPTH

_HEAD_PARTS: Final = 4
"""``seq``, ``time``, ``type`` and the rest of a canonical line."""
_ENDS: Final = (b"}}", b'},"ignorable":true}')
"""How a line ends that has neither surface nor sources."""
_SLICE: Final = 64
"""Lines parsed at once: more, and the garbage collector walks them again and again before they are gone."""
_DIGITS_AS_ZERO: Final = bytes(0x30 if chr(byte).isdigit() else 0x20 for byte in range(256))
_LONG_NUMBER: Final = b"0" * 19
"""Fewer digits are always below 2^63."""


def type_key(name: str) -> bytes:
    """How a canonical line spells its type."""
    return b'"type":"%s"' % name.encode()


def read_stored(
    lines: Sequence[bytes], first_seq: int, known: Mapping[bytes, str], passed: frozenset[bytes]
) -> Iterator[SessionEvent]:
    """The events in a run of stored lines, without those that are passed over. Their data is plain: see ``glance``.

    Args:
        lines: Canonical lines without newline.
        first_seq: The seq of the first one; the others follow without a gap.
        known: Types by their ``type_key``.
        passed: Keys of the types that nobody looks at: such lines are told by their first bytes and not parsed.

    Raises:
        LogError: ``log.not_json`` or ``log.bad_envelope``.
    """
    picked: list[tuple[bytes, int, str | None]] = []
    for seq, line in enumerate(lines, first_seq):
        parts = line.split(b",", 3)
        kind: str | None = None
        if len(parts) == _HEAD_PARTS and parts[0] == b'{"seq":%d' % seq and parts[1][:7] == b'"time":':
            key = parts[2]
            if key in passed and parts[1][7:].isdigit() and parts[3].startswith(b'"data":{') and line.endswith(_ENDS):
                continue
            kind = known.get(key)
        picked.append((line, seq, kind))
        if len(picked) == _SLICE:
            yield from _events(picked)
            picked.clear()
    yield from _events(picked)


def _events(picked: list[tuple[bytes, int, str | None]]) -> Iterator[SessionEvent]:
    values = _sound_values([line for line, _, _ in picked])
    if values is None:
        for line, seq, _ in picked:
            yield glance(line, at=seq)
        return
    for value, (line, seq, kind) in zip(values, picked, strict=True):
        yield stored_event(value, line, seq, kind)


def _sound_values(lines: list[bytes]) -> list[Any] | None:
    """The parsed lines, or None when a look at each is needed."""
    joined = b"[%s]" % b",".join(lines)
    if b"-0.0" in joined or _LONG_NUMBER in joined.translate(_DIGITS_AS_ZERO):
        return None
    if any(line.count(b"{") + line.count(b"[") > MAX_DEPTH for line in lines):
        return None
    try:
        values = from_json(joined, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        return None
    if len(values) != len(lines) or to_json(values) != joined:
        return None
    return cast("list[Any]", values)
