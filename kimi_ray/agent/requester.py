"""One step's model request: attempts with backoff, the stream, and what of it the log keeps.

Retries stay in their step; every attempt leaves an ``llm/response``, failed ones too, and every wait an ``llm/retry``
before it begins.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.limits import LimitMeter
from kimi_ray.agent.response_facts import response_facts
from kimi_ray.agent.turn_signal import TurnSignal, TurnStopped
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import KimiRayError, ProviderError, StoreError, as_error
from kimi_ray.ids import new_message_id
from kimi_ray.llm.assemble import Assembled, Assembler
from kimi_ray.llm.chat import ChatProvider, ChatRequest, Chunk, ReasoningDelta, TextDelta, ToolCallDelta
from kimi_ray.llm.faults import answer_fault
from kimi_ray.llm.retry import RetryPolicy
from kimi_ray.llm.slots import slots_of

COALESCED_CHUNK_BYTES = 4 << 10
COALESCED_CHUNK_S = 0.5

RecordChunks = Literal["all", "coalesced", "none"]


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """How a turn reaches its model: snapshotted with the turn, so that a switch takes effect in the next one."""

    provider: ChatProvider
    model: str
    """The name on the wire."""
    retry: RetryPolicy
    record_chunks: RecordChunks


@dataclass(slots=True)
class Progress:
    """What a watcher may see of a running agent. ``moved`` is monotonic seconds of the last sign of life."""

    phase: str = "idle"
    turn: int | None = None
    step: int | None = None
    retries: int = 0
    streamed_chars: int = 0
    moved: float = 0.0

    def enter(self, phase: str) -> None:
        """Another phase begins."""
        self.phase = phase
        self.moved = time.monotonic()


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, in the log."""

    content: list[dict[str, Any]]
    finish: str
    message_seq: int

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls that the model asks for, in its order."""
        return [block for block in self.content if block["type"] == "tool-call"]


class Requester:
    """Asks the model on behalf of one agent.

    Args:
        journal: Where everything is written.
        jitter_seed: For the jitter of retries.
        progress: Told of every sign of life.
        meter: Told of waiting that is no work.
    """

    def __init__(self, journal: Journal, jitter_seed: str, progress: Progress, meter: LimitMeter) -> None:
        self._journal = journal
        self._jitter_seed = jitter_seed
        self._rng: random.Random | None = None
        self._progress = progress
        self._meter = meter

    async def ask(self, request: ChatRequest, route: ModelRoute, signal: TurnSignal, *, after: int = 0) -> Answer:
        """Ask until an answer is complete, the attempts are used up, or the turn is stopped.

        1. The attempt waits for a place at the server, where places are counted.
        2. The provider streams; chunks are recorded as the model's settings say.
        3. The attempt's ``llm/response`` and, when complete, the ``assistant/message`` are appended.
        4. A retryable failure waits (``llm/retry`` first) and asks again with the same request.

        Args:
            request: What is asked.
            route: Where.
            signal: The turn's.
            after: Attempts of this step that were made before: those of a request that was given up and mended.

        Raises:
            ProviderError: the last attempt's; ``details.attempts`` counts them. What a filter left of an answer is
                kept as an interrupted message.
            StoreError: there was no room for what the model said; what came so far is kept as an interrupted message.
            TurnStopped: the signal; text received so far is in the log as an interrupted message.
        """
        attempt = 0
        while True:
            attempt += 1
            place, waited_ms = await self._place(route, signal)
            run = _Attempt(request, route, after + attempt, waited_ms)
            try:
                with place, signal.interruptible():
                    answer = await self._stream(run)
                fault = answer_fault(empty=answer.empty, finish=answer.finish, raw_finish=answer.raw_finish)
                if fault is not None:
                    run.answer = answer
                    raise fault
            except ProviderError as error:
                self._respond(run, answer=run.answer, error=error)
                # Seeding costs more than a whole turn of a scripted model, and few agents ever retry.
                self._rng = self._rng or random.Random(self._jitter_seed)
                delay_ms = route.retry.delay_ms(attempt, error, self._rng)
                if delay_ms is None:
                    if error.code == "provider.filtered":
                        self._keep_text(run)
                    raise error.with_details(attempts=run.attempt) from None
                self._journal.append(
                    "llm/retry",
                    {
                        "turn": request.turn,
                        "step": request.step,
                        "attempt": run.attempt,
                        "delay_ms": delay_ms,
                        "max_attempts": after + route.retry.max_attempts,
                        "error": error.to_data(),
                    },
                )
                self._progress.retries += 1
                self._progress.enter("retry")
                with self._meter.resting(signal, delay_ms / 1000), signal.interruptible():
                    await asyncio.sleep(delay_ms / 1000)
                self._progress.enter("model")
                continue
            except TurnStopped:
                self._keep_partial(run)
                raise
            except StoreError as error:
                if error.code != "store.fenced":
                    self._keep_partial(run)
                raise
            except BaseException as error:
                # What came was on the wire, whatever the provider or the log made of it.
                if not (ends_this_task(error) or isinstance(error, KeyboardInterrupt)):
                    self._keep_partial(run, as_error(error))
                raise
            return self._complete(run, answer)

    async def _place(self, route: ModelRoute, signal: TurnSignal) -> tuple[AbstractContextManager[object], int | None]:
        """A place at the model's server and the milliseconds it took to get it (None: nobody counts places)."""
        slots = slots_of(route.provider)
        if slots is None:
            return nullcontext(), None
        place = slots.take_now()
        if place is not None:
            return place, 0
        began = time.monotonic()
        self._progress.enter("limiter")
        with self._meter.resting(signal), signal.interruptible():
            place = await slots.take()
        self._progress.enter("model")
        return place, round((time.monotonic() - began) * 1000)

    async def _stream(self, run: _Attempt) -> Assembled:
        recorder = _ChunkRecorder(self._journal, run)
        add, progress, stream = run.assembler.add, self._progress, run.route.provider.stream(run.request)
        room = self._journal.durable.wait_for_room
        try:
            async for chunk in stream:
                add(chunk)
                now = time.monotonic()
                progress.moved = now
                kind = type(chunk)
                if kind is TextDelta or kind is ReasoningDelta or kind is ToolCallDelta:
                    if run.first_token is None:
                        run.first_token = now
                    progress.streamed_chars += recorder.take(chunk, now)
                    await room()
        except BaseException:
            recorder.keep_rest()
            raise
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        return run.assembler.result()

    def _complete(self, run: _Attempt, answer: Assembled) -> Answer:
        self._respond(run, answer=answer, error=None)
        request, journal = run.request, self._journal
        content = self._with_unique_ids(answer.content)
        data = _message_of(run, content)
        event = journal.append("assistant/message", data, surface="append", sources=run.chunk_seqs or None)
        if answer.meta.tokens is not None:
            journal.append(
                "llm/tokens",
                {"turn": request.turn, "step": request.step, "attempt": run.attempt, "tokens": answer.meta.tokens},
            )
        return Answer(content, answer.finish, event.seq)

    def _with_unique_ids(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The blocks, each call with an id that no other call of the log has."""
        known, used = self._journal.fold.call_ids, set[str]()
        out: list[dict[str, Any]] = []
        for block in content:
            if block["type"] != "tool-call":
                out.append(block)
                continue
            call_id, n = block["id"], 1
            while call_id in used or call_id in known:
                n += 1
                call_id = f"{block['id']}__{n}"
            used.add(call_id)
            out.append(block if n == 1 else {**block, "id": call_id})
        return out

    def _keep_partial(self, run: _Attempt, error: KimiRayError | None = None) -> None:
        self._respond(run, answer=None, error=error)
        self._keep_text(run)

    def _keep_text(self, run: _Attempt) -> None:
        content = run.assembler.partial()
        if content:
            data = _message_of(run, content) | {"interrupted": True}
            self._journal.append("assistant/message", data, surface="append", sources=run.chunk_seqs or None)

    def _respond(self, run: _Attempt, *, answer: Assembled | None, error: KimiRayError | None) -> None:
        request, meta = run.request, run.assembler.meta
        now = time.monotonic()
        timing: dict[str, Any] = {"total_ms": round((now - run.began) * 1000)}
        if run.limiter_ms is not None:
            timing["limiter_ms"] = run.limiter_ms
        if meta.connect_ms is not None:
            timing["connect_ms"] = meta.connect_ms
        if run.first_token is not None:
            timing["ttft_ms"] = round((run.first_token - run.began) * 1000)
        data: dict[str, Any] = {"turn": request.turn, "step": request.step, "attempt": run.attempt}
        data |= response_facts(run.assembler, answer, error)
        data["timing"] = timing
        if error is not None:
            data["error"] = error.to_data()
        self._journal.append("llm/response", data)


class _Attempt:
    __slots__ = (
        "answer",
        "assembler",
        "attempt",
        "began",
        "chunk_seqs",
        "first_token",
        "limiter_ms",
        "request",
        "route",
    )

    def __init__(self, request: ChatRequest, route: ModelRoute, attempt: int, limiter_ms: int | None) -> None:
        self.limiter_ms = limiter_ms
        self.request = request if attempt == 1 else replace(request, attempt=attempt)
        self.route = route
        self.attempt = attempt
        self.assembler = Assembler()
        self.answer: Assembled | None = None
        """What came, where it is none to go on with."""
        self.began = time.monotonic()
        self.first_token: float | None = None
        self.chunk_seqs: list[int] = []


class _ChunkRecorder:
    """Turns stream deltas into ``assistant/chunk`` events: all of them, coalesced, or none.

    Coalesced: deltas of one block are joined until 4 KiB or half a second have passed; what is left at the end of a
    complete answer is not written, since the whole message follows at once.
    """

    def __init__(self, journal: Journal, run: _Attempt) -> None:
        self._journal = journal
        self._run = run
        self._mode = run.route.record_chunks
        self._parts: list[str] = []
        self._size = 0
        self._since = run.began
        self._open: tuple[str, int, str | None, str | None] | None = None

    def take(self, chunk: Chunk, now: float) -> int:
        """Take a delta; returns its length in characters."""
        if isinstance(chunk, ToolCallDelta):
            key, text = ("tool-call-delta", chunk.index, chunk.id, chunk.name), chunk.arguments
        elif isinstance(chunk, TextDelta):
            key, text = ("text-delta", chunk.index, None, None), chunk.text
        elif isinstance(chunk, ReasoningDelta):
            key, text = ("reasoning-delta", chunk.index, None, None), chunk.text
        else:
            return 0
        if self._mode == "all":
            self._write(key, text)
        elif self._mode == "coalesced":
            if self._open is not None and self._open[:2] != key[:2]:
                self._cut()
            self._open = self._open or key
            self._parts.append(text)
            self._size += len(text)
            if self._size >= COALESCED_CHUNK_BYTES or now - self._since >= COALESCED_CHUNK_S:
                self._cut()
                self._since = now
        return len(text)

    def keep_rest(self) -> None:
        """The stream broke: write what was not yet, since no message will have it."""
        self._cut()

    def _cut(self) -> None:
        if self._open is not None and self._parts:
            self._write(self._open, "".join(self._parts))
        self._parts.clear()
        self._size = 0
        self._open = None

    def _write(self, key: tuple[str, int, str | None, str | None], text: str) -> None:
        kind, index, call_id, name = key
        chunk: dict[str, Any] = {"type": kind, "index": index}
        if kind == "tool-call-delta":
            if call_id is not None:
                chunk["id"] = call_id
            if name is not None:
                chunk["name"] = name
            chunk["arguments"] = _storable(text)
        else:
            chunk["text"] = _storable(text)
        request = self._run.request
        event = self._journal.append(
            "assistant/chunk",
            {"turn": request.turn, "step": request.step, "attempt": self._run.attempt, "chunk": chunk},
        )
        self._run.chunk_seqs.append(event.seq)


def _storable(text: str) -> str:
    """A fragment may end in half a surrogate pair; alone it cannot be stored."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _message_of(run: _Attempt, content: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``assistant/message`` says of an attempt's answer."""
    request = run.request
    return {
        "turn": request.turn,
        "step": request.step,
        "message": {
            "id": new_message_id(),
            "role": "assistant",
            "content": content,
            "source": {"kind": "model", "provider": run.route.provider.name, "model": request.model},
        },
        "attempt": run.attempt,
    }
