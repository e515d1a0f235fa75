"""What a log's model answered, by position: what the ``recorded`` provider plays."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

from kimi_ray.events import SessionEvent, read_stored, type_key
from kimi_ray.llm.assemble import Assembler
from kimi_ray.llm.chat import Finish, ReasoningDelta, TextDelta, ToolCallDelta
from kimi_ray.llm.recorded import RecordedAnswer
from kimi_ray.replay.recording import Attempt, Recording
from kimi_ray.replay.sources import LogSource, load_recording
from kimi_ray.session.log_reader import pages
from kimi_ray.store.seam import Stream

_CHUNK = "assistant/chunk"
_KNOWN = {type_key(_CHUNK): _CHUNK}


def answer_of(attempt: Attempt) -> RecordedAnswer:
    """What came of one recorded attempt."""
    return RecordedAnswer.of(
        attempt.content,
        attempt.response,
        usage=(attempt.message or {}).get("usage"),
        retried=attempt.retried,
        cut=not attempt.failed and not attempt.answered,
    )


def answers_of(recording: Recording) -> list[RecordedAnswer]:
    """All of a recording, in order, failed attempts too."""
    return [answer_of(attempt) for turn in recording.turns for _, _, attempt in turn.attempts]


async def recorded_answers(source: LogSource, stream: Stream) -> list[RecordedAnswer]:
    """All of a log, in order; what another log's agent was answered, of which it began as a copy, is not its own.

    A log that has streamed parts and no messages (a script that another program kept) is played from its parts: one
    answer for each ``finish``.

    Raises:
        SessionError: ``session.not_found``; AgentError: ``agent.not_found``.
        StoreError: ``store.corrupt``; LogError: ``log.*``.
    """
    recording = await load_recording(source, stream)
    found = answers_of(recording)
    if found:
        return found
    chunks: list[dict[str, Any]] = []
    lines = pages(source, stream)
    async with aclosing(lines):
        seq = 0
        async for page in lines:
            chunks += _chunks(read_stored(page, seq, _KNOWN, frozenset()), recording.header.seed_length or 0)
            seq += len(page)
    return _assembled(chunks)


def _chunks(events: Iterable[SessionEvent], first: int) -> list[dict[str, Any]]:
    return [event.data["chunk"] for event in events if event.type == _CHUNK and event.seq >= first]


def _assembled(chunks: list[dict[str, Any]]) -> list[RecordedAnswer]:
    answers: list[RecordedAnswer] = []
    assembler, is_open = Assembler(), False
    for chunk in chunks:
        kind, index, is_open = chunk["type"], int(chunk.get("index", 0)), True
        if kind == "text-delta":
            assembler.add(TextDelta(index, chunk["text"]))
        elif kind == "reasoning-delta":
            assembler.add(ReasoningDelta(index, chunk["text"]))
        elif kind == "tool-call-delta":
            assembler.add(ToolCallDelta(index, chunk.get("id"), chunk.get("name"), chunk.get("arguments", "")))
        elif kind == "finish":
            assembler.add(Finish("stop"))
            answers.append(RecordedAnswer(assembler.result().content))
            assembler, is_open = Assembler(), False
    if is_open:
        answers.append(RecordedAnswer(assembler.result().content, cut=True))
    return answers
