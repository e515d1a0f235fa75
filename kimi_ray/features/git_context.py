"""What a new ``explore`` subagent is told of the repository that it looks at: remote, branch, changes, last commits.

The text goes before the subagent's prompt, as a ``<git-context>`` block. It comes from git in the caller's working
directory, by commands that change nothing there and run nothing that the repository configures. Swarms and rollouts
that a program starts get none: they are not asked about in ``AgentSlots.child_starting``.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.slots import AgentSlots, ChildStarting
from kimi_ray.errors import ToolError
from kimi_ray.scopes import Feature, LifecycleScope
from kimi_ray.tools.contract import Environment, ExecResult

PROFILE = "explore"
NOT_A_REPOSITORY = '<git-context status="unavailable" reason="not-a-repo"/>'
HOSTS = frozenset({"github.com", "gitlab.com", "gitee.com", "bitbucket.org", "codeberg.org", "git.sr.ht"})
"""A remote elsewhere is not told: its name alone may be a secret."""

# K 8.3 (gitContext.ts)
GIT_TIMEOUT_S = 5.0
MAX_DIRTY_FILES = 20
MAX_COMMIT_LINE = 200

_MAX_OUTPUT_BYTES = 1 << 20
_FATAL = 128
_ENV = {
    "LC_ALL": "C",
    "LANGUAGE": "C",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    # a partial clone would fetch what it lacks, by the programs that its config names
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
}
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false")
_INSIDE = ("rev-parse", "--is-inside-work-tree")
_FILTERS = ("config", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
_REMOTE = ("remote", "get-url", "origin")
_BRANCH = ("symbolic-ref", "--short", "HEAD")
_STATUS = ("status", "--porcelain", "--ignore-submodules=dirty")
"""Whether a submodule's files have changed is not looked at: that would run the filters of its own config."""
_LOG = ("log", "-3", "--format=%h %s")

_UNUSABLE = re.compile(r"[\x00-\x20\x7f]")
_SCP = re.compile(r"(?:(?P<user>[^/@:]+)@)?(?P<host>[^/:@]+):(?P<path>[^/].*)")
_SCHEMES = ("https", "http", "ssh", "git")


async def collect_git_context(environment: Environment) -> str:
    """The block for the environment's working directory; "" when there is nothing to tell.

    A command that fails or takes longer than ``GIT_TIMEOUT_S`` only leaves out its own part.
    """
    if environment.root is None:
        return ""
    inside = await _run(environment, shlex.join((*_GIT, *_INSIDE)))
    if inside is None or inside.exit_code != 0:
        refused = inside is not None and inside.exit_code == _FATAL and "not a git repository" in inside.output
        return NOT_A_REPOSITORY if refused else ""
    remote, branch, status, log = await asyncio.gather(
        _git(environment, _REMOTE), _git(environment, _BRANCH), _status(environment), _git(environment, _LOG)
    )
    sections = [
        *_remote_sections(remote.output.strip() if remote else ""),
        *([f"Branch: {branch.output.strip()}"] if branch and branch.output.strip() else []),
        *_dirty_section(status),
        *_commits_section(log),
    ]
    if not sections:
        return ""
    return "\n".join(["<git-context>", f"Working directory: {environment.root}", *sections, "</git-context>"])


def safe_remote(url: str) -> str | None:
    """A remote's address without credentials, query and fragment; None for a host that is not among ``HOSTS``."""
    if _UNUSABLE.search(url):
        return None
    if "://" not in url:
        found = _SCP.fullmatch(url)
        if found is None or found["host"].lower() not in HOSTS:
            return None
        user = "git@" if found["user"] == "git" else ""  # any other name there may be a token
        return f"{user}{found['host']}:{found['path']}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in _SCHEMES or host not in HOSTS:
        return None
    return urlunsplit((parts.scheme, host if port is None else f"{host}:{port}", parts.path, "", ""))


def project_name(remote: str) -> str | None:
    """``owner/name`` of a remote that ``safe_remote`` gave."""
    path = urlsplit(remote).path if "://" in remote else remote.split(":", 1)[1]
    return path.strip("/").removesuffix(".git") or None


class GitContext:
    """Puts the block before the first prompt of each ``explore`` subagent of an agent."""

    def __init__(self, slots: AgentSlots, environment: Environment) -> None:
        self._environment = environment
        self._collecting: asyncio.Task[str] | None = None
        slots.child_starting.register("git_context", self._tell)

    async def _tell(self, child: ChildStarting) -> None:
        if child.profile != PROFILE or not child.first:
            return
        block = await self._block()
        if block:
            child.before.append(block)

    async def _block(self) -> str:
        """The block as it is now: those who ask at the same time get one answer."""
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(collect_git_context(self._environment))
        # shielded: one who leaves takes nothing from the others; each command of it has its own time-out
        return await asyncio.shield(self._collecting)


class _Services(Provider):
    scope = LifecycleScope.AGENT
    context = provide(GitContext)


class GitContextFeature(Feature):
    """The git context of ``explore`` subagents."""

    name = "git_context"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        return (_Services(),)

    def on_agent(self) -> Sequence[type]:
        """See ``Feature.on_agent``."""
        return (GitContext,)


async def _run(environment: Environment, command: str) -> ExecResult | None:
    """A command's result; None when it could not be run or was too slow."""
    try:
        result = await environment.exec(command, env=_ENV, timeout_s=GIT_TIMEOUT_S, max_output_bytes=_MAX_OUTPUT_BYTES)
    except ToolError:  # no directory, no shell, an environment that is closed: there is nothing to tell
        return None
    return None if result.timed_out else result


async def _git(environment: Environment, arguments: Sequence[str], options: Sequence[str] = ()) -> ExecResult | None:
    """What git says on stdout alone; None for a failure."""
    result = await _run(environment, f"{shlex.join((*_GIT, *options, *arguments))} 2>/dev/null")
    return result if result is not None and result.exit_code == 0 else None


async def _status(environment: Environment) -> ExecResult | None:
    """``git status``, with the programs that the repository would have it run (clean filters) set to none."""
    known = await _run(environment, f"{shlex.join((*_GIT, *_FILTERS))} 2>/dev/null")
    if known is None or known.exit_code not in (0, 1) or known.truncated_bytes:
        return None
    names: set[str] = set()
    for line in known.output.splitlines():
        where, _, key = line.partition("\t")
        if where in ("local", "worktree") and key.count(".") > 1:
            names.add(key.removeprefix("filter.").rpartition(".")[0])
    if any("=" in name for name in names):
        return None  # cannot be set to none from here
    options = [
        part
        for name in sorted(names)
        for key, value in (("clean", ""), ("process", ""), ("required", "false"))
        for part in ("-c", f"filter.{name}.{key}={value}")
    ]
    return await _git(environment, _STATUS, options)


def _remote_sections(url: str) -> list[str]:
    remote = safe_remote(url) if url else None
    if remote is None:
        return []
    project = project_name(remote)
    return [f"Remote: {remote}", *([f"Project: {project}"] if project else [])]


def _dirty_section(status: ExecResult | None) -> list[str]:
    lines = [line for line in status.output.splitlines() if line.strip()] if status else []
    if status is None or not lines:
        return []
    shown = [f"  {line}" for line in lines[:MAX_DIRTY_FILES]]
    more = len(lines) - MAX_DIRTY_FILES
    plus = "+" if status.truncated_bytes else ""
    if more > 0:
        shown.append(f"  ... and {more}{plus} more")
    return ["\n".join([f"Dirty files ({len(lines)}{plus}):", *shown])]


def _commits_section(log: ExecResult | None) -> list[str]:
    lines = [line for line in log.output.splitlines() if line.strip()] if log else []
    return ["\n".join(["Recent commits:", *(f"  {line[:MAX_COMMIT_LINE]}" for line in lines)])] if lines else []
