"""What a log says about its agent: prompts, totals, the last request header, the bound profile.

One fold serves the live agent (as an observer of its log) and a reopened one (over the stored events), so both see
the same. The log of a fork begins with its source's: at ``log/end-seed`` only what the model saw goes on.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.agent.context_commands import ContextCommands
from kimi_ray.agent.ended_prompts import EndedPrompts
from kimi_ray.agent.id_table import IdTable
from kimi_ray.agent.learned_window import LearnedWindows
from kimi_ray.agent.specs import AgentTotals
from kimi_ray.agent.task_fold import TaskRecord, follow_task
from kimi_ray.events import CORE, SessionEvent, encode, read_stored, type_key
from kimi_ray.log import Counted, message_text
from kimi_ray.log.projection_units import KEPT_TODO_WRITES
from kimi_ray.settings import PermissionModeName, PromptState, Usage

FINAL_STATES = frozenset({"completed", "failed", "cancelled", "blocked"})


KEPT = 64
"""Of a living agent so many newest turns, and prompts that have ended, are in memory; the log has the others."""

_EXACT = 1 << 53
"""A float up to here that has no fraction is the number that was meant."""


def content_hash(content: Any) -> int:
    """A short hash of a prompt's content; equal within a process for equal content."""
    return hash(encode(content))


@dataclass(slots=True)
class PromptRecord:
    """One prompt as the log tells it. ``content`` is dropped once the prompt has run."""

    prompt_id: str
    content: Any
    state: PromptState = "pending"
    on_interrupt: str = "fail"
    sampling: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None
    turn: int | None = None
    error: dict[str, Any] | None = None
    seq: int = -1
    steered_into: str | None = None
    content_hash: int | None = None
    """Of the content that was dropped: the same prompt sent again is told from another with its id."""
    source: dict[str, Any] | None = None
    """Who asks, unless it is the user."""
    output_schema: dict[str, Any] | None = None
    output: Any = None
    """The checked answer, as it was recorded last."""
    submitted_at: int = 0
    heard: bool = False
    """Its message is in the log."""

    @property
    def of_rollout(self) -> bool:
        """Whether it is a rollout function, or asked by one: nobody can go on with it when its process is lost."""
        return self.source is not None and self.source.get("kind") == "rollout"

    @property
    def is_rollout(self) -> bool:
        """Whether it is a rollout function."""
        return self.of_rollout and "function" in (self.source or {})


@dataclass(slots=True)
class TurnRecord:
    """How a finished turn went; kept for the newest turns only."""

    reason: dict[str, Any]
    steps: int
    tool_calls: int
    usage: Usage
    text: str
    message_seq: int | None
    end_seq: int


@dataclass(slots=True)
class Sums:
    """What an agent used so far; times in milliseconds."""

    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    interruptions: int = 0
    retries: int = 0
    input: int = 0
    cached: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0
    estimated: bool = False
    model_ms: int = 0
    tools_ms: int = 0
    store_ms: int = 0
    queued_ms: int = 0
    limiter_ms: int = 0
    retry_wait_ms: int = 0
    wall_ms: int = 0

    def usage(self) -> Usage:
        return Usage(
            input=self.input,
            cached=self.cached,
            cache_write=self.cache_write,
            output=self.output,
            reasoning=self.reasoning,
            estimated=True if self.estimated else None,
        )


@dataclass(slots=True)
class AgentFold:
    """The running state of one agent, from its log alone."""

    prompts: dict[str, PromptRecord] = field(default_factory=dict[str, PromptRecord])
    """Those that are open, and the newest ``keep_prompts`` that have ended, in the order they were accepted."""
    ended: EndedPrompts = field(default_factory=EndedPrompts)
    """What is left of those that ended before."""
    held: set[str] = field(default_factory=set[str])
    """Prompts whose ends are not told yet: they stay among ``prompts``, and what ended behind them with them."""
    turns: dict[int, TurnRecord] = field(default_factory=dict[int, TurnRecord])
    header: dict[str, Any] | None = None
    bind: dict[str, Any] | None = None
    model_name: str | None = None
    served_model: str | None = None
    fingerprint: str | None = None
    last_message_seq: int | None = None
    call_ids: IdTable = field(default_factory=IdTable)
    """Of all tool calls that the model ever asked for: no two in a log are the same."""
    sums: Sums = field(default_factory=Sums)
    revivals: int = 0
    """How often the agent was brought back to open work since it last finished a turn by itself."""
    tasks: dict[str, TaskRecord] = field(default_factory=dict[str, TaskRecord])
    """Background tasks, in the order they started."""
    scores: dict[str, Any] = field(default_factory=dict[str, Any])
    """The scores of this log, each as it was recorded last."""
    kept_results: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Long tool results that the model was shown the preview of: the blob of each as JSON, by call id."""
    todos: list[dict[str, Any]] | None = None
    """The todo list as it was last written; None until it is. An undo gives back the one before what it took."""
    asked: ContextCommands = field(default_factory=ContextCommands)
    """The compactions and undos that somebody asked for by name."""
    counted: Counted = field(default_factory=Counted)
    """The last answer of which a server counted the tokens."""
    windows: LearnedWindows = field(default_factory=LearnedWindows)
    """The windows of models whose servers refused requests as too long."""
    failed_at: int | None = None
    """How large the context was when a compaction by pressure last failed for want of a summary; None: the last one did
    not, or another model was chosen since."""
    _compacted_at: int | None = None
    permission_mode: PermissionModeName | None = None
    """The mode that was set last; None: none was, the configured one counts."""
    approved_calls: set[str] = field(default_factory=set[str])
    """What was approved for the session: each a tool's name with what the call was about."""
    open_questions: dict[str, None] = field(default_factory=dict[str, None])
    """The ids of calls that wait for somebody's answer."""
    open_hooks: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """The hooks that run: what each ``hook/invoked`` says, by its seq."""
    last_lives: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
    """The last two ``runtime/activated``: where it lived before, and where it lives."""
    seed_bind: dict[str, Any] | None = None
    """How the agent is bound behind a seed: what the log's header says, none of the source's."""
    _todo_writes: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list[tuple[int, list[dict[str, Any]]]])
    _turn_base: Sums = field(default_factory=Sums)
    _turn_text: str = ""
    _turn_message_seq: int | None = None
    _turn_started: int = 0
    _turn_estimated: bool = False
    _ended_ids: deque[str] = field(default_factory=deque[str])
    keep_turns: int = 1024
    """How many finished turns are kept whole."""
    keep_prompts: int = sys.maxsize
    """How many prompts that have ended are kept whole."""

    def apply(self, event: SessionEvent) -> None:
        """Follow one event."""
        handler = _HANDLERS.get(event.type)
        if handler is not None:
            handler(self, event)

    def totals(self, cost_usd: float | None = None) -> AgentTotals:
        """The agent's whole life so far."""
        s = self.sums
        return AgentTotals(
            turns=s.turns,
            steps=s.steps,
            tool_calls=s.tool_calls,
            usage=s.usage(),
            cost_usd=cost_usd,
            interruptions=s.interruptions,
            model_ms=s.model_ms,
            tools_ms=s.tools_ms,
            store_ms=s.store_ms,
            queued_ms=s.queued_ms,
            limiter_ms=s.limiter_ms,
            retry_wait_ms=s.retry_wait_ms,
            wall_ms=s.wall_ms,
            retries=s.retries,
        )

    def _submitted(self, event: SessionEvent) -> None:
        self._let_go()
        data = event.data
        record = self.prompts[data["prompt_id"]] = PromptRecord(
            data["prompt_id"],
            data["content"],
            on_interrupt=data.get("on_interrupt") or "fail",
            sampling=data.get("sampling"),
            limits=data.get("limits"),
            seq=event.seq,
            source=data.get("source"),
            output_schema=data.get("output_schema"),
            submitted_at=event.time,
        )
        if record.is_rollout:
            record.state = "running"

    def _started(self, event: SessionEvent) -> None:
        record = self.prompts.get(event.data["prompt_id"])
        if record is not None:
            record.state = "running"
            record.turn = event.data["turn"]

    def _steered(self, event: SessionEvent) -> None:
        for prompt_id in event.data["prompt_ids"]:
            record = self.prompts.get(prompt_id)
            if record is not None:
                record.state = "steered"
                record.turn = event.data["turn"]
                record.steered_into = event.data["active_prompt_id"]

    def _queued(self, event: SessionEvent) -> None:
        record = self.prompts.get(event.data["prompt_id"])
        if record is not None and record.state == "steered":
            # Its turn ended before it could join: it waits again.
            record.state = "pending"
            record.turn = record.steered_into = None

    def _completed(self, event: SessionEvent) -> None:
        record = self.prompts.get(event.data["prompt_id"])
        if record is not None:
            if "turn" in event.data:
                record.turn = event.data["turn"]
            elif record.state == "steered":
                record.turn = None  # it ended before it could join
            record.state = event.data["state"]
            record.error = event.data.get("error")
            if record.content is not None:
                record.content_hash = content_hash(record.content)
            record.content = record.output_schema = None
            self._ended_ids.append(record.prompt_id)
            if record.is_rollout:
                # What the function did between its turns is its time too.
                self.sums.wall_ms = max(self.sums.wall_ms, event.time - record.submitted_at)

    def _let_go(self) -> None:
        # Where prompts come and turns begin, never where they end: whoever ends one still tells of it.
        ids = self._ended_ids
        while len(ids) > self.keep_prompts and ids[0] not in self.held:
            record = self.prompts.get(ids.popleft())
            if record is not None and record.state in FINAL_STATES:
                self.ended.put(record.prompt_id, record.state, record.turn, record.content_hash)
                del self.prompts[record.prompt_id]

    def _turn_start(self, event: SessionEvent) -> None:
        self._let_go()
        s = self.sums
        self._turn_base = Sums(
            steps=s.steps,
            tool_calls=s.tool_calls,
            input=s.input,
            cached=s.cached,
            cache_write=s.cache_write,
            output=s.output,
            reasoning=s.reasoning,
        )
        s.turns += 1
        if event.data.get("continuation") == "recovery":
            for record in self.prompts.values():
                if record.state in ("running", "steered"):
                    record.turn = event.data["turn"]
        self._turn_text = ""
        self._turn_message_seq = None
        self._turn_started = event.time
        self._turn_estimated = False

    def _turn_end(self, event: SessionEvent) -> None:
        s, base = self.sums, self._turn_base
        reason = event.data["reason"]
        if reason["kind"] == "interrupted":
            s.interruptions += 1
        else:
            self.revivals = 0
        s.wall_ms += max(0, event.time - self._turn_started)
        usage = Usage(
            input=s.input - base.input,
            cached=s.cached - base.cached,
            cache_write=s.cache_write - base.cache_write,
            output=s.output - base.output,
            reasoning=s.reasoning - base.reasoning,
            estimated=True if self._turn_estimated else None,
        )
        turn = event.data["turn"]
        self.turns[turn] = TurnRecord(
            reason,
            s.steps - base.steps,
            s.tool_calls - base.tool_calls,
            usage,
            self._turn_text,
            self._turn_message_seq,
            event.seq,
        )
        if len(self.turns) > self.keep_turns:
            del self.turns[next(iter(self.turns))]

    def _activated(self, event: SessionEvent) -> None:
        self.last_lives = (self.last_lives[1], event.data)
        self.asked.new_life()
        if self.last_lives[0] is None:
            # What was there before the first life is a seed's, or was imported: nobody is to end it here.
            self.open_questions.clear()
            self.open_hooks.clear()
        is_open = any(record.state not in FINAL_STATES for record in reversed(self.prompts.values()))
        self.revivals = self.revivals + 1 if is_open else 0

    def _step_start(self, _event: SessionEvent) -> None:
        self.sums.steps += 1

    def _step_end(self, event: SessionEvent) -> None:
        s = self.sums
        model_ms, tools_ms, store_ms = _whole(event.data, "model_ms", "tools_ms", "store_ms")
        s.model_ms += model_ms
        s.tools_ms += tools_ms
        s.store_ms += store_ms

    def _tool_call(self, _event: SessionEvent) -> None:
        self.sums.tool_calls += 1

    def _message(self, event: SessionEvent) -> None:
        message = event.data["message"]
        for block in message["content"]:
            if block["type"] == "tool-call":
                self.call_ids.put(block["id"])
        if self.counted.message(event):
            self.windows.answered(self._wire_model, self.counted.tokens)
        if event.replaced is None:
            self.last_message_seq = event.seq
            text = message_text(message)
            if text.strip():
                self._turn_text = text
                self._turn_message_seq = event.seq

    def _use(self, usage: dict[str, Any] | None) -> None:
        s = self.sums
        if usage is not None:
            counts = _whole(usage, "input", "cached", "cache_write", "output", "reasoning")
            s.input += counts[0]
            s.cached += counts[1]
            s.cache_write += counts[2]
            s.output += counts[3]
            s.reasoning += counts[4]
            if usage.get("estimated"):
                s.estimated = self._turn_estimated = True

    def _summary_response(self, event: SessionEvent) -> None:
        self._use(event.data.get("usage"))

    def _response(self, event: SessionEvent) -> None:
        data, s = event.data, self.sums
        queued_ms, limiter_ms = _whole(data["timing"], "queued_ms", "limiter_ms")
        self._use(data.get("usage"))
        self.counted.response(data)
        if "error" in data:
            self.windows.failed(self._wire_model, data["error"])
        s.queued_ms += queued_ms
        s.limiter_ms += limiter_ms
        if "served_model" in data:
            self.served_model = data["served_model"]
        if "fingerprint" in data:
            self.fingerprint = data["fingerprint"]

    def _retry(self, event: SessionEvent) -> None:
        [delay_ms] = _whole(event.data, "delay_ms")
        self.sums.retries += 1
        self.sums.retry_wait_ms += delay_ms

    def _header(self, event: SessionEvent) -> None:
        if event.data["header"] != self.header:
            self.counted.forget()
        self.header = event.data["header"]

    @property
    def _wire_model(self) -> str:
        """The name on the wire in the last request."""
        return str((self.header or {}).get("model", ""))

    def _bind(self, event: SessionEvent) -> None:
        self.bind = event.data
        self.model_name = event.data.get("model")

    def _model(self, event: SessionEvent) -> None:
        self.model_name = event.data["model"]
        self.failed_at = None

    def _user(self, event: SessionEvent) -> None:
        record = self.prompts.get(event.data["id"])
        if record is not None:
            record.heard = True
        if event.replaced is not None:
            self.asked.replaced(event)
        follow_task(self.tasks, event)

    def _task(self, event: SessionEvent) -> None:
        follow_task(self.tasks, event)

    def _result(self, event: SessionEvent) -> None:
        full = event.data.get("full")
        if full is not None:
            self.kept_results[event.data["message"]["source"]["call_id"]] = encode(full)

    def _todo(self, event: SessionEvent) -> None:
        self.todos = event.data["todos"]
        self._todo_writes.append((event.seq, event.data["todos"]))
        del self._todo_writes[:-KEPT_TODO_WRITES]

    def _cut(self, event: SessionEvent) -> None:
        self.asked.cut(event)
        if event.replaced is None or not self._todo_writes or self._todo_writes[-1][0] < event.replaced[0]:
            return
        self._todo_writes = [write for write in self._todo_writes if write[0] < event.replaced[0]]
        self.todos = self._todo_writes[-1][1] if self._todo_writes else None

    def _compaction_start(self, event: SessionEvent) -> None:
        self.asked.started(event)
        if event.data.get("trigger") == "overflow":
            self.windows.mended(self._wire_model, event.data.get("tokens"))
        self._compacted_at = event.data.get("tokens") if event.data.get("trigger") == "pressure" else None

    def _compaction_summary(self, event: SessionEvent) -> None:
        self.asked.summed(event)

    def _compaction_end(self, event: SessionEvent) -> None:
        self.asked.ended(event)
        error = event.data.get("error")
        if error is None:
            self.failed_at = None
        elif error.get("code") == "compaction.summary" and self._compacted_at is not None:
            self.failed_at = self._compacted_at

    def _output(self, event: SessionEvent) -> None:
        record = self.prompts.get(event.data["prompt_id"])
        if record is not None:
            record.output = event.data["value"]

    def _score(self, event: SessionEvent) -> None:
        self.scores[event.data["name"]] = event.data["value"]

    def _permission_mode(self, event: SessionEvent) -> None:
        self.permission_mode = event.data["mode"]

    def _permission_asked(self, event: SessionEvent) -> None:
        self.open_questions[event.data["call_id"]] = None

    def _permission_decided(self, event: SessionEvent) -> None:
        data = event.data
        self.open_questions.pop(data["call_id"], None)
        if data.get("scope") == "session" and data["decision"] == "allow" and "rule" in data:
            self.approved_calls.add(data["rule"])

    def _hook_invoked(self, event: SessionEvent) -> None:
        self.open_hooks[event.seq] = event.data

    def _hook_result(self, event: SessionEvent) -> None:
        self.open_hooks.pop(event.data.get("invoked", -1), None)

    def _end_seed(self, _event: SessionEvent) -> None:
        """What came before is the source's: its open prompts are not run here, its use is not counted here."""
        self.prompts = {key: record for key, record in self.prompts.items() if record.state in FINAL_STATES}
        self.sums = Sums()
        self.scores = {}
        self._turn_base = Sums()
        self.revivals = 0
        self.asked = ContextCommands()
        self.last_lives = (None, None)
        self.bind = self.seed_bind
        if self.seed_bind is not None:
            self.model_name = self.seed_bind.get("model")


_HANDLERS: dict[str, Any] = {
    "prompt/submitted": AgentFold._submitted,  # pyright: ignore[reportPrivateUsage]
    "prompt/queued": AgentFold._queued,  # pyright: ignore[reportPrivateUsage]
    "prompt/started": AgentFold._started,  # pyright: ignore[reportPrivateUsage]
    "prompt/steered": AgentFold._steered,  # pyright: ignore[reportPrivateUsage]
    "prompt/completed": AgentFold._completed,  # pyright: ignore[reportPrivateUsage]
    "turn/start": AgentFold._turn_start,  # pyright: ignore[reportPrivateUsage]
    "turn/end": AgentFold._turn_end,  # pyright: ignore[reportPrivateUsage]
    "runtime/activated": AgentFold._activated,  # pyright: ignore[reportPrivateUsage]
    "step/start": AgentFold._step_start,  # pyright: ignore[reportPrivateUsage]
    "step/end": AgentFold._step_end,  # pyright: ignore[reportPrivateUsage]
    "tool/call": AgentFold._tool_call,  # pyright: ignore[reportPrivateUsage]
    "assistant/message": AgentFold._message,  # pyright: ignore[reportPrivateUsage]
    "llm/response": AgentFold._response,  # pyright: ignore[reportPrivateUsage]
    "compaction/start": AgentFold._compaction_start,  # pyright: ignore[reportPrivateUsage]
    "compaction/summary": AgentFold._compaction_summary,  # pyright: ignore[reportPrivateUsage]
    "compaction/end": AgentFold._compaction_end,  # pyright: ignore[reportPrivateUsage]
    "compaction/response": AgentFold._summary_response,  # pyright: ignore[reportPrivateUsage]
    "surface/cut": AgentFold._cut,  # pyright: ignore[reportPrivateUsage]
    "llm/retry": AgentFold._retry,  # pyright: ignore[reportPrivateUsage]
    "request/header": AgentFold._header,  # pyright: ignore[reportPrivateUsage]
    "profile/bind": AgentFold._bind,  # pyright: ignore[reportPrivateUsage]
    "profile/model": AgentFold._model,  # pyright: ignore[reportPrivateUsage]
    "output/recorded": AgentFold._output,  # pyright: ignore[reportPrivateUsage]
    "score/recorded": AgentFold._score,  # pyright: ignore[reportPrivateUsage]
    "user/message": AgentFold._user,  # pyright: ignore[reportPrivateUsage]
    "task/started": AgentFold._task,  # pyright: ignore[reportPrivateUsage]
    "task/ended": AgentFold._task,  # pyright: ignore[reportPrivateUsage]
    "task/lost": AgentFold._task,  # pyright: ignore[reportPrivateUsage]
    "task/reported": AgentFold._task,  # pyright: ignore[reportPrivateUsage]
    "tool/result": AgentFold._result,  # pyright: ignore[reportPrivateUsage]
    "todo/write": AgentFold._todo,  # pyright: ignore[reportPrivateUsage]
    "permission/mode": AgentFold._permission_mode,  # pyright: ignore[reportPrivateUsage]
    "permission/asked": AgentFold._permission_asked,  # pyright: ignore[reportPrivateUsage]
    "hook/invoked": AgentFold._hook_invoked,  # pyright: ignore[reportPrivateUsage]
    "hook/result": AgentFold._hook_result,  # pyright: ignore[reportPrivateUsage]
    "permission/decided": AgentFold._permission_decided,  # pyright: ignore[reportPrivateUsage]
    "log/end-seed": AgentFold._end_seed,  # pyright: ignore[reportPrivateUsage]
}

FOLLOWED = frozenset(_HANDLERS)
"""The types of events that ``AgentFold.apply`` looks at."""

_KNOWN = {type_key(entry.name): entry.name for entry in CORE}
_PASSED = frozenset(key for key, name in _KNOWN.items() if name not in FOLLOWED)


def living_fold(seed_bind: dict[str, Any] | None = None) -> AgentFold:
    """A fold for an agent that lives, however long: what ended long ago is not kept whole."""
    return AgentFold(seed_bind=seed_bind, keep_turns=KEPT, keep_prompts=KEPT)


def _whole(data: dict[str, Any], *names: str) -> list[int]:
    """Numbers that are summed up: one that is not whole would spoil the sums of everything behind it.

    Raises:
        TypeError: naming it.
    """
    found: list[int] = []
    for name in names:
        number: Any = data.get(name, 0)
        if type(number) is float and number.is_integer() and abs(number) <= _EXACT:
            number = int(number)
        if type(number) is not int:
            raise TypeError(f"{name} is no whole number: {str(number)[:40]}")
        found.append(number)
    return found


def fold_stored(fold: AgentFold, lines: Sequence[bytes], first_seq: int) -> None:
    """Follow a run of stored lines; what the fold does not look at is not parsed.

    Raises:
        LogError: ``log.not_json`` or ``log.bad_envelope``.
    """
    for event in read_stored(lines, first_seq, _KNOWN, _PASSED):
        fold.apply(event)
