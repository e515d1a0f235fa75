"""Whatever happens to the attempts of a swarm: each task has one result, the bounds hold, nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimi_ray.features.swarm import Attempt
from kimi_ray.features.swarm.launch_plan import INITIAL_LAUNCHES, LAUNCH_INTERVAL_MS
from kimi_ray.features.swarm.scheduler import TIMED_OUT
from tests.unit.features.swarm_stage import Played, Show, Stage, settle

TIMEOUT_MS = 40_000


class SwarmMachine(RuleBasedStateMachine):
    """A swarm whose subagents begin, answer, fail and are refused in any order, and may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.said: dict[int, tuple[str, str]] = {}
        """By task, how its last attempt ended."""
        self.interrupted = False

    def go(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    @initialize(
        count=st.integers(1, 9),
        cap=st.none() | st.integers(1, 4),
        timeout_ms=st.sampled_from([0, TIMEOUT_MS]),
        begins=st.booleans(),
    )
    def begin(self, count: int, cap: int | None, timeout_ms: int, begins: bool) -> None:
        self.count, self.cap = count, cap

        async def make() -> None:
            stage = Stage(begins=begins, on_launch=self.launched)
            self.show = Show(count, stage=stage, max_concurrency=cap, timeout_ms=timeout_ms)
            await settle()

        self.go(make())

    def launched(self, attempt: Attempt) -> None:
        plan = self.show.scheduler._plan
        assert plan.capacity is None or plan.running <= plan.capacity
        assert all(played.number != attempt.task.index for played in self.show.stage.running)
        if not self.show.stage.suspensions:
            spent = self.show.clock.now // LAUNCH_INTERVAL_MS
            assert len(self.show.attempts) < INITIAL_LAUNCHES + spent + 1

    def one(self, data: st.DataObject) -> Played | None:
        running = [played for played in self.show.stage.running if not played.outcome.done()]
        return data.draw(st.sampled_from(running)) if running else None

    @rule(ms=st.sampled_from([1, 699, 700, 3000, 6000, 12_000, TIMEOUT_MS, 180_000, 3_600_000]))
    def pass_time(self, ms: int) -> None:
        self.go(self.show.clock.advance(ms))

    @precondition(lambda self: not self.interrupted)
    @rule(data=st.data())
    def is_ready(self, data: st.DataObject) -> None:
        if (played := self.one(data)) is not None:
            if played.attempt.agent_id is None:
                played.attempt.began(f"agent-{played.number}")
            played.ready()
            self.go(settle())

    @precondition(lambda self: not self.interrupted)
    @rule(data=st.data(), outcome=st.sampled_from(["complete", "fail", "limit", "limit"]), at_once=st.booleans())
    def ends(self, data: st.DataObject, outcome: str, at_once: bool) -> None:
        if (played := self.one(data)) is not None:
            getattr(played, outcome)()
            self.said[played.number] = (outcome, played.attempt.agent_id or "")
            if at_once:
                self.go(settle())

    @precondition(lambda self: not self.interrupted)
    @rule(really=st.integers(0, 9))
    def interrupt(self, really: int) -> None:
        if really == 0:
            self.interrupted = True
            self.show.cancelled.set()
            self.go(settle())

    @invariant()
    def each_task_runs_once(self) -> None:
        if self.made:
            running = Counter(played.number for played in self.show.stage.running)
            assert all(count == 1 for count in running.values())
            assert self.cap is None or len(running) <= self.cap

    @property
    def made(self) -> bool:
        return hasattr(self, "show")

    def teardown(self) -> None:
        try:
            if self.made:
                self.go(self.finish())
        finally:
            self.loop.close()

    async def finish(self) -> None:
        show = self.show
        for _ in range(200):
            if show.running.done():
                break
            for played in show.stage.running:
                if not played.outcome.done():
                    played.complete()
                    self.said[played.number] = ("complete", played.attempt.agent_id or "")
            await show.clock.advance(60_000)
        results = await show.results()
        assert [result.task.index for result in results] == list(range(1, self.count + 1))
        assert show.stage.running == []
        for result in results:
            said, agent_id = self.said.get(result.task.index, ("nothing", ""))
            if result.status == "completed":
                assert said == "complete" and result.text == f"result {result.task.index}" and result.state is None
            elif result.status == "failed":
                assert said in ("fail", "limit") or result.text == TIMED_OUT
            else:
                assert self.interrupted
            assert agent_id in ("", result.agent_id)
            if result.status != "completed":
                assert (result.state == "started") == (result.agent_id is not None)
        if not self.interrupted:
            assert all(result.status != "aborted" for result in results)
        given_up = [agent_id for agent_id, code in show.stage.gave_up if code == "provider.rate_limit"]
        assert len(given_up) == len(set(given_up))


SwarmMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSwarm = SwarmMachine.TestCase
