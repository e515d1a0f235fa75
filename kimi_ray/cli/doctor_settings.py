"""What of the settings decides over the calls of agents: hooks, permissions, MCP servers, Features. No secrets."""

from __future__ import annotations

import shlex
from importlib.metadata import entry_points
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_ray.config import RuntimeConfig

_HOST_PYTHON = "{python}"
"""The word of a command that stands for the interpreter."""


def settings_facts(config: RuntimeConfig) -> dict[str, Any]:
    """What applies to agents, as JSON.

    Of a hook's command only the program is told, of an MCP server only the name: the rest may hold secrets.
    ``problem`` of a hook says why it never runs.
    """
    from kimi_ray.features.external_hooks.chosen import HookTable

    hooks = [
        {
            "event": one.event,
            "matcher": one.matcher,
            "program": _program(one.command),
            "problem": next((hook.problem for hook in HookTable([one]).broken(one.event)), None),
        }
        for one in config.hooks
    ]
    return {
        "hooks": hooks,
        "permission_mode": config.permission_mode,
        "permissions": [{"tool": rule.tool, "decision": rule.decision} for rule in config.permissions],
        "mcp_servers": sorted(config.mcp_servers),
        "mcp_installed": find_spec("mcp") is not None,
        "features": [*config.features, *sorted(point.value for point in entry_points(group="kimi_ray.features"))],
    }


def programs_not_there(config: RuntimeConfig) -> list[tuple[str, str]]:
    """The MCP servers that are started here by a program which this machine does not have, with that program."""
    return [
        (name, server.command[0])
        for name, server in sorted(config.mcp_servers.items())
        if server.command
        and server.command[0] != _HOST_PYTHON
        and which(server.command[0], path=server.env.get("PATH")) is None
    ]


def hook_line(hook: dict[str, Any]) -> str:
    """A hook in words: its event, its matcher if it has one, its program."""
    matcher = f" ({hook['matcher']})" if hook["matcher"] else ""
    return f"{hook['event']}{matcher}: {hook['program']}"


def permission_line(facts: dict[str, Any]) -> str:
    """The mode and the rules in words, with those that the mode passes over."""
    mode, rules = facts["permission_mode"], facts["permissions"]
    told = "; ".join(f"{rule['decision']} {rule['tool']}" for rule in rules) or "no rules"
    idle = mode == "auto" and any(rule["decision"] != "deny" for rule in rules)
    return f"mode {mode}; {told}" + (" (auto: only the rules that deny count)" if idle else "")


def _program(command: str) -> str:
    """The first word that is no assignment; what cannot be split is not shown."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return "..."
    program = next((word for word in words if "=" not in word), "...")
    return program if len(words) == 1 else f"{program} ..."
