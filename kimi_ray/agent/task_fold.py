"""What a log says about background tasks: which ran, how each ended, and whether the model has heard of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kimi_ray.events import SessionEvent

TaskStatus = Literal["running", "completed", "failed", "timed_out", "killed", "lost"]
KEPT = 200
"""Of the tasks that have ended and were told, so many newest ones are kept."""


@dataclass(slots=True)
class TaskRecord:
    """One background task as the log tells it; times are epoch milliseconds."""

    task_id: str
    kind: str
    description: str
    status: TaskStatus
    started_at: int
    ended_at: int | None = None
    exit_code: int | None = None
    reason: str | None = None
    timeout_s: float | None = None
    """Seconds it may run; None is no bound given, 0 one that was switched off."""
    agent_id: str | None = None
    output_tail: str = ""
    output_bytes: int = 0
    told: bool = False
    """The model has heard of its end: by a notice, or as the answer of a tool."""


def follow_task(tasks: dict[str, TaskRecord], event: SessionEvent) -> None:
    """Follow ``task/*``, and the ``user/message`` that tells of a task's end."""
    data = event.data
    if event.type == "user/message":
        source = data["source"]
        if source.get("kind") == "task":
            _told(tasks, source.get("task_id"))
    elif event.type == "task/started":
        tasks[data["task_id"]] = TaskRecord(
            data["task_id"],
            data["kind"],
            data.get("description") or "",
            "running",
            event.time,
            timeout_s=data.get("timeout_s"),
            agent_id=data.get("agent_id"),
        )
    elif event.type == "task/reported":
        _told(tasks, data["task_id"])
    else:
        record = tasks.get(data["task_id"])
        if record is None:
            return
        record.status = "lost" if event.type == "task/lost" else data["status"]
        record.ended_at = event.time
        record.exit_code = data.get("exit_code")
        record.reason = data.get("reason")
        record.output_tail = data.get("output_tail") or ""
        record.output_bytes = data.get("output_bytes") or 0


def _told(tasks: dict[str, TaskRecord], task_id: Any) -> None:
    record = tasks.get(task_id)
    if record is None:
        return
    record.told = True
    if len(tasks) > KEPT:
        old = next((known for known in tasks.values() if known.told and known.ended_at is not None), None)
        if old is not None:
            del tasks[old.task_id]
