"""The tools by which a model follows background tasks: TaskList, TaskOutput, TaskStop, WaitFor."""

from __future__ import annotations

from pydantic import Field

from kimi_ray.agent.task_fold import TaskRecord
from kimi_ray.features.tasks.service import TaskService
from kimi_ray.features.tasks.words import described
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

OUTPUT_BYTES = 30_000
"""Of a task's output, shown by TaskOutput."""
WAITED_BYTES = 4_000
"""Of a task's output, shown by WaitFor and TaskStop."""
MAX_WAIT_S = 600


class TaskListArguments(Arguments):
    """What TaskList takes."""

    active_only: bool = Field(default=True, description="Only those that run")
    limit: int = Field(default=20, ge=1, le=100, description="Newest first, at most so many")


class TaskList(BuiltinTool[TaskListArguments]):
    """The background tasks of this agent."""

    name = "TaskList"
    description = "List this agent's background tasks, newest first: id, kind, status, description."

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks

    def touches(self, arguments: TaskListArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.none()

    async def call(self, arguments: TaskListArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        records, total = self._tasks.list(active_only=arguments.active_only, limit=arguments.limit)
        what = "running" if arguments.active_only else "known"
        head = f"{total} background tasks {what}" + (f", the newest {len(records)}:" if total > len(records) else ":")
        blocks = [head, *(described(record) for record in records)] if records else [f"no background task is {what}"]
        return ToolOutput("\n\n".join(blocks), meta={"tasks": [record.task_id for record in records]})


class TaskOutputArguments(Arguments):
    """What TaskOutput takes."""

    task_id: str = Field(min_length=1)


class TaskOutput(BuiltinTool[TaskOutputArguments]):
    """A task's state and the end of its output; ``task.not_found``."""

    name = "TaskOutput"
    description = (
        f"Show a background task: its status and the last {OUTPUT_BYTES} bytes of its output so far. Does not wait: "
        "WaitFor does."
    )

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks

    def touches(self, arguments: TaskOutputArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.none()

    async def call(self, arguments: TaskOutputArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        text = _shown(self._tasks, self._tasks.get(arguments.task_id), OUTPUT_BYTES)
        self._tasks.report(arguments.task_id, self.name)
        return ToolOutput(text, meta={"task_id": arguments.task_id})


class TaskStopArguments(Arguments):
    """What TaskStop takes."""

    task_id: str = Field(min_length=1)
    reason: str | None = Field(default=None, max_length=500, description="Why, for the record")


class TaskStop(BuiltinTool[TaskStopArguments]):
    """End a task; ``task.not_found``."""

    name = "TaskStop"
    description = "Stop a background task: it is asked to end and killed after 5 seconds. One that has ended stays so."
    writes = True

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks

    def touches(self, arguments: TaskStopArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.none()

    async def call(self, arguments: TaskStopArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        record = await self._tasks.stop(arguments.task_id, arguments.reason, by=self.name)
        text = _shown(self._tasks, record, WAITED_BYTES)
        return ToolOutput(text, meta={"task_id": arguments.task_id})


class WaitForArguments(Arguments):
    """What WaitFor takes."""

    timeout: float = Field(ge=1, le=MAX_WAIT_S, description=f"Longest wait in seconds, 1 to {MAX_WAIT_S}")
    task_id: str | None = Field(default=None, min_length=1, description="Which task; any if not given")


class WaitFor(BuiltinTool[WaitForArguments]):
    """Wait for the end of a task; ``task.not_found``. That none has ended is no error."""

    name = "WaitFor"
    description = (
        "Wait until a background task ends, or any of them if no task_id is given, and show how it ended. When the "
        "time is over first, that is told and the task runs on. Only for when there is nothing else to do: the end of "
        "a task is told by a message anyway."
    )

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks

    def touches(self, arguments: WaitForArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.none()

    async def call(self, arguments: WaitForArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        wanted = None if arguments.task_id is None else [arguments.task_id]
        ended = await self._tasks.wait(wanted, arguments.timeout, context.cancelled, by=self.name)
        if ended:
            blocks = [_shown(self._tasks, record, WAITED_BYTES) for record in ended]
            return ToolOutput("\n\n".join(blocks), meta={"ended": [record.task_id for record in ended]})
        records, _ = self._tasks.list(active_only=True, limit=100)
        if not records:
            return ToolOutput("no background task is running", meta={"ended": []})
        running = "\n\n".join(described(record) for record in records if wanted is None or record.task_id in wanted)
        return ToolOutput(f"[nothing has ended within {arguments.timeout:g} s]\n\n{running}", meta={"ended": []})


def _shown(tasks: TaskService, record: TaskRecord, limit: int) -> str:
    output = tasks.output(record, limit)
    if not output:
        return f"{described(record)}\n\n[no output]"
    left_out = record.output_bytes - len(output.encode("utf-8", "replace"))
    mark = f"[... {left_out} bytes before this are not shown ...]\n" if left_out > 0 else ""
    return f"{described(record)}\n\n[output]\n{mark}{output}"
