"""What each event type carries. These models document the log and check it in tests and readers.

Writers build plain dicts (an event is encoded once and never parsed by the runtime); a test holds every written event
against its model. ``turn`` and ``step`` count from 0, ``attempt`` from 1, times are integer milliseconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonObject = dict[str, Any]


class Part(BaseModel):
    """Base of what payloads are made of: unknown keys are an error, so that a misspelt one cannot hide."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Payload(Part):
    """Base of all payloads."""

    imported: JsonObject | None = None
    """What an event of another program had besides, as it was."""


class BlobRef(Part):
    """Content kept by reference in ``<home>/blobs/``: digest ``sha256:<hex>`` and length."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    blob: str = Field(alias="$blob", pattern=r"^sha256:[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class TurnReason(Part):
    """How a turn ended. ``error`` for failed, ``name/value/used/scope`` for limit, ``cause`` for cancelled.

    A completed one has the cause ``repeated`` when it ended because its model made the same call again and again.
    """

    kind: Literal["completed", "cancelled", "blocked", "failed", "limit", "truncated", "timeout", "interrupted"]
    error: JsonObject | None = None
    cause: str | None = None
    name: str | None = None
    value: float | int | None = None
    used: float | int | None = None
    scope: Literal["agent", "session", "swarm"] | None = None
    recovered_at: int | None = None


class ChildPosition(Part):
    """Where a child's log stood, durably, when this was written."""

    seq: int
    epoch: int


class TurnStart(Payload):
    """A run of the loop begins, for these prompts (none: a continuation)."""

    turn: int = Field(ge=0)
    prompts: list[str] = Field(default_factory=list)
    continuation: str | None = None
    """``user``, ``recovery``, or the source kind of the message that woke the agent (``task``)."""


class TurnEnd(Payload):
    """The turn is over, however it ended. ``duration_ms`` is missing where a crash cut it short."""

    turn: int = Field(ge=0)
    reason: TurnReason
    steps: int | None = None
    duration_ms: int | None = None
    agents: dict[str, ChildPosition] | None = None


class StepStart(Payload):
    """One model request plus the tools it asks for begins."""

    turn: int = Field(ge=0)
    step: int = Field(ge=0)


class StepEnd(Payload):
    """The step is over. ``store_ms`` is what the loop waited for durability.

    ``interrupted``: the user stopped it, and it alone: its turn went on with what waited for its next step.
    """

    turn: int = Field(ge=0)
    step: int = Field(ge=0)
    interrupted: bool | None = None
    model_ms: int | None = None
    tools_ms: int | None = None
    store_ms: int | None = None
    agents: dict[str, ChildPosition] | None = None
    workspace: JsonObject | None = None
    recovered_at: int | None = None


class UserMessage(Payload):
    """A message of the user, or of the runtime in the user's role (``source.kind``)."""

    id: str
    role: Literal["user"]
    content: list[JsonObject] | JsonObject
    source: JsonObject


class AssistantMessage(Payload):
    """What the model answered, assembled. ``interrupted``: cut by a cancel, text so far."""

    turn: int
    step: int
    message: JsonObject
    usage: JsonObject | None = None
    attempt: int | None = None
    interrupted: Literal[True] | None = None


class ToolCall(Payload):
    """A call's turn came: its tool's body is about to run, or it is ``refused``, as its result says. ``arguments`` is
    the model's raw text."""

    turn: int
    step: int
    call_id: str
    name: str
    arguments: str | JsonObject
    refused: str | None = None
    """The tool's body will not run: the code of its result (``tool.denied``, ``tool.unknown``, ...)."""


class ToolResult(Payload):
    """The one answer to a tool call."""

    turn: int
    step: int
    message: JsonObject
    error: JsonObject | None = None
    meta: JsonObject | None = None
    full: BlobRef | None = None
    """The whole of a long result, of which the message has a preview."""
    queued_ms: int | None = None
    run_ms: int | None = None
    exit_code: int | None = None
    recovered_at: int | None = None


class SurfaceCut(Payload):
    """The replaced range left the surface; derives no message."""

    reason: Literal["undo"]
    prompts: list[str]
    undo_id: str | None = None
    """The caller's name for it: asked again it is not done again."""


class AssistantChunk(Payload):
    """Streamed parts of an answer, in order, of one block."""

    turn: int
    step: int
    attempt: int
    chunk: JsonObject


class PromptSubmitted(Payload):
    """A prompt was accepted: from here on it is never lost."""

    prompt_id: str
    content: list[JsonObject] | JsonObject
    on_interrupt: Literal["fail", "continue"] | None = None
    sampling: JsonObject | None = None
    limits: JsonObject | None = None
    source: JsonObject | None = None
    """Who asks, unless it is the user: ``{kind: rollout, function}`` is a rollout function, which runs from here on;
    ``{kind: rollout, prompt_id}`` a turn that the function of that prompt asks for."""
    output_schema: JsonObject | None = None
    """The JSON schema of the answer."""
    steer_if_active: bool | None = None


class PromptQueued(Payload):
    """The prompt waits behind others."""

    prompt_id: str
    queue_length: int


class PromptStarted(Payload):
    """The prompt's turn begins."""

    prompt_id: str
    turn: int


class PromptSteered(Payload):
    """Queued prompts joined the running turn."""

    prompt_ids: list[str]
    active_prompt_id: str
    turn: int


class PromptCompleted(Payload):
    """The prompt reached a final state."""

    prompt_id: str
    state: Literal["completed", "failed", "cancelled", "blocked"]
    turn: int | None = None
    error: JsonObject | None = None


class RequestHeader(Payload):
    """What every following request of this log is made with, until the next header. A full snapshot."""

    header: JsonObject
    reason: Literal["initial", "resume", "change"]


class LlmRetry(Payload):
    """Attempt ``attempt`` failed; the next begins after ``delay_ms``."""

    turn: int
    step: int
    attempt: int
    delay_ms: int
    max_attempts: int
    error: JsonObject


class LlmResponse(Payload):
    """What came back from one attempt, failed ones too."""

    turn: int
    step: int
    attempt: int
    response_id: str | None = None
    served_model: str | None = None
    fingerprint: str | None = None
    finish_reason: str | None = None
    raw_finish_reason: str | None = None
    http_status: int | None = None
    request_id: str | None = None
    usage: JsonObject | None = None
    timing: JsonObject
    error: JsonObject | None = None


class LlmTokens(Payload):
    """Token ids and log-probabilities of one attempt."""

    turn: int
    step: int
    attempt: int
    tokens: JsonObject | list[Any]


class ProfileBind(Payload):
    """The agent's profile as it was bound."""

    profile: JsonObject
    model: str | None = None
    sampling: JsonObject | None = None
    limits: JsonObject | None = None
    workdir: JsonObject | None = None


class ProfileModel(Payload):
    """Another model from the next turn on."""

    model: str


class PermissionMode(Payload):
    """The permission mode from here on."""

    mode: Literal["manual", "auto", "yolo"]


class PermissionAsked(Payload):
    """A call waits for somebody who says whether it may start."""

    call_id: str
    name: str
    about: str
    """What the call is about: a command, a path."""
    by: str
    """Why it is asked: ``rule``, ``sensitive``, ``git``, ``mode``."""
    rule: str | None = None
    wait_s: float
    """So long at most."""


class PermissionDecided(Payload):
    """Whether a call may start."""

    call_id: str
    decision: str
    """``allow``, ``deny``, or ``cancelled``: the turn ended, or its host was lost, before somebody answered."""
    rule: str | None = None
    """The rule that decided; with ``scope`` the call that is allowed from here on."""
    by: str | None = None
    """``rule``, ``session``, ``default``, ``git``, ``user``, ``nobody``, ``mode``, ``turn``, ``host``."""
    scope: str | None = None
    """``session``: also all further calls like it."""
    feedback: str | None = None
    """What the user said about it."""


class CompactionStart(Payload):
    """A compaction holds the log's surface."""

    compaction_id: str
    turn: int | None = None
    """The open turn; none for one between turns."""
    trigger: Literal["pressure", "overflow", "manual", "region"] | None = None
    instruction: str | JsonObject | None = None
    """What the user wants of the summary."""
    shadowed_range: JsonObject | None = None
    """The first and the last node of what it is to replace: {start, end}."""
    tokens: int | None = None
    """How large the next request would have been, resting on the server's count where there is one."""
    threshold: int | None = None
    """At which size it is asked for, by itself."""
    command_id: str | None = None
    """The caller's name for it: asked again it is not done again."""


class CompactionRequest(Payload):
    """A model is asked for the summary: with the system prompt and the tools of the log's last header, the messages of
    the range of ``compaction/start`` without the first ``left_out``, and ``message`` behind them."""

    compaction_id: str
    attempt: int
    provider: str
    model: str
    sampling: JsonObject | None = None
    left_out: int | None = None
    message: JsonObject


class CompactionResponse(Payload):
    """What came back, failed attempts too."""

    compaction_id: str
    attempt: int
    response_id: str | None = None
    served_model: str | None = None
    fingerprint: str | None = None
    finish_reason: str | None = None
    raw_finish_reason: str | None = None
    http_status: int | None = None
    request_id: str | None = None
    usage: JsonObject | None = None
    timing: JsonObject
    error: JsonObject | None = None


class CompactionSummary(Payload):
    """The summary that replaces a range. ``shadowed_tokens`` is the plain estimate of what it replaces, at four
    characters a token; ``tokens`` of ``compaction/start`` rests on the server's count and may be smaller."""

    compaction_id: str
    summary: list[JsonObject]
    shadowed_range: JsonObject
    shadowed_seqs: list[int]
    shadowed_tokens: int
    model: str | None = None
    usage: JsonObject | None = None


class CompactionPrune(Payload):
    """A tool result is about to be replaced by a shorter one. ``shadowed_tokens`` is the plain estimate of that result;
    ``tokens`` and ``threshold`` are as in ``compaction/start``, why it was due."""

    shadowed_range: JsonObject
    shadowed_seqs: list[int]
    shadowed_tokens: int
    tokens: int | None = None
    threshold: int | None = None


class CompactionEnd(Payload):
    """The compaction let go."""

    compaction_id: str
    turn: int | None = None
    error: JsonObject | None = None


class LogEndSeed(Payload):
    """Everything before came from a seed; this life of the log wrote none of it."""


class LogForked(Payload):
    """This log began as a copy."""

    source: JsonObject
    at: str | None = None


class LogSalvaged(Payload):
    """This log was made of what verified in a damaged one; here something is missing, or was mended.

    Seqs are those of the source; ``data`` of the events around is as it was, so seqs inside of it are the source's too.
    """

    source: JsonObject
    """{session_id, agent_id}."""
    lost: list[JsonObject] = Field(default_factory=list[JsonObject])
    """Each {after_seq, count?, file?, offset?}."""
    repaired: list[JsonObject] | None = None
    """At the end of the log: each {seq, new_seq?, change}."""


class RuntimeActivated(Payload):
    """A host took the log for writing."""

    epoch: int
    node: str | None = None
    host: str | None = None
    pid: int | None = None
    versions: JsonObject | None = None


class SubagentSpawned(Payload):
    """A child agent exists; ``seq`` and ``epoch`` are its durable position, for one that began with a history."""

    agent_id: str
    profile: str | None = None
    model: str | None = None
    description: str | None = None
    call_id: str | None = None
    background: bool | None = None
    labels: JsonObject | None = None
    item_id: str | None = None
    repeat: int | None = None
    attempt: int | None = None
    seq: int | None = None
    epoch: int | None = None


class SubagentStarted(Payload):
    """A child began to work."""

    agent_id: str


class SubagentSuspended(Payload):
    """A child waits (rate limit, lost host)."""

    agent_id: str
    seq: int | None = None
    epoch: int | None = None
    reason: str | None = None


class SubagentCompleted(Payload):
    """A child finished; ``seq`` and ``epoch`` are its durable position, ``message_seq`` its last answer."""

    agent_id: str
    seq: int
    epoch: int
    status: str | None = None
    message_seq: int | None = None


class SubagentFailed(Payload):
    """A child failed; its position as far as it is known."""

    agent_id: str
    seq: int | None = None
    epoch: int | None = None
    error: JsonObject


class SwarmStart(Payload):
    """A swarm of this session begins."""

    run_id: str
    rollouts: int
    max_concurrency: int
    profile: str | None = None


class SwarmEnd(Payload):
    """The swarm is over; the last positions of its children."""

    run_id: str
    counts: dict[str, int]
    agents: dict[str, ChildPosition] | None = None


class RunManifest(Payload):
    """What the run was started with."""

    run_id: str
    manifest: JsonObject


class ScoreRecorded(Payload):
    """A score of this log."""

    name: str
    value: Any
    by: str | None = None


class OutputRecorded(Payload):
    """The checked answer to a prompt; it counts if the prompt completes."""

    prompt_id: str
    value: Any
    by: Literal["tool", "text", "rollout"]
    """A call of ``final_answer``, the text of the last message, or what a rollout function returned."""


class NoteAdded(Payload):
    """A remark on this log."""

    text: str
    by: str | None = None


class TaskStarted(Payload):
    """A background task runs."""

    task_id: str
    kind: str
    description: str | None = None
    agent_id: str | None = None
    timeout_s: float | None = None
    call_id: str | None = None


class TaskEnded(Payload):
    """A background task ended."""

    task_id: str
    status: str
    exit_code: int | None = None
    reason: str | None = None
    output_tail: str | None = None
    output_bytes: int | None = None


class TaskLost(Payload):
    """A background task did not survive a restart."""

    task_id: str


class TaskReported(Payload):
    """The model heard of a task's end as the answer of a tool: no notice follows."""

    task_id: str
    by: str


class TodoWrite(Payload):
    """The whole todo list."""

    todos: list[JsonObject]


class HookInvoked(Payload):
    """A hook is about to run; ``about`` is the prompt, call, turn, agent or task that it is told of."""

    event: str
    command: str
    about: str | None = None


class HookResult(Payload):
    """What the hook said; without a ``hook/invoked`` before it: why it never runs."""

    event: str
    blocked: bool
    message: str | None = None
    """The reason when it blocked, else text for the model."""
    command: str | None = None
    about: str | None = None
    invoked: int | None = None
    """The seq of its ``hook/invoked``."""
    exit_code: int | None = None
    timed_out: bool | None = None
    duration_ms: int | None = None
    error: str | None = None
    """Why nothing was made of it: the event went on as if it had not been asked."""
