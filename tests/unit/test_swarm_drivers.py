"""A driver that is gone leaves a swarm running in its session; another one goes on with the run there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import RunError
from kimi_ray.events import SessionEvent
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.runs.execute import RunSink
from kimi_ray.runs.run_directory import read_rows
from kimi_ray.session_handle import Session
from kimi_ray.settings import Limits
from kimi_ray.swarm_handle import SwarmHandle
from tests.trees import check_positions, check_prompts, stored_logs, types
from tests.unit.runtime_fixtures import MODULE, Stage, running

ITEMS = ["a", "b", "held 1", "c", "held 2", "d"]


def hold_some(stage: Stage) -> None:
    """Prompts that begin with ``held`` wait at the gate, and no others."""

    async def answer(request: ChatRequest) -> Step:
        text = stage.prompt(request)
        if text.startswith("held"):
            return await Stage.answer(stage, request)
        stage.seen[text] += 1
        waiting = stage.faults.get(text)
        return waiting.pop(0) if waiting else Step(text=f"did {text}")

    sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
    stage.gate.clear()


async def driver_that_dies(session: Session, out: Path, rows: int, **options: Any) -> SwarmHandle:
    """A swarm whose driver has ``rows`` rows on disk, and died before it could say that it has them."""
    handle = await session.start_swarm("{{item}}", ITEMS, profile="bare", model=None, out=out, run_id="r", **options)
    take, stored, never = handle._take, asyncio.Event(), asyncio.Event()

    async def take_and_die(page: Any) -> None:
        await take(page)
        if len(handle._rows) >= rows:
            stored.set()
            await never.wait()

    handle._take = take_and_die  # type: ignore[method-assign]
    async with asyncio.timeout(15):
        await stored.wait()
    assert handle._main is not None
    handle._main.cancel()
    await asyncio.wait([handle._main])
    return handle


async def test_rows_that_a_dead_driver_stored_and_did_not_acknowledge_come_once(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        hold_some(stage)
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await driver_that_dies(session, tmp_path / "run", 4)
        assert len(read_rows(tmp_path / "run")) == 4
        handle = await session.start_swarm(
            "{{item}}", ITEMS, profile="bare", model=None, out=tmp_path / "run", resume=True
        )
        stage.gate.set()
        report = await handle.result(30)
        assert [(row.status, row.text, row.attempt) for row in report.rows] == [
            ("completed", f"did {item}", 1) for item in ITEMS
        ]
        assert stage.seen == dict.fromkeys(ITEMS, 1)
        await session.close()
        logs = await stored_logs(tmp_path / "home", session.id)
        check_prompts(logs)
        check_positions(logs)
        assert {name: types(events).count("runtime/activated") for name, events in logs.items()} == dict.fromkeys(
            logs, 1
        )
        spawned = [event.data["agent_id"] for event in logs["main"] if event.type == "subagent/spawned"]
        assert len(spawned) == len(set(spawned)) == 6
        assert types(logs["main"]).count("swarm/end") == 1


async def test_what_a_resume_runs_again_runs_again_though_the_swarm_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        hold_some(stage)
        stage.faults = {"b": [Step.error("provider.bad_request", 400)], "d": [Step.error("provider.bad_request", 400)]}
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await driver_that_dies(session, tmp_path / "run", 4)
        assert sorted(row.status for row in read_rows(tmp_path / "run")) == ["completed"] * 2 + ["failed"] * 2
        handle = await session.start_swarm(
            "{{item}}", ITEMS, profile="bare", model=None, out=tmp_path / "run", resume=True
        )
        stage.gate.set()
        report = await handle.result(30)
        assert [(row.status, row.text) for row in report.rows] == [("completed", f"did {item}") for item in ITEMS]
        assert [row.attempt for row in report.rows] == [1, 2, 1, 1, 1, 2]
        assert stage.seen == dict.fromkeys(ITEMS, 1) | {"b": 2, "d": 2}
        assert len({row.seed for row in report.rows}) == 6


async def test_rollouts_that_ended_with_no_driver_are_told_to_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        hold_some(stage)
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        first = await driver_that_dies(session, tmp_path / "run", 4)
        stage.gate.set()
        async with asyncio.timeout(15):
            while (await session._link.call("swarm_progress", first._key, group="control", timeout_s=5)).running:
                await asyncio.sleep(0.01)
        report = await session.swarm("{{item}}", ITEMS, profile="bare", model=None, out=tmp_path / "run", resume=True)
        assert [(row.status, row.attempt) for row in report.rows] == [("completed", 1)] * 6
        assert stage.seen == dict.fromkeys(ITEMS, 1)
        assert {row.key for row in read_rows(tmp_path / "run")} == {row.key for row in report.rows}


async def test_of_two_living_drivers_the_later_one_has_the_run(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        hold_some(stage)
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        first = await session.start_swarm("{{item}}", ITEMS, profile="bare", run_id="r")
        await stage.until_running(2)
        second = await session.start_swarm("{{item}}", ITEMS, profile="bare", run_id="r")
        with pytest.raises(RunError) as caught:
            await first.result(15)
        assert caught.value.code == "swarm.taken_over"
        await first.cancel()
        stage.gate.set()
        report = await second.result(30)
        assert [(row.status, row.text, row.attempt) for row in report.rows] == [
            ("completed", f"did {item}", 1) for item in ITEMS
        ]
        assert stage.seen == dict.fromkeys(ITEMS, 1)


async def test_a_run_taken_over_counts_once_and_keeps_no_place(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        hold_some(stage)
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile="bare", limits=Limits(max_steps=8)
        )
        await driver_that_dies(session, tmp_path / "run", 4)
        # Twice in a row, with nothing between.
        for _ in range(2):
            handle = await session.start_swarm("{{item}}", ITEMS, profile="bare", run_id="r")
        stage.gate.set()
        assert (await handle.result(30)).ok
        assert stage.seen == dict.fromkeys(ITEMS, 1)
        for number in range(2):
            assert (await (await session.main.submit(f"{number}")).result(10)).state == "completed"
        ended = await (await session.main.submit("one too many")).result(10)
        assert ended.stop == "limit:max_steps" and ended.error is not None and ended.error["details"]["used"] == 8
        status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
        assert sum(host["load"] for host in status["hosts"] if host["kind"] == "agents") == 1


async def test_a_run_whose_rows_could_not_be_kept_goes_on_with_other_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_args: object) -> None:
        raise RunError("no space", code="run.write_failed", hint="free some")

    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        monkeypatch.setattr(RunSink, "write", full)
        with pytest.raises(RunError) as caught:
            await session.swarm("{{item}}", ["a"], profile="bare", out=tmp_path / "run")
        assert caught.value.code == "run.write_failed" and stage.seen == {"a": 1}
        monkeypatch.undo()
        report = await session.swarm("{{item}}", ["a"], profile="bare", out=tmp_path / "run", resume=True)
        # It had completed, and its log says so: its row is written, nothing is paid twice.
        assert [(row.status, row.attempt) for row in report.rows] == [("completed", 1)] and stage.seen == {"a": 1}


async def counted_below(session: Session, limit: int) -> int:
    """How many steps the tree counts for main's children: so many of its limit are not left to main."""
    for number in range(limit + 1):
        if (await (await session.main.submit(f"{number}")).result(10)).stop == "limit:max_steps":
            return limit - number
    raise AssertionError("the limit was never reached")


def responses(logs: dict[str, list[SessionEvent]]) -> int:
    return sum(types(events).count("step/start") for name, events in logs.items() if name != "main")


async def test_a_run_that_is_asked_for_again_counts_once(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile="bare", limits=Limits(max_steps=6)
        )
        for _ in range(2):
            assert (await session.swarm("{{item}}", ["a", "b", "c"], profile="bare", run_id="r")).ok
        assert stage.seen == {"a": 1, "b": 1, "c": 1}
        assert await counted_below(session, 6) == 3


@pytest.mark.parametrize("moment_s", [0.0, 0.003, 0.01])
async def test_cancelled_and_taken_over_in_one_moment(tmp_path: Path, moment_s: float) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, _stage, model):

        async def answer(_request: ChatRequest) -> Step:
            await asyncio.sleep(0.02)
            return Step(text="done")

        sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile="bare", limits=Limits(max_steps=20)
        )
        first = await session.start_swarm("{{item}}", [*"abcd"], profile="bare", run_id="r")
        await asyncio.sleep(moment_s)
        cancelling = asyncio.create_task(first.cancel())
        await asyncio.sleep(0)
        second = await session.start_swarm("{{item}}", [*"abcd"], profile="bare", run_id="r")
        report = await second.result(30)
        await cancelling
        assert len(report.rows) == 4
        counted = await counted_below(session, 20)
        await session.close()
        logs = await stored_logs(tmp_path / "home", session.id)
        assert counted == responses(logs)
        check_prompts(logs)
        check_positions(logs)
        for event in logs["main"]:
            if event.type == "subagent/failed":
                ends = [e.data["state"] for e in logs[event.data["agent_id"]] if e.type == "prompt/completed"]
                assert ends == ["cancelled"]


async def test_what_begins_again_when_it_is_taken_over_is_counted_too(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        hold_some(stage)
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile="bare", limits=Limits(max_steps=20)
        )
        items, options = ["held 1", "held 2"], {"profile": "bare", "run_id": "r", "on_interrupted": "restart"}
        await session.start_swarm("{{item}}", items, **options)  # type: ignore[arg-type]
        await stage.until_running(2)
        second = await session.start_swarm("{{item}}", items, **options)  # type: ignore[arg-type]
        stage.gate.set()
        assert [(row.status, row.attempt) for row in (await second.result(30)).rows] == [("completed", 2)] * 2
        counted = await counted_below(session, 20)
        await session.close()
        assert counted == responses(await stored_logs(tmp_path / "home", session.id)) == 4
