"""The port by which an agent starts agents of its own and waits for them. Its words are plain picklable data.

``Subagents`` is a service of the Agent scope: it speaks for one agent, the *caller*. A child is an agent of the same
session with a log of its own; it works where the caller works, with the caller's permission mode and user tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kimi_ray.llm.models import ResolvedModel
from kimi_ray.settings import Profile, Usage

DEFAULT_PROFILE = "coder"

SubagentStatus = Literal["completed", "failed", "cancelled", "timed_out"]


@dataclass(frozen=True, slots=True)
class SummaryPolicy:
    """When an answer is too short to be of use to the caller: the child is asked again, and the longer one counts."""

    min_chars: int = 200
    retries: int = 1


@dataclass(frozen=True, slots=True)
class SubagentPlan:
    """What a child would be. With ``fork`` it begins with the caller's history, and is what the caller is."""

    profile: Profile
    model: ResolvedModel | None
    """None: the caller's, which only its session knows how to reach."""
    fork: bool = False


@dataclass(frozen=True, slots=True)
class SubagentInfo:
    """A child that exists."""

    agent_id: str
    profile: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class SubagentResult:
    """How a run of a child ended; a failure is data."""

    agent_id: str
    profile: str
    status: SubagentStatus
    text: str = ""
    """Its last answer; "" when there is none."""
    usage: Usage = field(default_factory=Usage)
    """Of this run."""
    error: dict[str, Any] | None = None
    """``KimiRayError.to_data()`` when it failed."""
    started: bool = False
    """Whether its prompt was accepted: it had begun, however it ended."""
    rate_limited: bool = False
    """Whether it failed because the model server let no more through: going on later may succeed."""


class Subagents(Protocol):
    """The children of one agent. All methods may be called for many children at once."""

    def offered(self) -> list[Profile]:
        """The profiles that the caller's allow-list names, as far as there are such."""
        ...

    def plan(self, profile: str | None = None, model: str | None = None, *, fork: bool = False) -> SubagentPlan:
        """What a child would be, by the rules for the caller; nothing is made.

        Args:
            profile: None is ``coder``. Must be allowed by the caller's ``Profile.subagents``. Not looked at for a fork.
            model: A configured one. None is the profile's, else the caller's.
            fork: The caller's own profile, model and history.

        Raises:
            ConfigError: ``profile.unknown``, ``model.not_configured``, ``model.no_api_key``.
            AgentError: ``agent.type_not_allowed``; ``agent.depth_exceeded`` {depth, max}.
        """
        ...

    async def spawn(
        self,
        plan: SubagentPlan,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        call_id: str | None = None,
        background: bool = False,
    ) -> str:
        """Make the child, alive and idle; gives its agent id. The caller's log tells of it (``subagent/spawned``).

        Args:
            plan: From ``plan``.
            description: A few words on its task, for the log.
            labels: Kept in the child's header for good; ``parent_agent_id`` is added.
            call_id: The tool call that asked for it.
            background: Whether the caller goes on meanwhile; only recorded.

        Raises:
            AgentError: ``agent.depth_exceeded``; ``limit.*`` when the session's tree has nothing left.
            KimiRayError: why it cannot be made.
        """
        ...

    async def run(
        self,
        agent_id: str,
        prompt: str | None,
        *,
        timeout_s: float | None = None,
        summary: SummaryPolicy | None = None,
        signal: asyncio.Event | None = None,
        on_started: Callable[[], None] | None = None,
        will_retry: bool = False,
    ) -> SubagentResult:
        """Give a child its prompt and wait for its end, through lost hosts. How it fails is in the result.

        The slot ``child_starting`` runs before a prompt is given (what handlers add goes before it), ``child_ended``
        after a completed run. The caller's log gets ``subagent/started``, then ``subagent/completed`` or
        ``subagent/failed`` with the child's durable position, before this returns. An answer that was cut off by the
        model's limit is a failure: ``agent.max_tokens_exceeded``.

        Args:
            agent_id: A child, new or stored.
            prompt: Its task. None lets it go on without a new message: after a rate limit, for one.
            timeout_s: Longest run, seconds; then its turn is cancelled: ``timed_out``. None or 0: no bound.
            summary: Ask again when the answer is too short; None: never.
            signal: Set: the child's turn is cancelled, and the result says ``cancelled``. So does cancelling this
                call's task, which then raises.
            on_started: Called once, when the prompt was accepted.
            will_retry: A failure by the rate limit is told as ``subagent/suspended``: the same child is to go on.

        Raises:
            AgentError: ``agent.already_running``. All else is in the result.
        """
        ...

    async def check_resume(self, agent_id: str) -> SubagentInfo:
        """A child that may be given another prompt: one of the caller's that is idle, stored ones as well.

        Raises:
            AgentError: ``agent.not_found``, ``agent.not_a_subagent``, ``agent.not_owned``, ``agent.already_running``.
        """
        ...

    async def cancel(self, agent_id: str) -> None:
        """Cancel what a child does now; its ``run`` ends with ``cancelled``. Idempotent."""
        ...

    async def labels_of(self, agent_id: str) -> dict[str, str]:
        """The labels of an agent of the session, as its log's header has them.

        Raises:
            AgentError: ``agent.not_found``.
        """
        ...
