"""A swarm on a stage: a clock that the test moves, and subagents that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kimi_ray.errors import AgentError, KimiRayError, ProviderError
from kimi_ray.features.swarm import Attempt, SwarmScheduler, SwarmTask, TaskResult


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(25):
        await asyncio.sleep(0)


class VirtualClock:
    """Time that passes only in ``advance``."""

    def __init__(self) -> None:
        self.now = 0
        self._until: int | None = None
        self._wake = asyncio.Event()

    def now_ms(self) -> int:
        return self.now

    async def wait(self, wake: asyncio.Event, until_ms: int | None) -> None:
        if until_ms is not None and until_ms <= self.now:
            return
        self._until, self._wake = until_ms, wake
        await wake.wait()

    async def advance(self, ms: int) -> None:
        end = self.now + ms
        await settle()
        while self._until is not None and self._until <= end:
            self.now, self._until = self._until, None
            self._wake.set()
            await settle()
        self.now = end
        await settle()


@dataclass(slots=True)
class Played:
    """An attempt on the stage."""

    attempt: Attempt
    outcome: asyncio.Future[str]
    stubborn: bool = False

    @property
    def number(self) -> int:
        return self.attempt.task.index

    def ready(self) -> None:
        self.attempt.ready()

    def complete(self, text: str | None = None) -> None:
        self.outcome.set_result(f"result {self.number}" if text is None else text)

    def fail(self, message: str = "it broke", code: str = "agent.broke") -> None:
        self.outcome.set_exception(AgentError(message, code=code))

    def limit(self) -> None:
        self.outcome.set_exception(ProviderError("Rate limited", code="provider.rate_limit"))


@dataclass(slots=True)
class Stage:
    """The launcher; every agent is called after its task."""

    begins: bool = True
    """Whether there is an agent as soon as an attempt is launched."""
    stubborn: frozenset[int] = frozenset()
    """Tasks whose attempts do not end when they are cancelled."""
    attempts: list[Played] = field(default_factory=list[Played])
    suspensions: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    gave_up: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    cancelled: list[int] = field(default_factory=list[int])
    on_launch: Callable[[Attempt], None] = lambda _: None
    running: list[Played] = field(default_factory=list[Played])

    async def launch(self, attempt: Attempt) -> str:
        played = Played(attempt, asyncio.get_running_loop().create_future())
        self.on_launch(attempt)
        self.attempts.append(played)
        self.running.append(played)
        if self.begins and not attempt.again:
            attempt.began(attempt.task.resume or f"agent-{attempt.task.index}")
        try:
            return await self._outcome(played)
        finally:
            self.running.remove(played)

    async def _outcome(self, played: Played) -> str:
        try:
            return await asyncio.shield(played.outcome)
        except asyncio.CancelledError:
            self.cancelled.append(played.number)
            if played.number in self.stubborn:
                return await played.outcome
            raise

    def suspended(self, task: SwarmTask, agent_id: str, reason: str) -> None:
        self.suspensions.append((agent_id, reason))

    def given_up(self, task: SwarmTask, agent_id: str, error: KimiRayError) -> None:
        self.gave_up.append((agent_id, error.code))

    @property
    def retried(self) -> list[str | None]:
        """By attempt, the agent that was to go on."""
        return [played.attempt.agent_id if played.attempt.again else None for played in self.attempts]

    @property
    def launched(self) -> list[int]:
        """The tasks of all attempts, in the order of their launches."""
        return [played.number for played in self.attempts]


class Show:
    """A swarm that runs."""

    def __init__(
        self,
        count: int,
        *,
        stage: Stage | None = None,
        max_concurrency: int | None = None,
        timeout_ms: int = 0,
        tasks: list[SwarmTask] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.stage = stage or Stage()
        self.tasks = tasks or [SwarmTask(n, f"do {n}", f"d #{n} (coder)", item=str(n)) for n in range(1, count + 1)]
        self.scheduler = SwarmScheduler(
            self.tasks, self.stage, self.clock, max_concurrency=max_concurrency, timeout_ms=timeout_ms
        )
        self.cancelled = asyncio.Event()
        self.running = asyncio.create_task(self.scheduler.run(self.cancelled))

    @property
    def attempts(self) -> list[Played]:
        return self.stage.attempts

    async def advance(self, ms: int) -> int:
        """Let time pass; gives how many attempts there were until then."""
        await self.clock.advance(ms)
        return len(self.stage.attempts)

    async def results(self) -> list[TaskResult]:
        async with asyncio.timeout(5):
            return await self.running

    async def abort(self) -> None:
        """End it as a cancellation of the caller would."""
        self.running.cancel()
        await asyncio.wait([self.running], timeout=5)
        assert self.running.cancelled()
        assert self.stage.running == []
