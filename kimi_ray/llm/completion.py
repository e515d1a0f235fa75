"""What a Chat Completions server answers, as chunks: the fragments of a stream, or one whole completion.

Servers differ. Accepted are: reasoning under ``reasoning``, ``reasoning_content`` or a name of one's own; tool calls
whose id stands in the first fragment, in all, or in none, and whose ``index`` is missing or always 0; usage in a chunk
of its own, in every chunk, inside a choice, or nowhere; cached tokens under four names.
"""

from __future__ import annotations

import math
from typing import Any, cast

from pydantic_core import to_json

from kimi_ray.llm.chat import (
    BlockEnd,
    BlockStart,
    Chunk,
    FinishReason,
    MetaChunk,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from kimi_ray.llm.surrogates import Joiner, whole
from kimi_ray.settings import Usage

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_calls": "tool-calls",
    "tool_use": "tool-calls",
    "function_call": "tool-calls",
    "length": "max-tokens",
    "max_tokens": "max-tokens",
    "model_length": "max-tokens",
    "content_filter": "filtered",
    "safety": "filtered",
}


def finish_reason(raw: str | None) -> FinishReason:
    """A server's word for the end, as one of ours."""
    return "stop" if raw is None else _FINISH.get(raw.lower(), "other")


class _Call:
    __slots__ = ("id", "index", "joiner", "name")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id: str | None = None
        self.name: str | None = None
        self.joiner = Joiner()


class CompletionReader:
    """Turns the JSON objects of one answer into chunks, and remembers what ``UsageChunk`` and ``Finish`` will say.

    Args:
        reasoning_field: A further name under which the server sends reasoning.
    """

    def __init__(self, reasoning_field: str = "reasoning_content") -> None:
        self._reasoning_fields = tuple(dict.fromkeys((reasoning_field, "reasoning_content", "reasoning")))
        self._next = 0
        self._open: int | None = None
        self._open_kind = ""
        self._joiner = Joiner()
        self._calls: list[_Call] = []
        self._call_at: dict[int, _Call] = {}
        self._known = False
        self.raw_finish: str | None = None
        self.finished = False
        self.answered = False
        self.usage: Usage | None = None
        self.text_chars = 0
        self.reasoning_chars = 0

    def read(self, data: dict[str, Any]) -> list[Chunk]:
        """The chunks of one object: a ``chat.completion.chunk`` or a whole ``chat.completion``."""
        chunks: list[Chunk] = []
        if not self._known:
            self._facts(data, chunks)
        usage = data.get("usage")
        choices = data.get("choices")
        if choices:
            self.answered = True
            choice = cast("dict[str, Any]", choices[0])
            delta = choice.get("delta")
            if delta:
                self._delta(delta, chunks, complete=False)
            elif choice.get("message"):
                self._delta(choice["message"], chunks, complete=True)
            if choice.get("logprobs") or choice.get("token_ids"):
                self._tokens(choice, chunks)
            raw = choice.get("finish_reason")
            if raw is not None:
                self.finished = True
                self.raw_finish = whole(str(raw))
            usage = usage or choice.get("usage")
        if usage:
            self.usage = read_usage(usage)
        return chunks

    def end(self) -> list[Chunk]:
        """Closes what is open: the blocks' ends, after the last of their text."""
        chunks: list[Chunk] = []
        self._close(chunks)
        for call in self._calls:
            rest = call.joiner.end()
            if rest:
                chunks.append(ToolCallDelta(call.index, None, None, rest))
            chunks.append(BlockEnd(call.index))
        self._calls = []
        return chunks

    def _facts(self, data: dict[str, Any], chunks: list[Chunk]) -> None:
        facts = MetaChunk(
            response_id=_word(data.get("id")),
            served_model=_word(data.get("model")),
            fingerprint=_word(data.get("system_fingerprint")),
            tokens={"prompt_token_ids": ids} if (ids := _token_ids(data.get("prompt_token_ids"))) else None,
        )
        if facts != MetaChunk():
            self._known = True
            chunks.append(facts)

    def _delta(self, delta: dict[str, Any], chunks: list[Chunk], *, complete: bool) -> None:
        for name in self._reasoning_fields:
            text = delta.get(name)
            if text and isinstance(text, str):
                self.reasoning_chars += len(text)
                self._text("reasoning", text, chunks)
                break
        text = delta.get("content")
        if text:
            self._text("text", text if isinstance(text, str) else _joined_parts(text), chunks)
        text = delta.get("refusal")
        if text and isinstance(text, str):
            self._text("text", text, chunks)
        for place, fragment in enumerate(delta.get("tool_calls") or ()):
            self._call(fragment, place if complete else _index(fragment.get("index")), chunks)

    def _text(self, kind: str, text: str, chunks: list[Chunk]) -> None:
        if self._open_kind != kind:
            self._close(chunks)
            self._open, self._open_kind = self._next, kind
            self._next += 1
            chunks.append(BlockStart(self._open, "text" if kind == "text" else "reasoning"))
        ready = self._joiner.feed(text)
        if ready:
            self._put(ready, chunks)

    def _put(self, text: str, chunks: list[Chunk]) -> None:
        index = cast("int", self._open)
        if self._open_kind == "text":
            self.text_chars += len(text)
            chunks.append(TextDelta(index, text))
        else:
            chunks.append(ReasoningDelta(index, text))

    def _close(self, chunks: list[Chunk]) -> None:
        if self._open is not None:
            rest = self._joiner.end()
            if rest:
                self._put(rest, chunks)
            chunks.append(BlockEnd(self._open))
            self._open, self._open_kind = None, ""

    def _call(self, fragment: dict[str, Any], at: int | None, chunks: list[Chunk]) -> None:
        function = cast("dict[str, Any]", fragment.get("function") or {})
        call_id, name = _word(fragment.get("id")), _word(function.get("name"))
        call = self._find_call(at, call_id, name)
        if call is None:
            self._close(chunks)
            call = _Call(self._next)
            self._next += 1
            self._calls.append(call)
            chunks.append(BlockStart(call.index, "tool-call"))
        if at is not None:
            self._call_at[at] = call
        # an id or a name that is repeated says nothing new
        call_id, name = (None if call.id else call_id), (None if call.name else name)
        call.id, call.name = call.id or call_id, call.name or name
        raw = function.get("arguments")
        text = raw if isinstance(raw, str) else "" if raw is None else to_json(raw).decode()
        ready = call.joiner.feed(text)
        self.text_chars += len(ready)
        if ready or call_id or name:
            chunks.append(ToolCallDelta(call.index, call_id, name, ready))

    def _find_call(self, at: int | None, call_id: str | None, name: str | None) -> _Call | None:
        """The call that a fragment goes on with; None when it begins another."""
        if at is not None:
            call = self._call_at.get(at)
        else:
            # without an index a fragment goes on with the last call, unless it has a name
            call = self._calls[-1] if self._calls and (name is None or call_id is not None) else None
        if call is None or call_id is None or call.id is None or call.id == call_id:
            return call
        # one place for two calls: another id that has been seen, or comes with a name of its own
        known = next((other for other in self._calls if other.id == call_id), None)
        return known or (None if name is not None else call)

    def _tokens(self, choice: dict[str, Any], chunks: list[Chunk]) -> None:
        tokens: dict[str, Any] = {}
        logprobs = choice.get("logprobs")
        content = cast("dict[str, Any]", logprobs).get("content") if isinstance(logprobs, dict) else None
        if content:
            tokens["logprobs"] = [
                _logprob(entry) | {"top_logprobs": [_logprob(top) for top in entry.get("top_logprobs") or ()]}
                for entry in content
            ]
        if ids := _token_ids(choice.get("token_ids")):
            tokens["token_ids"] = ids
        if tokens:
            chunks.append(MetaChunk(tokens=tokens))


def read_usage(usage: dict[str, Any]) -> Usage:
    """A server's usage with its parts made disjoint (``Usage``)."""
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    prompt_details = cast("dict[str, Any]", usage.get("prompt_tokens_details") or {})
    details = cast("dict[str, Any]", usage.get("completion_tokens_details") or {})
    cached = min(
        prompt,
        _count(prompt_details.get("cached_tokens"))
        or _count(usage.get("cached_tokens"))
        or _count(usage.get("prompt_cache_hit_tokens"))
        or _count(usage.get("cache_read_input_tokens")),
    )
    cache_write = min(
        prompt - cached,
        _count(prompt_details.get("cache_write_tokens")) or _count(usage.get("cache_creation_input_tokens")),
    )
    reasoning = _count(details.get("reasoning_tokens")) or _count(usage.get("reasoning_tokens"))
    if reasoning and _count(usage.get("total_tokens")) == prompt + completion + reasoning:
        completion += reasoning  # a server that counts reasoning beside the completion
    return Usage(
        input=prompt - cached - cache_write,
        cached=cached,
        cache_write=cache_write,
        output=completion,
        reasoning=min(reasoning, completion),
    )


def _count(value: Any) -> int:
    return max(0, int(value)) if isinstance(value, int | float) and math.isfinite(value) else 0


def _index(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _token_ids(value: Any) -> list[int]:
    """What a server says are token ids, if they are numbers that a log can hold."""
    ids = cast("list[Any]", value) if isinstance(value, list) else []
    return ids if all(type(one) is int and 0 <= one < 1 << 63 for one in ids) else []


def _word(value: Any) -> str | None:
    return whole(value) if isinstance(value, str) and value else None


def _joined_parts(parts: Any) -> str:
    if not isinstance(parts, list):
        return ""
    texts: list[str] = []
    for part in cast("list[Any]", parts):
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            texts.append(text)
    return "".join(texts)


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    value = entry.get("logprob")
    # + 0.0 makes 0.0 of -0.0, which a log cannot hold
    logprob = value + 0.0 if isinstance(value, int | float) and math.isfinite(value) else None
    return {"token": whole(str(entry.get("token", ""))), "logprob": logprob}
