"""An agent whose first prompt is a rollout function: the user's code decides what it is asked, and what comes of it.

In the log ``prompt/submitted`` with the source ``{kind: rollout, function}`` says that the function runs from here on,
and ``prompt/completed`` that it has ended; between them are the turns that it asked for, each with its own prompt, and
what it scored and remarked. What it returned is in ``output/recorded``. A function whose process is lost has no middle
to go on from: a revival closes its prompts as interrupted, and the swarm begins another attempt.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from functools import partial
from typing import Any, cast

from kimi_ray.agent.limits import limit_error
from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.rollout import RolloutContext, context_of, is_over, plain
from kimi_ray.agent.specs import AgentProgress, Outcome, PromptResult, PromptSpec
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import AgentError, KimiRayError, RunError, as_error
from kimi_ray.log import Message
from kimi_ray.tools.carried import CarriedTool
from kimi_ray.tools.output_schema import problems_of
from kimi_ray.tools.results import storable
from kimi_ray.user_threads import call_in_thread

GRACE_S = 5.0
"""What a function has to end once it is cancelled; then the rollout ends without it."""

MAX_OUTPUT_BYTES = 1 << 20

_TRACEBACK_LINES = 20
_TRACEBACK_CHARS = 4000


class RolloutFunctionAgent(LiveAgent):
    """A living agent that runs ``spec.rollout`` for its first prompt. Built as any ``LiveAgent``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tell_outcome, self._tell_idle = self._on_outcome, self._on_idle
        self._on_outcome, self._on_idle = self._ended_one, self._idle_unless_running
        self._asks: dict[str, asyncio.Future[Outcome]] = {}
        self._running: asyncio.Task[None] | None = None
        self._root: str | None = None
        self._stop = asyncio.Event()
        self._why: tuple[str, KimiRayError | None] = ("closed", None)
        self._over = False

    @property
    def _runs(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def busy(self) -> bool:
        """See ``LiveAgent.busy``; a running function may ask at any moment."""
        return self._runs or super().busy

    def submit(self, specs: tuple[PromptSpec, ...]) -> None:
        """See ``LiveAgent.submit``: a prompt that names the function begins it, once."""
        for spec in specs:
            if spec.source is not None and "function" in spec.source:
                self._begin(spec)
            else:
                super().submit((spec,))

    def cancel(self, prompt_id: str | None, cause: str, *, limit: KimiRayError | None = None) -> list[str]:
        """See ``LiveAgent.cancel``: the function's own prompt takes all that it asked for with it."""
        if not self._runs or prompt_id not in (None, self._root):
            return super().cancel(prompt_id, cause, limit=limit)
        hit = super().cancel(None, cause, limit=limit)
        self._end_function(cause, limit)
        return [*hit, cast("str", self._root)]

    def fence(self) -> None:
        """See ``LiveAgent.fence``."""
        super().fence()
        self._end_function("fenced", None)

    async def close(self, *, cause: str = "closed") -> None:
        """See ``LiveAgent.close``: the function is cancelled first, and has ``GRACE_S``."""
        self._closed = True
        running = self._running
        if running is not None and not running.done():
            if self.failure is None:
                self.cancel(None, cause)
            self._end_function(cause, None)
            await asyncio.wait([running])
        await super().close(cause=cause)

    def watch(self) -> AgentProgress:
        """See ``LiveAgent.watch``; the phase is ``rollout`` while only the function works."""
        if self._runs and self.progress.phase == "idle":
            self.progress.phase = "rollout"
        return super().watch()

    # -- what the function may have done (``RolloutPowers``) --------------------------------------------------------

    def record_event(self, type: str, data: dict[str, Any]) -> None:
        """See ``RolloutPowers.record``."""
        if self._over or self.failure is not None:
            raise is_over()
        self.journal.append(type, data)

    async def turn(self, spec: PromptSpec) -> PromptResult:
        """See ``RolloutPowers.turn``."""
        if self._over or self._stop.is_set() or self.failure is not None:
            raise is_over()
        ended = self._asks[spec.prompt_id] = asyncio.get_running_loop().create_future()
        try:
            super().submit((spec,))
            return (await ended).result
        except asyncio.CancelledError:
            super().cancel(spec.prompt_id, "rollout")
            raise
        finally:
            self._asks.pop(spec.prompt_id, None)

    async def messages(self) -> list[Message]:
        """See ``RolloutPowers.messages``."""
        return await self.journal.resolve(self.journal.log.messages())

    # -- the course of the function ---------------------------------------------------------------------------------

    def _begin(self, spec: PromptSpec) -> None:
        if self._closed:
            raise AgentError(f"the agent {self.stream} is closed", code="agent.closed")
        if self.prompts.knows(spec.prompt_id):
            return  # the call came twice
        content = [self.journal.block({"type": "text", "text": spec.text})] if spec.text else []
        self.journal.append(
            "prompt/submitted", {"prompt_id": spec.prompt_id, "content": content, "source": spec.source}
        )
        self._root = spec.prompt_id
        self._running = asyncio.get_running_loop().create_task(self._run(spec), name=f"rollout {self.stream}")

    def _end_function(self, cause: str, limit: KimiRayError | None) -> None:
        if not self._stop.is_set():
            self._why = (cause, limit)
            self._stop.set()

    async def _run(self, spec: PromptSpec) -> None:
        try:
            state, error, output = await self._outcome_of(spec)
            self._over = True
            if self.failure is not None:
                return
            if state == "completed" and output is not None:
                self.journal.append("output/recorded", {"prompt_id": spec.prompt_id, "value": output, "by": "rollout"})
            self.prompts.finish(spec.prompt_id, state, error=error)
            self._undurable.add(spec.prompt_id)
            await self._settle_durably([spec.prompt_id])
        except BaseException as error:
            self._over = True
            if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                raise
            if self.failure is None:
                self._break(as_error(error))
            return
        self._running = None
        if not super().busy:
            self._tell_idle()

    async def _outcome_of(self, spec: PromptSpec) -> tuple[str, dict[str, Any] | None, Any]:
        """Run the function to its end, or to ours; gives its prompt's state, error and output."""
        call = self.spec.rollout
        assert call is not None
        try:
            await self.journal.flush()  # what it does in the world is not undone: first the log says that it began
            function: Any = cast("Any", cast("CarriedTool", call.function).opened()).function
            context = context_of(
                call,
                item=self.spec.item,
                prompt=spec.text,
                prompt_id=spec.prompt_id,
                environment=self._environment,
                powers=_Powers(self),
            )
        except KimiRayError as error:
            return "failed", error.to_data(), None
        work = asyncio.ensure_future(_call(function, context, call.function.name))
        stop = asyncio.ensure_future(self._stop.wait())
        limits = self.spec.limits
        time_s = limits.time_s if limits is not None else None
        try:
            await asyncio.wait({work, stop}, timeout=time_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not stop.done() and time_s is not None:
                self.cancel(None, "limit", limit=limit_error("time_s", time_s, time_s))
            if not work.done():
                context.cancelled.set()
                work.cancel()
                await asyncio.wait({work}, timeout=GRACE_S)
        finally:
            stop.cancel()
            context.cancelled.set()
            if not work.done():
                work.cancel()
        return self._judged(work, call.output_schema, call.function.name)

    def _judged(
        self, work: asyncio.Future[tuple[BaseException | None, Any]], schema: dict[str, Any] | None, name: str
    ) -> tuple[str, dict[str, Any] | None, Any]:
        if self._stop.is_set():
            cause, limit = self._why
            if limit is not None:
                return "failed", limit.to_data(), None
            error = AgentError(f"the rollout was cancelled ({cause})", code="turn.cancelled")
            return "cancelled", error.to_data(), None
        failure, value = work.result()
        if failure is not None:
            return "failed", _failure(failure, name).to_data(), None
        try:
            output = plain(value, f"what the rollout function {name} returned")
            _check_output(output, schema, name)
        except KimiRayError as error:
            return "failed", error.to_data(), None
        return "completed", None, output

    def _ended_one(self, prompt_id: str, outcome: Outcome) -> None:
        waiting = self._asks.get(prompt_id)
        if waiting is None:
            self._tell_outcome(prompt_id, outcome)
        elif not waiting.done():
            waiting.set_result(outcome)

    def _idle_unless_running(self) -> None:
        if not self._runs or self.failure is not None:
            self._tell_idle()


class _Powers:
    """The agent, as the function's context sees it."""

    def __init__(self, agent: RolloutFunctionAgent) -> None:
        self.record = agent.record_event
        self.turn = agent.turn
        self.messages = agent.messages


async def _call(function: Any, context: RolloutContext, name: str) -> tuple[BaseException | None, Any]:
    """What the function raised, or what it returned. Only our own cancel is raised."""
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004  an object whose call is async
            value = function(context)
        else:
            value = await _in_thread(function, context, name)
        while inspect.isawaitable(value):
            value = await value
    except BaseException as error:
        if ends_this_task(error):
            raise
        return error, None
    return None, value


async def _in_thread(function: Any, context: RolloutContext, name: str) -> Any:
    ended = call_in_thread(partial(function, context), f"rollout {name}")
    try:
        failure, value = await asyncio.shield(ended)
    except asyncio.CancelledError:
        # nothing interrupts a thread: it sees `ctx.cancelled`, and until it ends the rollout goes on, as long as may be
        await asyncio.wait({ended}, timeout=GRACE_S)
        raise
    if failure is not None:
        raise failure
    return value


def _failure(error: BaseException, name: str) -> KimiRayError:
    """An error of ours as it is, also out of a task group; anything else is the user's, with where it came from."""
    raised = _leaves(error)
    theirs = [one for one in raised if not isinstance(one, KimiRayError)]
    if not theirs:
        return cast("KimiRayError", raised[0])
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    lines = "".join(frames).splitlines()[-_TRACEBACK_LINES:]
    known = as_error(theirs[0])
    return RunError(
        storable(known.message),
        code="swarm.rollout_failed",
        details={
            "exception": type(theirs[0]).__name__,
            "origin": "rollout",
            "rollout": name,
            "traceback": storable("\n".join(lines))[-_TRACEBACK_CHARS:],
        },
    )


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for one in group.exceptions for leaf in _leaves(one)]


def _check_output(output: Any, schema: dict[str, Any] | None, name: str) -> None:
    from kimi_ray.events import encode

    size = len(encode(output))
    if size > MAX_OUTPUT_BYTES:
        raise RunError(
            f"the rollout function {name} returned {size} bytes of JSON",
            code="swarm.bad_output",
            hint=f"it may return {MAX_OUTPUT_BYTES}; write what is large into a file of the working directory",
        )
    problems = [] if schema is None else problems_of(schema, output)
    if problems:
        raise RunError(
            f"what the rollout function {name} returned does not fit the output schema: {'; '.join(problems)}",
            code="swarm.bad_output",
            details={"problems": problems, "rollout": name},
        )
