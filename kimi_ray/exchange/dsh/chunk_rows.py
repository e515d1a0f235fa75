"""Packed rows of the harness: a run of streamed chunks in one storage record, decoded strictly."""

from __future__ import annotations

from typing import Any, Final, cast

from kimi_ray.exchange.dsh.js_json import is_number, is_safe_integer
from kimi_ray.exchange.dsh.model import Event, JsonObject

CHUNK_TAGS: Final = frozenset({"text-chunks", "reasoning-chunks", "tool-call-chunks"})
MAX_DATABASE_MEMBERS: Final = 1024
MAX_DATABASE_BYTES: Final = 1_048_576

_ROW_KEYS: Final = frozenset({"type", "seq0", "time0", "data"})
_PLACE_KEYS: Final = frozenset({"turn", "step", "index", "dt"})
_DELTAS: Final = {"text-chunks": "text-delta", "reasoning-chunks": "reasoning-delta"}


def expand_record(value: Any) -> list[Any]:
    """The events of a line: those of a packed row, or the value as it is (which is not checked here).

    Raises:
        ValueError: a malformed packed row.
    """
    if isinstance(value, dict):
        record = cast("JsonObject", value)
        tag = record.get("type")
        if type(tag) is str and tag in CHUNK_TAGS:
            if record.keys() != _ROW_KEYS:
                raise _malformed(tag, "its keys are not type, seq0, time0, data")
            return list(expand_row(tag, record["seq0"], record["time0"], record["data"]))
    return [value]


def expand_row(tag: str, seq: Any, time: Any, data: Any, *, least: int = 1, most: int | None = None) -> list[Event]:
    """The events of a packed row.

    Args:
        tag: Its type.
        seq: Of the first event.
        time: Of the first event, epoch milliseconds.
        data: The packed payload.
        least: The fewest members that it may have.
        most: The most members, or None.

    Raises:
        ValueError: it is not a row that the harness writes.
    """
    if not is_safe_integer(seq) or seq < 0:
        raise _malformed(tag, "seq0 must be a non-negative safe integer")
    if not is_safe_integer(time):
        raise _malformed(tag, "time0 must be a safe integer")
    if not isinstance(data, dict):
        raise _malformed(tag, "data must be an object")
    body = cast("JsonObject", data)
    many = "args" if tag == "tool-call-chunks" else "texts"
    call: JsonObject = {}
    wanted = _PLACE_KEYS | {many}
    if many == "args":
        call = {key: body[key] for key in ("id", "name") if key in body}
        wanted |= {"id"} | call.keys()
    if body.keys() != wanted or any(type(text) is not str for text in call.values()):
        raise _malformed(tag, "its data has other fields than its type")
    if not all(is_number(body[key]) for key in ("turn", "step", "index")):
        raise _malformed(tag, "turn, step and index must be numbers")
    members: Any = body[many]
    if not isinstance(members, list) or any(type(text) is not str for text in cast("list[Any]", members)):
        raise _malformed(tag, f"{many} must be a list of strings")
    texts = cast("list[str]", members)
    if len(texts) < least or (most is not None and len(texts) > most):
        raise _malformed(tag, f"{many} has {len(texts)} members")
    gaps: Any = body["dt"]
    if not isinstance(gaps, list) or not all(is_safe_integer(gap) for gap in cast("list[Any]", gaps)):
        raise _malformed(tag, "dt must be a list of safe integers")
    if len(cast("list[Any]", gaps)) != len(texts) - 1:
        raise _malformed(tag, f"{len(cast('list[Any]', gaps))} time gaps for {len(texts)} members")
    if not is_safe_integer(seq + len(texts) - 1):
        raise _malformed(tag, "its seqs are beyond the safe integers")
    return _members(tag, int(seq), int(time), body, call, texts, cast("list[int]", gaps))


def _members(
    tag: str, seq: int, time: int, body: JsonObject, call: JsonObject, texts: list[str], gaps: list[int]
) -> list[Event]:
    events: list[Event] = []
    for place, text in enumerate(texts):
        if place:
            time += int(gaps[place - 1])
            if not is_safe_integer(time):
                raise _malformed(tag, "its times are beyond the safe integers")
        if tag == "tool-call-chunks":
            chunk = {"type": "tool-call-delta", "index": body["index"], **call, "argumentsDelta": text}
        else:
            chunk = {"type": _DELTAS[tag], "index": body["index"], "text": text}
        data = {"turn": body["turn"], "step": body["step"], "chunk": chunk}
        events.append({"type": "assistant/chunk", "seq": seq + place, "time": time, "data": data})
    return events


def _malformed(tag: str, why: str) -> ValueError:
    return ValueError(f"malformed {tag} storage row: {why}")
