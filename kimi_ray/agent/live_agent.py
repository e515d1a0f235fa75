"""A living agent: its services around one log, and the task that runs its turns.

``LiveAgent`` is what a host holds. It is brought to life by ``revive`` (close what a crash left open, put pending
prompts back), takes prompts, runs turns one after the other, and ends by ``close``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kimi_ray.agent.ended_prompts import EndedPrompts
from kimi_ray.agent.final_answer import FinalAnswer
from kimi_ray.agent.fold import FINAL_STATES, AgentFold
from kimi_ray.agent.inbox import Inbox
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.limits import LimitMeter
from kimi_ray.agent.loop import TurnInput, TurnLoop
from kimi_ray.agent.maintenance import StandsStill
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.prompt_gates import PromptGates
from kimi_ray.agent.prompts import Prompts
from kimi_ray.agent.requester import Progress
from kimi_ray.agent.revival import revive_log
from kimi_ray.agent.slots import AgentAwake, AgentLeaving, AgentSlots
from kimi_ray.agent.specs import AgentProgress, AgentSpec, LogEntry, Outcome, PromptResult, PromptSpec, PromptStatus
from kimi_ray.agent.told import told
from kimi_ray.agent.turn_config import NOTHING, Asked, TurnConfigs
from kimi_ray.agent.turn_ends import error_of, state_of, stop_of
from kimi_ray.agent.turn_signal import TurnSignal, TurnStopped
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import AgentError, KimiRayError, StoreError, as_error
from kimi_ray.events import SessionEvent
from kimi_ray.llm.chat import ChatProvider, ToolSpec
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.settings import PromptState, Usage
from kimi_ray.tools.contract import Environment, Tool

LEAVING_S = 15.0
"""How long the end of an agent waits for those who are told of it."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A turn without a new message, asked for by the user, or the rest of one that a crash cut short.

    ``seq`` is where the log stood: prompts that were accepted before it run before it.
    """

    prompt_id: str
    kind: str
    seq: int
    asked: Asked


class LiveAgent(StandsStill):
    """One agent, alive.

    Args:
        spec: How it was asked for.
        epoch: The epoch of its grant.
        journal: Its log.
        prompts: Its queue.
        loop: Runs its turns.
        meter: Its limits.
        provider: Its model server.
        environment: Where its tools work.
        tools: Its tools, in order.
        progress: What a watcher sees.
        on_outcome: Called when a prompt reached its final state, durably.
        on_idle: Called when no prompt is left.
        inbox: What the runtime itself has to tell it.
        slots: Who else has a say.
        notices: Tells those who have none.
        in_use: Its model; None is the one of ``spec``.
    """

    def __init__(
        self,
        spec: AgentSpec,
        epoch: int,
        journal: Journal,
        prompts: Prompts,
        loop: TurnLoop,
        meter: LimitMeter,
        provider: ChatProvider,
        environment: Environment,
        tools: list[Tool],
        progress: Progress,
        *,
        on_outcome: Callable[[str, Outcome], None],
        on_idle: Callable[[], None],
        inbox: Inbox | None = None,
        slots: AgentSlots | None = None,
        notices: Notices | None = None,
        in_use: ModelInUse | None = None,
    ) -> None:
        self.spec = spec
        self._slots = slots if slots is not None else AgentSlots()
        self._notices = notices if notices is not None else Notices(journal)
        self._gates = PromptGates(journal, prompts, self._slots, self._settle_soon)
        self._waking = False
        self.inbox = inbox if inbox is not None else Inbox()
        self.inbox.on_wake(self._wake_if_open)
        self.stream = spec.stream
        self.epoch = epoch
        self.began = journal.log.next_seq
        """The first seq of this life."""
        self.journal = journal
        self.prompts = prompts
        self.meter = meter
        self.progress = progress
        self.final: FinalAnswer | None = None
        """Checks the answers to prompts that have a schema."""
        self.workdir_path: str | None = None
        self.workdir_created = False
        self.node_id: str | None = None
        self._loop = loop
        self._environment = environment
        self._tools = tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools)
        self._on_outcome = on_outcome
        self._on_idle = on_idle
        self._in_use = in_use if in_use is not None else ModelInUse(spec.model, provider)
        self._continuations: list[_Continuation] = []
        self._going_on: dict[str, None] = {}
        """Continuations that have no end yet."""
        self._configs = TurnConfigs()
        self._signal: TurnSignal | None = None
        self._current: list[str] = []
        self._driver: asyncio.Task[None] | None = None
        self._went_on = EndedPrompts()
        """Continuations that have ended: no log names them."""
        self._undurable = journal.fold.held = set[str]()
        self._untold: dict[str, Outcome] = {}
        self._settlers: set[asyncio.Task[None]] = set()
        self._closed = False
        self._holders: set[str] = set()
        self.failure: KimiRayError | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn runs, a prompt waits, or maintenance is at work."""
        running = self._maintenance is not None or (self._driver is not None and not self._driver.done())
        return running or (not self._closed and self._has_work)

    @property
    def _has_work(self) -> bool:
        return len(self.prompts) > 0 or bool(self._continuations) or self.inbox.wants_turn

    @property
    def closed(self) -> bool:
        """Whether it takes nothing any more: it is being closed, was closed, or broke."""
        return self._closed

    def revive(self) -> None:
        """Mend its log (``revive_log``), and go on with the prompts of the life before."""
        if self._slots.awake:
            self._tell_awake()
        found = revive_log(self.stream, self.journal, self.prompts)
        self._settle_soon(found.ended)
        self._continuations = [
            _Continuation(prompt_id, "recovery", 0, Asked.by(self.prompts.get(prompt_id)))
            for prompt_id in found.continued
        ]
        if self._continuations or len(self.prompts):
            self._wake()

    def _tell_awake(self) -> None:
        before = self.journal.fold.last_lives[0]
        if before is not None or self.journal.log.header.origin != "fork":
            self._waking = True
            self._notices.tell(self._slots.awake, AgentAwake("startup" if before is None else "resume"))

    def submit(self, specs: tuple[PromptSpec, ...]) -> None:
        """Accept prompts, in their order; the caller flushes before it says so.

        Raises:
            AgentError: ``prompt.id_conflict``, ``prompt.empty``, ``agent.closed``.
        """
        if self._closed:
            raise AgentError(f"the agent {self.stream} is closed", code="agent.closed")
        for spec in specs:
            if spec.continuation:
                if spec.prompt_id not in self._going_on and self._went_on.get(spec.prompt_id) is None:
                    self._going_on[spec.prompt_id] = None
                    now = self.journal.log.next_seq
                    self._continuations.append(_Continuation(spec.prompt_id, "user", now, Asked.by(spec)))
            else:
                self.prompts.accept(spec)
        self._wake()

    def is_waiting(self, prompt_id: str) -> bool:
        """Whether a prompt is accepted and its end is not durable yet; False also for one that is not known."""
        record = self.journal.fold.prompts.get(prompt_id)
        if record is None or prompt_id in self._untold:
            return False
        return record.state not in FINAL_STATES or prompt_id in self._undurable

    def status(self, prompt_id: str) -> PromptStatus:
        """Where a prompt or continuation stands; its end is not told before it is durable.

        Raises:
            AgentError: ``prompt.not_found``.
        """
        record = self.prompts.get(prompt_id)
        if record is not None and prompt_id not in self._untold:
            if record.state not in FINAL_STATES or prompt_id not in self._undurable:
                return PromptStatus(record.state, record.turn)
            ran = record.turn is not None or record.is_rollout
            return PromptStatus("running" if ran else "pending", record.turn)
        ended = self.journal.fold.ended.get(prompt_id) or self._went_on.get(prompt_id)
        if ended is not None and prompt_id not in self._undurable and prompt_id not in self._untold:
            return PromptStatus(ended.state, ended.turn)
        outcome = self.outcome(prompt_id)
        if outcome is not None:
            return PromptStatus(outcome.result.state, outcome.result.turn)
        if prompt_id in self._current:
            return PromptStatus("running", self.journal.log.order.open_turn)
        return PromptStatus("pending", None)

    def outcome(self, prompt_id: str) -> Outcome | None:
        """The end of a prompt or continuation, or None until it is durable.

        Raises:
            AgentError: ``prompt.not_found``; ``prompt.result_forgotten`` {turn} for one of long ago, which the log
                still tells of (``outcome_in``).
        """
        fold = self.journal.fold
        record = self.prompts.get(prompt_id)
        if prompt_id in self._undurable:
            return None
        if prompt_id in self._untold:
            return self._untold[prompt_id]
        if record is None:
            if prompt_id in self._going_on:
                return None
            went_on = self._went_on.get(prompt_id)
            ended = went_on or fold.ended.get(prompt_id)
            if ended is None:
                raise AgentError(f"there is no prompt {prompt_id} at {self.stream}", code="prompt.not_found")
            outcome = self.outcome_in(fold, prompt_id, ended.turn) if went_on is not None else None
            if outcome is None:
                raise self._forgotten(prompt_id, ended.turn, ended.state)
            return outcome
        if record.state not in FINAL_STATES:
            return None
        if record.turn is not None and record.turn not in fold.turns:
            # An answer without the text would be a lie, and looked like an empty one.
            raise self._forgotten(prompt_id, record.turn, record.state)
        return self._outcome(prompt_id, record.state, record.turn, record.error)

    def outcome_in(self, fold: AgentFold, prompt_id: str, turn: int | None) -> Outcome | None:
        """The end of a prompt as an earlier day's fold of the same log tells it.

        Args:
            fold: The log up to the prompt's end, its turn among those that are kept.
            prompt_id: A prompt, or a continuation, which no log names.
            turn: Of a continuation: its turn.
        """
        record = fold.prompts.get(prompt_id)
        if record is not None:
            lost = record.turn is not None and record.turn not in fold.turns
            return None if lost else self._outcome(prompt_id, record.state, record.turn, record.error, fold)
        found = fold.turns.get(turn) if turn is not None else None
        if found is None:
            return None
        return self._outcome(prompt_id, state_of(found.reason), turn, error_of(found.reason), fold)

    def _forgotten(self, prompt_id: str, turn: int | None, state: PromptState) -> AgentError:
        ran = "it never ran" if turn is None else f"it ran in turn {turn}"
        return AgentError(
            f"the result of the prompt {prompt_id} is not in memory any more: {ran}",
            code="prompt.result_forgotten",
            hint="the agent's log has it: agent.events(), or kimi-ray sessions show",
            details={"turn": turn, "kept": self.journal.fold.keep_turns, "state": state},
        )

    def cancel(self, prompt_id: str | None, cause: str, *, limit: KimiRayError | None = None) -> list[str]:
        """Cancel a prompt, or all: the queued ones first, then what runs. Returns the ids it hit."""
        if prompt_id is None:
            self.stop_maintenance()
        hit = self.prompts.cancel_queued(prompt_id)
        running = list(dict.fromkeys([*self.prompts.active, *self._current]))
        if self._signal is not None and (prompt_id is None or prompt_id in running):
            hit.extend(running)
            self._signal.stop("limit" if limit is not None else cause, limit=limit)
        for entry in list(self._continuations):
            members = [entry.prompt_id, *self.prompts.steered_into(entry.prompt_id)]
            if prompt_id is None or prompt_id in members:
                self._continuations.remove(entry)
                hit.extend(members)
                for member in members:
                    if self.prompts.get(member) is not None:
                        self.prompts.finish(member, "cancelled")
                    else:
                        # A continuation is nothing in the log before it runs.
                        self._goes_on_no_more(member, "cancelled", None)
                        end = self._untold[member] = self._outcome(member, "cancelled", None, None)
                        self._on_outcome(member, end)
        self._settle_soon([cancelled for cancelled in hit if self.prompts.is_final(cancelled)])
        return hit

    def cancel_step(self) -> bool:
        """Interrupt the running step alone: what was said is kept, each call is answered, and the turn goes on with
        what waits for its next step. Returns whether a step runs that is ended by this.
        """
        if self._signal is None or self.journal.log.order.open_step is None:
            return False
        return self._signal.stop_step()

    def set_model(self, model: ResolvedModel, provider: ChatProvider) -> None:
        """Another model from the next turn on."""
        self._in_use.switch(model, provider)
        self.meter.price = model.settings.price
        self.journal.append("profile/model", {"model": model.name})

    def record(self, entries: list[LogEntry]) -> int:
        """Append events of the session (children, scores, notes); returns the next seq."""
        for entry in entries:
            self.journal.append(entry.type, entry.data)
        return self.journal.log.next_seq

    def fence(self) -> None:
        """Another writer took the log: stop at once, write nothing, kill what runs."""
        if self.failure is not None:
            return
        failure = self.failure = StoreError(f"another writer took {self.stream}", code="store.fenced")
        self._closed = True

        def refuse(_event: SessionEvent) -> None:
            raise failure

        self.journal.log.veto_with(refuse)
        if self._signal is not None:
            self._signal.stop("fenced", fenced=True)
        if self._driver is not None:
            self._driver.cancel()
        self.stop_maintenance()
        self._notices.stop()

    def watch(self) -> AgentProgress:
        """Where it stands now."""
        progress, fold = self.progress, self.journal.fold
        moved = progress.moved or time.monotonic()
        return AgentProgress(
            stream=self.stream,
            phase=progress.phase,
            turn=progress.turn,
            step=progress.step,
            output_tokens=fold.sums.output,
            total_tokens=fold.sums.usage().total,
            cost_usd=self.meter.cost_usd or 0.0,
            retries=progress.retries,
            since_ms=round((time.monotonic() - moved) * 1000),
            turns=fold.sums.turns,
            steps=fold.sums.steps,
            tool_calls=fold.sums.tool_calls,
        )

    async def close(self, *, cause: str = "closed") -> None:
        """Cancel what runs, close its brackets, end running commands. The log's controller is the host's to close."""
        self._closed = True
        if self.failure is None:
            self.cancel(None, cause)
        driver = self._driver
        if driver is not None:
            if self.failure is not None:
                driver.cancel()
            await asyncio.wait([driver])
        if self._maintenance is not None:
            await asyncio.wait([self._maintenance])
        if self._settlers:
            await asyncio.wait(self._settlers)
        if self.failure is None:
            if self._slots.leaving:
                self._notices.tell(self._slots.leaving, AgentLeaving(cause))
            await self._notices.close(LEAVING_S)
        else:
            await self._notices.end()
        await self._environment.close()

    def _wake_if_open(self) -> None:
        if not self._closed and self._has_work:
            self._wake()

    def _wake(self) -> None:
        if self._holders:
            return
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name=f"agent {self.stream}")

    async def _drive(self) -> None:
        try:
            await self._run_turns()
        except BaseException as error:
            if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                raise
            self._break(as_error(error))

    def _break(self, error: KimiRayError) -> None:
        """The agent itself failed, not its turn: whoever waits hears it now; its log is as it is, to be revived."""
        self.failure = error
        self._closed = True
        waiting = [
            record.prompt_id for record in self.journal.fold.prompts.values() if self.is_waiting(record.prompt_id)
        ]
        waiting += self._going_on
        self._undurable.clear()
        for prompt_id in dict.fromkeys(waiting):
            lost = self._untold[prompt_id] = self._outcome(prompt_id, "failed", None, error.to_data())
            self._on_outcome(prompt_id, lost)
        self._on_idle()

    async def _run_turns(self) -> None:
        while not self.failure:
            work = self._next_work()
            if work is None:
                break
            ids, turn_input, asked = work
            self._current = ids
            signal = self._signal = TurnSignal()
            if self._closed:
                signal.stop("closed")
            turn, reason = self.journal.log.order.next_turn, None
            try:
                if not (self._waking or self._slots.prompt) or await self._may_start(turn_input, signal):
                    self.meter.limits = asked.limits_over(self.spec.limits)
                    tools = (*self._tools, *self._final_answer())
                    config = self._configs.of(self.spec, self._in_use.model, self._in_use.provider, tools, asked)
                    reason = await self._loop.run(config, turn_input, signal)
            finally:
                self._signal = None
                self._current = []
            if signal.fenced or self.failure is not None:
                self.fence()
                return
            settled = list(dict.fromkeys([*self.prompts.active, *ids]))
            self._undurable.update(settled)
            if reason is None:
                self.prompts.active = []
            else:
                self.prompts.settle(turn, state_of(reason), error_of(reason))
                for prompt_id in ids:
                    if prompt_id in self._going_on:
                        self._goes_on_no_more(prompt_id, state_of(reason), turn)
            await self._settle_durably(settled)
        self._on_idle()

    def _goes_on_no_more(self, prompt_id: str, state: PromptState, turn: int | None) -> None:
        self._going_on.pop(prompt_id, None)
        self._went_on.put(prompt_id, state, turn, None)

    async def _may_start(self, work: TurnInput, signal: TurnSignal) -> bool:
        """Let those who listen hear of the agent first, and the prompt pass its gate. False: it has its final state."""
        try:
            if self._waking:
                with signal.interruptible():
                    await self._notices.settled()
                self._waking = False
            for record in work.prompts if self._slots.prompt else ():
                messages = await self._gates.admit(record, signal)
                if messages is None:
                    return False
                work.messages = messages
        except TurnStopped:
            # Before its turn began, so as if it still stood in the queue.
            for record in work.prompts:
                if not signal.fenced:
                    limit = signal.limit
                    state = "cancelled" if limit is None else "failed"
                    self.prompts.finish(record.prompt_id, state, error=None if limit is None else limit.to_data())
            return not work.prompts
        return True

    def _settle_soon(self, prompt_ids: list[str]) -> None:
        """Prompts ended outside a turn: tell of it once it is durable."""
        if not prompt_ids:
            return
        self._undurable.update(prompt_ids)
        task = asyncio.get_running_loop().create_task(self._settle_durably(prompt_ids))
        self._settlers.add(task)
        task.add_done_callback(self._settlers.discard)

    async def _settle_durably(self, prompt_ids: list[str]) -> None:
        try:
            await self.journal.flush()
        except KimiRayError as error:
            # The events stay retained and go on being sent; who waits for the result must hear of it now.
            self._undurable.difference_update(prompt_ids)
            for prompt_id in prompt_ids:
                lost = self._untold[prompt_id] = self._outcome(prompt_id, "failed", None, error.to_data())
                self._on_outcome(prompt_id, lost)
            return
        self._undurable.difference_update(prompt_ids)
        if not self._undurable:
            self.journal.forget_blobs()
        for prompt_id in prompt_ids:
            outcome = self.outcome(prompt_id)
            if outcome is not None:
                self._on_outcome(prompt_id, outcome)

    def _next_work(self) -> tuple[list[str], TurnInput, Asked] | None:
        if self._continuations and not self.prompts.waits_since(self._continuations[0].seq):
            entry = self._continuations.pop(0)
            prompt_id, kind, asked = entry.prompt_id, entry.kind, entry.asked
            record = self.prompts.get(prompt_id)
            if record is None:
                self.prompts.active = []
                return [prompt_id], TurnInput([], kind, self._gates, []), asked
            self.prompts.active = [prompt_id, *self.prompts.steered_into(prompt_id)]
            # Interrupted before its message was in the log: the prompt runs from its start.
            if record.content is None or record.heard:
                return [prompt_id], TurnInput([], kind, self._gates, []), asked
            return [prompt_id], TurnInput([record], kind, self._gates, self._gates.say(record)), asked
        record = self.prompts.start_next()
        if record is None:
            if self._closed or not self.inbox.wants_turn:
                return None
            return [], TurnInput([], self.inbox.kind, self._gates, []), NOTHING
        return [record.prompt_id], TurnInput([record], None, self._gates, self._gates.say(record)), Asked.by(record)

    def _final_answer(self) -> tuple[ToolSpec, ...]:
        if self.final is None:
            return ()
        active = (self.prompts.get(prompt_id) for prompt_id in self.prompts.active)
        return self.final.begin([record for record in active if record is not None])

    def _outcome(
        self,
        prompt_id: str,
        state: PromptState,
        turn: int | None,
        error: dict[str, Any] | None,
        fold: AgentFold | None = None,
    ) -> Outcome:
        now = self.journal.fold
        fold = fold or now
        found = fold.turns.get(turn) if turn is not None else None
        result = PromptResult(
            prompt_id=prompt_id,
            state=state,
            text=found.text if found is not None else "",
            turn=turn,
            stop=stop_of(found.reason) if found is not None else state,
            usage=found.usage if found is not None else Usage(),
            steps=found.steps if found is not None else 0,
            tool_calls=found.tool_calls if found is not None else 0,
            error=error,
        )
        return Outcome(
            stream=self.stream,
            prompt_id=prompt_id,
            result=told(result, fold, now.scores),
            # What is not on the disk yet may be written anew, and otherwise, by the next life of this agent.
            seq=self.journal.durable_seq,
            epoch=self.epoch,
            totals=fold.totals(self.meter.cost_of(fold.sums)),
            message_seq=found.message_seq if found is not None else None,
            served_model=fold.served_model,
            fingerprint=fold.fingerprint,
            workdir_path=self.workdir_path,
            node_id=self.node_id,
        )
