"""Background tasks: work that goes on behind an agent's turn, as a Feature.

Here belongs what a task is, how it ends and how its end is told, and the tools that follow it. Other Features let work
go on behind an agent by the port ``kimi_ray.agent.background.BackgroundTasks``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from dishka import AnyOf, Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.background import BackgroundTasks
from kimi_ray.agent.inbox import Inbox
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.config import RuntimeConfig
from kimi_ray.features.tasks.bash import TaskBash
from kimi_ray.features.tasks.service import TaskService
from kimi_ray.features.tasks.tools import TaskList, TaskOutput, TaskStop, WaitFor
from kimi_ray.scopes import Feature, LifecycleScope


class _Services(Provider):
    scope = LifecycleScope.AGENT

    @provide(provides=AnyOf[TaskService, BackgroundTasks])
    async def tasks(
        self,
        journal: Journal,
        inbox: Inbox,
        slots: AgentSlots,
        notices: Notices,
        spec: AgentSpec,
        config: RuntimeConfig,
    ) -> AsyncIterator[TaskService]:
        """The agent's tasks; whatever way the agent ends, none is left."""
        tasks = TaskService(journal, inbox, slots, notices, spec, config)
        yield tasks
        await tasks.close()


class TasksFeature(Feature):
    """Brings ``BackgroundTasks``, the tools that follow tasks, and Bash with ``run_in_background``."""

    name = "tasks"

    def services(self) -> Sequence[Provider]:
        """See ``Feature``."""
        return (_Services(),)

    def on_agent(self) -> Sequence[type]:
        """See ``Feature``."""
        return (TaskService,)

    def tools(self) -> dict[str, type]:
        """See ``Feature``."""
        return {
            "Bash": TaskBash,
            "TaskList": TaskList,
            "TaskOutput": TaskOutput,
            "TaskStop": TaskStop,
            "WaitFor": WaitFor,
        }


__all__ = ["TaskService", "TasksFeature"]
