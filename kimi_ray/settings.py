"""What a user may say about an agent: sampling, limits, profile, working directory, item.

Frozen pydantic models, pure data: they travel to hosts, into ``run.json`` and into logs as they are. ``None`` always
means "not said": it is not sent, not limited, or taken from the profile or the model.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from kimi_ray.errors import ConfigError

Durability = Literal["disk", "os", "none"]
Checkpoint = Literal["request", "turn", "none"]
Isolation = Literal["shared", "dedicated"]
OnInterrupt = Literal["fail", "continue"]
PermissionModeName = Literal["manual", "auto", "yolo"]
HookEvent = Literal[
    "UserPromptSubmit",
    "UserPromptQueued",
    "PreToolUse",
    "PostToolUse",
    "PostToolUseFailure",
    "PermissionRequest",
    "PermissionResult",
    "TurnStarted",
    "Stop",
    "StopFailure",
    "Interrupt",
    "SessionStart",
    "SessionEnd",
    "SessionHeartbeat",
    "SubagentStart",
    "SubagentStop",
    "TaskStarted",
    "PreCompact",
    "PostCompact",
    "Notification",
]


class Settings(BaseModel):
    """Base of every setting and result: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own way costs twice as much, and results travel with every turn.
        return _again, (type(self), self.__dict__, self.__pydantic_fields_set__, self.__pydantic_private__)

    def said(self) -> dict[str, Any]:
        """The fields that are not None, as JSON: what is logged and sent."""
        return self.model_dump(mode="json", exclude_none=True)


def _again(cls: type[Settings], values: dict[str, Any], said: set[str], private: dict[str, Any] | None) -> Settings:
    made, put = cls.__new__(cls), object.__setattr__
    put(made, "__dict__", values)
    put(made, "__pydantic_fields_set__", said)
    put(made, "__pydantic_extra__", None)
    put(made, "__pydantic_private__", private)
    return made


def check_settings(**given: tuple[type[Settings], object]) -> None:
    """Refuse an argument that is not an object of its class, before it travels anywhere.

    Args:
        given: By argument name, the class and what was given; None is always fine.

    Raises:
        ConfigError: ``request.bad_argument``.
    """
    for name, (kind, value) in given.items():
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name} must be a {kind.__name__}, not {type(value).__name__}",
                code="request.bad_argument",
                hint=f"write {name}={kind.__name__}(...), from kimi_ray import {kind.__name__}",
                details={"argument": name},
            )


class Sampling(Settings):
    """How the model samples. None is not sent to the server."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Sent as ``seed``; runs derive it per rollout and attempt."""
    stop: tuple[str, ...] | None = None
    reasoning_effort: str | None = None
    tool_choice: str | None = None
    """``auto``, ``none``, ``required`` or a tool's name."""
    parallel_tool_calls: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many alternatives per token; recorded as ``llm/tokens``."""
    token_ids: bool | None = None
    """Ask the server for token ids; recorded as ``llm/tokens``."""
    extra_body: dict[str, Any] | None = None
    """Further keys of the request body, sent as they are."""

    def over(self, base: Sampling | None) -> Sampling:
        """This sampling on top of ``base``: what is said here wins."""
        if base is None:
            return self
        return base.model_copy(update={k: v for k, v in self.__dict__.items() if v is not None})


class Limits(Settings):
    """Bounds of an agent, a session's tree or a swarm. None is unbounded.

    Reaching one ends the turn with ``limit`` {name, value, used, scope}; the overshoot is at most one model request
    per running agent.
    """

    max_turns: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    """Model requests, over all turns of the bounded thing."""
    max_steps_per_turn: int | None = Field(default=None, ge=1)
    """Model requests of one turn of an agent. It counts for nothing in what bounds a whole run."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Output tokens summed over all steps (the per-request cap is ``Sampling.max_output_tokens``)."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    max_cost_usd: float | None = Field(default=None, gt=0)
    """US dollars by the model's configured prices; needs a price."""
    time_s: float | None = Field(default=None, gt=0)
    """Wall seconds from the first turn's start."""
    working_time_s: float | None = Field(default=None, gt=0)
    """Seconds in model calls and tools; waiting in queues, in the limiter and for retries is not counted."""

    def over(self, base: Limits | None) -> Limits:
        """These limits on top of ``base``: what is said here wins."""
        if base is None:
            return self
        return base.model_copy(update={k: v for k, v in self.__dict__.items() if v is not None})


class Profile(Settings):
    """A kind of agent: its system prompt, its tools, its defaults.

    A name from ``agent``, ``coder``, ``explore``, ``plan``, ``bare`` (see ``kimi_ray.agent.profiles``) or an object of
    this class is accepted wherever a profile is asked for.
    """

    name: str = Field(min_length=1, max_length=64)
    system_prompt: str | None = None
    tools: tuple[str, ...] = ()
    model: str | None = None
    sampling: Sampling | None = None
    limits: Limits | None = None
    description: str = ""
    subagents: tuple[str, ...] | None = None
    """Profiles that its ``Agent`` and ``AgentSwarm`` tools may start; ``*`` is any, None and () are none."""


class HookSettings(Settings):
    """One ``[[hooks]]`` table: a command that is told of an event, and of some may forbid what is about to happen."""

    event: HookEvent
    command: str = Field(min_length=1)
    """For the shell; JSON comes on its stdin, exit 2 blocks."""
    matcher: str = ""
    """A regular expression searched in the event's matcher value; empty matches all."""
    timeout_s: float = Field(default=30.0, gt=0, le=600)
    cwd: str | None = None
    """Where it runs; None is the agent's working directory."""
    env: dict[str, str] = Field(default_factory=dict)


class PermissionRule(Settings):
    """One ``[[permissions]]`` table. The first rule of the strictest decision that matches a call decides."""

    tool: str = Field(min_length=1, pattern=r"(?s)^[^()\s]+(\(.+\))?$")
    """``Name`` or ``Name(pattern)``: globs over the tool's name and over what the call is about."""
    decision: Literal["allow", "ask", "deny"]


class McpServer(Settings):
    """One ``[mcp_servers.X]`` table: a server of the Model Context Protocol, started or reached once a session."""

    command: tuple[str, ...] | None = None
    """What to start; it speaks over its stdin and stdout. The word ``{python}`` is the interpreter of the host."""
    url: str | None = None
    """Where it is reached (streamable HTTP), in place of a command."""
    env: dict[str, str] = Field(default_factory=dict)
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    tools: tuple[str, ...] | None = None
    """Which of its tools are offered; None is all."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    call_timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.url is None) or self.command == ():
            raise ValueError("an MCP server needs a command or a url, and not both")
        return self


class Workdir(Settings):
    """Where an agent works. Built by the class methods, or parsed from the command line's form.

    ``none``: no directory, tools that need one refuse. ``shared``: the directory itself. ``copy``: a private copy of a
    directory. ``git``: a private worktree of a local repository. ``factory``: what a function makes. Private
    directories are made on the agent's node and removed at its end unless kept.
    """

    kind: Literal["none", "shared", "copy", "git", "factory"]
    path: str | None = None
    """A directory; for ``git`` the repository, for ``factory`` the function."""
    ref: str | None = None
    """``git`` only: a commit, branch or tag."""
    writes: bool = False
    """``shared`` only: the user accepts that several agents write into one directory."""
    timeout_s: float | None = Field(default=None, gt=0)
    """``factory`` only: seconds for making, and for releasing; None is 600."""
    _code: str = PrivateAttr("")

    @classmethod
    def none(cls) -> Workdir:
        """No working directory."""
        return cls(kind="none")

    @classmethod
    def shared(cls, path: str, *, writes: bool = False) -> Workdir:
        """The directory itself, seen by every agent that gets it."""
        return cls(kind="shared", path=path, writes=writes)

    @classmethod
    def copy(cls, path: str) -> Workdir:  # pyright: ignore[reportIncompatibleMethodOverride]  replaces pydantic's deprecated copy()
        """A private copy of the directory for each agent."""
        return cls(kind="copy", path=path)

    @classmethod
    def git(cls, repo: str, ref: str = "HEAD") -> Workdir:
        """A worktree of a local repository for each agent, with a detached HEAD. Nothing is fetched.

        Args:
            repo: The top directory of a repository, or a bare one.
            ref: A commit, branch or tag of it.
        """
        return cls(kind="git", path=repo, ref=ref)

    @classmethod
    def factory(cls, function: str, *, timeout_s: float | None = None) -> Workdir:
        """What a function makes, called on the agent's node.

        Args:
            function: ``package.module:function``. It is called as ``function(item, ctx)``, with ``ctx`` a
                ``kimi_ray.tools.FactoryContext``, and gives a directory's path: returned, awaited, yielded once (a
                generator, an async one), or by a context manager of either kind. What comes after the yield releases.
            timeout_s: Seconds for making, and again for releasing.
        """
        return cls(kind="factory", path=function, timeout_s=timeout_s)

    @property
    def is_remote(self) -> bool:
        """Whether a ``git`` workdir names a repository elsewhere: a URL, or ``user@host:path``."""
        return self.kind == "git" and self.path is not None and _REMOTE.match(self.path) is not None

    @property
    def is_private(self) -> bool:
        """Whether an agent has a directory of its own, which is only on the node where it was made."""
        return self.kind in ("copy", "git", "factory")

    @property
    def code(self) -> str:
        """A digest of the code that a factory on its way to a node is of, where it is known; it is in no log."""
        return self._code

    def with_code(self, digest: str) -> Self:
        """The same, with the digest of its code."""
        found = self.model_copy()
        found._code = digest
        return found

    def within(self, cwd: str) -> Self:
        """The same with an absolute path: relative ones are relative to ``cwd``, ``~`` is the home directory. A
        function's name and a URL are no paths."""
        if self.path is None or self.kind == "factory" or self.is_remote:
            return self
        path = os.path.abspath(os.path.join(cwd, os.path.expanduser(self.path)))
        return self.model_copy(update={"path": path})

    @model_validator(mode="after")
    def _path_given(self) -> Self:
        if self.kind in ("shared", "copy", "git", "factory") and not self.path:
            raise ValueError(f"a {self.kind} workdir needs a path")
        return self


_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[^/:{]+@[^/:]+:")


class Item(Settings):
    """One thing to work on: a row of the items file, or an object given in Python."""

    id: str | None = None
    """The explicit id; None takes the hash of the canonical data."""
    data: Any
    """The columns (a dict) or a bare string; what ``{{item}}`` and ``{{column}}`` show."""
    prompt: str | None = None
    workdir: Workdir | None = None
    sampling: Sampling | None = None
    limits: Limits | None = None
    tags: dict[str, str] = Field(default_factory=dict)


class Usage(Settings):
    """Tokens of one or more model requests. The parts are disjoint except that ``reasoning`` is within ``output``."""

    input: int = 0
    """Input tokens that were not read from a cache."""
    cached: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0
    estimated: bool | None = None
    """True when a server reported none and the numbers are our estimate."""

    @property
    def total(self) -> int:
        """Input, cached, cache-written and output tokens together."""
        return self.input + self.cached + self.cache_write + self.output

    def plus(self, other: Usage) -> Usage:
        """The sum; estimated as soon as a part is."""
        return Usage(
            input=self.input + other.input,
            cached=self.cached + other.cached,
            cache_write=self.cache_write + other.cache_write,
            output=self.output + other.output,
            reasoning=self.reasoning + other.reasoning,
            estimated=True if self.estimated or other.estimated else None,
        )


PromptState = Literal["pending", "running", "steered", "completed", "failed", "cancelled", "blocked"]
StopKind = Literal[
    "completed", "repeated", "cancelled", "blocked", "failed", "limit", "truncated", "timeout", "interrupted"
]
