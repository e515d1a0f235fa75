"""The envelope of an event: its keys, their order, its canonical bytes.

``{"seq","time","type","data","surface"?,"sources"?,"ignorable"?}``, one object a line; absent means absent, not null.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import intern
from typing import Any, Final, cast

from kimi_ray.errors import LogError
from kimi_ray.events.json_rule import FrozenDict, FrozenList, decode, decode_plain, encode, freeze, freeze_checked

_REQUIRED: Final = 4
"""``seq``, ``time``, ``type`` and ``data`` are always there."""
_KEYS: Final = frozenset({"seq", "time", "type", "data", "surface", "sources", "ignorable"})

SurfaceOp = str | dict[str, list[int]]
"""``"append"`` or ``{"replace": [start, end]}``."""


class SessionEvent:
    """One immutable event of a log. ``line`` is its canonical bytes without the final newline.

    The data of an event that was read from a store may be out of memory: it is then read from ``line`` when somebody
    looks at it, and stays.
    """

    __slots__ = ("data", "ignorable", "line", "seq", "sources", "surface", "time", "type")

    seq: int
    time: int
    type: str
    data: Any
    surface: SurfaceOp | None
    sources: tuple[int, ...] | None
    ignorable: bool
    line: bytes

    def __getattr__(self, name: str) -> Any:
        # Reached only for a slot that is empty: the data was unloaded.
        if name != "data":
            raise AttributeError(f"an event has no {name}")
        data: Any = decode(self.line)["data"]
        object.__setattr__(self, "data", data)
        return data

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an event cannot be changed ({name})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an event cannot be changed ({name})")

    def __repr__(self) -> str:
        return f"SessionEvent({self.line.decode()[:200]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionEvent) and other.line == self.line

    def __hash__(self) -> int:
        return hash(self.line)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return (parse_event, (self.line,))

    def unload(self) -> None:
        """Let go of the parsed data; the next look at it reads ``line`` again."""
        try:
            object.__delattr__(self, "data")
        except AttributeError:
            pass

    @property
    def replaced(self) -> tuple[int, int] | None:
        """The surface span ``(start, end)`` that this event replaces, or None."""
        if isinstance(self.surface, dict):
            start, end = self.surface["replace"]
            return start, end
        return None

    def to_data(self) -> dict[str, Any]:
        """The envelope as a JSON object, in key order."""
        return envelope(self.seq, self.time, self.type, self.data, self.surface, self.sources, self.ignorable)


class _NewEvent(SessionEvent):
    """An event while its slots are being filled: three times faster than writing past the guard, slot by slot."""

    __slots__ = ()
    __setattr__ = object.__setattr__  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        seq: int,
        time: int,
        type: str,
        data: Any,
        surface: SurfaceOp | None,
        sources: tuple[int, ...] | None,
        ignorable: bool,
        line: bytes,
    ) -> None:
        self.seq = seq
        self.time = time
        self.type = type
        self.data = data
        self.surface = surface
        self.sources = sources
        self.ignorable = ignorable
        self.line = line
        self.__class__ = SessionEvent  # pyright: ignore[reportAttributeAccessIssue]


def envelope(
    seq: int,
    time: int,
    type: str,
    data: Any,
    surface: SurfaceOp | None,
    sources: tuple[int, ...] | None,
    ignorable: bool,
) -> dict[str, Any]:
    """The JSON object of an event, keys in their order."""
    out: dict[str, Any] = {"seq": seq, "time": time, "type": type, "data": data}
    if surface is not None:
        out["surface"] = surface
    if sources is not None:
        out["sources"] = list(sources)
    if ignorable:
        out["ignorable"] = True
    return out


def make_event(
    seq: int,
    time: int,
    type: str,
    data: Any,
    surface: SurfaceOp | None = None,
    sources: tuple[int, ...] | None = None,
    ignorable: bool = False,
) -> SessionEvent:
    """Check, freeze and encode one event.

    Raises:
        LogError: ``log.not_json`` when ``data`` breaks the JSON rule or is not an object; ``log.bad_envelope`` for a
            ``surface`` or ``sources`` of another shape.
    """
    if not isinstance(data, dict):
        raise LogError(f"the data of {type} must be an object, not {data.__class__.__name__}", code="log.not_json")
    frozen = freeze(cast("dict[str, Any]", data))
    if surface is not None:
        surface = _surface_of(surface, seq)
    if sources is not None:
        sources = _sources_of(list(sources), seq)
    # The caller's plain containers encode five times faster than their frozen copies, and hold the same values.
    line = encode(envelope(seq, time, type, data, surface, sources, ignorable))
    return _NewEvent(seq, time, type, frozen, surface, sources, ignorable, line)


def parse_event(line: bytes, *, at: int | None = None) -> SessionEvent:
    """Read one stored line back, under the same rules as it was written.

    Args:
        line: Canonical bytes, with or without the final newline.
        at: The seq that it must have.

    Raises:
        LogError: ``log.not_json`` or ``log.bad_envelope``.
    """
    raw = _one_line(line, at)
    return _event_of(decode_plain(raw), raw, at, freeze_checked)


def glance(line: bytes, *, at: int | None = None) -> SessionEvent:
    """``parse_event`` for a fold that looks once: the data is checked but not frozen.

    Whoever keeps the event calls ``unload`` before anybody else sees it.

    Raises:
        LogError: as ``parse_event``.
    """
    raw = _one_line(line, at)
    return _event_of(decode_plain(raw), raw, at, _as_it_is)


def event_from_data(value: Any, *, line: bytes | None = None, at: int | None = None) -> SessionEvent:
    """An event from its parsed envelope (already under the JSON rule).

    Raises:
        LogError: ``log.bad_envelope`` naming the key.
    """
    return _event_of(value, line, at, _as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def _one_line(line: bytes, at: int | None) -> bytes:
    raw = bytes(line).rstrip(b"\n")
    if b"\n" in raw:
        raise _bad("an event is one line", at)
    return raw


def stored_event(value: Any, line: bytes, seq: int, kind: str | None) -> SessionEvent:
    """An event from a line whose beginning was looked at: its seq is right, and so is ``kind`` unless it is None.

    Raises:
        LogError: ``log.bad_envelope``.
    """
    time, data = value.get("time"), value.get("data")
    if kind is not None and type(time) is int and type(data) is dict:
        more = len(value) - _REQUIRED
        if more == 0:
            return _NewEvent(seq, time, kind, data, None, None, False, line)
        if value.get("surface") == "append" and (more == 1 or (more == 2 and "sources" in value)):
            sources = None if more == 1 else _sources_of(value["sources"], seq)
            return _NewEvent(seq, time, kind, data, "append", sources, False, line)
        if more == 1 and value.get("ignorable") is True:
            return _NewEvent(seq, time, kind, data, None, None, True, line)
    return _event_of(value, line, seq, _as_it_is)


def _event_of(value: Any, line: bytes | None, at: int | None, shape: Callable[[Any], Any]) -> SessionEvent:
    if not isinstance(value, dict):
        raise _bad("an event is an object", at)
    body = cast("dict[str, Any]", value)
    seq, time, kind, data = body.get("seq"), body.get("time"), body.get("type"), body.get("data")
    if type(seq) is not int or seq < 0:
        raise _bad("seq must be an int >= 0", at)
    if at is not None and seq != at:
        raise _bad(f"seq is {seq} where {at} belongs", at)
    if type(time) is not int:
        raise _bad("time must be an int", seq)
    if type(kind) is not str or not all(kind.partition("/")):
        raise _bad("type must be family/what", seq)
    if not isinstance(data, dict):
        raise _bad("data must be an object", seq)
    surface: SurfaceOp | None = None
    sources: tuple[int, ...] | None = None
    ignorable = False
    if len(body) > _REQUIRED:
        extra = body.keys() - _KEYS
        if extra:
            raise _bad(f"unknown envelope key {sorted(extra)[0]!r}", at)
        surface = _surface_of(body.get("surface"), seq) if "surface" in body else None
        sources = _sources_of(body["sources"], seq) if "sources" in body else None
        ignorable = "ignorable" in body
        if ignorable and body["ignorable"] is not True:
            raise _bad("ignorable is true or absent", seq)
    if line is None:
        line = encode(envelope(seq, time, kind, data, surface, sources, ignorable))
    return _NewEvent(seq, time, intern(kind), shape(data), surface, sources, ignorable, line)


def _surface_of(value: Any, seq: int) -> SurfaceOp:
    if type(value) is str and value == "append":
        return "append"
    if isinstance(value, dict):
        body = cast("dict[str, Any]", value)
        span = body.get("replace")
        if body.keys() == {"replace"} and isinstance(span, list):
            ends = cast("list[Any]", span)
            if len(ends) == 2 and all(type(end) is int and end >= 0 for end in ends):
                return FrozenDict(replace=FrozenList(ends))
    raise _bad('surface is "append" or {"replace": [start, end]}', seq)


def _sources_of(value: Any, seq: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _bad("sources is a list of seqs", seq)
    found = cast("list[Any]", value)
    if any(type(item) is not int or not 0 <= item < seq for item in found) or len(set(found)) != len(found):
        raise _bad("sources are distinct earlier seqs", seq)
    return tuple(found)


def _bad(what: str, at: int | None) -> LogError:
    return LogError(f"event {'?' if at is None else at}: {what}", code="log.bad_envelope", details={"seq": at})
