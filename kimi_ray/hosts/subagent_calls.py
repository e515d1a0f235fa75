"""The caller's side of subagents: a child is made, given its prompts and waited for, through lost hosts.

The same for a program (``session.run_subagent``) and for an agent whose model asked: both speak to the session's host
for what only the session can say, and to the child's own host for its prompts, as a driver does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptSpec
from kimi_ray.agent.subagents import SubagentResult, SubagentStatus, SummaryPolicy
from kimi_ray.errors import AgentError, KimiRayError, error_from_data
from kimi_ray.hosts.courier import Courier, Route
from kimi_ray.hosts.ports import Group
from kimi_ray.hosts.subagent_words import BeginSubagent, EndSubagent, Inherited, ReadyChild, SpawnSubagent
from kimi_ray.ids import new_message_id
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.settings import Limits, Usage
from kimi_ray.store.seam import Stream

SUMMARY_PROMPT = (
    "Your answer is too short for the one who gave you the task: it is all that they see of your work. Answer again, in"
    " full: what you did, what you found, with names of files and the facts that matter, and what is left open."
)
"""What a child is asked whose answer was too short."""

_CANCEL_S = 30.0
"""How long a cancelled child has to say how it ended."""

_T = TypeVar("_T")


class SessionCaller(Protocol):
    """The way to a session's host, wherever it is by now."""

    @property
    def id(self) -> str:
        """The session."""
        ...

    async def call(self, method: str, *args: Any, group: Group = "default", timeout_s: float = ...) -> Any:
        """Call for something that may be asked twice. Raises what the host raised."""
        ...


@dataclass(slots=True)
class RunWish:
    """What a run of a child is to be like; see ``Subagents.run``."""

    timeout_s: float | None = None
    summary: SummaryPolicy | None = None
    signal: asyncio.Event | None = None
    on_started: Callable[[], None] | None = None
    will_retry: bool = False


@dataclass(slots=True)
class _Run:
    """A run on its way."""

    child: ReadyChild
    run_id: str
    route: Route
    wish: RunWish
    deadline: float | None
    accepted: bool = False
    text: str = ""
    usage: Usage = field(default_factory=Usage)
    last: Outcome | None = None

    @property
    def agent_id(self) -> str:
        return self.child.agent_id


class SubagentCalls:
    """The children of one agent.

    Args:
        courier: Of this process.
        session: The session.
        caller: The agent whose children they are.
        resolve_model: How to reach a model by name, for a child from another time.
        by_agent: Whether the caller's own turn waits; then its children are forgotten here when they have ended.
        route: The way to an agent of the session.
    """

    def __init__(
        self,
        courier: Courier,
        session: SessionCaller,
        caller: str,
        resolve_model: Callable[[str], ResolvedModel],
        *,
        by_agent: bool,
        route: Callable[[str, str | None], Route] | None = None,
    ) -> None:
        self._courier = courier
        self._session = session
        self._caller = caller
        self._resolve_model = resolve_model
        self._by_agent = by_agent
        self._route_of = route or self._own_route

    async def spawn(self, spec: SpawnSubagent) -> ReadyChild:
        """Make a child. Raises as ``SessionSubagents.spawn``."""

        async def spawn(model: ResolvedModel | None) -> ReadyChild:
            said = spec if model is None else replace(spec, model=model)
            return await self._session.call("spawn_subagent", self._session.id, said)

        return await self._with_model(spawn)

    async def check(self, agent_id: str, *, whosever: bool = False) -> ReadyChild:
        """See ``SessionSubagents.check``; ``whosever``: what any agent is, whatever it does."""
        caller = None if whosever else self._caller
        return await self._session.call("check_subagent", self._session.id, caller, agent_id, group="control")

    async def run(
        self, agent_id: str, prompt: str | None, wish: RunWish, inherited: Inherited | None = None
    ) -> SubagentResult:
        """Give a child its prompt and wait; see ``Subagents.run``.

        Raises:
            AgentError: ``agent.already_running``.
        """
        run_id = new_message_id()
        begin = BeginSubagent(self._caller, agent_id, run_id, None, inherited, self._by_agent)
        run: _Run | None = None
        try:
            child = await self._begin(begin)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + wish.timeout_s if wish.timeout_s else None
            run = _Run(child, run_id, self._route_of(agent_id, child.host), wish, deadline)
            result = await self._drive(run, prompt, child.limits)
        except asyncio.CancelledError:
            self._courier.afterwards(self._abort(agent_id, run_id, run))
            raise
        except KimiRayError as error:
            if run is None:
                if error.code == "agent.already_running":
                    raise
                return SubagentResult(agent_id, "", "failed", error=error.to_data())
            result = self._result(run, "failed", error)
        # Its end is told even if nobody waits for that any more.
        telling = self._courier.spawn(self._tell(run, result))
        await asyncio.shield(telling)
        return result

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _begin(self, spec: BeginSubagent) -> ReadyChild:
        async def begin(model: ResolvedModel | None) -> ReadyChild:
            return await self._session.call("begin_subagent", self._session.id, replace(spec, model=model))

        return await self._with_model(begin)

    async def _drive(self, run: _Run, prompt: str | None, limits: Limits | None) -> SubagentResult:
        """The prompt, and again when the answer is too short."""
        source = {"kind": "subagent", "agent_id": self._caller} if self._by_agent else None
        first = PromptSpec(
            run.run_id,
            prompt or "",
            limits=limits,
            on_interrupt="continue",
            continuation=prompt is None,
            source=source if prompt is not None else None,
        )
        status, error = await self._ask(run, first)
        summary = run.wish.summary
        if summary is not None:
            for _ in range(summary.retries):
                if status != "completed" or len(run.text.strip()) >= summary.min_chars:
                    break
                before = run.text
                again = replace(
                    first, prompt_id=new_message_id(), text=SUMMARY_PROMPT, continuation=False, source=source
                )
                status, error = await self._ask(run, again)
                if status == "failed":
                    # What it had answered stands.
                    status, error = "completed", None
                if len(before.strip()) >= len(run.text.strip()):
                    run.text = before
        return self._result(run, status, error)

    async def _ask(self, run: _Run, prompt: PromptSpec) -> tuple[SubagentStatus, KimiRayError | None]:
        """One prompt to its end."""
        (entry,) = self._courier.submit(run.route, [prompt])
        entry.accepted.add_done_callback(lambda done: self._accepted(run, done))
        outcome = asyncio.ensure_future(self._courier.outcome(run.route, entry.accepted, prompt.prompt_id))
        try:
            why = await self._until_ended(run, outcome)
            if why is not None:
                await self._cancel(run.route)
                await asyncio.wait([outcome], timeout=_CANCEL_S)
        finally:
            if not outcome.done():
                outcome.cancel()
        if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
            ended = run.last = outcome.result()
            if prompt.continuation and _is_unknown(ended):
                # Its host was lost, and what had no message with it.
                return await self._ask(run, replace(prompt, prompt_id=new_message_id()))
            run.text = ended.result.text or run.text
            run.usage = run.usage.plus(ended.result.usage)
            if why is None or ended.result.state == "completed":
                return _judged(ended)
        elif why is None:
            return "failed", _error_in(outcome)
        return why, _why(run.agent_id, why, run.wish.timeout_s)

    async def _until_ended(self, run: _Run, outcome: asyncio.Future[Outcome]) -> SubagentStatus | None:
        """None when it ended by itself, else why it is to be cancelled."""
        signal = run.wish.signal
        stop = asyncio.ensure_future(signal.wait()) if signal is not None else None
        left = None if run.deadline is None else max(0.0, run.deadline - asyncio.get_running_loop().time())
        try:
            waits = [outcome] if stop is None else [outcome, stop]
            done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if stop is not None:
                stop.cancel()
        if outcome in done:
            return None
        return "cancelled" if done else "timed_out"

    def _accepted(self, run: _Run, done: asyncio.Future[None]) -> None:
        if done.cancelled() or done.exception() is not None or run.accepted:
            return
        run.accepted = True
        if run.wish.on_started is not None:
            run.wish.on_started()

    def _result(self, run: _Run, status: SubagentStatus, error: KimiRayError | None) -> SubagentResult:
        return SubagentResult(
            run.agent_id,
            run.child.profile,
            status,
            run.text,
            run.usage,
            error.to_data() if error is not None else None,
            started=run.accepted,
            rate_limited=status == "failed" and error is not None and error.error_class == "rate_limit",
        )

    async def _tell(self, run: _Run, result: SubagentResult) -> None:
        """The caller's log hears how it ended."""
        goes_on = result.rate_limited and run.wish.will_retry
        stop = "rate limit" if goes_on else "completed" if result.status == "completed" else result.status
        # One that was cancelled did not fail.
        error = None if result.status in ("completed", "cancelled") else result.error
        await self._end(run.agent_id, run.run_id, stop, run.last, error, goes_on=goes_on)
        if self._by_agent:
            self._courier.drop(run.route)

    async def _end(
        self,
        agent_id: str,
        run_id: str,
        stop: str,
        last: Outcome | None,
        error: dict[str, Any] | None,
        *,
        goes_on: bool = False,
    ) -> None:
        known = last is not None and last.seq >= 0
        totals: AgentTotals | None = last.totals if last is not None and known else None
        end = EndSubagent(
            self._caller,
            agent_id,
            run_id,
            stop,
            last.seq if last is not None else -1,
            last.epoch if last is not None else -1,
            last.message_seq if last is not None and known else None,
            error,
            goes_on=goes_on,
            totals=totals,
        )
        await self._session.call("end_subagent", self._session.id, end, group="store")

    async def _abort(self, agent_id: str, run_id: str, run: _Run | None) -> None:
        """Whoever waited is gone: the child's turn is cancelled, and the end told."""
        route = run.route if run is not None else self._route_of(agent_id, None)
        try:
            await self._cancel(route)
            last = run.last if run is not None else None
            if run is not None and last is None and run.accepted:
                last = await self._last_of(route, run_id)
            await self._end(agent_id, run_id, "cancelled", last, None)
        finally:
            if self._by_agent:
                self._courier.drop(route)

    async def _last_of(self, route: Route, run_id: str) -> Outcome | None:
        """How a cancelled run ended, if it says so in time."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.set_result(None)
        try:
            async with asyncio.timeout(_CANCEL_S):
                return await self._courier.outcome(route, accepted, run_id)
        except TimeoutError:
            return None
        except KimiRayError as error:
            self._courier.last_error = error
            return None  # its log says how far it came: the session reads it there

    async def _cancel(self, route: Route) -> None:
        try:
            await self._courier.call(route, "cancel", route.stream, None, "parent", group="control")
        except KimiRayError as error:
            if error.code != "agent.not_found":
                self._courier.last_error = error  # whoever waits for the child hears what became of it

    def _own_route(self, agent_id: str, host: str | None) -> Route:
        async def resolve(suspect: str | None) -> str:
            async def ask(model: ResolvedModel | None) -> str:
                return await self._session.call("agent_host", self._session.id, agent_id, suspect, model)

            return await self._with_model(ask)

        route = self._courier.route(Stream(self._session.id, agent_id), resolve, host)
        if host is not None and route.host is None:
            route.host = host
        return route

    async def _with_model(self, ask: Callable[[ResolvedModel | None], Awaitable[_T]]) -> _T:
        """Ask, and again with the model that the session was not told how to reach."""
        try:
            return await ask(None)
        except AgentError as error:
            if error.code != "agent.model_needed":
                raise
            return await ask(self._resolve_model(str(error.details["model"])))


def _is_unknown(outcome: Outcome) -> bool:
    return outcome.seq < 0 and (outcome.result.error or {}).get("code") == "prompt.not_found"


def _judged(outcome: Outcome) -> tuple[SubagentStatus, KimiRayError | None]:
    """What the end of a child's turn means to its caller."""
    result = outcome.result
    if result.stop == "truncated":
        error = AgentError(
            f"the answer of {outcome.stream.agent_id} was cut off at the model's limit of output tokens",
            code="agent.max_tokens_exceeded",
            hint="ask for less at once, or raise max_output_tokens",
            details={"agent_id": outcome.stream.agent_id},
        )
        return "failed", error
    if result.state == "completed":
        return "completed", None
    if result.state == "cancelled":
        return "cancelled", _why(outcome.stream.agent_id, "cancelled", None)
    if result.error is not None:
        return "failed", error_from_data(result.error)
    return "failed", AgentError(
        f"{outcome.stream.agent_id} ended {result.state} ({result.stop})", code=f"prompt.{result.state}"
    )


def _why(agent_id: str, status: SubagentStatus, timeout_s: float | None) -> AgentError:
    if status == "timed_out":
        return AgentError(
            f"{agent_id} timed out after {timeout_s:g} s",
            code="agent.timed_out",
            hint="give it more time (timeout_s of the call, subagent_timeout_s for the tools), or go on with it: its"
            " log has what it did",
            details={"agent_id": agent_id, "timeout_s": timeout_s},
        )
    return AgentError(f"{agent_id} was cancelled", code="agent.cancelled", details={"agent_id": agent_id})


def _error_in(future: asyncio.Future[Outcome]) -> KimiRayError:
    error = None if future.cancelled() else future.exception()
    if isinstance(error, KimiRayError):
        return error
    return KimiRayError(repr(error), code="internal")
