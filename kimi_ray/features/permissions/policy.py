"""Who decides about a call, one after the other; the first that does is heard."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kimi_ray.features.permissions.calls import Call
from kimi_ray.features.permissions.rules import Match, RuleBook
from kimi_ray.settings import PermissionModeName

HARMLESS = frozenset(
    {
        "Read", "Grep", "Glob", "ReadMediaFile", "SetTodoList", "TodoList", "TaskList", "TaskOutput", "WaitFor",
        "CronList", "WebSearch", "FetchURL", "Agent", "AgentSwarm", "AskUserQuestion", "Skill", "EnterPlanMode",
        "ExitPlanMode", "CreateGoal", "GetGoal", "SetGoalBudget", "UpdateGoal", "select_tools", "final_answer",
    }
)  # fmt: skip
"""Tools that run unasked in every mode: they look, or ask others who are asked themselves."""

_SENSITIVE = re.compile(
    r"\.env(\.(?!example$|sample$|template$|dist$).*)?|\.envrc|id_(rsa|dsa|ecdsa|ed25519)[^/]*|.*\.(pem|key|p12|pfx|jks|keystore|kdbx)"
    r"|\.netrc|_netrc|\.npmrc|\.pypirc|\.htpasswd|\.git-credentials|\.pgpass|\.my\.cnf|credentials(\.(json|ya?ml|toml|ini))?"
    r"|secrets?\.(json|ya?ml|toml|ini|env)|\.dockercfg|kubeconfig|authorized_keys|shadow|master\.key|\.vault-token",
    re.IGNORECASE,
)
_SENSITIVE_DIRECTORIES = frozenset({".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".gcloud"})
_GIT = frozenset({".git", ".gitmodules"})

DecidedBy = Literal["rule", "session", "default", "git", "mode", "sensitive"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, by whom; ``ask``: somebody is to be asked. ``recorded``: whether the log tells it."""

    decision: Literal["allow", "ask", "deny"]
    by: DecidedBy
    rule: str | None = None
    unseen: str | None = None
    recorded: bool = True


def decide(call: Call, mode: PermissionModeName, rules: RuleBook, approved: frozenset[str] | set[str]) -> Decision:
    """Whether a call may start.

    1. ``auto``: nobody is there to answer ``AskUserQuestion``: denied.
    2. A rule that denies.
    3. ``auto``: allowed.
    4. What was approved for the session.
    5. A rule that asks; then one that allows.
    6. Sensitive files, and what belongs to git itself: asked.
    7. ``yolo``: allowed.
    8. Tools that only look: allowed.
    9. Writing inside of the working directory, if it is under git: allowed.
    10. Asked.

    Args:
        call: The call.
        mode: The agent's mode.
        rules: The configured rules.
        approved: What was approved for the session, as ``Call.exactly``.
    """
    if mode == "auto" and call.tool == "AskUserQuestion":
        return Decision("deny", "mode")
    denied = rules.meaning(rules.deny, call)
    if denied is not None:
        return _by_rule("deny", denied)
    if mode == "auto":
        return Decision("allow", "mode", recorded=False)
    if call.exactly in approved:
        return Decision("allow", "session", call.exactly)
    asked = rules.meaning(rules.ask, call)
    if asked is not None:
        return _by_rule("ask", asked)
    allowed = rules.allowing(call)
    if allowed is not None:
        return Decision("allow", "rule", allowed)
    if touches_sensitive(call):
        return Decision("ask", "sensitive")
    if touches_git(call):
        return Decision("ask", "git")
    if mode == "yolo":
        return Decision("allow", "mode", recorded=False)
    if call.tool in HARMLESS:
        return Decision("allow", "default")
    if writes_under_git(call):
        return Decision("allow", "git")
    return Decision("ask", "mode")


def touches_sensitive(call: Call) -> bool:
    """Whether a path of the call, or a word of its command, names a file that may hold secrets."""
    return any(is_sensitive(path) for path in _paths(call))


def touches_git(call: Call) -> bool:
    """Whether it names what belongs to git itself, such as its hooks."""
    return any(not _GIT.isdisjoint(path.casefold().split("/")) for path in _paths(call))


def is_sensitive(path: str) -> bool:
    """Whether a path names a file that may hold secrets."""
    parts = [part for part in path.casefold().split("/") if part]
    return bool(parts) and (
        not _SENSITIVE_DIRECTORIES.isdisjoint(parts) or any(_SENSITIVE.fullmatch(part) for part in parts)
    )


def writes_under_git(call: Call) -> bool:
    """Whether it does nothing but touch files inside of a working directory that is under git."""
    return (
        bool(call.files)
        and all(not call.inside(name).startswith("/") for names in call.files for name in names.real[:1])
        and _is_under_git(call.root)
    )


def _is_under_git(directory: str) -> bool:
    while True:
        if os.path.lexists(os.path.join(directory, ".git")):
            return True
        above = os.path.dirname(directory)
        if above == directory:
            return False
        directory = above


def _paths(call: Call) -> Sequence[str]:
    if call.command is not None:
        words = [word.text for command in call.commands.commands for word in command]
        # an option's value, a redirection's target, a remote place: --key=x.pem, >.env, host:.ssh/id_rsa
        return re.split(r"[\s=:'\"<>|;&()]+", " ".join((call.command, *words)))
    return [name for names in call.files for name in names.all]


def _by_rule(decision: Literal["ask", "deny"], match: Match) -> Decision:
    return Decision(decision, "rule", match.rule, match.unseen)
