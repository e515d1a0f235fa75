"""A checked answer: the tool ``final_answer``, whose parameters are the schema, and what stands for a call of it.

A turn whose prompt has an ``output_schema`` offers the tool beside the agent's own. It ends when the tool is called
with an answer that fits, or when the model ends with a text that is such an answer as JSON. What does not goes back to
the model with the reasons, ``MAX_CORRECTIONS`` times; then the turn fails with ``output.invalid``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from pydantic_core import from_json, to_json

from kimi_ray.agent.fold import PromptRecord
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots, StepStarting, ToolDone, TurnStopping
from kimi_ray.errors import AgentError, KimiRayError, LogError, ToolError
from kimi_ray.events import freeze, thaw
from kimi_ray.llm.chat import ToolSpec
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.output_schema import problems_of
from kimi_ray.tools.registry import FINAL_ANSWER as NAME
from kimi_ray.tools.results import storable

MAX_CORRECTIONS = 3
"""Answers that do not fit and are sent back, in one turn."""

DESCRIPTION = (
    "Give your final answer by calling this tool once, when everything else is done. The task is not finished before"
    " it was called with arguments that fit its parameters; a call that fits ends it."
)
_WRAPPED = "answer"
_FENCE = re.compile(r"\A\s*```[A-Za-z]*\s*\n(?P<body>.*?)\n?```\s*\Z", re.DOTALL)
_SHOWN = 2000
_TOLD_CHARS = 4000
"""A shorter schema is told again in words, for models that do not look at tools."""


class FinalAnswer:
    """The tool of one agent, and the rules of the turns that need it. A service of the Agent scope.

    Args:
        journal: Where the answer is recorded.
        slots: Where it has its say, from the first turn on that has a schema.
    """

    name = NAME
    writes = False
    description = DESCRIPTION

    def __init__(self, journal: Journal, slots: AgentSlots) -> None:
        self._journal = journal
        self._slots = slots
        self._listens = False
        self._prompt_id = ""
        self._schema: dict[str, Any] | None = None
        self._answered = False
        self._problems: list[str] = []
        self._refused = 0

    def begin(self, prompts: Sequence[PromptRecord]) -> tuple[ToolSpec, ...]:
        """A turn begins: the tool that it offers, if its first prompt has a schema."""
        first = prompts[0] if prompts else None
        schema = first.output_schema if first is not None else None
        self._schema = thaw(schema)
        self._answered = False
        self._problems, self._refused = [], 0
        if first is None or schema is None:
            return ()
        self._prompt_id = first.prompt_id
        if not self._listens:
            self._listens = True
            self._slots.step.register(NAME, self._before_step)
            self._slots.tool_done.register(NAME, self._after_call)
            self._slots.turn_stopping.register(NAME, self._before_end)
        return (ToolSpec(NAME, DESCRIPTION, self.parameters),)

    # -- the tool ---------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema; one that is not of an object is that of the argument ``answer``."""
        schema = self._schema or {}
        if _is_object(schema):
            return schema
        # what it defines is named from the root, and the root is now around it
        shared = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
        inner = {key: value for key, value in schema.items() if key not in shared}
        return {"type": "object", "properties": {_WRAPPED: inner}, "required": [_WRAPPED], **shared}

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        return Accesses.none()

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``."""
        if self._schema is None:
            raise ToolError(f"there is no tool {NAME!r} in this turn", code="tool.unknown")
        if not isinstance(arguments, dict):
            problems = ["the arguments are not one JSON object"]
        elif _is_object(self._schema):
            problems = _problems(self._schema, arguments)
        elif _WRAPPED not in arguments:
            problems = [f"`{_WRAPPED}` is required"]
        else:
            problems = _problems(self._schema, cast("dict[str, Any]", arguments)[_WRAPPED])
        if problems:
            self._refuse(problems)
            raise ToolError(
                f"the answer does not fit: {'; '.join(problems)}",
                code="tool.bad_arguments",
                hint=f"call {NAME} again with all of it",
                details={"tool": NAME, "problems": problems},
            )
        return cast("dict[str, Any]", arguments)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        schema = self._schema
        if schema is None:
            raise ToolError(f"there is no tool {NAME!r} in this turn", code="tool.unknown")
        self._record(arguments if _is_object(schema) else arguments[_WRAPPED], "tool")
        return ToolOutput("The answer was taken.")

    # -- the turn ---------------------------------------------------------------------------------------------------

    async def _before_step(self, _event: StepStarting) -> None:
        if self._schema is not None and self._refused > MAX_CORRECTIONS:
            raise self._invalid(f"{self._refused} calls of {NAME}", None)

    async def _after_call(self, event: ToolDone) -> None:
        if self._schema is not None and event.name == NAME and self._answered and not event.output.is_error:
            event.stop_turn = True

    async def _before_end(self, event: TurnStopping) -> None:
        schema = self._schema
        if schema is None or self._answered:
            return
        value, problems = _answer_in(event.text, schema)
        if not problems:
            self._record(value, "text")
            return
        self._refuse(problems)
        if self._refused > MAX_CORRECTIONS:
            raise self._invalid(f"{self._refused} answers", event.text)
        event.go_on(_correction(problems, schema), kind="output_schema", times=MAX_CORRECTIONS)

    def _record(self, value: Any, by: str) -> None:
        self._answered = True
        self._journal.append("output/recorded", {"prompt_id": self._prompt_id, "value": value, "by": by})

    def _refuse(self, problems: list[str]) -> None:
        self._refused += 1
        self._problems = problems

    def _invalid(self, what: str, text: str | None) -> KimiRayError:
        details: dict[str, Any] = {"problems": self._problems, "corrections": MAX_CORRECTIONS}
        if text is not None:
            details["text"] = storable(text[:_SHOWN])
        return AgentError(
            f"{what} did not fit the output schema; of the last: {'; '.join(self._problems)}",
            code="output.invalid",
            hint="the log has all of them; a smaller schema, or another model, may do",
            details=details,
        )


def _is_object(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object"


def _answer_in(text: str, schema: dict[str, Any]) -> tuple[Any, list[str]]:
    """A text as an answer: as JSON, also in a fence; as it is where the schema wants text. And what is wrong."""
    fenced = _FENCE.match(text)
    body = fenced["body"] if fenced is not None else text
    try:
        value = from_json(body)
    except ValueError:
        if schema.get("type") == "string" and text.strip():
            return text, problems_of(schema, text)
        return None, ["the last message is not the answer as JSON"]
    problems = _problems(schema, value)
    if problems and schema.get("type") == "string" and not problems_of(schema, text):
        return text, []
    return value, problems


def _problems(schema: dict[str, Any], value: Any) -> list[str]:
    try:
        freeze(value)
    except LogError as error:
        return [error.message]
    return problems_of(schema, value)


def _correction(problems: list[str], schema: dict[str, Any]) -> str:
    text = to_json(schema).decode()
    told = f"JSON that fits this schema: {text}" if len(text) <= _TOLD_CHARS else "that as JSON"
    return (
        f"Your answer does not have the form that is asked for: {'; '.join(problems)}. Call the tool {NAME} with your"
        f" final answer as its arguments, or answer with nothing but {told}"
    )
