"""From chunks to a message: one ``Assembler`` an attempt, on the hot path of every model request.

The rules (kept wherever a stream is replayed):

* blocks stand in the order in which their index was first seen; deltas alone, without start and end, are fine;
* what comes for a block after its end is ignored;
* a tool call without an id gets ``call-<index>``; duplicates within a conversation are the agent's business;
* an answer cut by ``max-tokens`` loses the tool calls whose arguments are not a complete JSON object;
* no finish means ``stop``; ``stop`` and ``tool-calls`` follow from whether there are calls, ``raw`` keeps the server's
  word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic_core import from_json

from kimi_ray.errors import ProviderError
from kimi_ray.llm.chat import (
    BlockEnd,
    BlockStart,
    BlockType,
    Chunk,
    Finish,
    FinishReason,
    MetaChunk,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UsageChunk,
)
from kimi_ray.llm.surrogates import whole
from kimi_ray.settings import Usage

_META_FACTS = ("response_id", "served_model", "fingerprint", "http_status", "request_id", "connect_ms")


@dataclass(slots=True)
class Assembled:
    """One attempt's answer, complete."""

    content: list[dict[str, Any]]
    """Blocks in log form: ``text``, ``reasoning``, ``tool-call`` (``arguments`` as raw JSON text)."""
    finish: FinishReason
    raw_finish: str | None = None
    usage: Usage | None = None
    meta: MetaChunk = field(default_factory=MetaChunk)
    empty: bool = False
    """Neither text nor a tool call. Not so when reasoning used up the output tokens: that answer is truncated."""

    @property
    def text(self) -> str:
        """All text blocks, joined."""
        return "".join([block["text"] for block in self.content if block["type"] == "text"])

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool-call blocks, in the model's order."""
        return [block for block in self.content if block["type"] == "tool-call"]


class _Block:
    __slots__ = ("closed", "id", "kind", "name", "parts")

    def __init__(self, kind: BlockType) -> None:
        self.kind: BlockType = kind
        self.parts: list[str] = []
        self.closed = False
        self.id: str | None = None
        self.name: str | None = None


class Assembler:
    """Collects the chunks of one attempt."""

    __slots__ = ("_blocks", "_finish", "_metas", "_usage")

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._usage: Usage | None = None
        self._metas: list[MetaChunk] = []
        self._finish: Finish | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk.

        Raises:
            ProviderError: ``provider.bad_stream`` when the stream breaks the grammar of ``kimi_ray.llm.chat``.
        """
        if self._finish is not None:
            raise _bad_stream(f"{type(chunk).__name__} after the finish")
        kind = type(chunk)
        if kind is TextDelta:
            chunk = cast("TextDelta", chunk)
            self._text(chunk.index, "text", chunk.text)
        elif kind is ReasoningDelta:
            chunk = cast("ReasoningDelta", chunk)
            self._text(chunk.index, "reasoning", chunk.text)
        elif kind is ToolCallDelta:
            self._call(cast("ToolCallDelta", chunk))
        elif kind is BlockStart:
            chunk = cast("BlockStart", chunk)
            if chunk.index in self._blocks:
                raise _bad_stream(f"block {chunk.index} starts twice")
            self._blocks[chunk.index] = _Block(chunk.block_type)
        elif kind is BlockEnd:
            block = self._blocks.get(cast("BlockEnd", chunk).index)
            if block is not None:
                block.closed = True
        elif kind is UsageChunk:
            if self._usage is not None:
                raise _bad_stream("usage twice")
            self._usage = cast("UsageChunk", chunk).usage
        elif kind is MetaChunk:
            self._metas.append(cast("MetaChunk", chunk))
        else:
            self._finish = cast("Finish", chunk)

    def _block(self, index: int, kind: BlockType) -> _Block:
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = _Block(kind)
        elif block.kind != kind:
            raise _bad_stream(f"block {index} is {block.kind}, and a {kind} delta came for it")
        return block

    def _text(self, index: int, kind: Literal["text", "reasoning"], text: str) -> None:
        block = self._block(index, kind)
        if not block.closed:
            block.parts.append(text)

    def _call(self, delta: ToolCallDelta) -> None:
        block = self._block(delta.index, "tool-call")
        if block.closed:
            return
        if delta.id and block.id is None:
            block.id = delta.id
        if delta.name and block.name is None:
            block.name = delta.name
        if delta.arguments:
            block.parts.append(delta.arguments)

    def result(self) -> Assembled:
        """The answer as far as it came; complete once the stream has ended."""
        finish: FinishReason = self._finish.reason if self._finish is not None else "stop"
        content: list[dict[str, Any]] = []
        said = called = thought = False
        for index, block in self._blocks.items():
            text = whole("".join(block.parts))
            if block.kind == "tool-call":
                if finish == "max-tokens" and not _is_object(text):
                    continue
                called = True
                content.append(
                    {
                        "type": "tool-call",
                        "id": whole(block.id) if block.id else f"call-{index}",
                        "name": whole(block.name or ""),
                        "arguments": text,
                    }
                )
            elif text:
                content.append({"type": block.kind, "text": text})
                if block.kind == "text":
                    said = said or not text.isspace()
                else:
                    thought = thought or not text.isspace()
        if finish in ("stop", "tool-calls"):
            finish = "tool-calls" if called else "stop"
        return Assembled(
            content=content,
            finish=finish,
            raw_finish=self._finish.raw if self._finish is not None else None,
            usage=self._usage,
            meta=_merged(self._metas),
            empty=not said and not called and not (thought and finish == "max-tokens"),
        )

    def partial(self) -> list[dict[str, Any]]:
        """What a cancelled or broken stream leaves: its text and reasoning blocks that are not blank."""
        content: list[dict[str, Any]] = []
        for block in self._blocks.values():
            if block.kind != "tool-call":
                text = whole("".join(block.parts))
                if text and not text.isspace():
                    content.append({"type": block.kind, "text": text})
        return content

    @property
    def usage(self) -> Usage | None:
        """The usage, once the server has sent it (also of a stream that then broke)."""
        return self._usage

    @property
    def meta(self) -> MetaChunk:
        """The facts that came so far, merged."""
        return _merged(self._metas)


def _merged(metas: list[MetaChunk]) -> MetaChunk:
    if len(metas) == 1:
        return metas[0]
    facts: dict[str, Any] = {}
    tokens: dict[str, Any] = {}
    for meta in metas:
        for name in _META_FACTS:
            value = getattr(meta, name)
            if value is not None:
                facts[name] = value
        for key, value in (meta.tokens or {}).items():
            known = tokens.get(key)
            # per-token lists come in slices, one a chunk
            tokens[key] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value
    return MetaChunk(**facts, tokens=tokens or None)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(from_json(arguments), dict)
    except ValueError:
        return False


def _bad_stream(what: str) -> ProviderError:
    return ProviderError(
        f"the provider broke the grammar of a stream: {what}",
        code="provider.bad_stream",
        details={"found": what},
        retryable=True,
    )
