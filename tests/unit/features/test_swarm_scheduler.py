"""The scheduler of ``AgentSwarm``: the ramp, the limited phase, time-outs and both kinds of end (K test 58)."""

from __future__ import annotations

import pytest

from kimi_ray.features.swarm import SwarmTask, TaskResult
from kimi_ray.features.swarm.launch_plan import RETRY_LIMIT_MS
from kimi_ray.features.swarm.scheduler import INTERRUPTED, INTERRUPTED_WAITING, SUSPENDED, TIMED_OUT
from tests.unit.features.swarm_stage import Show, Stage, settle

Facts = tuple[int, str | None, str, str | None, str]


def facts(results: list[TaskResult]) -> list[Facts]:
    return [(result.task.index, result.agent_id, result.status, result.state, result.text) for result in results]


def done(*numbers: int) -> list[Facts]:
    return [(n, f"agent-{n}", "completed", None, f"result {n}") for n in numbers]


# -- the ramp -------------------------------------------------------------------------------------------------------


async def test_five_at_once_then_one_each_700_ms() -> None:
    show = Show(9)
    assert await show.advance(0) == 5
    assert await show.advance(699) == 5
    assert await show.advance(1) == 6
    assert [await show.advance(700) for _ in range(4)] == [7, 8, 9, 9]
    for played in show.attempts:
        played.complete()
    assert facts(await show.results()) == done(*range(1, 10))


async def test_what_completes_is_taken_while_the_next_launch_is_waited_for() -> None:
    show = Show(6)
    assert await show.advance(0) == 5
    show.attempts[0].complete()
    assert await show.advance(699) == 5
    assert await show.advance(1) == 6
    for played in show.attempts[1:]:
        played.complete()
    assert facts(await show.results()) == done(*range(1, 7))


async def test_no_tasks_are_no_results() -> None:
    assert await Show(0, tasks=[]).results() == []


async def test_the_results_are_in_the_order_of_the_tasks() -> None:
    show = Show(3)
    await show.advance(0)
    for played in reversed(show.attempts):
        played.complete()
        await settle()
    assert facts(await show.results()) == done(1, 2, 3)


async def test_a_cap_holds_and_a_free_place_is_taken_at_once_only_by_the_first_five() -> None:
    show = Show(9, max_concurrency=3)
    assert await show.advance(0) == 3
    assert await show.advance(700) == 3
    show.attempts[0].complete()
    assert await show.advance(0) == 4
    show.attempts[1].complete()
    assert await show.advance(0) == 5
    show.attempts[2].complete()
    assert await show.advance(0) == 5
    assert await show.advance(699) == 5
    assert await show.advance(1) == 6
    for at in range(3, 9):
        show.attempts[at].complete()
        await show.advance(700)
        assert len(show.stage.running) <= 3
    assert facts(await show.results()) == done(*range(1, 10))


# -- the limited phase ----------------------------------------------------------------------------------------------


async def all_ready(show: Show) -> None:
    for played in show.stage.running:
        played.ready()
    await settle()


async def test_the_first_refusal_ends_the_ramp_and_its_task_goes_first_with_the_same_agent() -> None:
    show = Show(9)
    await show.advance(0)
    await all_ready(show)
    show.attempts[0].limit()
    await settle()
    assert await show.advance(700) == 5
    show.attempts[1].complete()
    assert await show.advance(3000) == 6
    assert show.stage.launched[5] == 1 and show.stage.retried[5] == "agent-1"
    await show.abort()


async def test_refused_tasks_are_suspended_and_launches_wait() -> None:
    show = Show(8)
    await show.advance(0)
    await all_ready(show)
    show.attempts[0].limit()
    show.attempts[1].limit()
    await settle()
    assert show.stage.suspensions == [("agent-1", SUSPENDED), ("agent-2", SUSPENDED)]
    assert await show.advance(500) == 5
    assert await show.advance(2500) == 6
    assert show.stage.launched[5] == 2 and show.stage.retried[5] == "agent-2"
    await show.abort()


async def test_the_only_unfinished_task_fails_when_it_is_refused() -> None:
    show = Show(2)
    await show.advance(0)
    await all_ready(show)
    show.attempts[0].complete()
    await settle()
    show.attempts[1].limit()
    assert facts(await show.results()) == [*done(1), (2, "agent-2", "failed", "started", "Rate limited")]
    assert show.stage.suspensions == []
    assert show.stage.gave_up == [("agent-2", "provider.rate_limit")]


async def test_full_capacity_holds_launches_back() -> None:
    show = Show(12)
    await show.advance(0)
    await all_ready(show)
    for count in range(6, 13):
        assert await show.advance(700) == count
        await all_ready(show)
    show.attempts[0].limit()
    await settle()
    assert await show.advance(3000) == 12
    await show.abort()


async def test_three_quiet_minutes_give_one_place_back() -> None:
    show = Show(6)
    await show.advance(0)
    await all_ready(show)
    for at in range(4):
        show.attempts[at].limit()
        assert await show.advance(2000 if at < 3 else 0) == 5
    assert await show.advance(179_999) == 5
    assert await show.advance(1) == 6
    assert show.stage.launched[5] == 4 and show.stage.retried[5] == "agent-4"
    await show.abort()


async def test_refusals_within_two_seconds_cost_one_place() -> None:
    show = Show(7)
    await show.advance(0)
    await all_ready(show)
    for at in range(3):  # capacity 5 - 1; two still run
        show.attempts[at].limit()
        await settle()
    assert [await show.advance(3000) for _ in range(3)] == [6, 7, 7]
    assert show.stage.launched[5:] == [3, 2]
    assert show.stage.retried[5:] == ["agent-3", "agent-2"]
    await show.abort()


async def test_launches_go_on_while_there_is_room() -> None:
    show = Show(8)
    await show.advance(0)
    await all_ready(show)
    show.attempts[0].limit()
    await settle()
    show.attempts[1].complete()
    show.attempts[2].complete()
    assert await show.advance(2999) == 5
    assert await show.advance(1) == 6
    assert show.stage.launched[5] == 1 and show.stage.retried[5] == "agent-1"
    assert await show.advance(2999) == 6
    assert await show.advance(1) == 7
    assert show.stage.launched[6] == 6 and show.stage.retried[6] is None
    await show.abort()


async def test_refusals_of_attempts_that_never_began_stretch_the_wait() -> None:
    show = Show(9)
    await show.advance(0)
    await all_ready(show)
    assert await show.advance(1400) == 7
    show.attempts[5].limit()
    show.attempts[6].limit()
    show.attempts[0].complete()
    show.attempts[1].complete()
    await settle()
    assert await show.advance(11_999) == 7
    assert await show.advance(1) == 8
    assert show.stage.launched[7] == 7 and show.stage.retried[7] == "agent-7"
    show.attempts[2].complete()
    show.attempts[7].ready()  # its turn began: back to 3 s
    assert await show.advance(2999) == 8
    assert await show.advance(1) == 9
    await show.abort()


async def test_the_wait_of_one_task_doubles_with_each_refusal() -> None:
    show = Show(5)
    await show.advance(0)
    await all_ready(show)
    for played in show.attempts[1:4]:
        played.complete()
    for count, delay in ((5, 3000), (6, 6000), (7, 12_000)):
        show.attempts[-1].limit()
        await settle()
        assert await show.advance(delay - 1) == count
        assert await show.advance(1) == count + 1
        assert show.stage.launched[-1] == 5
        await all_ready(show)
    await show.abort()


async def test_a_refusal_without_an_agent_is_a_failure_to_start() -> None:
    show = Show(2, stage=Stage(begins=False))
    await show.advance(0)
    show.attempts[0].limit()
    show.attempts[1].attempt.began("agent-2")
    show.attempts[1].complete()
    assert facts(await show.results()) == [(1, None, "failed", "not_started", "Rate limited"), *done(2)]
    assert show.stage.gave_up == []


async def test_the_cap_holds_in_the_limited_phase_too() -> None:
    show = Show(8, max_concurrency=2)
    for at in range(4):  # four have begun well by now
        await show.advance(700)
        await all_ready(show)
        show.attempts[at].complete()
    await show.advance(700)
    await all_ready(show)
    show.stage.running[0].limit()
    await settle()
    for _ in range(5):
        await show.advance(10 * 60_000)  # recovers far beyond the cap
        assert len(show.stage.running) <= 2
    await show.abort()


async def test_a_task_that_is_refused_for_ever_is_given_up() -> None:
    show = Show(2)
    await show.advance(0)
    await all_ready(show)
    refusals = 0
    while not show.stage.gave_up:
        refused = next((played for played in show.stage.running if played.number == 2), None)
        if refused is None:
            await show.advance(60_000)
            continue
        refused.limit()
        refusals += 1
        assert refusals < 20
        await settle()
    assert refusals == 12 and show.clock.now < 3 * RETRY_LIMIT_MS
    show.attempts[0].complete()
    assert facts(await show.results()) == [*done(1), (2, "agent-2", "failed", "started", "Rate limited")]


# -- failures and time-outs -----------------------------------------------------------------------------------------


async def test_a_failure_is_a_result_and_touches_no_other() -> None:
    show = Show(3)
    await show.advance(0)
    show.attempts[1].fail("no such file")
    show.attempts[0].complete()
    show.attempts[2].complete()
    assert facts(await show.results()) == [*done(1), (2, "agent-2", "failed", "started", "no such file"), *done(3)]


async def test_a_launch_that_fails_has_not_started() -> None:
    show = Show(2, stage=Stage(begins=False))
    await show.advance(0)
    for played in show.attempts:
        played.fail("no host")
    assert [fact[1:] for fact in facts(await show.results())] == [(None, "failed", "not_started", "no host")] * 2


async def test_any_exception_of_a_launcher_is_a_result() -> None:
    show = Show(2)
    await show.advance(0)
    show.attempts[0].outcome.set_exception(RuntimeError("odd"))
    show.attempts[1].outcome.cancel()
    results = await show.results()
    assert [result.status for result in results] == ["failed", "failed"]
    assert results[0].text == "RuntimeError: odd"


async def test_a_time_out_fails_only_its_task() -> None:
    show = Show(2, timeout_ms=10_000)
    await show.advance(0)
    show.attempts[0].ready()
    show.attempts[1].complete()
    await show.advance(9999)
    assert not show.running.done()
    await show.advance(1)
    assert facts(await show.results()) == [(1, "agent-1", "failed", "started", TIMED_OUT), *done(2)]
    assert show.stage.cancelled == [1]
    assert show.stage.gave_up == [("agent-1", "agent.timed_out")]


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_no_time_out_is_no_bound(timeout_ms: int) -> None:
    show = Show(1, timeout_ms=timeout_ms)
    await show.advance(24 * 3_600_000)
    show.attempts[0].complete("done")
    assert facts(await show.results()) == [(1, "agent-1", "completed", None, "done")]


async def test_a_waiting_task_spends_no_time() -> None:
    show = Show(6, timeout_ms=1000)
    await show.advance(0)
    assert await show.advance(700) == 6
    for played in show.attempts[:5]:
        played.complete()
    await show.advance(999)
    assert not show.running.done()
    await show.advance(1)
    assert facts(await show.results()) == [*done(1, 2, 3, 4, 5), (6, "agent-6", "failed", "started", TIMED_OUT)]


async def test_an_attempt_that_does_not_end_when_its_time_is_up_is_left_behind() -> None:
    show = Show(2, stage=Stage(stubborn=frozenset({1})), timeout_ms=1000, max_concurrency=1)
    await show.advance(0)
    await show.advance(1000)
    assert show.stage.cancelled == [1]
    assert await show.advance(9999) == 1  # it still has its place
    assert await show.advance(1) == 2
    show.attempts[1].complete()
    assert facts(await show.results()) == [(1, "agent-1", "failed", "started", TIMED_OUT), *done(2)]


# -- the end --------------------------------------------------------------------------------------------------------


async def test_an_interruption_gives_each_task_its_result_at_once() -> None:
    show = Show(6)
    await show.advance(0)
    show.attempts[0].complete()
    await settle()
    show.cancelled.set()
    assert facts(await show.results()) == [
        *done(1),
        *((n, f"agent-{n}", "aborted", "started", INTERRUPTED) for n in range(2, 6)),
        (6, None, "aborted", "not_started", INTERRUPTED_WAITING),
    ]
    assert sorted(show.stage.cancelled) == [2, 3, 4, 5] and show.stage.running == []


async def test_an_interruption_knows_the_agents_of_suspended_tasks() -> None:
    show = Show(2)
    await show.advance(0)
    await all_ready(show)
    show.attempts[0].limit()
    await settle()
    show.cancelled.set()
    assert facts(await show.results()) == [
        (n, f"agent-{n}", "aborted", "started", INTERRUPTED) for n in (1, 2)
    ]  # fmt: skip


async def test_an_interruption_before_the_beginning_starts_nothing() -> None:
    show = Show(3)
    show.cancelled.set()
    assert [result.state for result in await show.results()] == ["not_started"] * 3
    assert show.attempts == []


async def test_a_cancellation_gives_no_results_and_leaves_nothing_running() -> None:
    show = Show(6)
    await show.advance(0)
    await show.abort()
    assert sorted(show.stage.cancelled) == [1, 2, 3, 4, 5]


async def test_what_a_task_is_reaches_its_launcher() -> None:
    tasks = [SwarmTask(1, "go on", "d #1 (resume)", item="a", resume="agent-7"), SwarmTask(2, "new", "d #2 (coder)")]
    show = Show(0, tasks=tasks)
    await show.advance(0)
    assert [played.attempt.task for played in show.attempts] == tasks
    for played in show.attempts:
        played.complete()
    assert [result.agent_id for result in await show.results()] == ["agent-7", "agent-2"]
