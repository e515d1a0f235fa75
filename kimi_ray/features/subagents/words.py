"""What a model reads of its subagents: headers of lines ``key: value``, then the text."""

from __future__ import annotations

from kimi_ray.agent.subagents import SubagentResult

TOO_MANY_TASKS = "Too many background tasks are already running."
RESUME_HINT = 'to let it go on, call Agent with resume="{agent_id}" (the agent_id) and a prompt such as "continue"'
TASK_HINT = (
    'once it has ended, Agent with resume="{agent_id}" gives it another task; resume takes the agent_id, not the'
    " task_id {task_id}"
)
NEXT_STEP = (
    "Go on with other work. You are told when it has ended; TaskOutput shows how it stands. Do not wait for it idly,"
    " and do not start it a second time."
)


def result_text(result: SubagentResult) -> str:
    """A run that was waited for. One that failed says why, and how to go on where that makes sense."""
    lines = [f"agent_id: {result.agent_id}", f"actual_subagent_type: {result.profile}"]
    if result.status == "completed":
        return "\n".join([*lines, "status: completed", "", "[summary]", result.text])
    lines += ["status: failed", "", failure_text(_message_of(result))]
    if result.status == "timed_out":
        lines.append(f"resume_hint: {RESUME_HINT.format(agent_id=result.agent_id)}")
    return "\n".join(lines)


def background_text(task_id: str, agent_id: str, profile: str, description: str) -> str:
    """A run that goes on behind."""
    lines = [
        f"task_id: {task_id}",
        "status: running",
        f"agent_id: {agent_id}",
        f"actual_subagent_type: {profile}",
        "automatic_notification: true",
        "",
        f"description: {description}",
        "",
        f"next_step: {NEXT_STEP}",
        f"resume_hint: {TASK_HINT.format(agent_id=agent_id, task_id=task_id)}",
    ]
    return "\n".join(lines)


def failure_text(message: str) -> str:
    """Why there is no answer."""
    return f"subagent error: {message}"


def _message_of(result: SubagentResult) -> str:
    said = str((result.error or {}).get("message") or "")
    return said or f"the subagent ended {result.status}"
