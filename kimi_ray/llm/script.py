"""What a scripted model says: steps, a function of the request, or either one named in a config."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from kimi_ray.errors import ConfigError, ProviderError
from kimi_ray.llm.chat import ChatRequest, FinishReason
from kimi_ray.llm.faults import scripted_fault
from kimi_ray.named_code import CannotLoadError, load_named
from kimi_ray.settings import Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the scripted model makes. ``arguments`` is raw JSON text; without an id one is made up."""

    name: str
    arguments: str = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure to raise instead of answering, or after ``after_chunks`` chunks of the answer."""

    code: str
    status: int | None = None
    retry_after_ms: int | None = None
    message: str | None = None
    after_chunks: int = 0

    def build(self) -> ProviderError:
        """The error, with the retryability that its code has everywhere."""
        return scripted_fault(self.code, status=self.status, retry_after_ms=self.retry_after_ms, message=self.message)


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of a scripted model: text, reasoning, tool calls, or a fault."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: FinishReason | None = None
    """None: ``tool-calls`` with calls, else ``stop``."""
    usage: Usage | None = None
    """None: estimated from the request and the answer, the same every time."""
    latency_s: float | None = None
    """Seconds before the first chunk; None takes the provider's."""
    fault: Fault | None = None

    @classmethod
    def call(cls, name: str, arguments: Mapping[str, Any] | str | None = None, *, text: str = "") -> Step:
        """A step with one tool call; ``arguments`` as a mapping or as raw JSON text."""
        return cls(text=text, tool_calls=(tool_call(name, arguments),))

    @classmethod
    def error(
        cls,
        code: str,
        status: int | None = None,
        retry_after_ms: int | None = None,
        message: str | None = None,
        *,
        after_chunks: int = 0,
        text: str = "",
    ) -> Step:
        """A step that fails with ``code`` (``provider.*`` or ``context.overflow``).

        Args:
            code: The error's code; retryable or not as the code is everywhere.
            status: HTTP status in the error's details.
            retry_after_ms: What the server asks to wait, in milliseconds.
            message: The error's message.
            after_chunks: How many chunks of ``text`` come before the failure: a stream that breaks.
            text: What the broken stream was about to say.
        """
        return cls(text=text, fault=Fault(code, status, retry_after_ms, message, after_chunks))

    @property
    def answers(self) -> bool:
        """Whether an assistant message comes of this step (a failed or empty one leaves none)."""
        return self.fault is None and (bool(self.tool_calls) or bool(self.text.strip()))


Answer = Step | str | Mapping[str, Any]
"""What a script may say: a step, a bare text, or a step in its config form."""
ScriptFunction = Callable[[ChatRequest], Answer | Awaitable[Answer]]
Script = Sequence[Answer] | ScriptFunction
"""A list of steps, or a function of the request."""


def tool_call(name: str, arguments: Mapping[str, Any] | str | None = None, *, id: str | None = None) -> ToolCall:
    """A ``ToolCall`` with its arguments given as a mapping, as raw JSON text, or not at all."""
    raw = arguments if isinstance(arguments, str) else to_json(dict(arguments or {})).decode()
    return ToolCall(name, raw, id)


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _CallForm(_Form):
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    id: str | None = None


class _FaultForm(_Form):
    code: str
    status: int | None = None
    retry_after_ms: int | None = None
    message: str | None = None
    after_chunks: int = 0


class _StepForm(_Form):
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[_CallForm, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    latency_s: float | None = Field(default=None, ge=0)
    error: _FaultForm | None = None


def as_step(answer: Answer, at: int | None = None) -> Step:
    """Any form of an answer as a ``Step``.

    Args:
        answer: What the script says.
        at: Its place in a list of steps, from 0, for messages; None is the answer of a function.

    Raises:
        ConfigError: ``config.invalid_script``.
    """
    which = "a step of the script" if at is None else f"step {at} of the script (the first is 0)"
    if type(answer) is Step:
        return answer
    if isinstance(answer, str):
        return Step(text=answer)
    if isinstance(answer, Step):
        return answer
    if not isinstance(answer, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  comes from users' functions
        raise _invalid(f"{which} is a {type(answer).__name__}, and neither a Step nor a text nor a table")
    try:
        form = _StepForm.model_validate(dict(answer))
    except ValidationError as error:
        raise _invalid(f"{which} is wrong at {_problem(error)}") from None
    return Step(
        text=form.text,
        reasoning=form.reasoning,
        tool_calls=tuple(tool_call(call.name, call.arguments, id=call.id) for call in form.tool_calls),
        finish=form.finish,
        usage=form.usage,
        latency_s=form.latency_s,
        fault=Fault(**form.error.model_dump()) if form.error is not None else None,
    )


def load_script(script: Script | str) -> Sequence[Step] | ScriptFunction:
    """A script from any form: steps, a function, or ``package.module:name`` of either.

    Raises:
        ConfigError: ``config.invalid_script`` naming what cannot be imported or used.
    """
    source = "the script"
    if isinstance(script, str):
        source = script
        script = _imported(script)
    if callable(script):
        return script
    if not isinstance(script, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  comes from users' modules
        raise _invalid(f"{source} is neither a function nor a list of steps")
    return tuple(as_step(step, at) for at, step in enumerate(script))


def _problem(error: ValidationError) -> str:
    """Where a table is not a step, why, and which keys there are at that place."""
    first = error.errors(include_url=False, include_context=False)[0]
    loc = first["loc"]
    place = ".".join(str(part) for part in loc) or "the top"
    if first["type"] not in ("extra_forbidden", "missing"):
        return f"{place}: {first['msg']}"
    table = str(loc[0]) if len(loc) > 1 else ""
    form: type[BaseModel] | None = {"tool_calls": _CallForm, "error": _FaultForm, "usage": Usage}.get(table)
    said = "there is no such key" if first["type"] == "extra_forbidden" else "it is missing"
    of = f"of {table}" if form is not None else "of a step"
    return f"{place}: {said}; the keys {of} are {', '.join((form or _StepForm).model_fields)}"


def _imported(name: str) -> Script:
    try:
        found = load_named(name)
    except CannotLoadError as error:
        raise _invalid(f"the script {name!r} cannot be imported: {error.why}", error.hint) from error
    if found is None or isinstance(found, str):
        raise _invalid(f"{name!r} is no script")
    return cast("Script", found)


def _invalid(message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(
        message,
        code="config.invalid_script",
        hint=hint or "give a list of steps, a function of the request, or package.module:function",
    )
