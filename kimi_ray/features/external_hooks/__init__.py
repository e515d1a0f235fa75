"""External hooks: commands of the user's that are told what an agent does, and of some of it say whether it may.

What may enter: how hooks are chosen, run, read and recorded. What may not: what a tool call means, or who may make it
(that is ``permissions``).
"""

from kimi_ray.features.external_hooks.agent_hooks import AgentHooks
from kimi_ray.features.external_hooks.chosen import Hook, HookTable
from kimi_ray.features.external_hooks.feature import ExternalHooks
from kimi_ray.features.external_hooks.process import CommandEnd, HookProcesses
from kimi_ray.features.external_hooks.session_hooks import SessionHooks
from kimi_ray.features.external_hooks.verdict import Verdict, verdict_of

__all__ = [
    "AgentHooks",
    "CommandEnd",
    "ExternalHooks",
    "Hook",
    "HookProcesses",
    "HookTable",
    "SessionHooks",
    "Verdict",
    "verdict_of",
]
