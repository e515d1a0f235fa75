"""A model that plays what another one once answered: by position, whatever it is asked.

Each agent has its own answers and its own place in them; what a request holds is not looked at. That is for who
compares (``kimi_ray.replay``).

As a model of its own, ``recorded:FILE``, it plays a file of answers, one JSON object a line
(``kimi-ray replay SESSION --answers FILE`` writes it).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import to_json

from kimi_ray.errors import ConfigError, ProviderError, error_from_data
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

    def to_line(self, agent_id: str) -> bytes:
        """The answer as a line of a file of answers, without newline."""
        said: dict[str, Any] = {"agent_id": agent_id, "content": self.content}
        if self.usage is not None:
            said["usage"] = self.usage.said()
        for name in ("finish", "error", "retried", "cut"):
            value = getattr(self, name)
            if value:
                said[name] = value
        return to_json(said)

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
        self._places: dict[tuple[str, str], int] = {}
        self._name = name

    @property
    def name(self) -> str:
        """The provider's name as logged."""
        return self._name

    @property
    def left(self) -> dict[str, int]:
        """Answers that nobody asked for yet, by agent; agents without any left out."""
        counts = {agent_id: len(listed) for agent_id, listed in self._answers.items()}
        for (_, agent_id), place in self._places.items():
            counts[agent_id] = min(counts[agent_id], len(self._answers[agent_id]) - place)
        return {agent_id: count for agent_id, count in counts.items() if count}

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """The agent's next answer. One that was cut never ends: whoever replays stops it as it was stopped.

        An agent that was not seen before, such as a resumed one, goes on behind the answers that it has.

        Raises:
            ProviderError: The recorded failure; ``provider.recording_exhausted``.
        """
        answers, agent = self._answers.get(request.agent_id, ()), (request.session_id, request.agent_id)
        place = self._places.get(agent)
        if place is None:
            place = _place_of(answers, request)
        if place >= len(answers):
            raise ProviderError(
                f"the recording has {len(answers)} answers for agent {request.agent_id}, and all were given",
                code="provider.recording_exhausted",
                hint="the conversation went on for longer than it was recorded",
                details={"agent_id": request.agent_id, "answers": len(answers)},
            )
        self._places[agent] = place + 1
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


def load_answers(path: str) -> dict[str, list[RecordedAnswer]]:
    """A file of answers, by agent.

    Raises:
        ConfigError: ``config.invalid_recording`` {file, line}.
    """
    found: dict[str, list[RecordedAnswer]] = {}
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise _invalid(path, None, f"cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            form = _AnswerForm.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _invalid(path, number, f"is no answer: {where + ': ' if where else ''}{first['msg']}") from None
        said = {name: getattr(form, name) for name in ("content", "finish", "usage", "error", "retried", "cut")}
        found.setdefault(form.agent_id, []).append(RecordedAnswer(**said))
    return found


class _BlockForm(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["text", "reasoning", "tool-call"]
    text: str = ""
    id: str = ""
    name: str = ""
    arguments: str = ""


class _AnswerForm(BaseModel):
    model_config = ConfigDict(extra="forbid")
    agent_id: str = "main"
    content: list[_BlockForm] = Field(default_factory=list[_BlockForm])
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    retried: bool = False
    cut: bool = False

    @field_validator("content")
    @classmethod
    def _plain(cls, value: list[_BlockForm]) -> Any:
        return [block.model_dump(exclude_unset=True) for block in value]


def _place_of(answers: Sequence[RecordedAnswer], request: ChatRequest) -> int:
    """Behind as many whole answers as the conversation has."""
    had = sum(message["role"] == "assistant" for message in request.messages)
    place = 0
    while had and place < len(answers):
        had -= answers[place].error is None and bool(answers[place].content)
        place += 1
    return place


def _invalid(path: str, line: int | None, what: str) -> ConfigError:
    at = "" if line is None else f" line {line}"
    return ConfigError(
        f"the recording {path}{at} {what}",
        code="config.invalid_recording",
        hint="kimi-ray replay SESSION --answers FILE writes one",
        details={"file": path} | ({} if line is None else {"line": line}),
    )


def _usage(said: Mapping[str, Any]) -> Usage:
    return Usage(**{key: value for key, value in said.items() if key in Usage.model_fields})
