"""Agents and prompts as a program holds them. Plain objects of one driver; the living things are elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

from kimi_ray.errors import AgentError, ConfigError
from kimi_ray.events import SessionEvent, encode, freeze
from kimi_ray.features.compaction import CompactionResult, UndoResult, check_count, checked_instruction
from kimi_ray.features.permissions import Answer, AnswerScope, checked_answer, checked_mode
from kimi_ray.hosts.courier import Courier, Entry, Route
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.specs import Outcome, PromptResult, PromptSpec, PromptStatus
from kimi_ray.ids import MAIN, is_path_safe_id, new_message_id
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.log_following import follow_log
from kimi_ray.session import turn_reason
from kimi_ray.session.time_travel import point_of
from kimi_ray.session_lifecycle import Lifecycle
from kimi_ray.session_link import Notes, SessionLink
from kimi_ray.settings import Item, Limits, OnInterrupt, PermissionModeName, Sampling, check_settings
from kimi_ray.store.seam import Stream
from kimi_ray.tools.output_schema import schema_of

if TYPE_CHECKING:
    from kimi_ray.runs.prompts import Prompt
    from kimi_ray.runs.report import SwarmReport
    from kimi_ray.session_handle import AgentSwarmOptions, Session
    from kimi_ray.swarm_handle import SwarmHandle

T = TypeVar("T")
Content = str | Sequence[dict[str, Any]]
"""A prompt: text, or content blocks (``{"type": "text", "text": ...}`` and the like)."""

_FLUSH_S = 60.0
_COMPACT_S = 3600.0


@dataclass(frozen=True, slots=True)
class SessionServices:
    """What the runtime lends its sessions."""

    courier: Courier
    notes: Notes
    resolve_model: Callable[[str | ResolvedModel | None], ResolvedModel]
    lifecycle: Lifecycle
    features: Features


class Pending(Coroutine[Any, Any, T]):
    """Something under way that can be awaited, or left alone.

    A submit takes effect when it is made, in order; awaiting it waits until it is accepted durably.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin
        self._inner: Coroutine[Any, Any, T] | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._started().__await__()

    def send(self, value: Any, /) -> Any:
        """See ``Coroutine.send``."""
        return self._started().send(value)

    @overload
    def throw(self, typ: type[BaseException], val: object = None, tb: TracebackType | None = None, /) -> Any: ...
    @overload
    def throw(self, typ: BaseException, val: None = None, tb: TracebackType | None = None, /) -> Any: ...
    def throw(self, typ: Any, val: Any = None, tb: Any = None, /) -> Any:
        """See ``Coroutine.throw``."""
        return self._started().throw(typ if isinstance(typ, BaseException) else val if val is not None else typ())

    def close(self) -> None:
        """See ``Coroutine.close``."""
        if self._inner is not None:
            self._inner.close()

    def _started(self) -> Coroutine[Any, Any, T]:
        if self._inner is None:
            self._inner = self._begin()
        return self._inner


class PromptHandle:
    """A prompt that was given to an agent."""

    def __init__(self, agent: Agent, prompt_id: str, accepted: asyncio.Future[None]) -> None:
        """Use ``agent.submit``."""
        self.agent = agent
        self.id = prompt_id
        self._accepted = accepted
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"PromptHandle({self.id} of {self.agent.stream})"

    async def accepted(self) -> PromptHandle:
        """Wait until the prompt is durable: from then on no crash loses it.

        Raises:
            KimiRayError: why it was refused.
        """
        await asyncio.shield(self._accepted)
        return self

    async def result(self, timeout_s: float | None = None) -> PromptResult:
        """Wait for its end. Cancelling this await, or running into the time-out, cancels the prompt.

        Args:
            timeout_s: Seconds; None waits as long as it takes.

        Raises:
            AgentError: ``prompt.timeout``.
            KimiRayError: why the prompt was refused, or cannot be waited for any more. A prompt that failed does not
                raise here: see ``PromptResult.raise_for_state``.
        """
        if self._outcome is None:
            agent = self.agent
            try:
                async with asyncio.timeout(timeout_s):
                    self._outcome = await agent.services.courier.outcome(agent.route, self._accepted, self.id)
            except TimeoutError:
                await self._cancel("timeout")
                raise AgentError(
                    f"prompt {self.id} did not end within {timeout_s:g} s and was cancelled",
                    code="prompt.timeout",
                    details={"prompt_id": self.id, "timeout_s": timeout_s},
                ) from None
            except asyncio.CancelledError:
                agent.services.courier.afterwards(self.cancel())
                raise
            agent.ended(self._outcome)
        return self._outcome.result

    async def status(self) -> PromptStatus:
        """Where it stands now, and its turn once it has one: right behind a submit, unless it has to wait.

        Raises:
            KimiRayError: why the prompt was refused.
        """
        if self._outcome is not None:
            return PromptStatus(self._outcome.result.state, self._outcome.result.turn)
        await self.accepted()
        agent = self.agent
        return await agent.services.courier.call(agent.route, "prompt_status", agent.stream, self.id, group="control")

    async def cancel(self) -> bool:
        """Cancel it, queued or running; its text so far is kept. Returns whether there was something to cancel.

        The model is told that the user interrupted it, with its next turn.
        """
        return await self._cancel("user")

    async def _cancel(self, cause: str) -> bool:
        agent = self.agent
        hit: list[str] = await agent.services.courier.call(
            agent.route, "cancel", agent.stream, self.id, cause, group="control"
        )
        return self.id in hit


class Agent:
    """One agent of a session."""

    def __init__(self, session: Session, link: SessionLink, services: SessionServices, agent_id: str) -> None:
        """Use ``session.main`` or ``session.agent(id)``."""
        self.id = agent_id
        self.stream = Stream(link.id, agent_id)
        self.services = services
        self._session = session
        self._link = link
        self.route: Route = services.courier.route(
            self.stream, self._resolve, link.main_host if agent_id == MAIN else None
        )

    def __repr__(self) -> str:
        return f"Agent({self.stream})"

    def submit(
        self,
        prompt: Content,
        *,
        steer_if_active: bool = False,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        output_schema: Any = None,
        on_interrupt: OnInterrupt = "fail",
        prompt_id: str | None = None,
    ) -> Pending[PromptHandle]:
        """Give the agent a prompt. Prompts run one after the other, in the order of these calls, awaited or not.

        Awaiting the call waits until the prompt is durable.

        Args:
            prompt: Text, or content blocks.
            steer_if_active: Join the running turn, if there is one, instead of waiting for its end.
            sampling: For this prompt's turn, on top of the agent's.
            limits: For this prompt's turn, on top of the agent's.
            output_schema: A pydantic model, or a JSON schema, that the final answer must fit: it is the result's
                ``output``.
            on_interrupt: What becomes of it if its host is lost in the middle: ``fail`` or ``continue``.
            prompt_id: An id of the caller's own; the same id again is the same prompt.

        Raises:
            AgentError: ``prompt.empty``, ``prompt.id_conflict``; ``runtime.closed`` when nothing can be sent.
            ConfigError: ``output.bad_schema``; ``request.conflict`` for a schema of a prompt that joins another's turn.
        """
        spec = _prompt_spec(prompt, prompt_id, sampling, limits, on_interrupt, steer_if_active=steer_if_active)
        if output_schema is not None:
            spec = _with_schema(spec, output_schema)
        return self._give([spec], _only)

    def submit_many(
        self, prompts: Sequence[Content], *, sampling: Sampling | None = None, limits: Limits | None = None
    ) -> Pending[list[PromptHandle]]:
        """Give the agent several prompts, in this order. See ``submit``."""
        return self._give([_prompt_spec(prompt, None, sampling, limits, "fail") for prompt in prompts], list)

    def continue_turn(self, *, sampling: Sampling | None = None, limits: Limits | None = None) -> Pending[PromptHandle]:
        """Run a turn without a new message. See ``submit``."""
        spec = PromptSpec(new_message_id(), sampling=sampling, limits=limits, continuation=True)
        return self._give([spec], _only)

    async def cancel(self, prompt_id: str | None = None) -> list[str]:
        """Cancel a prompt, or all: the queued ones first, then the running one. Returns the ids that were hit."""
        return await self.services.courier.call(self.route, "cancel", self.stream, prompt_id, "user", group="control")

    async def cancel_step(self) -> bool:
        """Interrupt the running step alone. What the model has said is kept, running tools end and each call has its
        result; then the turn goes on with the prompts that were steered into it. With none, it is over.

        Returns:
            Whether a step was running.
        """
        return await self.services.courier.call(self.route, "cancel_step", self.stream, group="control")

    async def steer(self, prompt_ids: Sequence[str]) -> None:
        """Let queued prompts join the running turn."""
        await self.services.courier.call(self.route, "steer", self.stream, list(prompt_ids), group="control")

    async def messages(self, at: str | None = None, *, seq: int | None = None) -> list[dict[str, Any]]:
        """What the model would see now, or saw earlier.

        Args:
            at: A point as forks take it: ``"3"``, ``"3.2"``, ``"^3"``, what a fork there begins with.
            seq: In place of a point: as it was when that was the next event's, 0 up to the number of events.

        Raises:
            ConfigError: ``request.invalid``, ``request.conflict``, ``request.out_of_range`` {seq, next_seq};
                SessionError: ``session.fork_point_not_found``.
        """
        if at is not None or seq is not None:
            await self.flush()
            seq = await point_of(self.services.courier.store, self.stream, at, seq)
        return await self.services.courier.call(self.route, "messages", self.stream, seq, group="control")

    async def set_model(self, model: str | ResolvedModel) -> None:
        """Another model, from the next turn on.

        Raises:
            ConfigError: ``model.not_configured``.
        """
        resolved = self.services.resolve_model(model)
        await self._link.call("set_agent_model", self._link.id, self.id, resolved)
        if self.id == MAIN:
            self._link.spec = replace(self._link.spec, main=replace(self._link.spec.main, model=resolved))

    async def compact(self, instruction: str | None = None) -> CompactionResult | None:
        """Replace what was said, but for the last message, by the user's own words and a summary; durable when it
        returns. Prompts that come meanwhile run afterwards.

        Args:
            instruction: What you want of the summary.

        Returns:
            What became of it, or None when there is nothing to compact.

        Raises:
            AgentError: ``compaction.busy``: a turn runs or a prompt waits; ``compaction.cancelled``,
                ``compaction.changed``, ``compaction.summary``, ``compaction.commit``: nothing changed;
                ``compaction.persistence``: it is done, and not durable yet.
            ConfigError: ``request.invalid``.
        """
        checked_instruction(instruction)
        return await self.services.courier.call(
            self.route, "compact", self.stream, instruction, new_message_id(), group="wait", timeout_s=_COMPACT_S
        )

    async def undo(self, count: int = 1) -> UndoResult:
        """Take back the last prompts of the user and all that came of them: the model does not see them any more.
        What was done in files and elsewhere stays done.

        Args:
            count: How many prompts.

        Raises:
            AgentError: ``agent.busy``: a turn runs or a prompt waits; ``agent.undo_unavailable`` {reason}: there are
                fewer prompts, or they were compacted.
            ConfigError: ``request.invalid``.
        """
        check_count(count)
        result: UndoResult = await self.services.courier.call(
            self.route, "undo", self.stream, count, new_message_id(), group="store", timeout_s=_FLUSH_S
        )
        if self.id == MAIN:
            self.services.notes.add(self._link, prompt=result.last_prompt or "")
        return result

    async def set_permission_mode(self, mode: PermissionModeName) -> None:
        """Another permission mode, from the next tool call on; in the log when it returns, so it outlives any host.

        Args:
            mode: ``manual``, ``auto`` or ``yolo`` (``docs/permissions.md``).
        """
        checked_mode(mode, required=True)
        await self.services.courier.call(self.route, "set_permission_mode", self.stream, mode, group="control")

    async def decide(
        self, call_id: str, decision: Answer, *, scope: AnswerScope = "once", feedback: str | None = None
    ) -> None:
        """Answer the question about a tool call of this agent (``session.approvals()``).

        Args:
            call_id: Which.
            decision: ``allow`` or ``deny``.
            scope: ``session`` allows this agent all further calls like it: the same command, the same files, or, for
                other tools, the tool.
            feedback: What the model is to hear of a denial.

        Raises:
            ToolError: ``tool.not_asked``: the call does not wait for an answer (any more).
            ConfigError: ``request.invalid``.
        """
        checked_answer(call_id, decision, scope, feedback)
        await self.services.courier.call(
            self.route, "decide", self.stream, call_id, decision, scope, feedback, group="control"
        )

    async def wake(self) -> None:
        """Bring the agent to life if it is cold: prompts that it accepted before a crash run then.

        Raises:
            AgentError: ``agent.not_found``.
            ConfigError: ``model.not_configured`` for the model that its log names.
        """
        known = await self._link.call("find_agent", self._link.id, self.id, group="control")
        await self._resolve(known)

    async def swarm(
        self, prompt: Prompt | None, items: Iterable[str | dict[str, Any] | Item], **options: Unpack[AgentSwarmOptions]
    ) -> SwarmReport:
        """A swarm whose rollouts are this agent's children, and its result. See ``Session.start_swarm``."""
        return await self._session.swarm(prompt, items, **options, parent=self.id)

    async def start_swarm(
        self, prompt: Prompt | None, items: Iterable[str | dict[str, Any] | Item], **options: Unpack[AgentSwarmOptions]
    ) -> SwarmHandle:
        """``Session.start_swarm`` with this agent as the parent: its log tells of the swarm. Raises as that."""
        return await self._session.start_swarm(prompt, items, **options, parent=self.id)

    async def flush(self) -> None:
        """Everything of this agent is durable from here on."""
        await self.services.courier.call(self.route, "flush", [self.stream], group="store", timeout_s=_FLUSH_S)

    async def events(self, from_seq: int = 0, *, follow: bool = False) -> AsyncIterator[SessionEvent]:
        """The agent's events from a seq on; with ``follow`` also those to come, until the loop is left.

        Reading brings no agent to life.
        """
        if from_seq < 0:
            raise AgentError(f"a log has no event {from_seq}", code="request.out_of_range", hint="events count from 0")
        events = follow_log(self.services.courier, self.stream, from_seq, follow=follow)
        async with aclosing(events):
            async for event in events:
                yield event

    def ended(self, outcome: Outcome) -> None:
        """A prompt of this agent has ended: the session's document hears of it."""
        if self.id == MAIN and outcome.seq >= 0:
            self.services.notes.add(self._link, reason=turn_reason(outcome.result.stop))

    def _give(self, prompts: list[PromptSpec], shape: Callable[[list[PromptHandle]], T]) -> Pending[T]:
        entries: list[Entry] | None = None
        if _running_loop() is self.services.courier.loop:
            entries = self._send(prompts)

        async def begin() -> T:
            # Made outside of the loop (for `run_sync`): it takes effect when it is run.
            sent = entries if entries is not None else self._send(prompts)
            for entry in sent:
                await asyncio.shield(entry.accepted)
            return shape([PromptHandle(self, entry.prompt.prompt_id, entry.accepted) for entry in sent])

        return Pending(begin)

    def _send(self, prompts: list[PromptSpec]) -> list[Entry]:
        entries = self.services.courier.submit(self.route, prompts)
        if self.id == MAIN:
            for entry in entries:
                if not entry.prompt.continuation:
                    entry.accepted.add_done_callback(partial(self._accepted, entry.prompt))
        return entries

    def _accepted(self, prompt: PromptSpec, done: asyncio.Future[None]) -> None:
        """The session's document hears of a prompt of main's; of one that was refused it does not."""
        if not done.cancelled() and done.exception() is None:
            self.services.notes.add(self._link, prompt=prompt.content or prompt.text)

    async def _resolve(self, suspect: str | None) -> str:
        model: ResolvedModel | None = None
        for _ in range(2):
            try:
                return await self._link.call("agent_host", self._link.id, self.id, suspect, model)
            except AgentError as error:
                if error.code != "agent.model_needed" or model is not None:
                    raise
                model = self.services.resolve_model(str(error.details["model"]))
        raise AssertionError


def _with_schema(spec: PromptSpec, output_schema: Any) -> PromptSpec:
    if spec.steer_if_active:
        raise ConfigError(
            "a prompt with an output schema needs a turn of its own",
            code="request.conflict",
            hint="leave out steer_if_active",
        )
    return replace(spec, output_schema=schema_of(output_schema))


def _prompt_spec(
    prompt: Content,
    prompt_id: str | None,
    sampling: Sampling | None,
    limits: Limits | None,
    on_interrupt: OnInterrupt,
    *,
    steer_if_active: bool = False,
) -> PromptSpec:
    check_settings(sampling=(Sampling, sampling), limits=(Limits, limits))
    text = prompt if isinstance(prompt, str) else ""
    content = None if isinstance(prompt, str) else _checked_blocks(prompt)
    if prompt_id is not None and not (isinstance(prompt_id, str) and is_path_safe_id(prompt_id)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AgentError(
            f"{prompt_id!r} cannot be a prompt's id",
            code="prompt.bad_id",
            hint="use 1 to 128 letters, digits, _ and -, or leave it out",
        )
    if not (text.strip() if content is None else content):
        raise AgentError("the prompt is empty", code="prompt.empty", hint="give it some text")
    _check_storable(text if content is None else content)
    return PromptSpec(
        prompt_id=prompt_id or new_message_id(),
        text=text,
        content=content,
        sampling=sampling,
        limits=limits,
        on_interrupt=on_interrupt,
        steer_if_active=steer_if_active,
    )


def _checked_blocks(prompt: object) -> tuple[dict[str, Any], ...]:
    """Content blocks as they may be stored: one that no request can be made of would fail every later turn, too."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise _bad_prompt(f"a prompt of type {type(prompt).__name__}")
    blocks = tuple(cast("Sequence[object]", prompt))
    for number, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise _bad_prompt(f"block {number} of type {type(block).__name__}")
        body = cast("dict[str, Any]", block)
        kind = body.get("type")
        if kind not in ("text", "image"):
            raise _bad_prompt(f"block {number} of the kind {kind!r}")
        if kind == "text" and not isinstance(body.get("text"), str):
            raise _bad_prompt(f"block {number} without a text")
    return cast("tuple[dict[str, Any], ...]", blocks)


def _check_storable(content: Any) -> None:
    """Refused here, what no log can hold leaves nothing behind: no title, no last prompt of its session.

    Raises:
        LogError: ``log.not_json``.
    """
    if not (isinstance(content, str) and content.isascii()):
        encode(freeze(content))


def _bad_prompt(what: str) -> AgentError:
    return AgentError(
        f"a prompt cannot hold {what}" if what.startswith("block") else f"{what} cannot be submitted",
        code="prompt.invalid",
        hint='give text, or a list of blocks {"type": "text", "text": ...} and {"type": "image", ...}',
    )


def _only(handles: list[PromptHandle]) -> PromptHandle:
    return handles[0]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
