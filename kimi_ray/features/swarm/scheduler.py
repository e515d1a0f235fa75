"""Runs the tasks of a swarm to their ends: one result for each, in their order, whatever becomes of an attempt.

It knows a launcher, a clock and the rules of ``LaunchPlan``; what an agent is, it does not know.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from kimi_ray.errors import AgentError, KimiRayError, as_error
from kimi_ray.features.swarm.launch_plan import LaunchPlan

Status = Literal["completed", "failed", "aborted"]
State = Literal["started", "not_started"]

RATE_LIMIT = "rate_limit"
TIMED_OUT = "Subagent timed out."
SUSPENDED = "Provider rate limit; subagent requeued for retry."
INTERRUPTED = "This subagent batch was interrupted before this subagent finished."
INTERRUPTED_WAITING = "This subagent batch was interrupted before this subagent was started."

STOP_MS = 10_000
"""How long an attempt whose time is up may take to end; then its place is given to another."""
_LEAVE_S = 1.0
"""How long attempts may take to end once the whole is over; the tool's own grace is 2 s."""


@dataclass(frozen=True, slots=True)
class SwarmTask:
    """One subagent's work. ``index`` counts from 1, over resumes and items."""

    index: int
    prompt: str
    description: str
    item: str | None = None
    resume: str | None = None
    """The agent to go on with, in place of a new one."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task ended. ``text`` is the subagent's answer, or what went wrong; ``state`` only if not completed."""

    task: SwarmTask
    status: Status
    text: str
    agent_id: str | None = None
    state: State | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt at a task, as its launcher sees it."""

    task: SwarmTask
    on_ready: Callable[[], None]
    agent_id: str | None = None
    """The agent, once there is one."""
    again: bool = False
    """An earlier attempt was refused by the provider: its agent is to go on, without another prompt."""

    def began(self, agent_id: str) -> None:
        """There is an agent: from here on the task has been started."""
        self.agent_id = agent_id

    def ready(self) -> None:
        """The agent's turn has begun."""
        self.on_ready()


class Launcher(Protocol):
    """What runs subagents."""

    async def launch(self, attempt: Attempt) -> str:
        """Run an attempt to its end and give the answer; a cancelled call ends the subagent's turn.

        Raises:
            KimiRayError: it failed; one of the class ``rate_limit`` that began is tried again, with the same agent.
        """
        ...

    def suspended(self, task: SwarmTask, agent_id: str, reason: str) -> None:
        """A subagent was refused by the provider, and will be launched again."""
        ...

    def given_up(self, task: SwarmTask, agent_id: str, error: KimiRayError) -> None:
        """A subagent has failed for a reason that its own last attempt does not know of."""
        ...


class Clock(Protocol):
    """The time, in milliseconds from some beginning, and waiting for it."""

    def now_ms(self) -> int:
        """Now."""
        ...

    async def wait(self, wake: asyncio.Event, until_ms: int | None) -> None:
        """Return when ``wake`` is set, or at that time."""
        ...


class MonotonicClock:
    """The real time."""

    def now_ms(self) -> int:
        """See ``Clock.now_ms``."""
        return int(time.monotonic() * 1000)

    async def wait(self, wake: asyncio.Event, until_ms: int | None) -> None:
        """See ``Clock.wait``."""
        if until_ms is None:
            await wake.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0, until_ms - self.now_ms()) / 1000):
                await wake.wait()


@dataclass(slots=True)
class _Running:
    attempt: Attempt
    index: int
    task: asyncio.Task[str]
    deadline: int | None
    timed_out: bool = False


class SwarmScheduler:
    """Runs tasks once.

    Args:
        tasks: In the order of the results.
        launcher: Runs the subagents.
        clock: The time.
        max_concurrency: Most at once; None is no cap.
        timeout_ms: Of each attempt, from its start (not while its task waits); 0 is none.
    """

    def __init__(
        self,
        tasks: Sequence[SwarmTask],
        launcher: Launcher,
        clock: Clock,
        *,
        max_concurrency: int | None = None,
        timeout_ms: int = 0,
    ) -> None:
        self._tasks = tasks
        self._launcher = launcher
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._plan = LaunchPlan(len(tasks), max_concurrency=max_concurrency)
        self._results: list[TaskResult | None] = [None] * len(tasks)
        self._agents: dict[int, str] = {}
        """By task, the agent of an attempt that was refused."""
        self._running: dict[int, _Running] = {}
        self._ended: deque[_Running] = deque()
        self._leaving: set[asyncio.Task[str]] = set()
        self._wake = asyncio.Event()

    async def run(self, cancelled: asyncio.Event) -> list[TaskResult]:
        """Run all tasks.

        Once ``cancelled`` is set, what is finished keeps its result and the others are ``aborted``, at once. A
        cancellation of this coroutine is passed on, and there are no results then.

        Returns:
            One result for each task, in their order.
        """
        watch = asyncio.create_task(cancelled.wait())
        watch.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._wake.clear()
                now = self._clock.now_ms()
                self._collect(now)
                if cancelled.is_set():
                    break
                self._expire(now)
                for index in self._plan.due(now):
                    self._start(index, now)
                if not self._plan.unfinished:
                    break
                await self._clock.wait(self._wake, self._next_look())
        finally:
            watch.cancel()
            await self._leave()
        return [result or self._interrupted(index) for index, result in enumerate(self._results)]

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _start(self, index: int, now: int) -> None:
        agent_id = self._agents.get(index)
        attempt = Attempt(self._tasks[index], lambda: self._ready(index), agent_id, again=agent_id is not None)
        task = asyncio.create_task(self._launcher.launch(attempt))
        deadline = now + self._timeout_ms if self._timeout_ms > 0 else None
        running = self._running[index] = _Running(attempt, index, task, deadline)

        def end(_: object) -> None:
            self._ended.append(running)
            self._wake.set()

        task.add_done_callback(end)

    def _ready(self, index: int) -> None:
        if index in self._running:
            self._plan.ready(index, self._clock.now_ms())
            self._wake.set()

    def _collect(self, now: int) -> None:
        while self._ended:
            running = self._ended.popleft()
            self._leaving.discard(running.task)
            if self._running.get(running.index) is not running:
                continue  # its time was up and it did not end: it has its result
            del self._running[running.index]
            self._take(running, now)

    def _take(self, running: _Running, now: int) -> None:
        error = asyncio.CancelledError() if running.task.cancelled() else running.task.exception()
        if error is None:
            self._finish(running, "completed", running.task.result())
        elif running.timed_out:
            self._give_up(running, AgentError(TIMED_OUT, code="agent.timed_out"))
        else:
            agent_id, failure = running.attempt.agent_id, as_error(error)
            if failure.error_class != RATE_LIMIT or agent_id is None:
                self._finish(running, "failed", failure.message)
            elif self._plan.limited(running.index, now):
                self._agents[running.index] = agent_id
                self._launcher.suspended(running.attempt.task, agent_id, SUSPENDED)
            else:
                self._give_up(running, failure)

    def _give_up(self, running: _Running, error: KimiRayError) -> None:
        if running.attempt.agent_id is not None:
            self._launcher.given_up(running.attempt.task, running.attempt.agent_id, error)
        self._finish(running, "failed", error.message)

    def _finish(self, running: _Running, status: Status, text: str) -> None:
        agent_id = running.attempt.agent_id
        state: State | None = None
        if status != "completed":
            state = "not_started" if agent_id is None else "started"
        self._results[running.index] = TaskResult(running.attempt.task, status, text, agent_id, state)
        self._plan.finished(running.index)

    def _expire(self, now: int) -> None:
        for running in list(self._running.values()):
            if running.deadline is None or now < running.deadline:
                continue
            if running.timed_out:
                self._leaving.add(running.task)
                del self._running[running.index]
                self._give_up(running, AgentError(TIMED_OUT, code="agent.timed_out"))
            else:
                running.timed_out = True
                running.deadline = now + STOP_MS
                running.task.cancel()

    def _next_look(self) -> int | None:
        times = [running.deadline for running in self._running.values() if running.deadline is not None]
        launch = self._plan.next_look()
        return min([*times, launch] if launch is not None else times, default=None)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _interrupted(self, index: int) -> TaskResult:
        running = self._running.get(index)
        agent_id = running.attempt.agent_id if running is not None else None
        agent_id = agent_id or self._agents.get(index)
        if agent_id is None:
            return TaskResult(self._tasks[index], "aborted", INTERRUPTED_WAITING, None, "not_started")
        return TaskResult(self._tasks[index], "aborted", INTERRUPTED, agent_id, "started")

    async def _leave(self) -> None:
        tasks = self._leaving | {running.task for running in self._running.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at: nobody else will
