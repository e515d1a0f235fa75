"""The chat seam: what a model is asked, and the chunks in which it answers.

A provider turns a ``ChatRequest`` into an asynchronous stream of chunks. The grammar of a stream:

* ``BlockStart`` before the deltas of its index, ``BlockEnd`` closes it; a provider may send deltas alone;
* ``UsageChunk`` at most once, ``MetaChunk`` any number of times (each adds facts);
* exactly one ``Finish``, last.

A failure is raised as ``ProviderError`` out of the iterator (before or between chunks), never encoded as a chunk:
what was received until then is kept by the caller.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kimi_ray.settings import Sampling, Usage

BlockType = Literal["text", "reasoning", "tool-call"]
FinishReason = Literal["stop", "tool-calls", "max-tokens", "filtered", "other"]


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A content block opens. ``block_type`` says which deltas follow."""

    index: int
    block_type: BlockType


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of block ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text of block ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A fragment of a tool call; ``id`` and ``name`` come with the first fragment, ``arguments`` is raw JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """Block ``index`` is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class UsageChunk:
    """The tokens of this request, as the server counted them."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class MetaChunk:
    """Facts about the response. None is "not said"; a later chunk adds to an earlier one."""

    response_id: str | None = None
    served_model: str | None = None
    fingerprint: str | None = None
    http_status: int | None = None
    request_id: str | None = None
    connect_ms: int | None = None
    """From the call to the response's headers, in milliseconds."""
    tokens: dict[str, Any] | None = None
    """Token ids and log-probabilities, when asked for (``llm/tokens``)."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the stream. ``raw`` is the server's own word."""

    reason: FinishReason
    raw: str | None = None


Chunk = BlockStart | TextDelta | ReasoningDelta | ToolCallDelta | BlockEnd | UsageChunk | MetaChunk | Finish


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_data(self) -> dict[str, Any]:
        """The spec as JSON, as it is logged in ``request/header``."""
        return {"name": self.name, "description": self.description, "parameters": self.parameters}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model request, complete: everything that decides the bytes on the wire except the key.

    ``messages`` are log messages in order (``kimi_ray.log.messages``)::

        {"id", "role": "user", "content": [{"type": "text", "text"} | {"type": "image", ...}], "source": {...}}
        {"id", "role": "assistant", "content": [{"type": "text"|"reasoning", "text"},
                                                 {"type": "tool-call", "id", "name", "arguments": raw JSON text}], ...}
        {"id", "role": "user", "source": {"kind": "tool", "call_id"},
         "content": [{"type": "tool-result", "tool_call_id", "content": [blocks], "is_error": bool}]}
    """

    model: str
    """The name on the wire."""
    system: str | None
    messages: list[dict[str, Any]]
    tools: tuple[ToolSpec, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    session_id: str = ""
    agent_id: str = ""
    turn: int = 0
    step: int = 0
    attempt: int = 1
    """Counts from 1 within a step. Not sent."""
    purpose: Literal["step", "compaction"] = "step"
    """What the answer is for. Not sent."""


class ChatProvider(Protocol):
    """Reaches one model server (or plays one)."""

    @property
    def name(self) -> str:
        """The provider's name as logged, e.g. ``openai`` or ``scripted``."""
        ...

    def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """Ask and yield the answer's chunks.

        Raises:
            ProviderError: ``provider.*`` or ``context.overflow`` (see ``kimi_ray.llm.faults``).
        """
        ...

    async def close(self) -> None:
        """Let go of connections. Idempotent."""
        ...
