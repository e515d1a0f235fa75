"""The words of the calls between hosts: plain picklable data. What concerns one agent alone is ``agent.specs``'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_ray.agent.profiles import models_for
from kimi_ray.agent.specs import (
    AgentProgress,
    AgentSpec,
    AgentTotals,
    LogEntry,
    Outcome,
    PromptResult,
    PromptSpec,
    PromptStatus,
)
from kimi_ray.llm.reachable import NO_MODELS, ReachableModels
from kimi_ray.settings import Isolation
from kimi_ray.store.seam import Stream

__all__ = [
    "Ack",
    "AgentProgress",
    "AgentSpec",
    "AgentTotals",
    "EventPage",
    "LogEntry",
    "Outcome",
    "PlaceAgent",
    "PromptResult",
    "PromptSpec",
    "PromptStatus",
    "RunRequest",
    "SessionInfo",
    "SessionSpec",
    "Submit",
]


@dataclass(frozen=True, slots=True)
class Submit:
    """Prompts for an agent that lives on the called host.

    ``caller`` and ``number`` order the calls of one handle: the host admits ``number`` 0, 1, 2, ... of a caller in
    that order, whatever order they arrive in (Ray does not keep it).
    """

    stream: Stream
    prompts: tuple[PromptSpec, ...]
    caller: str = ""
    number: int = -1


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Bring an agent to life and give it work; ``release`` lets go of its scope when the last prompt is done."""

    agent: AgentSpec
    prompts: tuple[PromptSpec, ...]
    release: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to a ``Submit`` or ``RunRequest``: accepted durably, or the error as data."""

    stream: Stream
    error: dict[str, Any] | None = None
    refused: Mapping[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """Of a ``Submit`` the prompts that the agent would not have, by their places, and why; the others are accepted."""


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events of a log from a cursor: canonical lines; ``epoch`` is the live writer's, None from a cold log."""

    first_seq: int
    lines: tuple[bytes, ...]
    next_seq: int
    durable_seq: int
    epoch: int | None
    began: int = 0
    """The seq at which that writer began."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """How to create or resume a session. ``create`` False: the session must exist."""

    session_id: str
    nonce: str
    workspace_id: str
    cwd: str | None
    create: bool
    main: AgentSpec
    title: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tags: dict[str, str] = field(default_factory=dict[str, str])
    isolation: Isolation | None = None
    node_id: str | None = None
    """The node where main must live (its working directory is there), or None."""
    models: ReachableModels = field(default=NO_MODELS, repr=False)
    """What agents of the session that start others may give them to speak to."""

    def under_its_claim(self) -> SessionSpec:
        """With what main has of the session."""
        main = replace(self.main, claim=self.nonce, models=models_for(self.main.profile, self.models))
        return replace(self, main=main)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A living session."""

    session_id: str
    workspace_id: str
    host: str
    document: dict[str, Any]
    revision: int
    opened: bool = False
    """Whether this very call brought it to life."""
    main_host: str | None = None
    """The host on which its main agent lives."""
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    """Agents whose accepted prompts wait for somebody who knows how to reach their model, with its name."""


@dataclass(frozen=True, slots=True)
class PlaceAgent:
    """A wish for a place. ``fingerprint`` is of the user's code that the agent needs; empty: none, any host serves.

    ``node_id`` is where it must be; ``near`` a node that is tried first, if it is there and takes work.
    """

    stream: Stream
    isolation: Isolation | None = None
    node_id: str | None = None
    fingerprint: str = ""
    near: str | None = None
