"""The ``Agent`` tool: one subagent, one task, one answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from pydantic import Field, field_validator

from kimi_ray.agent.background import BackgroundTasks, TaskEnd, TaskStatus
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.subagents import DEFAULT_PROFILE, SubagentInfo, SubagentResult, Subagents, SummaryPolicy
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, ToolError
from kimi_ray.features.subagents.words import TOO_MANY_TASKS, background_text, failure_text, result_text
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

NAME = "Agent"

SUMMARY = SummaryPolicy()
"""A model sees of a subagent's work what it answers: a very short answer is asked for again."""

NO_SUMMARY = frozenset({"plan"})
"""Profiles whose answer is what they were asked for, long or short."""

OWN_MODEL = "primary"
"""Another word for the caller's own model."""

_TASK_STATUS: dict[str, TaskStatus] = {
    "completed": "completed",
    "failed": "failed",
    "cancelled": "killed",
    "timed_out": "timed_out",
}


class AgentArguments(Arguments):
    """What Agent takes."""

    prompt: str = Field(description="The whole task: the subagent knows nothing of this conversation, but for a fork")
    description: str = Field(description="What it is about, in 3 to 5 words")
    subagent_type: str | None = Field(default=None, description=f"Kind of subagent, by default {DEFAULT_PROFILE}")
    resume: str | None = Field(
        default=None, description="agent_id of an earlier subagent of yours: it goes on, with all it knows"
    )
    run_in_background: bool | None = Field(default=None, description="Return at once; you are told when it has ended")
    fork: bool | None = Field(default=None, description="Let it begin with all of this conversation")
    model: str | None = Field(default=None, description="Its model, by default yours")

    @field_validator("subagent_type", "resume", "model", mode="before")
    @classmethod
    def _said(cls, value: Any) -> Any:
        """An empty text says nothing."""
        return (value.strip() or None) if isinstance(value, str) else value

    @field_validator("run_in_background", "fork", mode="before")
    @classmethod
    def _said_yes(cls, value: Any) -> Any:
        return None if isinstance(value, str) and not value.strip() else value

    @field_validator("prompt", "description")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be empty")
        return value


class AgentTool(BuiltinTool[AgentArguments]):
    """A subagent for a task. One that fails is an answer that says so."""

    name = NAME
    writes = True

    def __init__(
        self, spec: AgentSpec, subagents: Subagents, background: BackgroundTasks, config: RuntimeConfig
    ) -> None:
        self._spec = spec
        self._subagents = subagents
        self._background = background
        self._timeout_s = config.subagent_timeout_s
        kinds = "\n".join(f"- {profile.name}: {profile.description}" for profile in subagents.offered())
        self.description = (
            "Start a subagent: an agent of its own with its own context, that works in this directory, has a task and"
            " answers once. Use it for work that is separate, or would fill your context with what you need not keep;"
            " several calls in one answer run side by side. Give it all it must know, and say what to answer: you see"
            " its last answer and nothing else. It cannot ask you anything. With resume an earlier subagent goes on."
            + (f"\nKinds of subagents:\n{kinds}" if kinds else "")
        )

    def touches(self, arguments: AgentArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.none()

    async def call(self, arguments: AgentArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        try:
            self._check(arguments)
            # A subagent that exists and has no task would be one that nobody ever hears of.
            with self._background.room() if arguments.run_in_background else nullcontext():
                child = await self._child(arguments, context)
            if arguments.run_in_background:
                return self._go_on_behind(child, arguments)
        except KimiRayError as error:
            if error.code == "task.limit_exceeded":
                return ToolOutput(TOO_MANY_TASKS, is_error=True, error_code=error.code)
            text = f"{error.message} ({error.hint})" if error.hint else error.message
            return ToolOutput(failure_text(text), is_error=True, error_code=error.code)
        result = await self._run(child, arguments.prompt, context)
        failed = result.status != "completed"
        code = str((result.error or {}).get("code") or "internal") if failed else None
        meta = {"agent_id": result.agent_id, "status": result.status, "usage": result.usage.said()}
        return ToolOutput(result_text(result), is_error=failed, error_code=code, meta=meta)

    def _check(self, arguments: AgentArguments) -> None:
        """Refuse what contradicts itself.

        Raises:
            ToolError: ``validation.failed``.
        """
        if arguments.resume is not None and arguments.subagent_type is not None:
            raise _refused("subagent_type cannot be combined with resume: a resumed subagent stays what it is.")
        if arguments.resume is not None and arguments.model is not None:
            raise _refused("model cannot be combined with resume: a resumed subagent keeps its model.")
        if arguments.fork:
            if arguments.resume is not None:
                raise _refused("fork cannot be combined with resume: a resumed subagent has a history of its own.")
            if arguments.subagent_type not in (None, self._spec.profile.name):
                raise _refused("fork cannot be combined with another subagent_type: a fork is what this agent is.")
            if arguments.model not in (None, OWN_MODEL, self._spec.model.name):
                raise _refused("fork cannot be combined with another model: a fork speaks to this agent's.")
        if arguments.run_in_background and not self._background.offered:
            raise _refused("run_in_background needs the tools TaskList, TaskOutput and TaskStop.")

    async def _child(self, arguments: AgentArguments, context: ToolContext) -> SubagentInfo:
        if arguments.resume is not None:
            return await self._subagents.check_resume(arguments.resume)
        model = None if arguments.model == OWN_MODEL else arguments.model
        plan = self._subagents.plan(arguments.subagent_type, model, fork=bool(arguments.fork))
        agent_id = await self._subagents.spawn(
            plan,
            description=arguments.description,
            call_id=context.call_id,
            background=bool(arguments.run_in_background),
        )
        return SubagentInfo(agent_id, plan.profile.name)

    async def _run(self, child: SubagentInfo, prompt: str, context: ToolContext | None) -> SubagentResult:
        return await self._subagents.run(
            child.agent_id,
            prompt,
            timeout_s=self._timeout_s or None,
            summary=None if child.profile in NO_SUMMARY else SUMMARY,
            signal=context.cancelled if context is not None else None,
        )

    def _go_on_behind(self, child: SubagentInfo, arguments: AgentArguments) -> ToolOutput:
        async def work(write: Callable[[str], None]) -> TaskEnd:
            result = await self._run(child, arguments.prompt, None)
            write(result.text)
            reason = None if result.status == "completed" else str((result.error or {}).get("message") or "")
            return TaskEnd(_TASK_STATUS[result.status], reason=reason or None)

        task_id = self._background.start("agent", arguments.description, work, agent_id=child.agent_id)
        text = background_text(task_id, child.agent_id, child.profile, arguments.description)
        return ToolOutput(text, meta={"agent_id": child.agent_id, "task_id": task_id})


def _refused(message: str) -> ToolError:
    return ToolError(message, code="validation.failed")
