"""Where others have a say in an agent's work: one slot for each kind of moment, in the Agent scope.

Handlers are registered by services that are built with the agent (``Feature.on_agent``). A handler that raises fails
what it was asked about: a prompt, a call, the turn. One that must never do harm catches what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.scopes import HookSlot
from kimi_ray.tools.contract import Accesses, Tool, ToolOutput


@dataclass(slots=True)
class PromptGate:
    """A prompt is about to run, or to join the running turn (``steered``)."""

    prompt_id: str
    content: list[dict[str, Any]]
    steered: bool = False
    reason: str | None = None
    """Why it is blocked, or None."""
    before: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """User messages that go before it: each {"content": [blocks], "source": {"kind": ...}}."""
    decided: bool = False

    @property
    def text(self) -> str:
        """The prompt's text blocks, joined."""
        return "\n".join(str(block["text"]) for block in self.content if block.get("type") == "text")

    def block(self, reason: str) -> None:
        """It does not run: its state will be ``blocked``, and ``reason`` is in its error.

        It stays in the log and on the surface, behind what was added before it (the reason itself, if nothing was).
        """
        self.reason = reason
        self.decided = True

    def add(self, text: str, *, kind: str) -> None:
        """A user message before it; ``kind`` is its source."""
        self.before.append({"content": [{"type": "text", "text": text}], "source": {"kind": kind}})


@dataclass(slots=True)
class ToolGate:
    """A checked tool call is about to start. The first decision stands."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    tool: Tool
    accesses: Accesses
    turn: int
    step: int
    batch: int = 1
    """How many calls the answer has."""
    veto: ToolOutput | None = None
    """The result in place of the call."""
    same_as: str | None = None
    """The id of an earlier call of the answer whose result is this one's too."""
    decided: bool = False

    def deny(self, reason: str, *, code: str = "tool.denied", by: str | None = None) -> None:
        """The call does not start: ``reason`` goes back to the model as an error result."""
        meta = None if by is None else {"by": by}
        self.veto = ToolOutput(reason, is_error=True, error_code=code, meta=meta)
        self.decided = True

    def share(self, call_id: str) -> None:
        """The call does not start: it gets the result of an earlier call of the same answer."""
        self.same_as = call_id
        self.decided = True

    def allow(self) -> None:
        """The call starts, whatever later handlers would say."""
        self.decided = True


@dataclass(slots=True)
class ToolDone:
    """A call has its output; a handler may put another in its place. Not asked of calls that were cancelled."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    output: ToolOutput
    turn: int
    step: int
    executed: bool = True
    """False for a call that did not start: an unknown tool, bad arguments (``arguments`` is then what could be read of
    them), a veto."""
    stop_turn: bool = False
    """The turn ends after this step, as completed."""
    stop_cause: str | None = None
    """Why, in a word for the ``cause`` in the turn's reason, where the turn is not over because its work is done."""


@dataclass(frozen=True, slots=True)
class PromptQueued:
    """A prompt waits behind others. A notice."""

    prompt_id: str
    content: list[dict[str, Any]]
    queue_length: int


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn has begun. A notice."""

    turn: int
    origin: str
    """``user``, or the kind of continuation."""
    prompt: str | None
    """The text of the prompt that began it."""


@dataclass(slots=True)
class StepStarting:
    """A step is about to make its request: the moment to look at the surface (compaction, reminders)."""

    turn: int
    step: int


@dataclass(slots=True)
class RequestFailed:
    """A step's request failed for good. A handler that mended the cause sets ``retry``."""

    turn: int
    step: int
    error: KimiRayError
    retry: bool = False
    decided: bool = False

    def again(self) -> None:
        """Make the request anew, from the log as it is now."""
        self.retry = True
        self.decided = True


@dataclass(slots=True)
class TurnStopping:
    """The turn would complete: no tool call, nothing joined.

    A turn goes on at most once for each ``kind``, unless its handler bounds itself otherwise.
    """

    turn: int
    text: str
    """The last answer."""
    granted: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often the turn has gone on so far, by kind."""
    message: dict[str, Any] | None = None
    decided: bool = False

    def go_on(self, text: str, *, kind: str, times: int = 1) -> None:
        """Another step, after this user message; ``kind`` is its source. Ignored once it was granted ``times`` times
        in this turn."""
        if self.granted.get(kind, 0) >= times:
            return
        self.message = {"content": [{"type": "text", "text": text}], "source": {"kind": kind}}
        self.decided = True


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn has ended; ``reason`` is that of ``turn/end``. A notice."""

    turn: int
    reason: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AgentAwake:
    """The agent lives: ``startup`` for a new log, ``resume`` for a stored one. A notice; the first turn waits for it.

    A fork's first life is not told: it is neither.
    """

    source: str


@dataclass(frozen=True, slots=True)
class AgentLeaving:
    """The agent is being closed. A notice, after its last turn."""

    reason: str


@dataclass(slots=True)
class ChildStarting:
    """A subagent of this agent is about to be given its prompt; a handler may add text before it."""

    agent_id: str
    profile: str
    prompt: str
    first: bool = True
    """Whether it is its first prompt: False for a child that is resumed."""
    before: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Compacting:
    """A compaction is about to begin. Awaited; it begins whatever is made of it."""

    trigger: str
    """``manual`` or ``auto``."""
    tokens: int
    """The size of the next request as it would be."""
    instruction: str | None = None
    """What the user wants of the summary."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction is over, and the conversation shorter. A notice."""

    trigger: str
    compaction_id: str
    tokens: int
    """The size of the next request now."""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A subagent of this agent has answered. A notice."""

    agent_id: str
    profile: str
    response: str


@dataclass(frozen=True, slots=True)
class TaskChanged:
    """A background task of this agent started or ended. A notice."""

    task_id: str
    kind: str
    status: str
    description: str | None


class AgentSlots:
    """All slots of one agent."""

    __slots__ = (
        "awake",
        "child_ended",
        "child_starting",
        "compacted",
        "compacting",
        "leaving",
        "prompt",
        "prompt_queued",
        "request_failed",
        "step",
        "task",
        "tool",
        "tool_done",
        "turn_ended",
        "turn_started",
        "turn_stopping",
    )

    def __init__(self) -> None:
        self.awake = HookSlot[AgentAwake]("awake")
        self.prompt = HookSlot[PromptGate]("prompt")
        self.prompt_queued = HookSlot[PromptQueued]("prompt_queued")
        self.turn_started = HookSlot[TurnStarted]("turn_started")
        self.step = HookSlot[StepStarting]("step")
        self.request_failed = HookSlot[RequestFailed]("request_failed")
        self.tool = HookSlot[ToolGate]("tool")
        self.tool_done = HookSlot[ToolDone]("tool_done")
        self.turn_stopping = HookSlot[TurnStopping]("turn_stopping")
        self.turn_ended = HookSlot[TurnEnded]("turn_ended")
        self.child_starting = HookSlot[ChildStarting]("child_starting")
        self.child_ended = HookSlot[ChildEnded]("child_ended")
        self.task = HookSlot[TaskChanged]("task")
        self.compacting = HookSlot[Compacting]("compacting")
        self.compacted = HookSlot[Compacted]("compacted")
        self.leaving = HookSlot[AgentLeaving]("leaving")
