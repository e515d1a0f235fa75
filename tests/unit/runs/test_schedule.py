"""The schedule under a fake clock: starts, retries, limits and ends, and no key is ever lost."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import ProviderError, RunError, StoreError, ToolError
from kimi_ray.runs import FailOn, RolloutKey, RowError, RunSeed, Schedule, Spent, Start
from kimi_ray.settings import Limits

INFRA = RowError.of(StoreError("m", code="store.unavailable"))
TOOL = RowError.of(ToolError("m", code="tool.failed"))
AUTH = RowError.of(ProviderError("m", code="provider.auth"))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def keys(count: int) -> list[RolloutKey]:
    return [RolloutKey(f"i{number}", 0) for number in range(count)]


def made(count: int, clock: Clock | None = None, **how: object) -> Schedule:
    return Schedule(keys(count), seed=RunSeed(7, sent=True), clock=clock or Clock(), **how)  # type: ignore[arg-type]


def starts(schedule: Schedule) -> list[Start]:
    found: list[Start] = []
    while (start := schedule.next_start()) is not None:
        found.append(start)
    return found


def test_starts_in_order_up_to_the_concurrency() -> None:
    schedule = made(5, max_concurrency=2)
    first = starts(schedule)
    assert [start.key.item_id for start in first] == ["i0", "i1"]
    assert all(start.attempt == 1 and start.send_seed for start in first)
    assert first[0].seed == RunSeed(7, sent=True).of("i0", 0, 1)
    assert schedule.finished(first[1].key, "completed", None)
    assert [start.key.item_id for start in starts(schedule)] == ["i2"]
    assert schedule.progress().running == 2
    assert not schedule.finished_all


def test_a_retry_waits_has_another_seed_and_goes_before_fresh_keys() -> None:
    clock = Clock()
    schedule = made(3, clock, max_concurrency=1, retries=2)
    (start,) = starts(schedule)
    assert not schedule.finished(start.key, "failed", INFRA)
    assert schedule.wait_s() is not None
    assert 0.75 <= (schedule.wait_s() or 0) <= 1
    (fresh,) = starts(schedule)
    assert fresh.key.item_id == "i1"
    clock.now += 1
    assert schedule.finished(fresh.key, "completed", None)
    (again,) = starts(schedule)
    assert (again.key, again.attempt) == (start.key, 2)
    assert again.seed != start.seed
    assert schedule.progress().retries == 1


def test_waits_double_up_to_a_minute() -> None:
    clock = Clock()
    schedule = made(1, clock, retries=12)
    waits: list[float] = []
    for _ in range(12):
        (start,) = starts(schedule)
        assert not schedule.finished(start.key, "failed", INFRA)
        waits.append(schedule.wait_s() or 0)
        clock.now += waits[-1]
    (start,) = starts(schedule)
    assert start.attempt == 13
    assert schedule.finished(start.key, "failed", INFRA)
    assert schedule.finished_all
    assert all(0.75 * 2**n <= wait <= 2**n for n, wait in enumerate(waits[:6]))
    assert max(waits) <= 60


@pytest.mark.parametrize(
    ("status", "error"), [("failed", TOOL), ("failed", AUTH), ("failed", None), ("cancelled", INFRA), ("limit", INFRA)]
)
def test_what_is_not_tried_again(status: str, error: RowError | None) -> None:
    schedule = made(1, retries=5)
    (start,) = starts(schedule)
    assert schedule.finished(start.key, status, error)  # type: ignore[arg-type]
    assert schedule.finished_all


def test_retry_on_is_the_users_choice() -> None:
    schedule = made(1, retries=1, retry_on=("tool",))
    (start,) = starts(schedule)
    assert not schedule.finished(start.key, "failed", TOOL)
    with pytest.raises(RunError) as error:
        made(1, retry_on=("tools",))
    assert error.value.code == "swarm.bad_retry_class"


def test_attempts_go_on_from_an_earlier_command_and_retries_begin_anew() -> None:
    clock = Clock()
    schedule = made(2, clock, retries=1, attempts_before={RolloutKey("i0", 0): 3})
    first, second = starts(schedule)
    assert (first.attempt, second.attempt) == (4, 1)
    assert not schedule.finished(first.key, "failed", INFRA)
    clock.now += 2
    (again,) = starts(schedule)
    assert again.attempt == 5
    assert schedule.finished(again.key, "failed", INFRA)


@pytest.mark.parametrize(
    ("text", "total", "threshold"),
    [("3", 100, 3), ("10%", 100, 10), ("10%", 5, 1), ("0.5%", 1000, 5), ("100%", 7, 7), ("33%", 10, 4)],
)
def test_fail_on(text: str, total: int, threshold: int) -> None:
    assert FailOn.parse(text).threshold(total) == threshold
    schedule = made(total, max_concurrency=total, fail_on=FailOn.parse(text))
    for number, start in enumerate(starts(schedule), start=1):
        schedule.finished(start.key, "failed", TOOL)
        assert (schedule.stopped == "fail_on") == (number >= threshold)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "1.5", "x", "5 %%", "nan%"])
def test_fail_on_that_is_none(text: str) -> None:
    with pytest.raises(RunError) as error:
        FailOn.parse(text)
    assert error.value.code == "swarm.bad_fail_on"


@pytest.mark.parametrize(
    ("limits", "spent", "stop"),
    [
        (Limits(max_steps=4), Spent(steps=2), "limit:max_steps"),
        (Limits(max_turns=4), Spent(turns=2), "limit:max_turns"),
        (Limits(max_tool_calls=4), Spent(tool_calls=2), "limit:max_tool_calls"),
        (Limits(max_output_tokens=4), Spent(output_tokens=2), "limit:max_output_tokens"),
        (Limits(max_total_tokens=4), Spent(total_tokens=2), "limit:max_total_tokens"),
        (Limits(max_cost_usd=0.4), Spent(cost_usd=0.2), "limit:max_cost_usd"),
        (Limits(working_time_s=4), Spent(working_s=2), "limit:working_time_s"),
    ],
)
def test_a_total_limit_counts_the_running_and_the_done(limits: Limits, spent: Spent, stop: str) -> None:
    schedule = made(10, max_concurrency=2, total_limits=limits)
    first, second = starts(schedule)
    assert schedule.spent(first.key, spent) is None
    assert schedule.spent(first.key, spent) is None, "a report replaces the last one"
    assert schedule.finished(first.key, "completed", None)
    hit = schedule.spent(second.key, spent)
    assert hit is not None
    assert hit.stop == schedule.stopped == stop
    assert schedule.next_start() is None
    assert schedule.running == (second.key,)
    assert schedule.finished(second.key, "limit", None)
    assert schedule.finished_all
    assert len(schedule.not_started()) == 8


def test_no_tool_calls_allowed_does_not_stop_a_run_that_makes_none() -> None:
    schedule = made(2, total_limits=Limits(max_tool_calls=0))
    assert len(starts(schedule)) == 2
    assert schedule.spent(RolloutKey("i0", 0), Spent(tool_calls=1)) is not None


def test_the_time_of_a_run() -> None:
    clock = Clock()
    schedule = made(5, clock, max_concurrency=1, total_limits=Limits(time_s=10))
    (start,) = starts(schedule)
    assert schedule.wait_s() == 10
    clock.now += 10
    hit = schedule.check_limits()
    assert hit is not None
    assert (hit.name, hit.value, hit.used) == ("time_s", 10, 10)
    schedule.finished(start.key, "limit", None)
    assert schedule.next_start() is None
    assert schedule.wait_s() is None


def test_a_stop_keeps_what_waits_and_the_first_reason() -> None:
    clock = Clock()
    schedule = made(4, clock, max_concurrency=2, retries=3)
    first, second = starts(schedule)
    assert not schedule.finished(first.key, "failed", INFRA)
    schedule.stop("cancelled")
    schedule.stop("fail_on")
    assert schedule.stopped == "cancelled"
    clock.now += 100
    assert schedule.next_start() is None
    assert not schedule.finished_all
    assert schedule.finished(second.key, "failed", INFRA), "no retry after a stop"
    assert schedule.finished_all
    assert schedule.not_started() == ((first.key, 1), (RolloutKey("i2", 0), 0), (RolloutKey("i3", 0), 0))


@pytest.mark.parametrize("how", [{"max_concurrency": 0}, {"retries": -1}])
def test_numbers_that_make_no_sense(how: dict[str, int]) -> None:
    with pytest.raises(RunError):
        made(1, **how)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_every_key_is_accounted_for_whatever_happens(
    seed: int, count: int, concurrency: int, retries: int, may_stop: bool
) -> None:
    dice, clock = random.Random(seed), Clock()
    schedule = made(count, clock, max_concurrency=concurrency, retries=retries)
    seeds: set[int] = set()
    done: set[RolloutKey] = set()
    for _ in range(2000):
        for start in starts(schedule):
            assert start.seed not in seeds
            seeds.add(start.seed)
            assert start.attempt <= retries + 1
        assert len(schedule.running) <= concurrency
        if schedule.finished_all:
            break
        if may_stop and dice.random() < 0.05:
            schedule.stop("cancelled")
        if schedule.running and dice.random() < 0.8:
            key = dice.choice(schedule.running)
            status, error = dice.choice([("completed", None), ("failed", INFRA), ("failed", TOOL), ("cancelled", None)])
            schedule.spent(key, Spent(steps=1))
            if schedule.finished(key, status, error, Spent(steps=2)):  # type: ignore[arg-type]
                assert key not in done
                done.add(key)
        else:
            clock.now += schedule.wait_s() or 0
    assert schedule.finished_all
    left = {key for key, _ in schedule.not_started()}
    assert done | left == set(keys(count))
    assert not done & left
    progress = schedule.progress()
    assert sum(progress.done.values()) == len(done)
    assert progress.spent.steps == 2 * len(seeds)
    assert may_stop or not left


def test_a_report_from_each_of_a_thousand_running_rollouts_costs_next_to_nothing() -> None:
    schedule = made(1000, max_concurrency=1000, total_limits=Limits(max_steps=10**9))
    begun = starts(schedule)
    before = time.process_time()
    for step in range(1, 21):
        for start in begun:
            schedule.spent(start.key, Spent(steps=step))
    assert schedule.progress().spent.steps == 20_000
    assert time.process_time() - before < 5, "the sum must not be made anew with every report"


def test_an_attempt_that_begins_again_is_counted_beside_the_one_that_follows() -> None:
    schedule = made(1, total_limits=Limits(max_steps=10))
    (start,) = starts(schedule)
    schedule.spent(start.key, Spent(steps=2))
    schedule.begins_again(start.key, Spent(steps=3))
    assert schedule.progress().spent.steps == 3 == schedule.spent_by_ended.steps and schedule.progress().running == 1
    schedule.spent(start.key, Spent(steps=4))
    assert schedule.progress().spent.steps == 7 and schedule.spent_by_ended.steps == 3
    schedule.begins_again(start.key, None)
    assert schedule.finished(start.key, "completed", None, Spent(steps=1))
    assert schedule.progress().spent.steps == 8 == schedule.spent_by_ended.steps
