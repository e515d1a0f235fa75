"""Replaying one agent: the loop of today on a fresh log, a model that answers as recorded, each request compared.

The recording says what the replay cannot make: prompts and notices, what a compaction put in the place of what, where
a turn was stopped. Everything else is made anew: the request, its header, what becomes of an answer, the calls, the
form of their results. The first request that is not the recorded one ends the replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

from dishka import AsyncContainer

from kimi_ray.agent.final_answer import FinalAnswer
from kimi_ray.agent.fold import PromptRecord
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.limits import LimitMeter
from kimi_ray.agent.loop import TurnInput, TurnLoop
from kimi_ray.agent.slots import AgentSlots, RequestFailed, StepStarting, ToolDone, ToolGate
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.turn_config import NOTHING, Asked, TurnConfig, turn_config
from kimi_ray.agent.turn_signal import TurnSignal
from kimi_ray.errors import KimiRayError, LogError
from kimi_ray.events import SessionEvent, thaw
from kimi_ray.ids import new_ulid
from kimi_ray.llm.chat import ChatRequest, Chunk, ToolSpec
from kimi_ray.llm.header import describe_request
from kimi_ray.replay.answers import answer_of
from kimi_ray.replay.difference import Found
from kimi_ray.replay.judge import Judge
from kimi_ray.replay.malformed import MALFORMED
from kimi_ray.replay.models import model_of_turn
from kimi_ray.replay.options import ReplayOptions
from kimi_ray.replay.recording import Attempt, Outside, RecordedStep, RecordedTurn, Recording, Shortening, code_of
from kimi_ray.replay.report import AgentReplay, Divergence
from kimi_ray.replay.shortening import IGNORED, Cues, ShorteningPlayer
from kimi_ray.replay.sources import Blobs
from kimi_ray.replay.stage import Parts, Stage
from kimi_ray.replay.tools import NEVER_RUN, NOT_STARTED, AbsentTool, tools_of_today
from kimi_ray.settings import Limits, Profile, Sampling, Workdir
from kimi_ray.store.seam import Stream
from kimi_ray.tools.contract import Tool, ToolContext, ToolOutput

_REFUSALS = frozenset({"tool.bad_arguments", "tool.unknown"})
"""Codes of results that say that a call could not start: those of today are compared with the recorded ones."""


class _Diverged(Exception):
    """The replay of the agent is over."""


class AgentPlayer:
    """Replays one agent. ``play`` once.

    Args:
        stream: Which.
        recording: Its script.
        blobs: Its session's.
        options: How.
        stage: Where it is built.
    """

    def __init__(
        self, stream: Stream, recording: Recording, blobs: Blobs, options: ReplayOptions, stage: Stage
    ) -> None:
        self._stream = stream
        self._recording = recording
        self._blobs = blobs
        self._options = options
        self._stage = stage
        self._judge = Judge(stream, recording, blobs, options.ignore)
        self._imported = self._judge.imported
        self._shortening = ShorteningPlayer(
            self._judge, blobs, stage.models, Cues(self._leave, self._stop_at), ignored=IGNORED in options.ignore
        )
        self._model: str | None = None
        self._divergence: Divergence | None = None
        self._turns = self._calls = self._ran = 0
        self._script: list[tuple[int, RecordedStep, Attempt]] = []
        self._next = 0
        self._signal = TurnSignal()
        self._turn: RecordedTurn | None = None
        self._config: TurnConfig | None = None
        self._header: dict[str, Any] = {}
        self._reason: dict[str, Any] | None = None
        self._done: set[str] = set()
        self._really: set[str] = set()
        self._absent: set[str] = set()
        self.raised: Exception | None = None
        """What the observer raised: the replay ended there."""
        self.name = "recorded"
        """As a provider: that of the recording."""

    async def play(self) -> AgentReplay:
        """Replay the agent up to its end, or to where it first differs.

        Raises:
            KimiRayError: why its log cannot be read, or its agent not be built.
        """
        recording = self._recording
        spec = self._spec = self._bound(recording.bind or {})
        parts = Parts(self, self._tools_of, self._blobs.read, self._shortening.summarizer)
        scope = await self._stage.enter(spec, recording.header, recording.seed, parts)
        try:
            self._journal = await scope.get(Journal)
            self._loop = await scope.get(TurnLoop)
            self._final = await scope.get(FinalAnswer)
            self._tools: list[Tool] = await scope.get(list[Tool])
            (await scope.get(LimitMeter)).limits = Limits()
            await self._shortening.begin(scope)
            slots = await scope.get(AgentSlots)
            slots.step.register("replay", self._before_request)
            slots.request_failed.register("replay", self._after_failure)
            slots.tool_done.register("replay", self._after_call)
            slots.tool.register("replay", self._before_call, before=slots.tool.handlers[0] if slots.tool else None)
            self._journal.log.observe(self._follow)
            self._journal.log.observe(self._show)
            self._judge.advance(len(recording.seed))
            for turn in recording.turns:
                await self._play_turn(turn)
            if recording.stray:
                raise _answers_of_nothing(recording)
            await self._play_tail()
        except _Diverged:
            pass
        except KimiRayError as error:
            self._divergence = self._judge.failed(self._turn, error.to_data(), recording.next_seq)
        except MALFORMED as error:
            bad = LogError(f"the recording cannot be followed: {error!r}", code="log.bad_payload")
            self._divergence = self._judge.failed(self._turn, bad.to_data(), recording.next_seq)
        finally:
            await scope.leave()
        self._explain()
        return AgentReplay(
            session_id=self._stream.session_id,
            agent_id=self._stream.agent_id,
            turns=self._turns,
            ends=recording.ends,
            ends_where=recording.ends_where,
            requests=self._judge.requests,
            recorded_requests=recording.requests,
            summary_requests=self._shortening.requests,
            shortenings=self._shortening.places,
            shortenings_taken=self._shortening.taken,
            tool_calls=self._calls,
            tools_run=self._ran,
            tools_absent=tuple(sorted(self._absent)),
            ignored=dict(self._judge.skipped),
            divergence=self._divergence,
        )

    def _bound(self, bind: dict[str, Any]) -> AgentSpec:
        try:
            return AgentSpec(
                self._stream,
                new_ulid(),
                Profile.model_validate(bind.get("profile") or {"name": "recorded"}),
                model_of_turn(None, {}, self._stage.models).model,
                sampling=Sampling.model_validate(bind["sampling"]) if bind.get("sampling") else None,
                workdir=cast("Workdir | None", self._options.workdir),
            )
        except MALFORMED as error:
            raise LogError(
                f"{self._stream}: what the agent was bound with cannot be read: {error}", code="log.bad_payload"
            ) from error

    # -- a turn -----------------------------------------------------------------------------------------------------

    async def _play_turn(self, turn: RecordedTurn) -> None:
        self._check_on()
        self._turns += 1
        self._turn, self._script, self._next = turn, list(turn.attempts), 0
        journal = self._journal
        await self._put_all(turn.before, turn)
        for submitted in turn.submitted:
            journal.append("prompt/submitted", thaw(submitted))
        for prompt_id in turn.completed:
            if prompt_id in journal.fold.prompts:
                journal.append("prompt/completed", {"prompt_id": prompt_id, "state": "completed"})
        if turn.steps:
            await self._run(turn)
        await self._put_all(turn.behind, turn)
        await self._check_end(turn)
        self._judge.advance(turn.end)

    async def _play_tail(self) -> None:
        """What came behind the last turn."""
        recording = self._recording
        await self._put_all(recording.tail, None)
        if recording.tail and recording.turns:
            turn = recording.turns[-1]
            self._judge.advance(recording.next_seq)
            found = await self._judge.compare_messages(await self._journal.wire_messages(), self._journal)
            if found is not None:
                self._leave(self._judge.different("messages", found, turn, None, None))
                raise _Diverged

    async def _put_all(self, items: Sequence[Outside], turn: RecordedTurn | None) -> None:
        for item in items:
            if isinstance(item, Shortening) and item.compactions:
                self._use_for(item, turn)
            await self._shortening.put(item, turn)
            self._check_on()

    def _use_for(self, item: Shortening, turn: RecordedTurn | None) -> None:
        """The model of a compaction between turns: its settings are in the header of a turn with the same one."""
        compaction = item.compactions[0]
        header = compaction.header
        if compaction.model != self._model:
            header = turn.header if turn is not None and turn.model == compaction.model else None
        said = thaw(header or {})
        if compaction.requests:
            said.setdefault("model", compaction.requests[0].event.data["model"])
            self.name = str(compaction.requests[0].event.data["provider"])
        self._shortening.use(compaction.model, said, self)

    async def _run(self, turn: RecordedTurn) -> None:
        self._header = await self._blobs.header(turn.header or {})
        self.name = str(self._header.get("provider") or "recorded")
        signal = self._signal = TurnSignal()
        prompts = [self._journal.fold.prompts.get(one) or PromptRecord(one, None) for one in turn.prompts]
        chosen = model_of_turn(turn.model, self._header, self._stage.models)
        self._model = turn.model
        self._shortening.use(turn.model, self._header, self)
        # Whose turn it is: also of one that goes on with the work of a prompt that a crash cut short.
        active = prompts
        if turn.continuation == "recovery":
            active = [one for one in self._journal.fold.prompts.values() if one.state == "running"]
        tools = (*(_spec_of(tool) for tool in self._tools), *self._final.begin(active))
        sampling: dict[str, Any] = self._header.get("sampling") or {}
        if turn.continuation == "user":
            asked = Asked(Sampling.model_validate(sampling), None)  # what it asked for is in no event but the header
        else:
            asked = Asked.by(active[0]) if active else NOTHING
        spec = replace(self._spec, send_seed="seed" in sampling)
        config = turn_config(spec, chosen.model, self, tools, asked)
        self._config = config = replace(config, header_extra=config.header_extra | chosen.extra)
        first = thaw(turn.steps[0].said)
        work = TurnInput(prompts, turn.continuation, _Joins(self), first)
        self._check_on()
        self._reason = await self._loop.run(config, work, signal)
        self._check_on()

    def said_next(self) -> list[dict[str, Any]]:
        """The messages from outside that the step behind the present one begins with."""
        turn = self._turn
        assert turn is not None
        at = (self._journal.log.order.next_step) if self._journal.log.order.open_turn is not None else 0
        return turn.steps[at].said if at < len(turn.steps) else []

    async def _before_request(self, starting: StepStarting) -> None:
        turn = self._turn
        if turn is not None:
            step = turn.steps[starting.step] if starting.step < len(turn.steps) else None
            await self._shortening.before_request(starting, turn, step)
            if step is not None and not step.attempts and not step.headed:
                await self._stop_at(step)

    async def _after_failure(self, failed: RequestFailed) -> None:
        """A request that was made anew, because what it had was mended, is made anew here."""
        turn = self._turn
        assert turn is not None
        place, step, attempt = self._script[self._next - 1]
        again = self._next < len(self._script) and self._script[self._next][0] == place and not attempt.retried
        await self._shortening.after_failure(failed, turn, step, attempt, again=again)

    def _follow(self, event: SessionEvent) -> None:
        """Stop the turn, or its step, where the recording was stopped behind an answer or its last result."""
        if event.replaced is not None or event.type not in ("assistant/message", "tool/result"):
            return
        if event.type == "tool/result":
            self._done.add(event.data["message"]["source"]["call_id"])
            self._calls += 1
        if self._next == 0 or self._turn is None:
            return
        place, step, attempt = self._script[self._next - 1]
        if attempt.answered and self._done.issuperset(attempt.calls):
            if step.interrupted:
                self._signal.stop_step()
            elif self._turn.is_stopped and self._next == len(self._script) and place == len(self._turn.steps) - 1:
                self._stop()

    def _show(self, event: SessionEvent) -> None:
        """Show an event to who observes. A log keeps to itself what its observers raise; a replay does not."""
        observe = self._options.observe
        if observe is None or self.raised is not None:
            return
        try:
            observe(self._stream, event)
        except Exception as error:  # noqa: BLE001  it is raised where the replay ends
            self.raised = error
            self._signal.stop("replay")

    def _stop(self) -> None:
        reason = (self._turn.reason if self._turn is not None else None) or {}
        self._signal.stop(str(reason.get("cause") or "replay") if reason.get("kind") == "cancelled" else "replay")

    async def _stop_at(self, step: RecordedStep | None) -> None:
        """Something was cut off here, if its step, or its turn there, was stopped: then this does not return."""
        turn = self._turn
        if step is None or turn is None:
            return
        if step.interrupted:
            self._signal.stop_step()
        elif turn.is_stopped and step is turn.steps[-1]:
            self._stop()
        else:
            return
        await _for_ever()

    # -- the model --------------------------------------------------------------------------------------------------

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """See ``ChatProvider``: compares the request with the recorded one, then answers as recorded."""
        if request.purpose == "compaction":
            async for chunk in self._shortening.stream(request):
                yield chunk
            return
        turn = self._turn
        assert turn is not None
        judge = self._judge
        asking = turn.steps[request.step] if request.step < len(turn.steps) else None
        if asking is not None and asking.interrupted and not asking.attempts:  # it was stopped before it asked
            self._signal.stop_step()
            await _for_ever()
        if self._next == len(self._script):
            if turn.is_stopped or not self._script:
                self._stop()
            else:
                self._leave(judge.extra(request, turn))
            await _for_ever()
        place, step, attempt = self._script[self._next]
        if place != request.step:
            early = place > request.step
            self._leave(judge.extra(request, turn) if early else judge.missing(turn, step, attempt, None))
            await _for_ever()
        self._next += 1
        judge.advance(attempt.seq)
        try:
            found = await self._compare(request)
        except KimiRayError as error:  # what the recording keeps by reference is not there
            self._leave(judge.failed(turn, error.to_data(), attempt.seq))
            await _for_ever()
        if found is not None:
            self._leave(judge.different("request", found, turn, step, attempt))
            await _for_ever()
        judge.requests += 1
        self._done = set()
        answer = answer_of(attempt)
        for chunk in answer.chunks():
            yield chunk
        failure = answer.failure()
        if failure is not None:
            raise failure
        if answer.cut:
            if step.interrupted:
                self._signal.stop_step()
            elif self._imported or (turn.is_stopped and self._next == len(self._script)):
                self._stop()
            else:
                lost = _lost_answer(judge.requests - 1, turn, step)
                self._leave(judge.failed(turn, lost.to_data(), attempt.seq))
            await _for_ever()

    async def close(self) -> None:
        """See ``ChatProvider``."""

    async def _compare(self, request: ChatRequest) -> Found | None:
        config = self._config
        assert config is not None
        if request.step == 0 and request.attempt == 1:
            today = describe_request(request, provider=self.name) | config.header_extra
            found = self._judge.compare_header(self._header, today)
            if found is not None:
                return found
        return await self._judge.compare_messages(request.messages, self._journal)

    # -- tools ------------------------------------------------------------------------------------------------------

    async def _tools_of(self, container: AsyncContainer) -> list[Tool]:
        recorded: dict[str, dict[str, Any]] = {}
        for turn in self._recording.turns:
            listed: Any = (await self._blobs.header(turn.header or {})).get("tools")
            for said in cast("list[dict[str, Any]]", listed) if isinstance(listed, list) else ():
                recorded.setdefault(said["name"], said)
        names = list(recorded)
        if self._imported or not names:
            names += [
                block["name"]
                for turn in self._recording.turns
                for _, _, attempt in turn.attempts
                for block in attempt.content
                if block["type"] == "tool-call" and self._imported
            ]
        own = () if self._imported else cast("Sequence[Tool]", self._options.own_tools)
        servers = self._options.tools == "real" and not self._imported
        features = self._stage.features
        found = await tools_of_today(names, recorded, features, container, own, self._run_tool, ask_servers=servers)
        if not self._imported:  # of another program's tools nothing is compared
            self._absent.update(tool.name for tool in found if tool.is_absent)
        return [*found]

    async def _run_tool(self, tool: Tool, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        result = self._result_of(context.call_id)
        background = bool(arguments.get("run_in_background"))
        recorded = self._options.tools == "recorded" or tool.name in NEVER_RUN or background or _was_refused(result)
        if not recorded and isinstance(tool, AbsentTool):
            self._absent.add(tool.name)
            recorded = True
        if recorded:
            return ToolOutput("")  # what was recorded takes its place
        self._really.add(context.call_id)
        self._ran += 1
        return await tool.run(arguments, context)

    async def _before_call(self, gate: ToolGate) -> None:
        """A call that was cut off has that result, also where an equal one before it had its own."""
        result = self._result_of(gate.call_id)
        if result is not None and code_of(result) in NOT_STARTED:
            gate.allow()

    async def _after_call(self, done: ToolDone) -> None:
        """Put the recorded output in the place of one that a tool did not make now."""
        if done.call_id in self._really or done.name == self._final.name:
            return
        step = self._script[self._next - 1][1] if self._next else None
        if step is not None and step.todos and done.executed:
            self._journal.append("todo/write", thaw(step.todos.pop(0)))
        result = self._result_of(done.call_id)
        if result is None:
            self._stop()  # the recording ends before it
            return
        code = code_of(result)
        if not done.executed and (code is None or code in _REFUSALS):
            return  # today's refusal: what becomes of it is compared
        block = result["message"]["content"][0]
        try:
            content = await self._blobs.blocks(block["content"])
        except KimiRayError as error:
            assert self._turn is not None
            self._leave(self._judge.failed(self._turn, error.to_data(), self._turn.end))
            return
        done.output = ToolOutput(
            content,
            is_error=bool(block.get("is_error")),
            error_code=code,
            exit_code=result.get("exit_code"),
            meta=thaw(result.get("meta")),
            bounded=True,
        )

    def _result_of(self, call_id: str) -> dict[str, Any] | None:
        return self._script[self._next - 1][1].results.get(call_id) if self._next else None

    # -- the end of a turn ------------------------------------------------------------------------------------------

    async def _check_end(self, turn: RecordedTurn) -> None:
        """All its requests were made, and what stands behind the last one is as it was, too."""
        judge = self._judge
        if self._next < len(self._script):
            _, step, attempt = self._script[self._next]
            self._leave(judge.missing(turn, step, attempt, self._reason))
        elif turn.reason is not None:
            judge.advance(turn.end)
            found = await judge.compare_messages(await self._journal.wire_messages(), self._journal)
            if found is not None:
                _, step, attempt = self._script[-1] if self._script else (0, None, None)
                self._leave(judge.different("messages", found, turn, step, attempt))
            elif not self._imported and turn.steps and not turn.is_stopped and self._reason is not None:
                then, now = turn.reason["kind"], self._reason["kind"]
                if then != now:
                    self._leave(judge.different("messages", ("reason.kind", then, now), turn, None, None))
        self._check_on()

    def _explain(self) -> None:
        """What differs behind a loss need not be of today's code: nobody can tell, so it is not told as that."""
        found, turn, lost = self._divergence, self._turn, self._recording.lost
        if found is None or found.kind == "failed" or not lost or (turn is not None and turn.end <= lost[0].seq):
            return
        what = found.message.removeprefix(f"{self._stream}: ")
        error = _lost_before(lost, what).to_data()
        self._divergence = self._judge.failed(turn, error, self._recording.next_seq)

    def _check_on(self) -> None:
        """Whether it goes on."""
        if self._divergence is not None or self.raised is not None:
            raise _Diverged

    def _leave(self, divergence: Divergence) -> None:
        self._divergence = self._divergence or divergence
        self._signal.stop("replay")


class _Joins:
    """What joins a replayed turn: what came from outside at the start of its next step."""

    def __init__(self, player: AgentPlayer) -> None:
        self._player = player

    @property
    def waiting(self) -> bool:
        return bool(self._player.said_next())

    async def join(self, signal: TurnSignal) -> list[dict[str, Any]]:
        return thaw(self._player.said_next())


def _spec_of(tool: Tool) -> ToolSpec:
    return ToolSpec(tool.name, tool.description, tool.parameters)


def _was_refused(result: dict[str, Any] | None) -> bool:
    """Whether somebody else than the tool gave the result."""
    if result is None:
        return True
    return code_of(result) in NOT_STARTED or "recovered_at" in result


def _answers_of_nothing(recording: Recording) -> LogError:
    return LogError(
        f"{len(recording.stray)} answers of the model stand outside of any step, the first at event"
        f" {recording.stray[0]}: events are missing before them",
        code="log.out_of_order",
        hint="the log is damaged: what was asked for these answers is not in the replay",
        details={"seqs": recording.stray[:100]},
    )


def _lost_answer(request: int, turn: RecordedTurn, step: RecordedStep) -> LogError:
    return LogError(
        f"the recording has lost something: of request {request} (turn {turn.number}, step {step.number}), which was"
        " not stopped, the events that an answer belongs to are not there",
        code="log.out_of_order",
        hint="the log is damaged: what it was answered cannot be said again",
        details={"turn": turn.number, "step": step.number},
    )


def _lost_before(lost: Sequence[SessionEvent], what: str) -> LogError:
    places = [place for event in lost for place in event.data["lost"]]
    counts = [place.get("count") for place in places]
    total = 0 if None in counts else sum(counts)
    many = "events" if total == 0 else f"{total} event{'' if total == 1 else 's'}"
    return LogError(
        f"the recording has lost something ({many}, the first before its event {lost[0].seq}), maybe the events that"
        f" an answer belongs to; behind it {what}",
        code="log.out_of_order",
        hint="the session was saved from a damaged one: what differs behind a loss may come of it",
        details={"seqs": [event.seq for event in lost[:100]]},
    )


async def _for_ever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError
