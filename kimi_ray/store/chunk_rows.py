"""Packed rows: a run of streamed chunks stored as one row, byte for byte recoverable.

A model streams an answer in hundreds of small ``assistant/chunk`` events that differ only in seq, time and text. Three
or more of them in a row, of one block, become one row at batch cut::

    {"type":"text-chunks","seq0":7,"time0":1700,"data":{"turn":0,"step":0,"attempt":1,"index":0,"dt":[3,4],"texts":[...]}}

``reasoning-chunks`` likewise; ``tool-call-chunks`` has ``id`` and ``name`` (where every fragment has the same) and
``args``. Member k has seq ``seq0 + k`` and time ``time0 + sum(dt[:k])``. Whatever would not come back as exactly the
same bytes stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import StoreError
from kimi_ray.events import SessionEvent

MIN_RUN: Final = 3
"""Shorter runs are not worth a row of their own."""
MAX_MEMBERS: Final = 1024
MAX_ROW_BYTES: Final = 1 << 20
_MAX_GAP_MS: Final = 2**53

_CHUNK: Final = "assistant/chunk"
_PREFIXES: Final = (b'{"type":"text-chunks"', b'{"type":"reasoning-chunks"', b'{"type":"tool-call-chunks"')
_TAIL: Final = b"}}}"


class _Kind(NamedTuple):
    row: bytes
    delta: bytes
    field: bytes
    """The key of the fragment in a chunk."""
    many: bytes
    """The key of the fragments in a packed row."""


_KINDS: Final = (
    _Kind(b"text-chunks", b"text-delta", b"text", b"texts"),
    _Kind(b"reasoning-chunks", b"reasoning-delta", b"text", b"texts"),
    _Kind(b"tool-call-chunks", b"tool-call-delta", b"arguments", b"args"),
)
_BY_DELTA: Final = {kind.delta.decode(): kind for kind in _KINDS}
_BY_ROW: Final = {kind.row.decode(): kind for kind in _KINDS}


class _Shape(NamedTuple):
    """What all members of a run share."""

    kind: _Kind
    turn: int
    step: int
    attempt: int
    block: int
    call: bytes
    """``"id":"...","name":"...",`` of a tool call, as far as they are given."""

    def middle(self) -> bytes:
        """The bytes of every member between its time and its fragment."""
        place = b'"turn":%d,"step":%d,"attempt":%d' % (self.turn, self.step, self.attempt)
        chunk = b'"type":"%s","index":%d,%s"%s":' % (self.kind.delta, self.block, self.call, self.kind.field)
        return b'"type":"assistant/chunk","data":{%s,"chunk":{%s' % (place, chunk)


def is_packed(line: bytes) -> bool:
    """Whether a stored row is a packed one: a look at its first bytes."""
    return line.startswith(_PREFIXES)


def pack_rows(events: Sequence[SessionEvent]) -> list[tuple[bytes, int]]:
    """The rows of a batch, in order: ``(row with its final newline, number of events in it)``.

    Args:
        events: Consecutive events of one log.
    """
    rows: list[tuple[bytes, int]] = []
    position, end = 0, len(events)
    while position < end:
        event = events[position]
        if event.type != _CHUNK:
            rows.append((event.line + b"\n", 1))
            position += 1
            continue
        row, members = _pack_run(events, position)
        if row is not None:
            rows.append((row, members))
        else:
            rows.extend((events[at].line + b"\n", 1) for at in range(position, position + members))
        position += members
    return rows


def _pack_run(events: Sequence[SessionEvent], start: int) -> tuple[bytes | None, int]:
    """The packed row of the run that begins at ``start`` (None: it stays verbatim), and how many events it spans."""
    first = events[start]
    shape = _shape_of(first)
    if shape is None:
        return None, 1
    middle = shape.middle()
    fragment = shape.kind.field.decode()
    texts: list[str] = []
    literals: list[bytes] = []
    gaps: list[int] = []
    seq, last_time, size = first.seq, first.time, len(middle)
    for at in range(start, min(len(events), start + MAX_MEMBERS)):
        event = events[at]
        head = b'{"seq":%d,"time":%d,' % (seq, event.time)
        line = event.line
        cut = len(head) + len(middle)
        if not (line.startswith(head) and line.startswith(middle, len(head)) and line.endswith(_TAIL)):
            break
        text: object = event.data["chunk"].get(fragment)
        gap = event.time - last_time
        size += len(line) - cut + 24  # a gap and its comma take at most 18 bytes
        if type(text) is not str or abs(gap) > _MAX_GAP_MS or size > MAX_ROW_BYTES:
            break
        texts.append(text)
        literals.append(line[cut:-3])
        if at > start:
            gaps.append(gap)
        seq += 1
        last_time = event.time
    members = len(texts)
    if members < MIN_RUN:
        return None, max(members, 1)
    packed = b"[%s]" % b",".join(literals)
    # A line that somebody else wrote may spell its text differently; only our own spelling comes back from the text.
    if packed != to_json(texts):
        return None, members
    place = b'"turn":%d,"step":%d,"attempt":%d,"index":%d' % (shape.turn, shape.step, shape.attempt, shape.block)
    data = b'%s,"dt":%s,%s"%s":%s' % (place, to_json(gaps), shape.call, shape.kind.many, packed)
    row = b'{"type":"%s","seq0":%d,"time0":%d,"data":{%s}}\n' % (shape.kind.row, first.seq, first.time, data)
    return row, members


def _shape_of(event: SessionEvent) -> _Shape | None:
    data: Any = event.data
    chunk: Any = data.get("chunk")
    if not isinstance(chunk, dict):
        return None
    body = cast("dict[str, Any]", chunk)
    delta = body.get("type")
    kind = _BY_DELTA.get(delta) if type(delta) is str else None
    turn: Any = data.get("turn")
    step: Any = data.get("step")
    attempt: Any = data.get("attempt")
    block: Any = body.get("index")
    if kind is None or not (type(turn) is type(step) is type(attempt) is type(block) is int):
        return None
    call = b""
    if kind.many == b"args":
        for key in ("id", "name"):
            if key in body:
                value = body[key]
                if type(value) is not str:
                    return None
                call += b'"%s":%s,' % (key.encode(), to_json(value))
    return _Shape(kind, turn, step, attempt, block, call)


def unpack_row(line: bytes) -> list[bytes]:
    """The canonical lines of a stored row, without newlines; a row that is not packed is its own only line.

    Raises:
        StoreError: ``store.corrupt`` when a packed row is not one that ``pack_rows`` writes.
    """
    raw = bytes(line).rstrip(b"\n")
    if not is_packed(raw):
        return [raw]
    try:
        value: Any = from_json(raw, allow_inf_nan=False, cache_strings="keys")
        spelled = to_json(value)
    except ValueError as error:
        _corrupt(f"it is not JSON: {error}")
    if spelled != raw:
        _corrupt("it is not spelled as it was written")
    if list(value) != ["type", "seq0", "time0", "data"]:
        _corrupt("its keys are not type, seq0, time0, data")
    kind = _BY_ROW[value["type"]]
    many = kind.many.decode()
    seq, time, data = value["seq0"], value["time0"], value["data"]
    if not isinstance(data, dict):
        _corrupt("its data is not an object")
    body = cast("dict[str, Any]", data)
    named = [key for key in ("id", "name") if many == "args" and key in body]
    if list(body) != ["turn", "step", "attempt", "index", "dt", *named, many]:
        _corrupt("the keys of its data are not those of its type")
    turn, step, attempt, index = body["turn"], body["step"], body["attempt"], body["index"]
    if not (type(seq) is type(time) is type(turn) is type(step) is type(attempt) is type(index) is int) or seq < 0:
        _corrupt("a number in it is not an int")
    if any(type(body[key]) is not str for key in named):
        _corrupt("id or name is not a string")
    texts, gaps = body[many], body["dt"]
    if not isinstance(texts, list) or not isinstance(gaps, list):
        _corrupt("its fragments or gaps are not a list")
    return _expand(
        _Shape(kind, turn, step, attempt, index, b"".join(b'"%s":%s,' % (k.encode(), to_json(body[k])) for k in named)),
        seq,
        time,
        cast("list[Any]", gaps),
        cast("list[Any]", texts),
    )


def _expand(shape: _Shape, seq: int, time: int, gaps: list[Any], texts: list[Any]) -> list[bytes]:
    if not MIN_RUN <= len(texts) <= MAX_MEMBERS:
        _corrupt(f"it has {len(texts)} members")
    if len(gaps) != len(texts) - 1:
        _corrupt(f"it has {len(gaps)} gaps for {len(texts)} members")
    middle = shape.middle()
    lines: list[bytes] = []
    for member, text in enumerate(texts):
        if member:
            gap = gaps[member - 1]
            if type(gap) is not int or abs(gap) > _MAX_GAP_MS:
                _corrupt(f"gap {member - 1} is not an int of milliseconds")
            time += gap
        if type(text) is not str:
            _corrupt(f"fragment {member} is not a string")
        lines.append(b'{"seq":%d,"time":%d,%s%s}}}' % (seq + member, time, middle, to_json(text)))
    return lines


def _corrupt(why: str) -> NoReturn:
    raise StoreError(f"a packed chunk row cannot be read: {why}", code="store.corrupt", details={"why": why})
