"""How rollout functions end: by an error, a limit, a cancel, a close; none is left behind, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent import rollout_agent
from kimi_ray.agent.rollout import RolloutContext
from kimi_ray.errors import KimiRayError, RunError
from kimi_ray.llm.script import Step
from kimi_ray.settings import Limits
from tests.unit.rollout_stage import BARE, Kept, begin, events_of, stage_module
from tests.unit.runtime_fixtures import running


async def test_what_a_function_raises_is_the_users_and_harms_nobody_else(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        ctx.score("tried", ctx.attempt)
        kind = ctx.item
        if kind == "value":
            raise ValueError("bad \ud800 thing")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "cancelled":
            raise asyncio.CancelledError
        if kind == "stop":
            raise StopIteration(1)
        return "fine"

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        items = ["value", "exit", "interrupt", "cancelled", "stop", "ok"]
        report = await session.swarm(None, items, rollout=rollout, retries=1, retry_on=["user_code"], seed=1, **BARE)
        assert [row.status for row in report.rows] == ["failed"] * 5 + ["completed"]
        for row in report.rows[:5]:
            assert row.error is not None and row.error.error_class == "user_code", row.error
            assert row.error.code == "swarm.rollout_failed" and row.attempt == 2
            assert row.scores == {"tried": 2} and row.output is None
        events = await events_of(session, report.rows[0].agent_id)
        error = events[-1].data["error"]
        assert error["details"]["exception"] == "ValueError"
        assert 'raise ValueError("bad' in error["details"]["traceback"]


async def test_a_failing_turn_keeps_its_class_unless_the_function_looks_at_it(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        if ctx.item == "raises":
            await ctx.agent.ask("broken")
        result = await ctx.agent.ask("broken", check=False)
        return {"state": result.state, "code": (result.error or {}).get("code")}

    async with running(tmp_path) as (runtime, stage, model):
        stage.faults = {"broken": [Step.error("provider.auth", 401) for _ in range(9)]}
        session = await begin(runtime, tmp_path, model)
        report = await session.swarm(None, ["raises", "looks"], rollout=rollout, **BARE)
        raised, looked = report.rows
        assert raised.status == "failed" and raised.error is not None and raised.error.error_class == "auth"
        assert looked.output == {"state": "failed", "code": "provider.auth"}


@pytest.mark.parametrize(
    "value", [object(), float("nan"), {"deep": {1, object()}}, "x" * (rollout_agent.MAX_OUTPUT_BYTES + 1)]
)
async def test_what_no_row_can_hold_is_refused(tmp_path: Path, value: Any) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        with pytest.raises(RunError):
            ctx.score("bad", object())
        with pytest.raises(RunError):
            ctx.score("", 1)
        with pytest.raises(RunError):
            ctx.note("x" * 1_000_000)
        return value

    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.status == "failed" and row.error is not None
        assert (row.error.code, row.error.error_class) == ("swarm.bad_output", "user_code")


async def test_whatever_goes_wrong_around_a_function_ends_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rollout(ctx: RolloutContext) -> str:
        return "fine"

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(rollout_agent, "_check_output", broken)
    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        async with asyncio.timeout(20):
            report = await session.swarm(None, ["a"], rollout=rollout, **BARE)
        (row,) = report.rows
        assert row.status == "failed" and row.error is not None and row.error.code == "internal"


async def test_limits_of_steps_and_of_time_end_it_as_limits(tmp_path: Path) -> None:
    async def many(ctx: RolloutContext) -> Any:
        for n in range(10):
            await ctx.agent.ask(f"turn {n}")
        return "never"

    async def slow(_ctx: RolloutContext) -> Any:
        await asyncio.sleep(60)

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=many, limits=Limits(max_steps=3), **BARE)).rows
        assert (row.status, row.stop, row.steps) == ("limit", "limit:max_steps", 3)
        assert len(stage.requests) == 3 and row.text == "did turn 2"
        (row,) = (await session.swarm(None, ["a"], rollout=slow, limits=Limits(time_s=0.05), **BARE)).rows
        assert (row.status, row.stop) == ("limit", "limit:time_s")
        assert row.timing.wall_ms >= 50
        report = await session.swarm(None, ["a", "b"], rollout=many, total_limits=Limits(max_steps=4), **BARE)
        assert {row.status for row in report.rows} <= {"limit", "not_started"}


async def test_cancel_ends_a_function_and_what_it_asked_for(tmp_path: Path) -> None:
    kept = Kept()

    async def rollout(ctx: RolloutContext) -> Any:
        kept.calls += 1
        try:
            await ctx.agent.ask("hang")
        except asyncio.CancelledError:
            kept.cancelled += 1
            ctx.score("partial", 1)
            raise

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_swarm(None, ["a", "b"], rollout=rollout, **BARE)
        await stage.until_running(2)
        await handle.cancel(5)
        report = await handle.result(20)
        assert [row.status for row in report.rows] == ["cancelled"] * 2
        assert (kept.calls, kept.cancelled) == (2, 2) and stage.running == 0
        assert report.rows[0].error is not None and report.rows[0].error.error_class == "cancelled"
        assert report.rows[0].scores == {"partial": 1}
        events = await events_of(session, report.rows[0].agent_id)
        submitted = [event.data["prompt_id"] for event in events if event.type == "prompt/submitted"]
        ended = {event.data["prompt_id"]: event.data["state"] for event in events if event.type == "prompt/completed"}
        assert ended == dict.fromkeys(submitted, "cancelled")


async def test_a_function_that_will_not_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_agent, "GRACE_S", 0.1)
    let_go = threading.Event()
    refused: list[str] = []

    def stuck(ctx: RolloutContext) -> Any:
        let_go.wait(30)
        try:
            ctx.score("late", 1)
        except KimiRayError as error:
            refused.append(error.code)

    async def stubborn(ctx: RolloutContext) -> Any:
        while not let_go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        with pytest.raises(KimiRayError):
            await ctx.agent.ask("late")
        refused.append("asked")

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        for function in (stuck, stubborn):
            (row,) = (await session.swarm(None, ["a"], rollout=function, limits=Limits(time_s=0.05), **BARE)).rows
            assert row.stop == "limit:time_s"
        let_go.set()
        async with asyncio.timeout(10):
            while len(refused) < 2:
                await asyncio.sleep(0.005)
        assert set(refused) == {"agent.closed", "asked"} and not stage.requests


async def test_a_plain_function_has_the_grace_to_score_once_it_is_cancelled(tmp_path: Path) -> None:
    asked: list[str] = []

    def rollout(ctx: RolloutContext) -> Any:
        while not ctx.cancelled.is_set():
            threading.Event().wait(0.005)
        ctx.score("partial", 1)
        try:
            ctx.run(ctx.agent.ask("late"))
        except KimiRayError as error:
            asked.append(error.code)

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        began = time.monotonic()
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, limits=Limits(time_s=0.05), **BARE)).rows
        assert (row.stop, row.scores) == ("limit:time_s", {"partial": 1}), row.error
        assert time.monotonic() - began < rollout_agent.GRACE_S  # as soon as it has ended, not later
        assert asked == ["agent.closed"] and not stage.requests


async def test_a_plain_function_that_is_cancelled_while_it_waits_is_told_and_may_score(tmp_path: Path) -> None:
    told: list[str] = []

    def rollout(ctx: RolloutContext) -> Any:
        try:
            ctx.run(ctx.agent.ask("hang"))
        except KimiRayError as error:
            told.append(error.code)
        ctx.score("partial", 1)

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_swarm(None, ["a"], rollout=rollout, **BARE)
        await stage.until_running(1)
        await handle.cancel(5)
        (row,) = (await handle.result(20)).rows
        assert (row.status, row.scores, told) == ("cancelled", {"partial": 1}, ["turn.cancelled"])


async def test_closing_the_session_ends_functions_and_leaves_their_logs_whole(tmp_path: Path) -> None:
    kept = Kept()

    async def rollout(ctx: RolloutContext) -> Any:
        kept.calls += 1
        try:
            await (ctx.agent.ask("hang") if ctx.item == "asks" else asyncio.sleep(60))
        finally:
            kept.ended += 1

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_swarm(None, ["asks", "works"], rollout=rollout, **BARE)
        await stage.until_running(1)
        async with asyncio.timeout(20):
            while kept.calls < 2:
                await asyncio.sleep(0.005)
            await session.close()
        assert kept.ended == 2 and stage.running == 0
        with contextlib.suppress(KimiRayError):
            await handle.result(20)
        again = await runtime.workspace(tmp_path / "work").resume(session.id, model=model)
        children = [one["agent_id"] for one in await again.agents() if one["agent_id"] != "main"]
        assert len(children) == 2
        for agent_id in children:
            events = await events_of(again, agent_id)
            kinds = Counter(event.type for event in events)
            assert kinds["prompt/submitted"] == kinds["prompt/completed"] > 0
            assert kinds["turn/start"] == kinds["turn/end"]


async def test_total_limits_count_every_turn_of_running_functions(tmp_path: Path) -> None:
    async def many(ctx: RolloutContext) -> Any:
        for n in range(1000):
            await ctx.agent.ask(f"turn {n}")

    async with running(tmp_path) as (runtime, stage, model):
        answer = stage.answer

        async def slowly(request: Any) -> Step:
            await asyncio.sleep(0.02)
            return await answer(request)

        stage_module(stage, slowly)
        session = await begin(runtime, tmp_path, model)
        handle = await session.start_swarm(
            None, ["a", "b"], rollout=many, total_limits=Limits(max_steps=30), max_concurrency=2, **BARE
        )
        report = await handle.result(30)
        assert {row.stop for row in report.rows} == {"limit:max_steps"}
        # The hosts are asked how far their agents are ten times a second.
        assert 28 <= len(stage.requests) <= 30 + 2 * 15
        cut = sum(row.steps for row in report.rows) - len(stage.requests)
        assert 0 <= cut <= 2, "what was cancelled had begun"


async def test_what_a_task_group_raises_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.agent.ask("broken"))
            if ctx.item == "both":
                group.create_task(_raises())
            if ctx.item == "waits":
                ctx.run(ctx.agent.ask("never"))

    async def _raises() -> None:
        raise LookupError("mine")

    async with running(tmp_path) as (runtime, stage, model):
        stage.faults = {"broken": [Step.error("provider.auth", 401) for _ in range(9)]}
        session = await begin(runtime, tmp_path, model)
        report = await session.swarm(None, ["ours", "both", "waits"], rollout=rollout, **BARE)
        ours, both, waits = (row.error for row in report.rows)
        assert ours is not None and ours.error_class == "auth"
        assert both is not None and (both.error_class, both.cause) == ("user_code", "LookupError")
        assert waits is not None and waits.code == "swarm.bad_rollout"
