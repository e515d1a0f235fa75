"""Calls of one step: what runs together, in which order results come, and that each call gets one."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import ToolError
from kimi_ray.tools import Accesses, ScheduledCall, ToolOutput, run_calls
from kimi_ray.tools.scheduling import conflict


class Stage:
    """Calls that wait to be released, and a record of what happened."""

    def __init__(self, *accesses: Accesses) -> None:
        self.accesses = accesses
        self.release = [asyncio.Event() for _ in accesses]
        self.started: list[int] = []
        self.committed: list[tuple[int, ToolOutput]] = []
        self.running: set[int] = set()
        self.most = 0
        self.cancelled = asyncio.Event()
        self.ignore_cancel: set[int] = set()

    async def _call(self, index: int) -> ToolOutput:
        self.running.add(index)
        self.most = max(self.most, len(self.running))
        try:
            while True:
                try:
                    await self.release[index].wait()
                    break
                except asyncio.CancelledError:
                    if index not in self.ignore_cancel:
                        raise
            return ToolOutput(str(index))
        finally:
            self.running.discard(index)

    def run(self, **settings) -> asyncio.Task[None]:
        calls = [ScheduledCall(a, lambda i=i: self._call(i)) for i, a in enumerate(self.accesses)]
        return asyncio.create_task(
            run_calls(
                calls,
                cancelled=self.cancelled,
                on_start=self.started.append,
                commit=lambda i, output: self.committed.append((i, output)),
                **settings,
            )
        )

    @property
    def order(self) -> list[int]:
        return [index for index, _ in self.committed]

    @property
    def codes(self) -> list[str | None]:
        return [output.error_code for _, output in self.committed]


async def settled(condition) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


R, W = Accesses.reads, Accesses.writes


async def test_reads_run_together_and_results_come_in_order() -> None:
    stage = Stage(R("a"), R("a"), R("b"))
    task = stage.run()
    await settled(lambda: stage.running == {0, 1, 2})
    stage.release[2].set()
    stage.release[1].set()
    await settled(lambda: stage.running == {0})
    assert stage.committed == []
    stage.release[0].set()
    await task
    assert stage.order == [0, 1, 2] and [output.content for _, output in stage.committed] == ["0", "1", "2"]


async def test_a_result_is_committed_as_soon_as_its_turn_has_come() -> None:
    stage = Stage(R("a"), R("b"))
    task = stage.run()
    stage.release[0].set()
    await settled(lambda: stage.order == [0])
    assert not task.done()
    stage.release[1].set()
    await task


async def test_a_later_call_does_not_overtake_a_waiting_conflicting_one_but_an_independent_one_starts() -> None:
    stage = Stage(R("a"), W("a"), R("a/x"), R("b"), W("c"))
    task = stage.run()
    await settled(lambda: stage.running == {0, 3, 4})
    stage.release[0].set()
    await settled(lambda: stage.running == {1, 3, 4})
    stage.release[1].set()
    await settled(lambda: stage.running == {2, 3, 4})
    for event in stage.release:
        event.set()
    await task
    assert stage.started == [0, 3, 4, 1, 2] and stage.order == [0, 1, 2, 3, 4]


async def test_everything_runs_alone() -> None:
    stage = Stage(R("a"), Accesses.all(), Accesses.none())
    task = stage.run()
    for expected in ({0}, {1}, {2}):
        await settled(lambda expected=expected: stage.running == expected)
        stage.release[min(expected)].set()
    await task
    assert stage.most == 1


async def test_the_bound_holds_and_places_roll() -> None:
    stage = Stage(*[R("a")] * 7)
    task = stage.run(max_concurrency=3)
    await settled(lambda: stage.running == {0, 1, 2})
    stage.release[1].set()
    await settled(lambda: stage.running == {0, 2, 3})
    for event in stage.release:
        event.set()
    await task
    assert stage.most == 3 and stage.started == list(range(7))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (W("a"), R("a"), True),
        (W("a"), R("./b/../a"), True),
        (W("a"), R("a/b/c"), True),
        (R("a/b"), W("a"), True),
        (W("a"), R("ab"), False),
        (W("a"), W("b"), False),
        (R("a"), R("a"), False),
        (W("/r/a"), R("a"), True),
        (W("."), R("x/y"), True),
        (W("/"), R("x"), True),
        (W("A.txt"), R("a.TXT"), True),
        (Accesses.all(), Accesses.none(), True),
        (Accesses.none(), W("."), False),
    ],
)
def test_conflicts(one: Accesses, other: Accesses, expected: bool) -> None:
    assert conflict(one, other, root="/r") is expected
    assert conflict(other, one, root="/r") is expected


async def test_cancel_gives_grace_then_cancels_and_nothing_more_starts() -> None:
    stage = Stage(R("a"), R("b"), W("a"), Accesses.all())
    task = stage.run(grace_s=0.05)
    await settled(lambda: stage.running == {0, 1})
    stage.cancelled.set()
    stage.release[1].set()
    await asyncio.wait_for(task, 3)
    assert stage.order == [0, 1, 2, 3] and stage.started == [0, 1]
    assert stage.codes == ["tool.cancelled", None, "tool.not_started", "tool.not_started"]


async def test_what_ends_within_the_grace_keeps_its_result() -> None:
    stage = Stage(R("a"), W("a"))
    task = stage.run(grace_s=5)
    await settled(lambda: stage.running == {0})
    stage.cancelled.set()
    await asyncio.sleep(0)
    stage.release[0].set()
    await asyncio.wait_for(task, 3)
    assert stage.codes == [None, "tool.not_started"]


async def test_cancelled_before_the_start() -> None:
    stage = Stage(R("a"), R("b"))
    stage.cancelled.set()
    await asyncio.wait_for(stage.run(), 3)
    assert stage.started == [] and stage.codes == ["tool.not_started"] * 2


async def test_a_call_that_ignores_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.tools.scheduling._STOP_S", 0.05)
    stage = Stage(R("a"), R("b"))
    stage.ignore_cancel = {0}
    task = stage.run(grace_s=0.01)
    await settled(lambda: stage.running == {0, 1})
    stage.cancelled.set()
    await asyncio.wait_for(task, 3)
    assert stage.codes == ["tool.cancelled", "tool.cancelled"]
    stage.release[0].set()
    await settled(lambda: not stage.running)
    assert stage.order == [0, 1]


async def test_cancelling_the_runner_still_commits_every_result() -> None:
    stage = Stage(R("a"), W("a"))
    task = stage.run()
    await settled(lambda: stage.running == {0})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 3)
    assert stage.codes == ["tool.cancelled", "tool.not_started"] and not stage.running


async def test_exceptions_become_results() -> None:
    async def ours() -> ToolOutput:
        raise ToolError("no", code="tool.special", hint="try it so")

    async def users() -> ToolOutput:
        raise ZeroDivisionError("by zero")

    async def leaves() -> ToolOutput:
        raise SystemExit(3)

    async def cancels() -> ToolOutput:
        raise asyncio.CancelledError

    got: dict[int, ToolOutput] = {}
    calls = [ScheduledCall(Accesses.none(), call) for call in (ours, users, leaves, cancels)]
    await run_calls(
        calls, cancelled=asyncio.Event(), on_start=lambda _: None, commit=lambda i, output: got.update({i: output})
    )
    assert [got[i].error_code for i in range(4)] == [
        "tool.special",
        "tool.user_code",
        "tool.user_code",
        "tool.user_code",
    ]
    assert got[0].content == "no\nHint: try it so" and got[1].content == "ZeroDivisionError: by zero"


async def test_a_failing_commit_stops_the_running_calls_and_is_raised() -> None:
    stage = Stage(R("a"), R("b"))
    seen: list[int] = []

    def commit(index: int, _: ToolOutput) -> None:
        seen.append(index)
        if index == 0:
            raise RuntimeError("the log is full")

    calls = [ScheduledCall(a, lambda i=i: stage._call(i)) for i, a in enumerate(stage.accesses)]
    task = asyncio.create_task(
        run_calls(calls, cancelled=stage.cancelled, on_start=stage.started.append, commit=commit)
    )
    await settled(lambda: stage.running == {0, 1})
    stage.release[0].set()
    with pytest.raises(RuntimeError, match="the log is full"):
        await asyncio.wait_for(task, 5)
    assert not stage.running and seen == [0, 1]


async def test_a_failing_start_leaves_a_result_for_each_call() -> None:
    stage = Stage(R("a"), R("b"), R("c"))

    def on_start(index: int) -> None:
        if index == 1:
            raise RuntimeError("not recorded")

    calls = [ScheduledCall(a, lambda i=i: stage._call(i)) for i, a in enumerate(stage.accesses)]
    got: list[tuple[int, str | None]] = []
    with pytest.raises(RuntimeError, match="not recorded"):
        await asyncio.wait_for(
            run_calls(
                calls,
                cancelled=stage.cancelled,
                on_start=on_start,
                commit=lambda i, output: got.append((i, output.error_code)),
            ),
            5,
        )
    assert got == [(0, "tool.cancelled"), (1, "tool.not_started"), (2, "tool.not_started")]


async def test_a_thousand_calls_do_not_compare_each_with_each_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counting(one: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        return False

    monkeypatch.setattr("kimi_ray.tools.scheduling._conflict", counting)

    async def run() -> ToolOutput:
        await asyncio.sleep(0)
        return ToolOutput("x")

    got: list[int] = []
    await run_calls(
        [ScheduledCall(R(f"file{index}"), run) for index in range(1000)],
        cancelled=asyncio.Event(),
        on_start=lambda index: None,
        commit=lambda index, output: got.append(index),
    )
    assert got == list(range(1000)) and compared < 50_000


async def test_no_calls() -> None:
    await asyncio.wait_for(Stage().run(), 1)


paths = st.sampled_from(["a", "a/b", "a/b/c", "b", "."])
accesses = st.one_of(
    st.just(Accesses.none()),
    st.just(Accesses.all()),
    st.lists(paths, min_size=1, max_size=2).map(lambda p: R(*p)),
    st.lists(paths, min_size=1, max_size=2).map(lambda p: W(*p)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(accesses, max_size=8), st.integers(1, 4), st.randoms(use_true_random=False), st.booleans())
def test_any_batch(wanted: list[Accesses], places: int, rng: random.Random, stop: bool) -> None:
    async def scenario() -> None:
        stage = Stage(*wanted)
        task = stage.run(max_concurrency=places, grace_s=0.0)
        finished: list[int] = []
        while not task.done():
            for _ in range(4):
                await asyncio.sleep(0)
            running = sorted(stage.running)
            assert len(running) <= places
            for n, one in enumerate(running):
                assert not any(conflict(wanted[one], wanted[other]) for other in running[n + 1 :])
                assert all(not conflict(wanted[one], wanted[e]) for e in range(one) if e not in finished)
            if stop and rng.random() < 0.2:
                stage.cancelled.set()
                await asyncio.wait_for(task, 3)
            elif running:
                index = rng.choice(running)
                stage.release[index].set()
                await settled(lambda index=index: index not in stage.running)
                finished.append(index)
        await task
        assert stage.order == list(range(len(wanted)))
        assert len(set(stage.started)) == len(stage.started)

    asyncio.run(scenario())


class Ends(Stage):
    """A stage whose call of one index ends those behind it."""

    def __init__(self, at: int, *accesses: Accesses) -> None:
        super().__init__(*accesses)
        self.at = at

    async def _call(self, index: int) -> ToolOutput:
        return dataclasses.replace(await super()._call(index), stop_batch=index == self.at)


@pytest.mark.parametrize("at", range(4))
async def test_behind_a_call_that_ends_the_batch_nothing_starts(at: int) -> None:
    stage = Ends(at, *[Accesses.all()] * 4)
    for release in stage.release:
        release.set()
    await asyncio.wait_for(stage.run(), 5)
    assert stage.started == list(range(at + 1)) and stage.order == [0, 1, 2, 3]
    assert stage.codes == [None] * (at + 1) + ["tool.not_started"] * (3 - at)


async def test_what_runs_beside_a_call_that_ends_the_batch_runs_on_and_what_is_before_it_starts() -> None:
    # 0 runs long and writes a; 1 waits for it; 2 ends the batch; 3 runs beside; 4 waits for a too
    stage = Ends(2, Accesses.writes("a"), Accesses.writes("a"), Accesses.none(), Accesses.none(), Accesses.reads("a"))
    running = stage.run()
    await settled(lambda: stage.running == {0, 2, 3})
    stage.release[2].set()
    await settled(lambda: stage.running == {0, 3})
    for release in stage.release:
        release.set()
    await asyncio.wait_for(running, 5)
    assert stage.started == [0, 2, 3, 1] and stage.order == [0, 1, 2, 3, 4]
    assert stage.codes == [None] * 4 + ["tool.not_started"]
