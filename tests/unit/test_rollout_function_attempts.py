"""Functions whose host is lost, and runs that go on: no attempt is made twice, and none that has ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent import rollout_agent
from kimi_ray.agent.rollout import RolloutContext
from kimi_ray.errors import RunError
from kimi_ray.runs.run_directory import read_attempts, read_manifest
from tests.unit.rollout_stage import BARE, begin
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


async def test_a_lost_function_begins_again_and_a_finished_one_never(tmp_path: Path) -> None:
    made: Counter[tuple[str, int]] = Counter()

    async def rollout(ctx: RolloutContext) -> Any:
        made[ctx.item, ctx.attempt] += 1
        if ctx.item != "quick":
            await ctx.agent.ask(f"{ctx.item} {ctx.attempt}")
        return ctx.attempt

    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
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
        session = await begin(runtime, tmp_path, model)
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
        session = await begin(runtime, tmp_path, model)
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
        session = await begin(runtime, tmp_path, model)
        handle = await session.start_swarm(None, ["a"], rollout=rollout, **BARE)
        async with asyncio.timeout(10):
            await stored.wait()
        monkeypatch.undo()
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        (row,) = (await handle.result(30)).rows
        assert (row.status, row.attempt, row.output, row.scores) == ("completed", 1, "did once", {"s": 1})
        assert begun == [1]
