"""How the payloads that have a counterpart are renamed.

Keys become our snake_case. A field without a place in our payload is kept under ``imported``, as it was. Only the
structure of messages and blocks is renamed: arguments, attachments, metadata are the user's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from kimi_ray.exchange.dsh.js_json import is_safe_integer
from kimi_ray.exchange.dsh.model import Event, JsonObject

FOREIGN_ERROR: Final = "dsh.error"
"""The code of an error that the harness recorded; its own code is in the details."""

_BLOCK_KEYS: Final = {"toolCallId": "tool_call_id", "isError": "is_error"}
_SOURCE_KEYS: Final = {"callId": "call_id", "compactionId": "compaction_id", "replayState": "replay_state"}
_USAGE_KEYS: Final = {
    "inputTokens": "input",
    "outputTokens": "output",
    "reasoningTokens": "reasoning",
    "cachedInputTokens": "cached",
    "cacheReadTokens": "cached",
    "cacheWriteTokens": "cache_write",
}
_SAMPLING_KEYS: Final = {
    "temperature": "temperature",
    "maxTokens": "max_output_tokens",
    "stop": "stop",
    "reasoningEffort": "reasoning_effort",
}
_BLOCK_TEXTS: Final = {
    "text": ("text",),
    "reasoning": ("text",),
    "tool-call": ("id", "name", "arguments"),
    "tool-result": ("toolCallId",),
}
_TOOL_CODES: Final = {"TOOL_OUTCOME_UNKNOWN": "tool.outcome_unknown", "TOOL_NOT_STARTED": "tool.not_started"}


class Context:
    """What a payload's meaning depends on: where in turn and step the log stands."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.turn = 0
        self.step = 0
        self.attempt = 1

    def follow(self, event: Event) -> None:
        """Take note of a converted event."""
        kind, data = event["type"], event["data"]
        if not isinstance(data, dict):
            return
        body = cast("JsonObject", data)
        if kind in ("turn/start", "step/start"):
            self.turn = _int(body.get("turn"), self.turn)
            self.step = _int(body.get("step"), 0)
            self.attempt = 1
        elif kind == "llm/retry":
            self.attempt += 1

    def foreign(self, kind: str) -> None:
        """An event is kept without being mapped."""
        self.counts[f"foreign:{kind}"] += 1

    def place(self, mapped: JsonObject) -> JsonObject:
        """Fill in turn and step where a message lacks them: our log puts every message in its step."""
        for key, default in (("turn", self.turn), ("step", self.step)):
            if type(mapped.get(key)) is not int:
                mapped[key] = default
                self.counts["position_filled"] += 1
        return {"turn": mapped.pop("turn"), "step": mapped.pop("step"), **mapped}


Mapping_ = Callable[[JsonObject, Context], JsonObject | None]


def _renamed(data: JsonObject, keys: Mapping[str, str]) -> JsonObject:
    """The fields under our names, in their order; the rest as ``imported``."""
    out: JsonObject = {}
    rest: JsonObject = {}
    for key, value in data.items():
        if key in keys:
            out[keys[key]] = value
        else:
            rest[key] = value
    return _with_rest(out, rest)


def _with_rest(out: JsonObject, rest: JsonObject) -> JsonObject:
    if rest:
        out["imported"] = rest
    return out


def _same(*names: str) -> Mapping_:
    keys = {name: name for name in names}
    return lambda data, _context: _renamed(data, keys)


def _turn_end(data: JsonObject, context: Context) -> JsonObject | None:
    out = _renamed(data, {"turn": "turn", "reason": "reason"})
    reason = out.get("reason")
    if not isinstance(reason, dict):
        return None
    out["reason"] = _reason(cast("JsonObject", reason), context)
    return out


def _reason(reason: JsonObject, context: Context) -> JsonObject:
    kind = reason.get("kind")
    if kind in ("completed", "blocked", "interrupted"):
        return {"kind": kind}
    if kind == "max-tokens":
        return {"kind": "truncated"}
    if kind == "aborted":
        cause = reason.get("reason")
        body = cast("JsonObject", cause) if isinstance(cause, dict) else {"kind": "unknown"}
        text = str(body.get("kind", "unknown"))
        if type(body.get("reason")) is str:
            text = f"{text}: {body['reason']}"
        return {"kind": "cancelled", "cause": text}
    if kind == "error":
        return {"kind": "failed", "error": foreign_error(reason.get("error"))}
    context.counts["unknown_turn_reason"] += 1
    error = foreign_error({"message": f"the turn ended for the reason {kind!r}"})
    error["details"] = {"reason": reason}
    return {"kind": "failed", "error": error}


def foreign_error(failure: Any) -> JsonObject:
    """A failure of the harness as error data of ours."""
    body = cast("JsonObject", failure) if isinstance(failure, dict) else {"message": str(failure)}
    details = {key: value for key, value in body.items() if key != "message"}
    error: JsonObject = {
        "code": FOREIGN_ERROR,
        "message": str(body.get("message", "")),
        "retryable": False,
        "kind": "KimiRayError",
    }
    if details:
        error["details"] = details
    return error


def _user_message(data: JsonObject, context: Context) -> JsonObject:
    return _message(data, context)


def _assistant_message(data: JsonObject, context: Context) -> JsonObject:
    out = _renamed(data, {key: key for key in ("turn", "step", "message", "usage", "interrupted")})
    out["message"] = _message(out["message"], context)
    rest = out.pop("imported", {})
    if "usage" in out:
        usage = out.pop("usage")
        if isinstance(usage, dict):
            out["usage"] = _keys(cast("JsonObject", usage), _USAGE_KEYS)
        else:
            rest["usage"] = usage
    if out.get("interrupted", True) is not True:
        rest["interrupted"] = out.pop("interrupted")
    return context.place(_with_rest(out, rest))


def _tool_result(data: JsonObject, context: Context) -> JsonObject:
    out = _renamed(data, {key: key for key in ("turn", "step", "message", "error", "meta")})
    out["message"] = _message(out["message"], context)
    rest = out.pop("imported", {})
    for key in ("error", "meta"):
        if key in out and not isinstance(out[key], dict):
            rest[key] = out.pop(key)
    if "error" in out:
        error = dict(out["error"])
        code = error.get("code")
        error["code"] = _TOOL_CODES.get(code, code) if type(code) is str else FOREIGN_ERROR
        out["error"] = error
    return context.place(_with_rest(out, rest))


def _message(message: JsonObject, context: Context) -> JsonObject:
    out = {key: value for key, value in message.items() if key in ("id", "role", "content", "source")}
    out["content"] = [_block(block, context) for block in out["content"]]
    out["source"] = _keys(out["source"], _SOURCE_KEYS)
    return _with_rest(out, {key: value for key, value in message.items() if key not in out})


def _block(block: Any, context: Context, *, inner: bool = False) -> JsonObject:
    body = cast("JsonObject", block) if isinstance(block, dict) else {}
    kind = body.get("type")
    texts = _BLOCK_TEXTS.get(kind, ()) if type(kind) is str else (None,)
    if any(key is None or type(body.get(key)) is not str for key in texts):
        context.counts["odd_block"] += 1
        return {"type": "dsh/block", "value": block}
    if kind != "tool-result":
        return body
    content = body.get("content")
    if inner or not isinstance(content, list):
        context.counts["odd_block"] += 1
        return {"type": "dsh/block", "value": block}
    blocks = [_block(one, context, inner=True) for one in cast("list[Any]", content)]
    return {**_keys(body, _BLOCK_KEYS), "content": blocks}


def _tool_call(data: JsonObject, context: Context) -> JsonObject:
    names = {"turn": "turn", "step": "step", "callId": "call_id", "name": "name", "arguments": "arguments"}
    return context.place(_renamed(data, names))


def _chunk(data: JsonObject, context: Context) -> JsonObject | None:
    chunk = data.get("chunk")
    if not isinstance(chunk, dict):
        return None
    out = _renamed(data, {"turn": "turn", "step": "step", "chunk": "chunk"})
    renamed = {"argumentsDelta": "arguments", "blockType": "block_type"}
    out["chunk"] = _keys(cast("JsonObject", chunk), renamed)
    placed = context.place(out)
    return {"turn": placed.pop("turn"), "step": placed.pop("step"), "attempt": context.attempt, **placed}


def _retry(data: JsonObject, context: Context) -> JsonObject | None:
    if not is_safe_integer(data.get("maxRetries")):
        return None  # retried without a bound, which ours always has
    out = _renamed(data, {"turn": "turn", "step": "step", "delayMs": "delay_ms", "failure": "error"})
    out |= {"attempt": context.attempt, "max_attempts": data["maxRetries"] + 1}
    out["error"] = foreign_error(out.get("error"))
    return out


def _request_header(data: JsonObject, _context: Context) -> JsonObject | None:
    header, reason = data.get("header"), data.get("reason")
    body = cast("JsonObject", header) if isinstance(header, dict) else {}
    config = dict(cast("JsonObject", body.get("config") or {}))
    out: JsonObject = {"provider": config.pop("provider", None), "model": config.pop("model", None)}
    sampling = {ours: config.pop(theirs) for theirs, ours in _SAMPLING_KEYS.items() if theirs in config}
    if sampling:
        out["sampling"] = sampling
    for key in ("system", "tools"):
        if body.get(key):
            out[key] = body[key]
    rest = {key: value for key, value in body.items() if key not in ("config", "system", "tools")}
    if config:
        rest["config"] = config
    made: JsonObject = {"header": out, "reason": reason}
    other = {key: value for key, value in data.items() if key not in ("header", "reason")}
    return _with_rest(made, other | ({"header": rest} if rest else {}))


def _compaction_end(data: JsonObject, _context: Context) -> JsonObject:
    out = _renamed(data, {"compactionId": "compaction_id", "turn": "turn", "error": "error"})
    if "error" in out:
        out["error"] = foreign_error(out["error"])
    return out


_SHADOWED: Final = {
    "shadowedRange": "shadowed_range",
    "shadowedSeqs": "shadowed_seqs",
    "shadowedTokenCount": "shadowed_tokens",
}


def _summary(data: JsonObject, _context: Context) -> JsonObject:
    names = {"compactionId": "compaction_id", "summary": "summary", **_SHADOWED, "model": "model", "usage": "usage"}
    out = _renamed(data, names)
    if isinstance(out.get("usage"), dict):
        out["usage"] = _keys(out["usage"], _USAGE_KEYS)
    return out


PAYLOADS: Final[dict[str, Mapping_]] = {
    "turn/start": _same("turn"),
    "turn/end": _turn_end,
    "step/start": _same("turn", "step"),
    "step/end": _same("turn", "step"),
    "user/message": _user_message,
    "assistant/message": _assistant_message,
    "tool/result": _tool_result,
    "tool/call": _tool_call,
    "assistant/chunk": _chunk,
    "llm/retry": _retry,
    "request/header": _request_header,
    "compaction/start": lambda data, _context: _renamed(data, {"compactionId": "compaction_id", "turn": "turn"}),
    "compaction/summary": _summary,
    "compaction/prune": lambda data, _context: _renamed(data, _SHADOWED),
    "compaction/end": _compaction_end,
    "session/end-seed": _same(),
    "todo/write": _same("todos"),
    "hook/invoked": _same("event", "command"),
    "hook/result": _same("event", "blocked", "message"),
}
"""By the harness's type: our payload, or None when this one has no form of ours."""


def _keys(body: JsonObject, names: Mapping[str, str]) -> JsonObject:
    """The same object under our names; a name that is taken leaves the key as it was."""
    out: JsonObject = {}
    for key, value in body.items():
        name = names.get(key, key)
        out[key if name != key and (name in body or name in out) else name] = value
    return out


def _int(value: Any, default: int) -> int:
    return value if type(value) is int else default
