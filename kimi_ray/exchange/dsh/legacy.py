"""Older shapes of version 0, brought to the present one as the harness does when it reads.

What looks like the present shape and is wrong stays as it is, so that the rules refuse it; an old shape that is wrong
is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

from kimi_ray.exchange.dsh.errors import Refusal, corrupt
from kimi_ray.exchange.dsh.js_json import is_number, is_safe_integer
from kimi_ray.exchange.dsh.model import Event, JsonObject
from kimi_ray.exchange.dsh.vocabulary import RETIRED_TYPES

_PLAIN_REASONS: Final = frozenset({"completed", "blocked", "max-tokens", "interrupted"})
_FAILURE_KEYS: Final = frozenset({"message", "code"})
_FAILURE_EXTRAS: Final = frozenset({"status", "providerRetryAfterMs", "requestId"})


def refuse_retired(events: list[Event], session_id: str) -> None:
    """Refuse event types that no reader of this version can replay.

    Raises:
        Refusal: ``corrupt``.
    """
    for retired in RETIRED_TYPES:
        for event in events:
            if event.get("type") == retired:
                raise _refused(session_id, event, f"unsupported legacy {retired} event")
    for event in events:
        if event.get("type") == "request/header":
            data = event.get("data")
            if data is None:
                raise corrupt(f'session "{session_id}" has a request/header without data', seq=event["seq"])
            if _record(data).get("reason") == "fallback":
                raise _refused(session_id, event, 'unsupported legacy request/header reason "fallback"')


class Upgrade:
    """Brings the events of one session to the present shape, in order.

    Args:
        session_id: Its id, part of the message ids that are made up.
    """

    def __init__(self, session_id: str) -> None:
        self._id = session_id
        self._message_ids: dict[int, str] = {}
        self.upgraded = 0

    def apply(self, event: Event) -> Event:
        """The event in the present shape, the same object when it has it.

        Raises:
            Refusal: ``corrupt``, a malformed old shape.
        """
        made = self._message(self._steering(self._turn_end(self._turn_start(event))))
        self.upgraded += made is not event
        return made

    def note(self, event: Event) -> None:
        """Remember the message id of an event that passed the rules."""
        data = _record(event.get("data"))
        message = data if event["type"] == "user/message" else _record(data.get("message"))
        if type(message.get("id")) is str:
            self._message_ids[event["seq"]] = message["id"]

    def _turn_start(self, event: Event) -> Event:
        data = event.get("data")
        if event["type"] != "turn/start" or not isinstance(data, dict) or "trigger" not in data:
            return event
        body = cast("JsonObject", data)
        kind = _record(body["trigger"]).get("kind")
        if not _is_turn(body.get("turn")) or body.keys() != {"turn", "trigger"} or type(kind) is not str or not kind:
            raise self._malformed(event)
        return {**event, "data": {"turn": body["turn"]}}

    def _turn_end(self, event: Event) -> Event:
        data = event.get("data")
        if event["type"] != "turn/end" or not isinstance(data, dict):
            return event
        body = cast("JsonObject", data)
        reason = _record(body.get("reason"))
        kind = reason.get("kind")
        if not _is_turn(body.get("turn")) or body.keys() != {"turn", "reason"} or type(kind) is not str:
            raise self._malformed(event)
        if kind in _PLAIN_REASONS:
            if reason.keys() != {"kind"}:
                raise self._malformed(event)
            return event
        if (kind == "aborted" and "reason" in reason) or (kind == "error" and "error" in reason):
            return event
        if kind in ("aborted", "disposed"):
            if reason.keys() != {"kind"}:
                raise self._malformed(event)
            present: JsonObject = {
                "kind": "aborted",
                "reason": {"kind": "legacy" if kind == "aborted" else "disposed"},
            }
        elif kind == "error":
            present = self._error(event, reason)
        else:
            return event
        return {**event, "data": {**body, "reason": present}}

    def _error(self, event: Event, reason: JsonObject) -> JsonObject:
        if not is_safe_integer(reason.get("step")) or reason["step"] < 0:
            raise self._malformed(event)
        failure = _record(reason.get("failure"))
        if failure and reason.keys() == {"kind", "step", "failure"} and _is_failure(failure):
            return {"kind": "error", "error": failure}
        wanted = {"kind", "step", "message", *(("code",) if "code" in reason else ())}
        texts = [reason.get("message"), reason.get("code", "UNKNOWN")]
        if reason.keys() != wanted or any(type(text) is not str for text in texts):
            raise self._malformed(event)
        return {"kind": "error", "error": {"message": texts[0], "code": texts[1]}}

    def _steering(self, event: Event) -> Event:
        if event["type"] != "steering/message":
            return event
        data = _record(event.get("data"))
        if not is_safe_integer(data.get("turn")):
            raise self._malformed(event)
        if data.keys() == {"turn", "message"} and isinstance(data["message"], dict):
            return {**event, "type": "user/message", "data": data["message"]}
        if data.keys() != {"turn", "content", "source"}:
            raise self._malformed(event)
        message = {"content": data["content"], "source": data["source"], "id": self._made_up(event), "role": "user"}
        return {**event, "type": "user/message", "data": message}

    def _message(self, event: Event) -> Event:
        data = event.get("data")
        if not isinstance(data, dict):
            return event
        body, kind = cast("JsonObject", data), event["type"]
        if kind == "user/message":
            if body.keys() & {"id", "role", "message"} or not body.keys() >= {"content", "source"}:
                return event
            return {**event, "data": {**body, "id": self._made_up(event), "role": "user"}}
        if "message" in body:
            return event
        if kind == "assistant/message" and body.keys() >= {"content", "provenance"}:
            message: JsonObject = {
                "id": self._made_up(event),
                "role": "assistant",
                "content": body["content"],
                "source": {**_record(body["provenance"]), "kind": "model"},
            }
            return {**event, "data": {**_without(body, {"content", "provenance"}), "message": message}}
        if kind == "tool/result" and body.keys() >= {"callId", "content", "isError"}:
            call_id = body["callId"]
            block = {
                "type": "tool-result",
                "toolCallId": call_id,
                "content": body["content"],
                "isError": body["isError"],
            }
            message = {
                "id": self._inherited(event),
                "role": "user",
                "content": [block],
                "source": {"kind": "tool", "callId": call_id},
            }
            return {**event, "data": {**_without(body, {"callId", "content", "isError"}), "message": message}}
        return event

    def _inherited(self, event: Event) -> str | None:
        """The id of the result that this one replaces, or one made up."""
        op = _record(event.get("surfaceOp"))
        if op.get("op") == "replace" and is_number(op.get("start")):
            return self._message_ids.get(op["start"])
        return self._made_up(event)

    def _made_up(self, event: Event) -> str:
        return f"legacy-message:{self._id}:{event['seq']}"

    def _malformed(self, event: Event) -> Refusal:
        return _refused(self._id, event, f"malformed pre-react-loop {event['type']}")


def _refused(session_id: str, event: Event, what: str) -> Refusal:
    return corrupt(f'session "{session_id}" contains {what} at seq {event["seq"]}', seq=event["seq"])


def _record(value: Any) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _without(body: JsonObject, keys: Iterable[str]) -> JsonObject:
    left = set(keys)
    return {key: value for key, value in body.items() if key not in left}


def _is_turn(value: Any) -> bool:
    return is_safe_integer(value) and value >= 1


def _is_failure(failure: JsonObject) -> bool:
    return (
        failure.keys() >= _FAILURE_KEYS
        and failure.keys() <= _FAILURE_KEYS | _FAILURE_EXTRAS
        and all(type(failure[key]) is str for key in _FAILURE_KEYS)
        and all(key not in failure or is_number(failure[key]) for key in ("status", "providerRetryAfterMs"))
        and ("requestId" not in failure or type(failure["requestId"]) is str)
    )
