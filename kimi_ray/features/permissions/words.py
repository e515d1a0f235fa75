"""What is said about permissions: to the model, to the user, between handles and hosts."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field

from kimi_ray.errors import ConfigError
from kimi_ray.features.permissions.policy import Decision
from kimi_ray.settings import PermissionModeName, Settings
from kimi_ray.tools.results import storable

Answer = Literal["allow", "deny"]
AnswerScope = Literal["once", "session"]

WHY = {
    "rule": "a rule asks",
    "sensitive": "it touches a file that may hold secrets",
    "git": "it touches what belongs to git itself",
    "mode": "the permission mode is manual",
}
_SUBAGENT = " You are a subagent: say in your answer what you could not do, so that whoever gave you the task knows."


class Approval(Settings):
    """A call that waits for an answer: ``agent.decide(call_id, "allow")`` or ``"deny"``."""

    agent_id: str
    call_id: str
    tool: str
    about: str
    """What the call is about: a command, a path."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    by: str
    """Why it is asked: ``rule``, ``sensitive``, ``git``, ``mode``."""
    rule: str | None = None
    asked_at: int
    """Epoch milliseconds."""
    wait_s: float
    """So long at most; then it is denied."""


def checked_mode(mode: str | None, *, required: bool = False) -> None:
    """Refuse what is no permission mode; None is none unless one is ``required``.

    Raises:
        ConfigError: ``request.invalid``.
    """
    _one_of("permission_mode", mode, (*(() if required else (None,)), *get_args(PermissionModeName)))


def checked_answer(call_id: object, decision: object, scope: object, feedback: object) -> None:
    """Refuse what is no answer.

    Raises:
        ConfigError: ``request.invalid``.
    """
    _text("call_id", call_id)
    _one_of("decision", decision, get_args(Answer))
    _one_of("scope", scope, get_args(AnswerScope))
    if feedback is not None:
        _text("feedback", feedback)


def _text(key: str, value: object) -> None:
    if not isinstance(value, str) or storable(value) != value:
        raise ConfigError(
            f"{key} is {ascii(value)[:200]}",
            code="request.invalid",
            hint="give text" if not isinstance(value, str) else "half characters (lone surrogates) cannot be stored",
            details={"key": key},
        )


def _one_of(key: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        names = ", ".join(str(one) for one in known if one is not None)
        raise ConfigError(
            f"{ascii(value)[:200]} is no {key}",
            code="request.invalid",
            hint=f"one of {names}",
            details={"key": key, "value": ascii(value)[:200]},
        )


def forbidden(decision: Decision, *, subagent: bool) -> str:
    """What the model reads of a call that a rule, or the mode, forbids."""
    if decision.by == "mode":
        text = "Nobody is there to answer questions: decide by yourself."
    elif decision.unseen is not None:
        text = (
            f"This call is not allowed: the rule {decision.rule} forbids some commands, and it cannot be told whether "
            f"this is one of them ({decision.unseen}). Write each command out plainly."
        )
    else:
        text = f"This call is not allowed: the rule {decision.rule} forbids it. Do not try to do the same another way."
    return text + _SUBAGENT if subagent else text


def unanswered(decision: Decision, wait_s: float, *, subagent: bool) -> str:
    """What the model reads of a call that somebody had to agree to, and nobody answered."""
    waited = f" within {wait_s:g} s" if wait_s else ""
    text = (
        f"This call needs somebody's agreement ({WHY.get(decision.by, decision.by)}), and nobody answered{waited}. "
        "Do not try to do the same another way: go on without it, or say what you would need."
    )
    return text + _SUBAGENT if subagent else text


def refused(feedback: str | None, *, subagent: bool) -> str:
    """What the model reads of a call that the user said no to."""
    text = f"The user did not allow this call: {feedback}" if feedback else "The user did not allow this call."
    return text + _SUBAGENT if subagent else text
