"""What the harness demands of stored events: message shapes, vocabulary, and for a whole session envelope and surface.

``check_event`` and ``check_known`` run on every read; ``check_session`` is what restoring the session adds.
"""

from __future__ import annotations

from typing import Any, Final, cast

from kimi_ray.exchange.dsh.errors import InvalidSession, unsupported
from kimi_ray.exchange.dsh.js_json import is_safe_integer, shown
from kimi_ray.exchange.dsh.model import Event, JsonObject
from kimi_ray.exchange.dsh.vocabulary import KNOWN_TYPES, SURFACE_TYPES

_ENVELOPE: Final = frozenset({"type", "seq", "time", "data", "ignorable", "surfaceOp", "sourceEventSeqs"})
_ADAPTER_KEYS: Final = frozenset({"reasoningEffort", "maxTokens"})


def check_event(event: Event) -> None:
    """The shape of an event that carries a message; any other passes.

    Raises:
        InvalidSession: what is wrong with it.
    """
    kind = event.get("type")
    if type(kind) is not str or kind not in SURFACE_TYPES:
        return
    seq: int = event["seq"]
    subject = f"session event at seq {seq}"
    data = event.get("data")
    message = _record(data) if kind == "user/message" else _record(_record(data).get("message"))
    if not _is_text(message.get("id")):
        raise InvalidSession(f"{subject} lacks an identified message", seq)
    role = "assistant" if kind == "assistant/message" else "user"
    if message.get("role") != role:
        raise InvalidSession(f'{subject} message must have role "{role}"', seq)
    origin = message.get("source")
    source = cast("JsonObject", origin) if isinstance(origin, dict) else {}
    if not _is_text(source.get("kind")):
        raise InvalidSession(f"{subject} message has invalid source", seq)
    content: Any = message.get("content")
    if not isinstance(content, list):
        raise InvalidSession(f"{subject} message has invalid content", seq)
    if kind == "assistant/message":
        if source["kind"] != "model" or not _has_model(source):
            raise InvalidSession(f"{subject} message must have model source", seq)
    elif kind == "tool/result":
        _check_result(subject, seq, source, cast("list[Any]", content))


def _check_result(subject: str, seq: int, source: JsonObject, content: list[Any]) -> None:
    if source["kind"] != "tool" or not _is_text(source.get("callId")):
        raise InvalidSession(f"{subject} message must have tool source", seq)
    block = cast("JsonObject", content[0]) if len(content) == 1 and isinstance(content[0], dict) else {}
    if block.get("type") != "tool-result" or not isinstance(block.get("content"), list):
        raise InvalidSession(f"{subject} message must contain one tool-result block", seq)
    if block.get("toolCallId") != source["callId"]:
        raise InvalidSession(f"{subject} message has mismatched tool call ids", seq)


def check_known(event: Event, session_id: str) -> None:
    """Refuse a required event of a type that the harness does not know.

    Raises:
        Refusal: ``unsupported``.
    """
    kind = event.get("type")
    if (type(kind) is str and kind in KNOWN_TYPES) or event.get("ignorable") is True:
        return
    named = shown(kind) if "type" in event else "undefined"
    raise unsupported(
        f'session "{session_id}" contains event type "{named}" (seq {event["seq"]}) unknown to this harness and not '
        "marked ignorable; refusing to interpret the log — it was likely written by a newer harness",
        seq=event["seq"],
    )


def check_session(events: list[Event]) -> None:
    """Envelopes, request headers and the surface of a whole session.

    Raises:
        InvalidSession: what is wrong, naming the event's index.
    """
    surface = _Surface()
    for index, event in enumerate(events):
        _check_envelope(event, index)
        if event["type"] == "request/header":
            _check_request_header(event["data"], index)
        surface.add(event)


def _check_envelope(event: Event, index: int) -> None:
    right = (
        event.keys() <= _ENVELOPE
        and type(event.get("type")) is str
        and is_safe_integer(event.get("seq"))
        and event["seq"] == index
        and is_safe_integer(event.get("time"))
        and "data" in event
        and ("ignorable" not in event or event["ignorable"] is True)
    )
    if not right:
        raise InvalidSession(f"seed event at index {index} has an invalid event envelope", index)


def _check_request_header(data: Any, index: int) -> None:
    header = _record(_record(data).get("header"))
    config = header.get("config")
    if not isinstance(config, dict) or not _has_model(cast("JsonObject", config)):
        raise InvalidSession(f"seed request/header at index {index} lacks provider/model", index)
    settings = cast("JsonObject", config)
    if "reasoningEffort" in settings and not _is_text(settings["reasoningEffort"]):
        raise InvalidSession(f"seed request/header at index {index} has an invalid reasoningEffort", index)
    if "adapterDefaults" not in header:
        return
    defaults = header["adapterDefaults"]
    marks = cast("JsonObject", defaults) if isinstance(defaults, dict) else {"": None}
    if any(key not in _ADAPTER_KEYS or mark is not True or key not in settings for key, mark in marks.items()):
        raise InvalidSession(f"seed request/header at index {index} has invalid adapterDefaults", index)


class _Surface:
    """Which events the model sees, folded as the harness does."""

    def __init__(self) -> None:
        self._nodes: list[int] = []
        self._events: dict[int, Event] = {}

    def add(self, event: Event) -> None:
        """Take one more event.

        Raises:
            InvalidSession: it breaks a rule of the surface.
        """
        seq: int = int(event["seq"])
        if event["type"] not in SURFACE_TYPES:
            if "surfaceOp" in event or "sourceEventSeqs" in event:
                raise InvalidSession(
                    f"event {seq} ({event['type']}) carries surface metadata, and is not on the surface", seq
                )
            return
        if "surfaceOp" not in event:
            raise InvalidSession(f"surface event {seq} ({event['type']}) lacks surfaceOp", seq)
        sources = self._sources(event, seq)
        op = event["surfaceOp"]
        if op == "append":
            self._nodes.append(seq)
        else:
            self._replace(event, seq, op, sources)
        self._events[seq] = event

    def _sources(self, event: Event, seq: int) -> set[int] | None:
        if "sourceEventSeqs" not in event:
            return None
        found: Any = event["sourceEventSeqs"]
        if not isinstance(found, list):
            raise InvalidSession(f"sourceEventSeqs of event {seq} is not a list", seq)
        seqs = cast("list[Any]", found)
        if not seqs and event["type"] != "assistant/message":
            raise InvalidSession(f"sourceEventSeqs of event {seq} is empty", seq)
        if not all(is_safe_integer(one) and 0 <= one < seq for one in seqs) or len(set(seqs)) != len(seqs):
            raise InvalidSession(f"sourceEventSeqs of event {seq} are not distinct earlier seqs", seq)
        return set(seqs)

    def _replace(self, event: Event, seq: int, op: Any, sources: set[int] | None) -> None:
        body = _record(op)
        if body.keys() != {"op", "start", "end"} or body["op"] != "replace":
            raise InvalidSession(f"event {seq} has an invalid surfaceOp", seq)
        places = [self._nodes.index(at) if at in self._nodes else -1 for at in (body["start"], body["end"])]
        if places[0] < 0 or places[1] < places[0]:
            raise InvalidSession(
                f"event {seq} replaces {body['start']}..{body['end']}, which is no span of the surface", seq
            )
        shadowed = self._nodes[places[0] : places[1] + 1]
        missing = [one for one in shadowed if one not in (sources or ())]
        if missing:
            raise InvalidSession(f"event {seq} shadows {missing[0]} without citing it", seq)
        if event["type"] == "tool/result":
            before = self._events[shadowed[0]]
            if len(shadowed) != 1 or before["type"] != "tool/result":
                raise InvalidSession(f"tool/result {seq} must replace exactly one tool/result", seq)
            if _but_content(before) != _but_content(event):
                raise InvalidSession(f"tool/result {seq} may only change the content of the one it replaces", seq)
        self._nodes[places[0] : places[1] + 1] = [seq]


def _but_content(event: Event) -> JsonObject:
    data = dict(event["data"])
    message = dict(data["message"])
    block = dict(message["content"][0])
    block["content"] = None
    return {**data, "message": {**message, "content": [block]}}


def _has_model(value: JsonObject) -> bool:
    return _is_text(value.get("provider")) and _is_text(value.get("model"))


def _is_text(value: Any) -> bool:
    return type(value) is str and bool(value)


def _record(value: Any) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}
