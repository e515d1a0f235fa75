"""What a model reads about tasks: the notice of an end, and the lines by which tools describe a task."""

from __future__ import annotations

import time

from kimi_ray.agent.task_fold import TaskRecord

SHOWN_BYTES = 2000
"""Of a task's output in the notice of its end."""

_KINDS = {"process": "Background command", "agent": "Background agent"}
_WORDS = {
    "completed": "completed",
    "failed": "failed",
    "timed_out": "timed out",
    "killed": "was stopped",
    "lost": "was lost",
}


def notice(record: TaskRecord, output: str) -> str:
    """The message that tells the agent of a task's end.

    Args:
        record: The ended task.
        output: The end of its output.
    """
    attributes = {
        "id": notification_id(record),
        "category": "task",
        "type": f"task.{record.status}",
        "source_kind": "background_task",
        "source_id": record.task_id,
    }
    if record.agent_id is not None:
        attributes["agent_id"] = record.agent_id
    head = " ".join(f'{name}="{_attribute(value)}"' for name, value in attributes.items())
    lines = [
        f"<notification {head}>",
        f"Title: {_KINDS.get(record.kind, 'Background task')} {_WORDS[record.status]}",
        f"Severity: {'info' if record.status == 'completed' else 'warning'}",
        _body(record),
    ]
    if output:
        left_out = record.output_bytes - len(output.encode("utf-8", "replace"))
        shown = f' left_out="{left_out} bytes before this; TaskOutput shows more"' if left_out > 0 else ""
        lines += [f"<output{shown}>", output.rstrip("\n"), "</output>"]
    lines.append("</notification>")
    return "\n".join(lines)


def notification_id(record: TaskRecord) -> str:
    """One for each end of a task: the same again for a notice that is told again."""
    return f"{record.task_id}:{record.status}"


def described(record: TaskRecord) -> str:
    """A task in lines ``name: value``."""
    lines = {
        "task_id": record.task_id,
        "kind": record.kind,
        "status": record.status,
        "description": record.description,
        "agent_id": record.agent_id,
        "exit_code": record.exit_code,
        "reason": record.reason,
        "runtime_s": f"{_runtime_ms(record) / 1000:.1f}",
        "output_bytes": record.output_bytes or None,
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items() if value not in (None, ""))


def _runtime_ms(record: TaskRecord) -> int:
    ended = record.ended_at if record.ended_at is not None else round(time.time() * 1000)
    return max(0, ended - record.started_at)


def _body(record: TaskRecord) -> str:
    what = f"{record.description} ({record.task_id})" if record.description else record.task_id
    if record.status == "lost":
        return f"{what} did not survive: the process that ran it is gone. What it did until then stands."
    facts = f" with exit code {record.exit_code}" if record.exit_code is not None else ""
    why = f": {record.reason}" if record.reason else ""
    return f"{what} {_WORDS[record.status]}{facts} after {_runtime_ms(record) / 1000:.1f} s{why}"


def _attribute(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")
