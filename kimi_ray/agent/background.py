"""The port by which a tool lets work go on behind the agent: a background task, with an id that can be asked for.

A service of the Agent scope. Who brings the tools that list, read and stop tasks brings its implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

TaskStatus = Literal["completed", "failed", "killed", "timed_out"]


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How a task ended: its last words, and why when it did not complete."""

    status: TaskStatus
    output: str = ""
    """Appended to what it has written so far."""
    reason: str | None = None
    exit_code: int | None = None
    """Of a command."""


TaskWork = Callable[[Callable[[str], None]], Coroutine[Any, Any, TaskEnd]]
"""What a task does: called once with a function that appends to its output. It is stopped by cancelling it; what it
raises is a failure."""


class BackgroundTasks(Protocol):
    """The background tasks of one agent."""

    @property
    def offered(self) -> bool:
        """Whether the agent can follow tasks: whether it has the tools TaskList, TaskOutput and TaskStop."""
        ...

    def room(self) -> AbstractContextManager[None]:
        """Keep the place of one task while its ``start`` is prepared; let go of it right before ``start``, with no
        wait between.

        Raises:
            AgentError: ``task.limit_exceeded``, ``agent.closed``.
        """
        ...

    def start(
        self,
        kind: str,
        description: str,
        work: TaskWork,
        *,
        agent_id: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Begin a task; gives its id. Its end is told to the agent when it comes (a message, which wakes it).

        Args:
            kind: ``agent``, ``process`` ...: the beginning of its id.
            description: A few words, for lists and for the message.
            work: What it does.
            agent_id: The subagent that does it, for a task of the kind ``agent``.
            timeout_s: Seconds after which it is stopped as ``timed_out``; None or 0: no bound.

        Raises:
            AgentError: ``task.limit_exceeded``: nothing was begun.
        """
        ...
