"""What the reason with which a turn ended means for its prompts: their state, their ``stop``, their error."""

from __future__ import annotations

from typing import Any

from kimi_ray.errors import AgentError
from kimi_ray.settings import PromptState

REPEATED = "repeated"
"""The cause, and the ``stop``, of a turn that ended because its model made the same call again and again."""

_STATES: dict[str, PromptState] = {
    "completed": "completed",
    "truncated": "completed",
    "cancelled": "cancelled",
    "blocked": "blocked",
}


def state_of(reason: dict[str, Any]) -> PromptState:
    """The final state of the prompts of a turn that ended so."""
    return _STATES.get(reason["kind"], "failed")


def stop_of(reason: dict[str, Any]) -> str:
    """A turn's reason as a result's ``stop``: its kind, ``limit:<name>``, or ``repeated`` of one that completed so."""
    if reason["kind"] == "completed" and reason.get("cause") == REPEATED:
        return REPEATED
    return f"limit:{reason['name']}" if reason["kind"] == "limit" else reason["kind"]


def error_of(reason: dict[str, Any]) -> dict[str, Any] | None:
    """The error that a turn's reason amounts to, as data, or None for one that completed."""
    kind = reason["kind"]
    if "error" in reason:
        return reason["error"]
    if kind == "limit":
        used, value = reason.get("used", 0), reason.get("value", 0)
        text = f"the {reason.get('scope', 'agent')}'s limit {reason['name']}={value:g} is reached ({used:g} used)"
        code = f"limit.{reason['name']}"
        return AgentError(text, code=code, details={k: v for k, v in reason.items() if k != "kind"}).to_data()
    if kind == "interrupted":
        return AgentError(
            "the process that ran this turn was lost",
            code="turn.interrupted",
            hint='submit with on_interrupt="continue" to have it continued',
        ).to_data()
    if kind == "cancelled":
        return AgentError(f"the turn was cancelled ({reason.get('cause', 'user')})", code="turn.cancelled").to_data()
    return None
