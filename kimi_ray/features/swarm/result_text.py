"""What the model reads of a swarm: every task's outcome, in the order in which they were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kimi_ray.features.swarm.scheduler import Status, TaskResult

RESUME_HINT = (
    "Call AgentSwarm with resume_agent_ids using the agent_id values in this result to continue unfinished work."
)
UNKNOWN_ERROR = "unknown error"
_STATUSES: tuple[Status, ...] = ("completed", "failed", "aborted")


def render_results(results: Sequence[TaskResult]) -> str:
    """The ``<agent_swarm_result>`` text. Attributes are escaped, the answers themselves stay as they are."""
    counts = Counter(result.status for result in results)
    lines = [
        "<agent_swarm_result>",
        f"<summary>{', '.join(f'{status}: {counts[status]}' for status in _STATUSES if counts[status])}</summary>",
    ]
    if counts["completed"] < len(results) and any(result.agent_id is not None for result in results):
        lines.append(f"<resume_hint>{RESUME_HINT}</resume_hint>")
    return "\n".join([*lines, *map(_line, results), "</agent_swarm_result>"])


def _line(result: TaskResult) -> str:
    attributes = {
        "mode": "resume" if result.task.resume is not None else None,
        "agent_id": result.agent_id,
        "item": result.task.item,
        "state": result.state,
        "outcome": result.status,
    }
    shown = "".join(f' {name}="{_escaped(value)}"' for name, value in attributes.items() if value is not None)
    text = result.text if result.status == "completed" else result.text or UNKNOWN_ERROR
    return f"<subagent{shown}>{text}</subagent>"


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
