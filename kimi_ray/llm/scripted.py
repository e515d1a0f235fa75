"""A model that plays a script: tests, examples, benchmarks and demos without a network.

Each agent plays a list of steps from its beginning: the place in it is kept by (session, agent) and, for an agent not
seen before (a resumed one, a fork), found from the assistant messages that its conversation already has. A function
is asked anew every time, so what it says depends on the request alone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from typing import Literal, cast

from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import KimiRayError, ProviderError
from kimi_ray.llm.chat import (
    BlockEnd,
    BlockStart,
    ChatRequest,
    Chunk,
    Finish,
    MetaChunk,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UsageChunk,
)
from kimi_ray.llm.estimate import CHARS_PER_TOKEN, Estimator
from kimi_ray.llm.script import Script, ScriptFunction, Step, as_step, load_script
from kimi_ray.settings import Usage

SUMMARY = "A summary of {} messages."
"""What a script that has no summary says when it is asked for one."""

_MAX_CURSORS = 65_536


class ScriptedProvider:
    """Plays ``script``.

    Args:
        script: Steps (``Step``, text, or table), a function ``ChatRequest -> Step | str`` (may be async), or
            ``package.module:name`` of either.
        latency_s: Seconds before the first chunk.
        chunk_chars: Characters a delta; None sends each block whole, as one delta without start and end.
        tokens_per_s: Pace of the deltas (four characters a token); None is as fast as possible.
        on_end: What a list does when it is used up: ``error`` (``provider.script_exhausted``), ``repeat`` its last
            step, or ``cycle`` from its first.
        name: The provider's name as logged.

    Raises:
        ConfigError: ``config.invalid_script``.
    """

    def __init__(
        self,
        script: Script | str,
        *,
        latency_s: float = 0.0,
        chunk_chars: int | None = None,
        tokens_per_s: float | None = None,
        on_end: Literal["error", "repeat", "cycle"] = "error",
        name: str = "scripted",
    ) -> None:
        self._script = load_script(script)
        self._latency_s = latency_s
        self._pace_s = 1 / (tokens_per_s * CHARS_PER_TOKEN) if tokens_per_s else 0.0
        self._chunk_chars = chunk_chars or (CHARS_PER_TOKEN if tokens_per_s else None)
        self._on_end = on_end
        self._name = name
        self._estimator = Estimator()
        self._cursors: dict[tuple[str, str], int] = {}

    @property
    def name(self) -> str:
        """The provider's name as logged."""
        return self._name

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """Play the next step for this request.

        Raises:
            ProviderError: What the step says; ``provider.script_exhausted``, or ``provider.script_failed`` when the
                script's function raised.
        """
        script = self._script
        step = await self._step(script, request)
        latency = self._latency_s if step.latency_s is None else step.latency_s
        if latency > 0:
            await asyncio.sleep(latency)
        fault = step.fault
        if fault is not None and fault.after_chunks == 0:
            raise fault.build()
        sent = 0
        if self._chunk_chars is None:
            for chunk in _blocks(step, request):
                yield chunk
                sent += 1
                if fault is not None and sent >= fault.after_chunks:
                    raise fault.build()
        else:
            loop = asyncio.get_running_loop()
            start, chars = loop.time(), 0
            for chunk in _cut(step, request, self._chunk_chars):
                if self._pace_s and type(chunk) in _PACED:
                    chars += len(cast("TextDelta", chunk).text)
                    await asyncio.sleep(start + chars * self._pace_s - loop.time())
                yield chunk
                sent += type(chunk) in _PACED
                if fault is not None and sent >= fault.after_chunks:
                    raise fault.build()
        if fault is not None:
            raise fault.build()
        yield UsageChunk(step.usage if step.usage is not None else self._estimate(step, request))
        yield MetaChunk(response_id=f"{self._name}-{request.turn}-{request.step}", served_model=request.model)
        finish = step.finish or ("tool-calls" if step.tool_calls else "stop")
        yield Finish(finish, finish)

    async def _step(self, script: Sequence[Step] | ScriptFunction, request: ChatRequest) -> Step:
        if request.purpose == "compaction":
            # A list plays a conversation: a summary is no part of it. A function may write one.
            step = await _asked(script, request) if callable(script) else Step()
            return step if step.text.strip() or step.fault is not None else Step(SUMMARY.format(len(request.messages)))
        return await _asked(script, request) if callable(script) else self._next(script, request)

    async def close(self) -> None:
        """Nothing to let go of."""

    def _estimate(self, step: Step, request: ChatRequest) -> Usage:
        chars = len(step.text)
        for call in step.tool_calls:
            chars += len(call.name) + len(call.arguments)
        return self._estimator.usage(request, text_chars=chars, reasoning_chars=len(step.reasoning))

    def _next(self, steps: Sequence[Step], request: ChatRequest) -> Step:
        agent = (request.session_id, request.agent_id)
        at = self._cursors.pop(agent, None)
        if at is None:
            at = _place(steps, request)
            if len(self._cursors) >= _MAX_CURSORS:
                del self._cursors[next(iter(self._cursors))]
        # popped and put back: the order of the dict is the order of use
        self._cursors[agent] = at + 1
        if at < len(steps):
            return steps[at]
        if self._on_end == "error" or not steps:
            raise ProviderError(
                f"the script of {len(steps)} steps is used up by agent {request.agent_id or 'main'}",
                code="provider.script_exhausted",
                hint='add steps, or set on_end to "repeat" or "cycle"',
                details={"steps": len(steps)},
            )
        return steps[-1] if self._on_end == "repeat" else steps[at % len(steps)]


_PACED = (TextDelta, ReasoningDelta)


async def _asked(script: ScriptFunction, request: ChatRequest) -> Step:
    try:
        answer = script(request)
        if inspect.isawaitable(answer):
            answer = await answer
        return as_step(answer)
    except KimiRayError:
        raise
    except BaseException as error:
        if ends_this_task(error):
            raise
        raise ProviderError(
            f"the scripted model's function raised {type(error).__name__}: {error}",
            code="provider.script_failed",
            hint="correct the function named by the model's script",
            details={"exception": type(error).__name__},
        ) from error


def _place(steps: Sequence[Step], request: ChatRequest) -> int:
    """Where an agent not seen before stands: behind the steps that gave the answers in its conversation."""
    answers = sum(
        1 if message["role"] == "assistant" else message.get("source", {}).get("answers", 0)
        for message in request.messages
    )
    at = 0
    while answers and at < len(steps):
        answers -= steps[at].answers
        at += 1
    return at + answers + request.attempt - 1


def _call_id(request: ChatRequest, number: int) -> str:
    return f"call_{request.turn}_{request.step}_{number}"


def _blocks(step: Step, request: ChatRequest) -> list[Chunk]:
    chunks: list[Chunk] = []
    if step.reasoning:
        chunks.append(ReasoningDelta(0, step.reasoning))
    if step.text:
        chunks.append(TextDelta(len(chunks), step.text))
    for number, call in enumerate(step.tool_calls):
        index = len(chunks)
        chunks.append(ToolCallDelta(index, call.id or _call_id(request, number), call.name, call.arguments))
    return chunks


def _cut(step: Step, request: ChatRequest, size: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    for index, block in enumerate(_blocks(step, request)):
        if type(block) is ToolCallDelta:
            chunks.append(BlockStart(index, "tool-call"))
            arguments = block.arguments
            chunks.append(ToolCallDelta(index, block.id, block.name, arguments[:size]))
            chunks += [
                ToolCallDelta(index, None, None, arguments[at : at + size]) for at in range(size, len(arguments), size)
            ]
        else:
            delta = type(block)
            text = cast("TextDelta", block).text
            chunks.append(BlockStart(index, "reasoning" if delta is ReasoningDelta else "text"))
            make = ReasoningDelta if delta is ReasoningDelta else TextDelta
            chunks += [make(index, text[at : at + size]) for at in range(0, len(text), size)]
        chunks.append(BlockEnd(index))
    return chunks
