"""What an agent is told and what it tells: plain picklable data, complete in itself.

An ``AgentSpec`` has all that is needed to bring an agent to life, the model's key included (a secret travels in the
activation call and nowhere else; ``ResolvedModel`` keeps it out of reprs and dumps).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from kimi_ray.errors import AgentError, error_from_data
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.llm.reachable import NO_MODELS, ReachableModels
from kimi_ray.pickling import pickled_by_place
from kimi_ray.settings import (
    Limits,
    OnInterrupt,
    PermissionModeName,
    Profile,
    PromptState,
    Sampling,
    Settings,
    Usage,
    Workdir,
)
from kimi_ray.store.seam import Stream
from kimi_ray.tools.contract import Tool


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """How to bring one agent to life.

    ``header`` is the header of a new log, or None for a log that exists. ``nonce`` names the writer to be: the same
    nonce again is the same activation.
    """

    stream: Stream
    nonce: str
    profile: Profile
    model: ResolvedModel
    header: dict[str, Any] | None = None
    sampling: Sampling | None = None
    limits: Limits | None = None
    workdir: Workdir | None = None
    workdir_path: str | None = None
    """A directory prepared by an earlier activation (must still be there: else ``workdir.lost``)."""
    keep_workdir: bool = False
    user_tools: tuple[Tool, ...] = ()
    rollout: RolloutCall | None = None
    """The function that its first prompt runs, in place of the loop."""
    item: Any = None
    denied_paths: tuple[str, ...] = ()
    elsewhere: AgentTotals | None = None
    """What the other agents of its session's tree have used so far: counted against ``limits`` too."""
    send_seed: bool = True
    """Whether ``sampling.seed`` goes over the wire or is only recorded."""
    model_as_stored: bool = False
    """The model is the one that a stored log was thought to name: where it names another (``profile/model``), the agent
    does not come to life and ``agent.model_needed`` {model} says which."""
    permission_mode: PermissionModeName | None = None
    """None is what its log says last, else the setting ``permission_mode``."""
    claim: str | None = None
    """The nonce of the session's claim on whose behalf this is asked; when another claim is in force: refused."""
    models: ReachableModels = field(default=NO_MODELS, repr=False)
    """Of agents that may start others alone: the models of those."""

    @property
    def code(self) -> tuple[Tool, ...]:
        """All of the user's code that its host must import: hosts are chosen by it."""
        return self.user_tools if self.rollout is None else (*self.user_tools, self.rollout.function)


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """A rollout function, and what it is told of its rollout."""

    function: Tool
    """A ``CarriedTool`` around a ``RolloutFunction``."""
    item_id: str
    repeat: int
    attempt: int
    seed: int
    run_id: str
    tags: dict[str, str] = field(default_factory=dict[str, str])
    output_schema: dict[str, Any] | None = None
    """What the function returns must fit it."""


@pickled_by_place
@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt, or with ``continuation`` a turn without a new message (``text`` is then empty)."""

    prompt_id: str
    text: str = ""
    content: tuple[dict[str, Any], ...] | None = None
    """Content blocks instead of ``text``."""
    sampling: Sampling | None = None
    limits: Limits | None = None
    on_interrupt: OnInterrupt = "fail"
    steer_if_active: bool = False
    continuation: bool = False
    source: dict[str, Any] | None = None
    """Who asks, unless it is the user (``prompt/submitted``)."""
    output_schema: dict[str, Any] | None = None
    """The JSON schema of the answer."""


class PromptResult(Settings):
    """How a prompt ended.

    ``state`` is final: completed, failed, cancelled or blocked. ``stop`` is the turn's reason kind,
    ``limit:<name>``, or ``repeated`` when it completed because one call was made again and again. ``text`` is the last
    answer's text ("" when there is none).
    """

    prompt_id: str
    state: PromptState
    text: str = ""
    turn: int | None = None
    stop: str | None = None
    usage: Usage = Usage()
    steps: int = 0
    tool_calls: int = 0
    error: dict[str, Any] | None = None
    output: Any = None
    """The checked answer, for a prompt with an ``output_schema``; what a rollout function returned."""
    scores: dict[str, Any] = Field(default_factory=dict)
    """The scores in the agent's log by now."""

    def raise_for_state(self) -> PromptResult:
        """This result, unless the prompt did not complete.

        Raises:
            KimiRayError: the recorded error; ``prompt.cancelled`` or ``prompt.blocked`` without one.
        """
        if self.state == "completed":
            return self
        if self.error is not None:
            raise error_from_data(self.error)
        raise AgentError(f"prompt {self.prompt_id} ended {self.state} ({self.stop})", code=f"prompt.{self.state}")


@dataclass(frozen=True, slots=True)
class PromptStatus:
    """Where a prompt stands now. ``turn`` is None until it has one: while it waits, and if it never ran."""

    state: PromptState
    turn: int | None


@pickled_by_place
@dataclass(frozen=True, slots=True)
class AgentTotals:
    """What an agent used over its whole life, as its log tells; times in milliseconds."""

    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = None
    interruptions: int = 0
    model_ms: int = 0
    tools_ms: int = 0
    store_ms: int = 0
    queued_ms: int = 0
    limiter_ms: int = 0
    retry_wait_ms: int = 0
    wall_ms: int = 0
    retries: int = 0


@pickled_by_place
@dataclass(frozen=True, slots=True)
class Outcome:
    """A prompt's end, as ``wait_any`` reports it. ``seq``/``epoch``: the agent's durable position behind it."""

    stream: Stream
    prompt_id: str
    result: PromptResult
    seq: int
    epoch: int
    totals: AgentTotals
    message_seq: int | None = None
    served_model: str | None = None
    fingerprint: str | None = None
    workdir_path: str | None = None
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class AgentProgress:
    """Where a living agent stands now. ``since_ms``: time since it last got anywhere (a chunk, an event)."""

    stream: Stream
    phase: str
    """idle, model, tools, retry, store, limiter; rollout while only the code of a rollout function runs."""
    turn: int | None
    step: int | None
    output_tokens: int
    total_tokens: int
    cost_usd: float
    retries: int
    since_ms: int
    turns: int = 0
    """Over its whole life, as the following ones: those that have begun."""
    steps: int = 0
    tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An event to be appended to a live agent's log by its session (``subagent/*``, ``swarm/*``, scores, notes)."""

    type: str
    data: dict[str, Any]
