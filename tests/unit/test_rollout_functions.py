"""Rollout functions through the public API, everything in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kimi_ray.agent import rollout_agent
from kimi_ray.agent.rollout import RolloutContext
from kimi_ray.errors import KimiRayError, RunError, ToolError
from kimi_ray.llm.script import Step
from kimi_ray.runs.run_directory import read_attempts, read_manifest
from kimi_ray.settings import Item, Limits, Workdir
from tests.unit.runtime_fixtures import Stage, cluster_of, hosts_of, running

BARE = {"profile": "bare"}


class Verdict(BaseModel):
    good: bool
    why: str


@dataclass
class Kept:
    """What a function that is lost, stuck or cancelled tells a test."""

    calls: int = 0
    cancelled: int = 0
    ended: int = 0


async def _session(runtime: Any, tmp_path: Path, model: str) -> Any:
    return await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")


async def _events(session: Any, agent_id: str) -> list[Any]:
    return [event async for event in session.agent(agent_id).events()]


async def test_a_function_asks_scores_and_returns(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        first = await ctx.agent.ask(f"draft {ctx.item['word']}")
        second = await ctx.agent.ask(f"mend {first.text}")
        ctx.score("steps", 2)
        ctx.score("exact", 0.5)
        ctx.score("exact", 1.0)
        ctx.note("went well")
        assert len(await ctx.agent.messages()) == 4
        assert (ctx.prompt, ctx.repeat, ctx.attempt, ctx.tags["n"]) == (f"do {ctx.item['word']}", 0, 1, "x")
        return Verdict(good=True, why=second.text)

    async with running(tmp_path) as (runtime, stage, model):
        session = await _session(runtime, tmp_path, model)
        items = [Item(id=word, data={"word": word}, tags={"n": "x"}) for word in ("a", "b")]
        report = await session.swarm("do {{word}}", items, rollout=rollout, seed=4, **BARE)
        for row in report.rows:
            assert row.status == "completed" and row.error is None, row.error
            assert row.output == {"good": True, "why": f"did mend did draft {row.item_id}"}
            assert row.text == f"did mend did draft {row.item_id}"
            assert row.scores == {"steps": 2, "exact": 1.0}
            assert (row.turns, row.steps) == (2, 2) and row.usage.output > 0
        assert len(stage.requests) == 4
        events = await _events(session, report.rows[0].agent_id)
        kinds = [event.type for event in events]
        submitted = [event.data for event in events if event.type == "prompt/submitted"]
        assert submitted[0]["source"]["kind"] == "rollout" and "rollout" in submitted[0]["source"]["function"]
        root = submitted[0]["prompt_id"]
        assert [data["source"] for data in submitted[1:]] == [{"kind": "rollout", "prompt_id": root}] * 2
        ends = {event.data["prompt_id"]: event.data["state"] for event in events if event.type == "prompt/completed"}
        assert ends == {data["prompt_id"]: "completed" for data in submitted}
        assert kinds.index("output/recorded") < len(kinds) - 1 and kinds[-1] == "prompt/completed"
        assert Counter(kinds)["turn/start"] == Counter(kinds)["turn/end"] == 2
        assert events[-1].seq == report.rows[0].last_seq


async def test_the_generator_and_the_seed_are_those_of_the_attempt(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        return {"draw": ctx.rng.random(), "seed": ctx.seed}

    async with running(tmp_path) as (runtime, stage, model):
        session = await _session(runtime, tmp_path, model)
        runs = [await session.swarm(None, ["a", "b"], rollout=rollout, repeats=2, seed=5, **BARE) for _ in range(2)]
        draws = [[row.output["draw"] for row in report.rows] for report in runs]
        assert draws[0] == draws[1] and len(set(draws[0])) == 4
        assert [row.output["seed"] for row in runs[0].rows] == [row.seed for row in runs[0].rows]
        assert not stage.requests and runs[0].rows[0].text == ""


async def test_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    seen: list[str] = []

    def rollout(ctx: RolloutContext) -> str:
        seen.append(threading.current_thread().name)
        ctx.score("in_thread", True)
        ctx.note("from a thread")
        return ctx.run(ctx.agent.ask(f"hello {ctx.item}")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        report = await session.swarm(None, ["a"], rollout=rollout, **BARE)
        (row,) = report.rows
        assert (row.status, row.output, row.text) == ("completed", "did hello a", "did hello a"), row.error
        assert row.scores == {"in_thread": True}
        assert seen[0].startswith("rollout ")


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
        session = await _session(runtime, tmp_path, model)
        items = ["value", "exit", "interrupt", "cancelled", "stop", "ok"]
        report = await session.swarm(None, items, rollout=rollout, retries=1, retry_on=["user_code"], seed=1, **BARE)
        assert [row.status for row in report.rows] == ["failed"] * 5 + ["completed"]
        for row in report.rows[:5]:
            assert row.error is not None and row.error.error_class == "user_code", row.error
            assert row.error.code == "swarm.rollout_failed" and row.attempt == 2
            assert row.scores == {"tried": 2} and row.output is None
        events = await _events(session, report.rows[0].agent_id)
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
        session = await _session(runtime, tmp_path, model)
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
        session = await _session(runtime, tmp_path, model)
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
        session = await _session(runtime, tmp_path, model)
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
        session = await _session(runtime, tmp_path, model)
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
        session = await _session(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_swarm(None, ["a", "b"], rollout=rollout, **BARE)
        await stage.until_running(2)
        await handle.cancel(5)
        report = await handle.result(20)
        assert [row.status for row in report.rows] == ["cancelled"] * 2
        assert (kept.calls, kept.cancelled) == (2, 2) and stage.running == 0
        assert report.rows[0].error is not None and report.rows[0].error.error_class == "cancelled"
        assert report.rows[0].scores == {"partial": 1}
        events = await _events(session, report.rows[0].agent_id)
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
        session = await _session(runtime, tmp_path, model)
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
        session = await _session(runtime, tmp_path, model)
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
        session = await _session(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_swarm(None, ["a"], rollout=rollout, **BARE)
        await stage.until_running(1)
        await handle.cancel(5)
        (row,) = (await handle.result(20)).rows
        assert (row.status, row.scores, told) == ("cancelled", {"partial": 1}, ["turn.cancelled"])


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"text": {"a": 1}}, "request.bad_argument"),
        ({"text": None}, "request.bad_argument"),
        ({"text": " "}, "prompt.empty"),
        ({"text": "x", "limits": {"max_steps": 2}}, "request.bad_argument"),
        ({"text": "x", "sampling": {"temperature": 0}}, "request.bad_argument"),
    ],
)
async def test_what_cannot_be_asked_is_told_by_its_code(tmp_path: Path, said: dict[str, Any], code: str) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.agent.ask(**said)

    async with running(tmp_path) as (runtime, stage, model):
        session = await _session(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.status == "failed" and row.error is not None and row.error.code == code, row.error
        assert not stage.requests


async def test_asks_may_run_beside_each_other_and_be_given_up(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        both = await asyncio.gather(ctx.agent.ask("one"), ctx.agent.ask("two"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ctx.agent.ask("hang")
        last = await ctx.agent.ask("three")
        return [result.text for result in (*both, last)]

    async with running(tmp_path) as (runtime, stage, model):
        answer = stage.answer

        async def answers(request: Any) -> Step:
            if stage.prompt(request) == "hang":
                await asyncio.sleep(60)
            return await answer(request)

        stage_module(stage, answers)
        session = await _session(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.output == ["did one", "did two", "did three"], row.error


def stage_module(stage: Stage, answer: Any) -> None:
    """Let the scripted model ask another function."""
    import sys

    from tests.unit.runtime_fixtures import MODULE

    sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]


async def test_a_lost_function_begins_again_and_a_finished_one_never(tmp_path: Path) -> None:
    made: Counter[tuple[str, int]] = Counter()

    async def rollout(ctx: RolloutContext) -> Any:
        made[ctx.item, ctx.attempt] += 1
        if ctx.item != "quick":
            await ctx.agent.ask(f"{ctx.item} {ctx.attempt}")
        return ctx.attempt

    async with running(tmp_path) as (runtime, stage, model):
        session = await _session(runtime, tmp_path, model)
        stage.gate.clear()
        options = {**BARE, "seed": 3, "out": tmp_path / "r"}
        handle = await session.start_swarm(None, ["quick", "a", "b"], rollout=rollout, **options)
        await stage.until_running(2)
        async with asyncio.timeout(10):
            async for row in handle:
                assert row.item_id and row.item == "quick"
                break
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        stage.gate.set()
        report = await handle.result(40)
        assert [row.status for row in report.rows] == ["completed"] * 3
        assert [row.attempt for row in report.rows] == [1, 2, 2]
        assert [row.output for row in report.rows] == [1, 2, 2]
        assert made == Counter({("quick", 1): 1, ("a", 1): 1, ("a", 2): 1, ("b", 1): 1, ("b", 2): 1})
        first, second = report.rows[1].attempts
        assert first.error is not None and first.error.code == "turn.interrupted" and first.seed != second.seed
        assert len(read_attempts(tmp_path / "r")) == 5


@pytest.mark.parametrize("kind", [("sessions",), ("sessions", "agents")])
async def test_a_lost_session_host_finds_the_functions_again(tmp_path: Path, kind: tuple[str, ...]) -> None:
    made: Counter[tuple[str, int]] = Counter()

    async def rollout(ctx: RolloutContext) -> Any:
        made[ctx.item, ctx.attempt] += 1
        ctx.score("attempt", ctx.attempt)
        if ctx.item != "quick":
            await ctx.agent.ask(f"{ctx.item}")
        return {"attempt": ctx.attempt}

    async with running(tmp_path) as (runtime, stage, model):
        session = await _session(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_swarm(None, ["quick", "a", "b"], rollout=rollout, **BARE)
        await stage.until_running(2)
        for one in kind:
            for host in await hosts_of(runtime, one):
                cluster_of(runtime).kill_host(host)
        stage.gate.set()
        report = await handle.result(40)
        assert [row.status for row in report.rows] == ["completed"] * 3
        lost = "agents" in kind
        assert [row.output for row in report.rows] == [{"attempt": n} for n in ((1, 2, 2) if lost else (1, 1, 1))]
        assert [row.scores["attempt"] for row in report.rows] == [row.attempt for row in report.rows]
        assert all(count == 1 for count in made.values()) and made["quick", 1] == 1 and made["quick", 2] == 0


async def test_a_run_records_the_function_and_is_gone_on_with_by_it(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        if ctx.item == "b" and not let_through:
            raise ValueError
        return ctx.attempt

    async def another(ctx: RolloutContext) -> Any:
        return 0

    let_through: list[int] = []
    out = tmp_path / "run"
    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        options = {**BARE, "out": out, "output_schema": {"type": "integer"}}
        first = await session.swarm(None, ["a", "b"], rollout=rollout, **options)
        assert [row.status for row in first.rows] == ["completed", "failed"]
        manifest = read_manifest(out)
        assert manifest["rollout"].endswith("rollout") and manifest["output_schema"] == {"type": "integer"}
        let_through.append(1)
        again = {**options, "resume": True, "retry": ["user_code"]}
        with pytest.raises(RunError) as caught:
            await session.swarm(None, ["a", "b"], rollout=another, **again)
        assert caught.value.code == "run.mismatch" and "rollout" in caught.value.message
        with pytest.raises(RunError):
            await session.swarm(None, ["a", "b"], rollout=rollout, **{**again, "output_schema": None})
        second = await session.swarm(None, ["a", "b"], rollout=rollout, **again)
        assert [row.output for row in second.rows] == [1, 2]


async def test_tools_and_the_environment_are_the_profiles(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.environment.write_bytes("seen.txt", b"by the function")
        result = await ctx.agent.ask("read it")
        return [result.text, result.tool_calls]

    async with running(tmp_path) as (runtime, stage, model):
        stage.faults = {"read it": [Step.call("Read", {"file_path": "seen.txt"})]}
        session = await _session(runtime, tmp_path, model)
        (tmp_path / "from").mkdir()
        (row,) = (
            await session.swarm(
                None, ["a"], rollout=rollout, profile="explore", workdir=Workdir.copy(str(tmp_path / "from"))
            )
        ).rows
        assert row.output == ["did read it", 1] and row.tool_calls == 1, row.error


async def test_what_cannot_be_a_rollout_is_refused_before_the_start(tmp_path: Path) -> None:
    async def two(_a: Any, _b: Any) -> None: ...

    async def generator(_ctx: Any) -> Any:
        yield 1

    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        for wrong in (two, generator, 7):
            with pytest.raises(RunError) as caught:
                await session.start_swarm(None, ["a"], rollout=wrong, **BARE)
            assert caught.value.code == "swarm.bad_rollout"
        for missing in ("no_such_module_here:f", "json:nothing", "json"):
            with pytest.raises(ToolError) as refused:
                await session.start_swarm(None, ["a"], rollout=missing, **BARE)
            assert refused.value.code == "tool.not_importable"
        with pytest.raises(RunError) as caught:
            await session.start_swarm(None, ["a"], **BARE)
        assert caught.value.code == "swarm.no_prompt"


async def test_an_agent_that_ran_a_function_can_be_spoken_to_afterwards(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        return (await ctx.agent.ask("first")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        agent = session.agent(row.agent_id)
        assert (await (await agent.submit("second")).result(10)).text == "did second"


async def test_a_turn_without_a_message_and_a_continued_conversation(tmp_path: Path) -> None:
    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.agent.ask("one")
        again = await ctx.agent.continue_turn()
        return [again.text, again.state, len(await ctx.agent.messages())]

    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.output == ["did one", "completed", 3], row.error


async def test_closing_the_session_ends_functions_and_leaves_their_logs_whole(tmp_path: Path) -> None:
    kept = Kept()

    async def rollout(ctx: RolloutContext) -> Any:
        kept.calls += 1
        try:
            await (ctx.agent.ask("hang") if ctx.item == "asks" else asyncio.sleep(60))
        finally:
            kept.ended += 1

    async with running(tmp_path) as (runtime, stage, model):
        session = await _session(runtime, tmp_path, model)
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
            events = await _events(again, agent_id)
            kinds = Counter(event.type for event in events)
            assert kinds["prompt/submitted"] == kinds["prompt/completed"] > 0
            assert kinds["turn/start"] == kinds["turn/end"]


async def test_prompts_of_others_run_beside_the_function(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def rollout(ctx: RolloutContext) -> Any:
        await ctx.agent.ask("mine")
        asked.set()
        while len(await ctx.agent.messages()) < 4:
            await asyncio.sleep(0.005)
        return (await ctx.agent.ask("mine again")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        handle = await session.start_swarm(None, ["a"], rollout=rollout, **BARE)
        async with asyncio.timeout(20):
            await asked.wait()
            agent_id = next(one["agent_id"] for one in await session.agents() if one["agent_id"] != "main")
            other = await (await session.agent(agent_id).submit("from outside")).result(10)
        assert other.text == "did from outside"
        (row,) = (await handle.result(20)).rows
        assert (row.output, row.turns) == ("did mine again", 3)


async def test_a_gate_that_blocks_what_is_asked_is_told_to_the_function(tmp_path: Path) -> None:
    hook = {"event": "UserPromptSubmit", "command": "grep -q forbidden && { echo not that >&2; exit 2; } || exit 0"}

    async def rollout(ctx: RolloutContext) -> Any:
        first = await ctx.agent.ask("forbidden", check=False)
        second = await ctx.agent.ask("allowed")
        return [first.state, second.text]

    async with running(tmp_path, hooks=[hook]) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        (row,) = (await session.swarm(None, ["a"], rollout=rollout, **BARE)).rows
        assert row.output == ["blocked", "did allowed"], row.error


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
        session = await _session(runtime, tmp_path, model)
        handle = await session.start_swarm(
            None, ["a", "b"], rollout=many, total_limits=Limits(max_steps=30), max_concurrency=2, **BARE
        )
        report = await handle.result(30)
        assert {row.stop for row in report.rows} == {"limit:max_steps"}
        # The hosts are asked how far their agents are ten times a second.
        assert 28 <= len(stage.requests) <= 30 + 2 * 15
        cut = sum(row.steps for row in report.rows) - len(stage.requests)
        assert 0 <= cut <= 2, "what was cancelled had begun"


async def test_a_function_whose_end_is_in_its_log_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    stored = asyncio.Event()
    settle = rollout_agent.RolloutFunctionAgent._settle_durably

    async def silent(self: Any, prompt_ids: list[str]) -> None:
        if prompt_ids != [self._root]:
            await settle(self, prompt_ids)
            return
        await self.journal.flush()
        stored.set()
        await asyncio.sleep(3600)  # durable, and nobody is told

    monkeypatch.setattr(rollout_agent.RolloutFunctionAgent, "_settle_durably", silent)

    async def rollout(ctx: RolloutContext) -> Any:
        begun.append(ctx.attempt)
        ctx.score("s", 1)
        return (await ctx.agent.ask("once")).text

    async with running(tmp_path) as (runtime, _stage, model):
        session = await _session(runtime, tmp_path, model)
        handle = await session.start_swarm(None, ["a"], rollout=rollout, **BARE)
        async with asyncio.timeout(10):
            await stored.wait()
        monkeypatch.undo()
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        (row,) = (await handle.result(30)).rows
        assert (row.status, row.attempt, row.output, row.scores) == ("completed", 1, "did once", {"s": 1})
        assert begun == [1]


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
        session = await _session(runtime, tmp_path, model)
        report = await session.swarm(None, ["ours", "both", "waits"], rollout=rollout, **BARE)
        ours, both, waits = (row.error for row in report.rows)
        assert ours is not None and ours.error_class == "auth"
        assert both is not None and (both.error_class, both.cause) == ("user_code", "LookupError")
        assert waits is not None and waits.code == "swarm.bad_rollout"
