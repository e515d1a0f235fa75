"""A model that plays what another one once answered: by position, whatever it is asked.

Each agent has its own answers and its own place in them; what a request holds is not looked at. That is for who
compares (``kimi_ray.replay``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_ray.errors import ProviderError, error_from_data
from kimi_ray.llm.chat import (
    ChatRequest,
    Chunk,
    Finish,
    FinishReason,
    MetaChunk,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UsageChunk,
)
from kimi_ray.settings import Usage

_FINISHES = ("stop", "tool-calls", "max-tokens", "filtered", "other")


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What came of one attempt. ``content`` are the blocks of its message, as far as there was one."""

    content: Sequence[Mapping[str, Any]] = ()
    finish: FinishReason | None = None
    """None: ``tool-calls`` with calls, else ``stop``."""
    usage: Usage | None = None
    meta: MetaChunk | None = None
    error: Mapping[str, Any] | None = None
    """How the attempt failed, as data; what ``content`` has came before."""
    retried: bool = False
    """Of a failed one: whether another attempt followed it."""
    cut: bool = False
    """It was stopped before its end: after ``content`` nothing comes any more."""

    @classmethod
    def of(
        cls,
        content: Sequence[Mapping[str, Any]],
        response: Mapping[str, Any] | None,
        *,
        usage: Mapping[str, Any] | None = None,
        retried: bool = False,
        cut: bool = False,
    ) -> RecordedAnswer:
        """From the log: the blocks of an ``assistant/message`` and the ``llm/response`` of its attempt.

        Args:
            content: The blocks.
            response: What ``llm/response`` says; None where the log has none, as those of other programs.
            usage: For that case, what the message says.
            retried: Another attempt followed.
            cut: The attempt was stopped.
        """
        said = response or {}
        counted = said.get("usage") or usage
        finish = said.get("finish_reason")
        facts = {name: said[name] for name in ("response_id", "served_model", "fingerprint") if name in said}
        return cls(
            content=content,
            finish=finish if finish in _FINISHES else None,
            usage=None if counted is None else _usage(counted),
            meta=MetaChunk(**facts) if facts else None,
            error=said.get("error"),
            retried=retried,
            cut=cut,
        )

    def failure(self) -> ProviderError | None:
        """The error to raise. Whether it is retryable is what was recorded, and nobody is asked to wait."""
        if self.error is None:
            return None
        found = error_from_data(dict(self.error))
        details = {key: value for key, value in found.details.items() if key not in ("retry_after_ms", "attempts")}
        return ProviderError(found.message, code=found.code, hint=found.hint, details=details, retryable=self.retried)

    def chunks(self) -> Iterator[Chunk]:
        """Its stream, up to where it failed or was cut."""
        calls = False
        for index, block in enumerate(self.content):
            kind = block["type"]
            if kind == "text":
                yield TextDelta(index, block["text"])
            elif kind == "reasoning":
                yield ReasoningDelta(index, block["text"])
            elif kind == "tool-call":
                calls = True
                yield ToolCallDelta(index, block["id"], block["name"], block["arguments"])
        if self.error is not None or self.cut:
            return
        if self.usage is not None:
            yield UsageChunk(self.usage)
        if self.meta is not None:
            yield self.meta
        finish = self.finish or ("tool-calls" if calls else "stop")
        yield Finish(finish, finish)


class RecordedProvider:
    """Plays recorded answers.

    Args:
        answers: By agent id, in order. An agent without any, or beyond its last, gets ``provider.recording_exhausted``.
        name: The provider's name as logged.
    """

    def __init__(self, answers: Mapping[str, Iterable[RecordedAnswer]], *, name: str = "recorded") -> None:
        self._answers = {agent_id: tuple(listed) for agent_id, listed in answers.items()}
        self._places = dict.fromkeys(self._answers, 0)
        self._name = name

    @property
    def name(self) -> str:
        """The provider's name as logged."""
        return self._name

    @property
    def left(self) -> dict[str, int]:
        """Answers that nobody asked for yet, by agent; agents without any left out."""
        counts = {agent_id: len(self._answers[agent_id]) - place for agent_id, place in self._places.items()}
        return {agent_id: count for agent_id, count in counts.items() if count}

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """The agent's next answer. One that was cut never ends: whoever replays stops it as it was stopped.

        Raises:
            ProviderError: The recorded failure; ``provider.recording_exhausted``.
        """
        answers, place = self._answers.get(request.agent_id, ()), self._places.get(request.agent_id, 0)
        if place >= len(answers):
            raise ProviderError(
                f"the recording has {len(answers)} answers for agent {request.agent_id}, and all were given",
                code="provider.recording_exhausted",
                hint="the conversation went on for longer than it was recorded",
                details={"agent_id": request.agent_id, "answers": len(answers)},
            )
        self._places[request.agent_id] = place + 1
        answer = answers[place]
        for chunk in answer.chunks():
            yield chunk
        failure = answer.failure()
        if failure is not None:
            raise failure
        if answer.cut:
            await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Nothing to let go of."""


def _usage(said: Mapping[str, Any]) -> Usage:
    return Usage(**{key: value for key, value in said.items() if key in Usage.model_fields})
