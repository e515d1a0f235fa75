"""Reaching models: the chat seam, the providers behind it, and what is the same for all of them (faults, retries, how
many requests at once).

What may enter: how a request becomes an answer, how failures are named, when to try again, which settings a model has.
No agent, no log, no store, no Ray. A provider's library is imported when the provider is built, not with this room.
"""

from kimi_ray.llm.assemble import Assembled, Assembler
from kimi_ray.llm.chaos import ChaosProvider, ChaosSettings
from kimi_ray.llm.chat import (
    BlockEnd,
    BlockStart,
    ChatProvider,
    ChatRequest,
    Chunk,
    Finish,
    FinishReason,
    MetaChunk,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
    UsageChunk,
)
from kimi_ray.llm.faults import answer_fault
from kimi_ray.llm.header import describe_request
from kimi_ray.llm.limiter import AdaptiveLimit, Tally
from kimi_ray.llm.models import ModelSettings, Price, ResolvedModel, build_provider, cost_usd, resolve_model
from kimi_ray.llm.retry import RetryPolicy
from kimi_ray.llm.script import Script, ScriptFunction, Step, ToolCall
from kimi_ray.llm.scripted import ScriptedProvider
from kimi_ray.llm.slots import Place, SharedProvider, Slots, slots_of

__all__ = [
    "AdaptiveLimit",
    "Assembled",
    "Assembler",
    "BlockEnd",
    "BlockStart",
    "ChaosProvider",
    "ChaosSettings",
    "ChatProvider",
    "ChatRequest",
    "Chunk",
    "Finish",
    "FinishReason",
    "MetaChunk",
    "ModelSettings",
    "Place",
    "Price",
    "ReasoningDelta",
    "ResolvedModel",
    "RetryPolicy",
    "Script",
    "ScriptFunction",
    "ScriptedProvider",
    "SharedProvider",
    "Slots",
    "Step",
    "Tally",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolSpec",
    "UsageChunk",
    "answer_fault",
    "build_provider",
    "cost_usd",
    "describe_request",
    "resolve_model",
    "slots_of",
]
