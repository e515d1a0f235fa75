"""Permissions: which tool calls may start, who was asked, and what was decided, all of it in the agent's log.

What may enter: modes, rules, the order in which they decide, questions and their answers. What may not: what a tool
does; running anything.
"""

from kimi_ray.features.permissions.agent_permissions import AgentPermissions
from kimi_ray.features.permissions.calls import Call
from kimi_ray.features.permissions.feature import Permissions
from kimi_ray.features.permissions.policy import Decision, decide
from kimi_ray.features.permissions.rules import RuleBook
from kimi_ray.features.permissions.words import Answer, AnswerScope, Approval, checked_answer, checked_mode

__all__ = [
    "AgentPermissions",
    "Answer",
    "AnswerScope",
    "Approval",
    "Call",
    "Decision",
    "Permissions",
    "RuleBook",
    "checked_answer",
    "checked_mode",
    "decide",
]
