"""The turn: one run of the loop for one or more prompts, or a continuation without one.

Events of a turn, in order: ``turn/start``, ``prompt/started``; per step ``step/start``, ``user/message`` (of the
prompts that join here), ``request/header`` when it changed, ``assistant/chunk``..., ``llm/response``,
``assistant/message``, ``tool/call`` and ``tool/result`` per call, ``step/end``; then ``turn/end`` and
``prompt/completed``. However a turn ends, its brackets are closed. One that the user cancelled ends with a
``user/message`` that says so to the model. A step that alone was interrupted asks for no other one: the turn goes on
with what waits for its next step, or is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kimi_ray.agent.fold import PromptRecord
from kimi_ray.agent.inbox import Inbox, Note
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.limits import LimitMeter
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.requester import Answer, Progress, Requester
from kimi_ray.agent.slots import AgentSlots, RequestFailed, StepStarting, TurnEnded, TurnStarted, TurnStopping
from kimi_ray.agent.tool_runs import ToolRuns
from kimi_ray.agent.turn_config import TurnConfig
from kimi_ray.agent.turn_signal import StepStopped, TurnSignal, TurnStopped
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import KimiRayError, ProviderError, as_error
from kimi_ray.ids import new_message_id
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.header import describe_request
from kimi_ray.log import message_text
from kimi_ray.settings import Checkpoint

MAX_MENDS = 3
"""How often a step's request is made anew because a handler of ``request_failed`` mended the cause."""

_LIMIT_FACTS = frozenset({"name", "value", "used", "scope"})

INTERRUPTION = (
    "<system-reminder>\nThe user interrupted the turn above. What it was doing may be half done: do not take it for "
    "finished, and do not take it up again unless the user asks for it.\n</system-reminder>"
)


class Joins(Protocol):
    """The prompts that are steered into the running turn."""

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        ...

    async def join(self, signal: TurnSignal) -> list[dict[str, Any]]:
        """Let them join; gives their user messages.

        Raises:
            TurnStopped: the signal.
        """
        ...


@dataclass(slots=True)
class TurnInput:
    """What a turn starts with. ``joins`` is looked at behind each step."""

    prompts: list[PromptRecord]
    continuation: str | None
    """None, ``user``, ``recovery``, or the source kind of the note that began it."""
    joins: Joins
    messages: list[dict[str, Any]]
    """The user messages of the first step."""


@dataclass(slots=True)
class _Step:
    """What came of a step."""

    text: str = ""
    """The answer's; none for a step that was interrupted."""
    calls: bool = False
    """Whether the model is to hear the results of its calls."""
    truncated: bool = False
    ends: dict[str, Any] | None = None
    """The reason for which somebody wants the turn to end behind it."""


class TurnLoop:
    """Runs turns of one agent, one at a time.

    Args:
        journal: The agent's log.
        requester: Asks the model.
        tools: Runs tool calls.
        meter: The agent's limits.
        checkpoint: Where the loop waits for durability: ``request``, ``turn`` or ``none``.
        progress: Told where the turn is.
        session_id: For the provider.
        agent_id: For the provider.
        inbox: What the runtime itself has to tell.
        slots: Who else has a say.
        notices: Tells of turns.
    """

    def __init__(
        self,
        journal: Journal,
        requester: Requester,
        tools: ToolRuns,
        meter: LimitMeter,
        checkpoint: Checkpoint,
        progress: Progress,
        *,
        session_id: str,
        agent_id: str,
        inbox: Inbox | None = None,
        slots: AgentSlots | None = None,
        notices: Notices | None = None,
    ) -> None:
        self._inbox = inbox if inbox is not None else Inbox()
        self._slots = slots if slots is not None else AgentSlots()
        self._notices = notices if notices is not None else Notices(journal)
        self._journal = journal
        self._requester = requester
        self._tools = tools
        self._meter = meter
        self._checkpoint = checkpoint
        self._progress = progress
        self._session_id = session_id
        self._agent_id = agent_id

    async def run(self, config: TurnConfig, work: TurnInput, signal: TurnSignal) -> dict[str, Any]:
        """Run one turn to its end and return its reason.

        1. ``turn/start`` and ``prompt/started`` are appended.
        2. Steps run until the model asks for no tool, nobody joined and nobody wants it to go on; or until a handler
           ends the turn, a limit, an error or the signal.
        3. Open brackets are closed, ``turn/end`` is appended. Nothing is flushed here.

        A fenced writer writes nothing any more: the turn just stops.
        """
        journal, order = self._journal, self._journal.log.order
        turn = order.next_turn
        self._progress.turn = turn
        self._inbox.turn_begins()
        start: dict[str, Any] = {"turn": turn, "prompts": [prompt.prompt_id for prompt in work.prompts]}
        if work.continuation is not None:
            start["continuation"] = work.continuation
        journal.append("turn/start", start)
        for prompt in work.prompts:
            journal.append("prompt/started", {"prompt_id": prompt.prompt_id, "turn": turn})
        self._meter.start_turn(signal)
        try:
            reason = await self._steps(config, work, signal, turn)
        except TurnStopped:
            reason = self._stopped_reason(signal)
        except KimiRayError as error:
            reason = self._error_reason(error, signal)
        except BaseException as error:
            if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                raise
            reason = {"kind": "failed", "error": as_error(error).to_data()}
        finally:
            duration_ms = self._meter.end_turn()
        if not signal.fenced:
            self._close(turn, reason, duration_ms)
            if self._slots.turn_ended:
                self._notices.tell(self._slots.turn_ended, TurnEnded(turn, reason))
        self._progress.turn = self._progress.step = None
        self._progress.enter("idle")
        return reason

    async def _steps(self, config: TurnConfig, work: TurnInput, signal: TurnSignal, turn: int) -> dict[str, Any]:
        slots = self._slots
        say = work.messages
        if slots.turn_started:
            await self._tell_start(work, turn)
        self._meter.check_turn()
        step = 0
        granted: dict[str, int] = {}
        while True:
            signal.check()
            self._meter.check_request(step)
            done = await self._step(config, say, signal, turn, step)
            signal.check()
            if done.ends is not None:
                return done.ends
            say = await work.joins.join(signal) if work.joins.waiting else []
            if slots.turn_stopping and not (done.calls or say or self._inbox):
                say = await self._before_stop(done.text, turn, signal, granted)
                if work.joins.waiting:
                    say += await work.joins.join(signal)
            if not (done.calls or say or self._inbox):
                signal.check()
                return {"kind": "truncated" if done.truncated else "completed"}
            step += 1

    async def _step(
        self, config: TurnConfig, say: list[dict[str, Any]], signal: TurnSignal, turn: int, step: int
    ) -> _Step:
        """One step, from its start to its end; also when it alone is stopped, but not when the turn is."""
        journal, slots = self._journal, self._slots
        journal.append("step/start", {"turn": turn, "step": step})
        self._progress.step = step
        if self._inbox:
            for note in self._inbox.take():
                self._tell(note)
        for message in say:
            journal.append("user/message", message, surface="append")
        done = _Step()
        end: dict[str, Any] = {"turn": turn, "step": step}
        try:
            if slots.step:
                with signal.interruptible():
                    await slots.step.run(StepStarting(turn, step))
            answer, end["model_ms"] = await self._ask(config, signal, turn, step)
            end["tools_ms"] = 0
            calls = answer.tool_calls
            if calls:
                self._meter.check_tool_calls(len(calls))
                self._progress.enter("tools")
                # Whoever is asked about a call may take his time: that is no work of the agent's.
                runs = await self._tools.admit(calls, turn, step, signal, offered=[tool.name for tool in config.tools])
                began = self._meter.start_work(signal)
                try:
                    done.ends = await self._tools.run(runs, signal)
                finally:
                    end["tools_ms"] = self._meter.end_work(began)
            done.calls = bool(calls)
            done.truncated = answer.finish == "max-tokens"
            if slots.turn_stopping and not calls:
                done.text = message_text({"content": answer.content})
        except StepStopped:
            self._answer_open_calls({"kind": "step"})
        if signal.step_ended():
            end["interrupted"] = True
            done = _Step(ends=done.ends)
        end["store_ms"] = journal.take_store_wait_ms()
        journal.append("step/end", end)
        return done

    async def _tell_start(self, work: TurnInput, turn: int) -> None:
        text: str | None = None
        if work.prompts:
            [whole] = await self._journal.resolve([{"content": work.prompts[0].content}])
            text = message_text(whole)
        self._notices.tell(self._slots.turn_started, TurnStarted(turn, work.continuation or "user", text))

    async def _before_stop(
        self, text: str, turn: int, signal: TurnSignal, granted: dict[str, int]
    ) -> list[dict[str, Any]]:
        """What somebody has to say before the turn may end: one message, or none."""
        with signal.interruptible():
            asked = await self._slots.turn_stopping.run(TurnStopping(turn, text, granted))
        if asked.message is None:
            return []
        content, source = [self._journal.block(block) for block in asked.message["content"]], asked.message["source"]
        granted[source["kind"]] = granted.get(source["kind"], 0) + 1
        return [{"id": new_message_id(), "role": "user", "content": content, "source": source}]

    async def _ask(self, config: TurnConfig, signal: TurnSignal, turn: int, step: int) -> tuple[Answer, int]:
        """The step's answer and the milliseconds it took; a request whose cause of failure was mended is made anew."""
        slot, spent_ms, attempts = self._slots.request_failed, 0, 0
        for mends in range(MAX_MENDS + 1):
            request = await self._request(config, signal, turn, step)
            self._progress.enter("model")
            began = self._meter.start_work(signal)
            answer = failure = None
            try:
                answer = await self._requester.ask(request, config.route, signal, after=attempts)
            except ProviderError as error:
                if not slot or mends == MAX_MENDS:
                    raise
                failure = error
            finally:
                spent_ms += self._meter.end_work(began)
            if answer is not None:
                return answer, spent_ms
            assert failure is not None
            with signal.interruptible():
                asked = await slot.run(RequestFailed(turn, step, failure))
            if not asked.retry:
                raise failure
            attempts = failure.details["attempts"]
        raise AssertionError("the last round returns or raises")

    async def _request(self, config: TurnConfig, signal: TurnSignal, turn: int, step: int) -> ChatRequest:
        """The request from the log as it is now, with its header; all of it durable where that is asked for."""
        journal = self._journal
        request = ChatRequest(
            model=config.route.model,
            system=config.system,
            messages=await journal.wire_messages(),
            tools=config.tools,
            sampling=config.sampling,
            session_id=self._session_id,
            agent_id=self._agent_id,
            turn=turn,
            step=step,
        )
        if step == 0:
            self._head(config, request)
        self._progress.enter("store")
        with signal.interruptible():
            await journal.wait_for_store(durable=self._checkpoint == "request")
        return request

    def _head(self, config: TurnConfig, request: ChatRequest) -> None:
        header = describe_request(request, provider=config.route.provider.name) | config.header_extra
        for key in ("system", "tools"):
            if key in header:
                header[key] = self._journal.value(header[key])
        if header != self._journal.fold.header:
            known = self._journal.fold.header is not None
            self._journal.append("request/header", {"header": header, "reason": "change" if known else "initial"})

    def _tell(self, note: Note) -> None:
        self._journal.append(
            "user/message",
            {"id": new_message_id(), "role": "user", "content": note.content, "source": note.source},
            surface="append",
        )

    def _stopped_reason(self, signal: TurnSignal) -> dict[str, Any]:
        if signal.limit is not None:
            return self._error_reason(signal.limit, signal)
        return {"kind": "cancelled", "cause": signal.cause or "user"}

    def _error_reason(self, error: KimiRayError, signal: TurnSignal) -> dict[str, Any]:
        if error.code == "store.fenced":
            signal.fenced = True
        if error.code.startswith("limit.") and error.details.keys() >= _LIMIT_FACTS:
            return {"kind": "limit", **{key: error.details[key] for key in _LIMIT_FACTS}}
        if error.code == "provider.timeout":
            return {"kind": "timeout", "error": error.to_data()}
        return {"kind": "failed", "error": error.to_data()}

    def _close(self, turn: int, reason: dict[str, Any], duration_ms: int) -> None:
        order = self._journal.log.order
        self._answer_open_calls(reason)
        if order.open_step is not None:
            self._journal.append(
                "step/end",
                {"turn": turn, "step": order.open_step, "store_ms": self._journal.take_store_wait_ms()},
            )
        if reason["kind"] == "cancelled" and reason["cause"] == "user":
            self._remind()
        end = {"turn": turn, "reason": reason, "steps": order.next_step, "duration_ms": duration_ms}
        self._journal.append("turn/end", end)

    def _answer_open_calls(self, reason: dict[str, Any]) -> None:
        for call_id in list(self._journal.log.order.pending_calls):
            self._tools.refuse(call_id, reason)

    def _remind(self) -> None:
        """Tell the model that the user interrupted it; once, however often that happened before anybody spoke."""
        messages = self._journal.log.messages()
        if messages and messages[-1].get("source", {}).get("kind") != "interruption":
            self._tell(Note("interruption", [{"type": "text", "text": INTERRUPTION}], {"kind": "interruption"}))
