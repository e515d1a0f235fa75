"""Bash for an agent that can follow background tasks: the same tool, and a way to let a command run on."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from kimi_ray.features.tasks.processes import BackgroundCommand
from kimi_ray.features.tasks.service import TaskService
from kimi_ray.tools.builtin.bash import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S, Bash
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments, compact_schema, validate

BACKGROUND_TIMEOUT_S = 600
MAX_BACKGROUND_TIMEOUT_S = 86_400


class BackgroundBashArguments(Arguments):
    """What Bash takes where commands can run in the background."""

    command: str = Field(min_length=1, description="The command")
    cwd: str | None = Field(default=None, description="Directory to start in, relative to the working directory")
    timeout: float | None = Field(
        default=None,
        gt=0,
        le=MAX_BACKGROUND_TIMEOUT_S,
        description=f"Seconds: {DEFAULT_TIMEOUT_S} if not given, at most {MAX_TIMEOUT_S}; in the background "
        f"{BACKGROUND_TIMEOUT_S} if not given, at most {MAX_BACKGROUND_TIMEOUT_S}",
    )
    description: str | None = Field(
        default=None, description="What the command is for, in a few words; needed in the background"
    )
    run_in_background: bool = Field(
        default=False, description="Go on while it runs; a message tells when it has ended. Follow it by its task_id"
    )
    disable_timeout: bool = Field(default=False, description="In the background: let it run without a timeout")

    @model_validator(mode="after")
    def _fits(self) -> BackgroundBashArguments:
        if not self.run_in_background:
            if self.disable_timeout:
                raise ValueError("disable_timeout is for run_in_background only")
            if self.timeout is not None and self.timeout > MAX_TIMEOUT_S:
                raise ValueError(f"timeout is at most {MAX_TIMEOUT_S} unless run_in_background is true")
        elif not (self.description or "").strip():
            raise ValueError("run_in_background needs a description")
        return self


class TaskBash:
    """Bash, for the agents that have this Feature: with ``run_in_background`` if the agent can follow tasks."""

    name: ClassVar[str] = Bash.name
    writes: ClassVar[bool] = True
    _parameters: ClassVar[dict[str, Any]] = compact_schema(BackgroundBashArguments)

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks
        self._plain = Bash()

    @property
    def description(self) -> str:
        """What the model reads."""
        if not self._tasks.offered:
            return self._plain.description
        return (
            f"{self._plain.description} With run_in_background it is a task instead: a task_id comes back at once, "
            "TaskOutput, WaitFor and TaskStop follow it, and it ends with the agent at the latest."
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of the arguments."""
        return self._parameters if self._tasks.offered else self._plain.parameters

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        return Accesses.all()

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``."""
        if not self._tasks.offered:
            return self._plain.check(arguments)
        return validate(BackgroundBashArguments, arguments, tool=self.name).model_dump(by_alias=True)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        if not arguments.get("run_in_background"):
            known = {"command", "cwd", "timeout", "description"}
            plain = {key: value for key, value in arguments.items() if key in known and value is not None}
            return await self._plain.run(plain, context)
        return await self._start(BackgroundBashArguments.model_validate(arguments), context)

    async def _start(self, arguments: BackgroundBashArguments, context: ToolContext) -> ToolOutput:
        description = arguments.description or arguments.command
        timeout_s = 0.0 if arguments.disable_timeout else arguments.timeout or BACKGROUND_TIMEOUT_S
        with self._tasks.room():
            command = await BackgroundCommand.start(context.environment, arguments.command, arguments.cwd)
        try:
            task_id = self._tasks.start("process", description, command.work, timeout_s=timeout_s)
        except BaseException:
            await command.abandon()
            raise
        bound = f"for at most {timeout_s:g} s" if timeout_s else "without a timeout"
        text = (
            f"task_id: {task_id}\nkind: process\nstatus: running\ndescription: {description}\n"
            f"automatic_notification: true\n\nIt runs {bound}. Go on with other work: a message comes when it ends. "
            "TaskOutput shows what it has written, WaitFor waits for it, TaskStop ends it."
        )
        return ToolOutput(text, meta={"task_id": task_id})
