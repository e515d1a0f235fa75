"""A provider that makes another one fail: seeded, so that a run meets the same faults again.

Every decision comes from a hash of the seed and of what is asked for (session, agent, turn, step, attempt), never from
a clock or from the order of requests: concurrency changes nothing. At most one of ``rate_limit``, ``server_error``,
``timeout`` and ``cut_stream`` hits a request; what spoils an answer (``bad_arguments``, ``duplicate_ids``) and
``slow_first_token`` come on top.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator
from pydantic_core import from_json, to_json

from kimi_ray.llm.chat import (
    ChatProvider,
    ChatRequest,
    Chunk,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from kimi_ray.llm.faults import Place, connection_fault, status_fault, timeout_fault
from kimi_ray.settings import Settings

Share = Field(default=0.0, ge=0, le=1)


class ChaosSettings(Settings):
    """``[models.X.chaos]``: which share of the requests meets which fault, 0 to 1."""

    seed: int = 0
    rate_limit: float = Share
    """429."""
    retry_after_share: float = Field(default=0.5, ge=0, le=1)
    """Of the 429s: how many say ``Retry-After``."""
    retry_after_s: float = Field(default=1.0, ge=0)
    """What they say, seconds."""
    server_error: float = Share
    """500, 502, 503 or 529."""
    timeout: float = Share
    """Silence for ``timeout_after_s``, then ``provider.timeout``."""
    timeout_after_s: float = Field(default=1.0, ge=0)
    cut_stream: float = Share
    """The connection breaks in the middle of a text or of a tool call."""
    bad_arguments: float = Share
    """Of the answers with tool calls: arguments that are cut JSON, or have values of the wrong types."""
    duplicate_ids: float = Share
    """Of the answers with tool calls: all have one id, the same in every such answer."""
    slow_first_token: float = Share
    """The first chunk comes ``slow_s`` late."""
    slow_s: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _one_request_one_fault(self) -> Self:
        whole = self.rate_limit + self.server_error + self.timeout + self.cut_stream
        if whole > 1:
            raise ValueError(f"rate_limit, server_error, timeout and cut_stream are {whole:g} together, above 1")
        return self


BAD_DAY = ChaosSettings(rate_limit=0.10, server_error=0.05, cut_stream=0.05, bad_arguments=0.05)
"""What a chaos model without a ``chaos`` table does."""

Failure = Literal["rate_limit", "server_error", "timeout", "cut_stream"]
_FAILURES: tuple[Failure, ...] = ("rate_limit", "server_error", "timeout", "cut_stream")
_STATUSES = ((500, "internal error"), (502, "bad gateway"), (503, "unavailable"), (529, "overloaded"))
_SHARED_ID = "call_again"
_FRACTION = 2**64


class Dice:
    """The chances of one request, each under a name of its own; equal requests roll equal numbers."""

    __slots__ = ("_of",)

    def __init__(self, seed: int, request: ChatRequest) -> None:
        of = (seed, request.session_id, request.agent_id, request.turn, request.step, request.attempt)
        self._of = to_json(of)

    def roll(self, name: str) -> float:
        """A number from 0 up to, but not including, 1."""
        digest = hashlib.blake2b(self._of + name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / _FRACTION


class ChaosProvider:
    """Passes requests on to ``inner``, and spoils some.

    Args:
        inner: Who answers.
        settings: What goes wrong, and how often.
    """

    def __init__(self, inner: ChatProvider, settings: ChaosSettings = BAD_DAY) -> None:
        self._inner = inner
        self._settings = settings

    @property
    def name(self) -> str:
        """``chaos``."""
        return "chaos"

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """The inner answer, or what has become of it.

        Raises:
            ProviderError: the fault that was rolled, or the inner provider's own.
        """
        settings, dice = self._settings, Dice(self._settings.seed, request)
        place = Place(request.model, "chaos")
        failure = planned_failure(settings, dice)
        if settings.slow_first_token and dice.roll("slow") < settings.slow_first_token:
            await asyncio.sleep(settings.slow_s)
        if failure == "rate_limit":
            headers: dict[str, str] = {}
            if dice.roll("retry_after") < settings.retry_after_share:
                headers["retry-after-ms"] = str(round(settings.retry_after_s * 1000))
            raise status_fault(place, 429, "too many requests", headers)
        if failure == "server_error":
            status, wording = _STATUSES[int(dice.roll("status") * len(_STATUSES))]
            raise status_fault(place, status, wording)
        if failure == "timeout":
            await asyncio.sleep(settings.timeout_after_s)
            raise timeout_fault(place, "idle", settings.timeout_after_s)
        answer = cast("AsyncGenerator[Chunk]", self._inner.stream(request))
        spoiler = _Spoiler(settings, dice)
        cutter = _Cutter(dice) if failure == "cut_stream" else None
        try:
            async for whole in answer:
                for chunk in spoiler.take(whole):
                    if cutter is None:
                        yield chunk
                        continue
                    kept = cutter.take(chunk)
                    if kept is not None:
                        yield kept
                    if cutter.is_cut:
                        raise connection_fault(place, "it was made to break", cut=True)
        finally:
            await answer.aclose()

    async def close(self) -> None:
        """Close the inner provider. Idempotent."""
        await self._inner.close()


def planned_failure(settings: ChaosSettings, dice: Dice) -> Failure | None:
    """The failure that a request meets, or None."""
    rolled = dice.roll("failure")
    for name in _FAILURES:
        rolled -= getattr(settings, name)
        if rolled < 0:
            return name
    return None


class _Cutter:
    """Lets an answer through up to the middle of its first text or, as the dice say, tool call; else to its finish."""

    def __init__(self, dice: Dice) -> None:
        self._wanted = (ToolCallDelta,) if dice.roll("cut_where") < 0.5 else (TextDelta, ReasoningDelta)
        self._part = dice.roll("cut_part")
        self.is_cut = False

    def take(self, chunk: Chunk) -> Chunk | None:
        """What of a chunk gets through."""
        if isinstance(chunk, Finish):
            self.is_cut = True
            return None
        if isinstance(chunk, self._wanted):
            self.is_cut = True
            return _beginning(chunk, self._part)
        return chunk


def _beginning(chunk: TextDelta | ReasoningDelta | ToolCallDelta, part: float) -> Chunk:
    if isinstance(chunk, ToolCallDelta):
        kept = chunk.arguments[: int(len(chunk.arguments) * part)]
        return ToolCallDelta(chunk.index, chunk.id, chunk.name, kept)
    return type(chunk)(chunk.index, chunk.text[: int(len(chunk.text) * part)])


class _Spoiler:
    """Spoils tool calls. Arguments can only be spoiled whole: their fragments wait for a chunk of something else."""

    def __init__(self, settings: ChaosSettings, dice: Dice) -> None:
        self._broken = bool(settings.bad_arguments) and dice.roll("arguments") < settings.bad_arguments
        self._same_ids = bool(settings.duplicate_ids) and dice.roll("ids") < settings.duplicate_ids
        self._cut = self._broken and dice.roll("arguments_how") < 0.5
        self._held: list[ToolCallDelta] = []

    def take(self, chunk: Chunk) -> list[Chunk]:
        """What goes on now."""
        if not (self._broken or self._same_ids):
            return [chunk]
        held = self._held
        if isinstance(chunk, ToolCallDelta) and (not held or held[0].index == chunk.index):
            held.append(chunk)
            return []
        self._held = [chunk] if isinstance(chunk, ToolCallDelta) else []
        ready: list[Chunk] = [self._call(held)] if held else []
        return ready if self._held else [*ready, chunk]

    def _call(self, held: list[ToolCallDelta]) -> ToolCallDelta:
        arguments = "".join([delta.arguments for delta in held])
        if self._broken:
            arguments = _half(arguments) if self._cut else _mistyped(arguments)
        call_id = _SHARED_ID if self._same_ids else next((delta.id for delta in held if delta.id), None)
        name = next((delta.name for delta in held if delta.name), None)
        return ToolCallDelta(held[0].index, call_id, name, arguments)


def _half(arguments: str) -> str:
    """Cut JSON: never a whole object."""
    return arguments.rstrip().removesuffix("}")[: max(1, len(arguments) // 2)] or "{"


def _mistyped(arguments: str) -> str:
    """The same names with values that no schema asks for; one more name when there are none."""
    try:
        value: Any = from_json(arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return "[1, 2]"
    fields = cast("dict[str, Any]", value)
    wrong = {name: {"wrong": 1} if isinstance(given, str) else "wrong" for name, given in fields.items()}
    return to_json(wrong or {"wrong": [None]}).decode()
