"""The words of subagents between the caller's side and the session's host: plain picklable data; and a run there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.agent.specs import AgentTotals
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.runs.schedule import Spent
from kimi_ray.settings import Isolation, Limits, PermissionModeName, Profile, Sampling, Workdir
from kimi_ray.tools.contract import Tool


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a child has from its caller and its own log cannot tell: code, directories that it may not read, a place."""

    user_tools: tuple[Tool, ...] = ()
    denied_paths: tuple[str, ...] = ()
    permission_mode: PermissionModeName | None = None
    item: Any = None
    send_seed: bool = True
    isolation: Isolation | None = None
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class SpawnSubagent:
    """A child is to be made. The same ``nonce`` again is the same child. ``fork``: with its caller's history."""

    caller: str
    nonce: str
    profile: Profile
    model: ResolvedModel | None
    """None: its caller's."""
    fork: bool = False
    sampling: Sampling | None = None
    workdir: Workdir | None = None
    cwd: str | None = None
    labels: dict[str, str] = field(default_factory=dict[str, str])
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of ``subagent/spawned``."""
    inherited: Inherited | None = None
    """None: as the session's main agent has it."""


@dataclass(frozen=True, slots=True)
class BeginSubagent:
    """A child is to be given a prompt. The same ``run_id`` again is the same run."""

    caller: str
    agent_id: str
    run_id: str
    model: ResolvedModel | None = None
    """How to reach the child's model, when its session does not know."""
    inherited: Inherited | None = None
    by_agent: bool = False
    """Whether the caller's own turn waits: the run ends with the caller. Else a program waits."""


@dataclass(frozen=True, slots=True)
class ReadyChild:
    """A child that is alive, or told of; ``host`` None: not brought to life."""

    agent_id: str
    profile: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    host: str | None = None
    limits: Limits | None = None
    """What it may use under its session's limits."""


@dataclass(frozen=True, slots=True)
class EndSubagent:
    """A run of a child has ended. ``seq`` and ``epoch`` are the child's durable position, -1 where it is not known."""

    caller: str
    agent_id: str
    run_id: str
    stop: str
    seq: int = -1
    epoch: int = -1
    message_seq: int | None = None
    error: dict[str, Any] | None = None
    goes_on: bool = False
    """It failed, and the same child is to be asked again: told as suspended."""
    totals: AgentTotals | None = None
    """What the child has used over its whole life."""


@dataclass(eq=False, slots=True)
class ChildRun:
    """A child at work for its caller."""

    caller: str
    agent_id: str
    run_id: str
    by_agent: bool
    caller_host: str | None
    before: Spent = field(default_factory=Spent)
    """What the child had used when the run began."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
