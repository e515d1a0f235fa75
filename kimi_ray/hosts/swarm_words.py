"""The words of a swarm between driver and session host: what is to run, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kimi_ray.hosts.specs import Outcome
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.llm.reachable import NO_MODELS, ReachableModels
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.plan import OnInterrupted, Rollout
from kimi_ray.runs.rows import AttemptRow
from kimi_ray.runs.schedule import FailOn
from kimi_ray.runs.seeds import RunSeed
from kimi_ray.settings import Isolation, Limits, PermissionModeName, Profile, Settings
from kimi_ray.tools.contract import Tool

__all__ = [
    "LONG_TURN_STEPS",
    "CancelMode",
    "GoingOn",
    "KeyEnd",
    "LongTurn",
    "OnInterrupted",
    "Rollout",
    "RowEntry",
    "RowPage",
    "Stalled",
    "SwarmKey",
    "SwarmProgress",
    "SwarmSpec",
]

LONG_TURN_STEPS = 100
"""A turn of so many steps without a ``max_steps`` is told of: a model that repeats itself goes on for ever."""

CancelMode = Literal["drain", "cancel"]
"""``drain``: nothing new starts, what runs goes to its end. ``cancel``: what runs is cancelled too."""


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """A swarm as one command knows it: another command may go on with the run."""

    session_id: str
    run_id: str
    command: str


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """A swarm, apart from its rollouts' data, which follow in ``feed_swarm`` in the order of ``keys``."""

    session_id: str
    run_id: str
    keys: tuple[RolloutKey, ...]
    profile: Profile
    model: ResolvedModel
    seed: RunSeed
    max_concurrency: int = 32
    retries: int = 0
    retry_on: tuple[str, ...] = ()
    fail_on: FailOn | None = None
    total_limits: Limits | None = None
    attempts_before: dict[RolloutKey, int] = field(default_factory=dict[RolloutKey, int])
    on_interrupted: OnInterrupted = "continue"
    isolation: Isolation | None = None
    node_id: str | None = None
    cwd: str | None = None
    user_tools: tuple[Tool, ...] = ()
    rollout: Tool | None = None
    """A function that each rollout runs in place of the loop, carried."""
    output_schema: dict[str, Any] | None = None
    denied_paths: tuple[str, ...] = ()
    keep_workdirs: bool = False
    price_date: str | None = None
    parent: str = "main"
    """The agent of the session to which the swarm belongs: its log tells of it."""
    command: str = ""
    """Who runs it: one command begins it, another one may take it over (``run_id`` stays)."""
    claim: str | None = None
    """The session's claim; its host fills it in, as what follows."""
    depth: int = 1
    """How deep its agents are in the tree: main's are at 1."""
    permission_mode: PermissionModeName | None = None
    """The mode of the parent, which its agents begin with."""
    models: ReachableModels = field(default=NO_MODELS, repr=False)
    """What its agents may give to theirs."""
    going_on: dict[RolloutKey, GoingOn] = field(default_factory=dict[RolloutKey, "GoingOn"])
    """Rollouts whose newest attempt goes on in its log."""

    @property
    def code(self) -> tuple[Tool, ...]:
        """All of the user's code that its hosts must import."""
        return self.user_tools if self.rollout is None else (*self.user_tools, self.rollout)


@dataclass(frozen=True, slots=True)
class GoingOn:
    """An attempt that another host of the session began.

    ``host``: where its agent lives, if it does. ``ended``: how it ended, if it has; its parent's log says so already.
    """

    agent_id: str
    number: int
    prompt_id: str | None
    host: str | None = None
    ended: Outcome | None = None


@dataclass(frozen=True, slots=True)
class KeyEnd:
    """A rollout is done: the last of its attempts decides, or ``stop`` says why there was none."""

    key: RolloutKey
    stop: str | None = None


RowEntry = AttemptRow | KeyEnd


@dataclass(frozen=True, slots=True)
class RowPage:
    """Entries from a cursor, in order of completion: each attempt as it ends, then the end of its key.

    ``next_cursor`` acknowledges what is below it. ``done``: no entry will follow; ``error`` is then why the swarm as a
    whole went wrong (never a failing rollout), or None.
    """

    entries: tuple[RowEntry, ...]
    next_cursor: int
    done: bool
    error: dict[str, Any] | None = None


class Stalled(Settings):
    """An agent that has not got anywhere for a while."""

    agent_id: str
    item_id: str
    repeat: int
    phase: str
    """As ``AgentProgress.phase``."""
    since_ms: int


class LongTurn(Settings):
    """An agent with ``LONG_TURN_STEPS`` or more steps in its running turn, and no ``max_steps`` that would end it."""

    agent_id: str
    item_id: str
    repeat: int
    steps: int


class SwarmProgress(Settings):
    """Where a swarm stands. Counts are rollouts; tokens and cost are of all attempts so far."""

    total: int = 0
    queued: int = 0
    running: int = 0
    retrying: int = 0
    retries: int = 0
    """New attempts of rollouts."""
    request_retries: int = 0
    """New attempts of model requests, of the rollouts that run now."""
    done: int = 0
    completed: int = 0
    limit: int = 0
    failed: int = 0
    cancelled: int = 0
    not_started: int = 0
    steps: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    tokens_per_s: float = 0.0
    """Output tokens a second, over the last seconds."""
    cost_usd: float | None = None
    interruptions: int = 0
    stalled: tuple[Stalled, ...] = ()
    long_turns: tuple[LongTurn, ...] = ()
    """The longest first, at most 20."""
    elapsed_s: float = 0.0
    stopped: str | None = None
    """Why nothing new starts: ``cancelled``, ``fail_on``, ``limit:<name>``; None while it goes on."""
