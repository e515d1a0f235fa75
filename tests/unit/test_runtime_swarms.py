"""Swarms through the public API, everything in this process."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError, RunError
from kimi_ray.llm.script import Step
from kimi_ray.runs.run_directory import read_attempts, read_manifest, read_rows
from kimi_ray.settings import Item, Limits, Sampling, Workdir
from kimi_ray.store import open_store
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

BARE = {"profile": "bare"}
SPAWNED = "subagent/spawned"


async def test_twenty_items_are_twenty_requests(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        items = [Item(id=f"i{n}", data={"word": f"w{n}"}, tags={"n": str(n)}) for n in range(20)]
        handle = await session.start_swarm("say {{word}}", items, max_concurrency=7, tags={"t": "x"}, **BARE)
        came = [row.item_id async for row in handle]
        report = await handle.result()
        assert sorted(came) == sorted(row.item_id for row in report.rows)
        assert [row.item_id for row in report.rows] == [f"i{n}" for n in range(20)]
        assert [row.text for row in report.rows] == [f"did say w{n}" for n in range(20)]
        assert len(stage.requests) == 20 and stage.most <= 7
        row = report.rows[3]
        assert row.status == "completed" and row.attempt == 1 and row.tags == {"t": "x", "n": "3"}
        assert row.item == {"word": "w3"} and row.index == 3 and row.steps == 1 and row.turns == 1
        assert row.session_id == session.id and row.seed is not None and len(row.attempts) == 1
        assert len({row.agent_id for row in report.rows}) == 20
        await session.flush()
        logs = await open_store(tmp_path / "home").list(session.id)
        headers = {log.stream.agent_id: log.header for log in logs if log.header}
        header = headers[row.agent_id or ""]
        assert header["origin"] == "subagent" and header["delegation_depth"] == 1
        assert header["parent"] == {"session_id": session.id, "agent_id": "main"}
        assert (header["run_id"], header["item_id"], header["repeat"], header["attempt"]) == (report.run_id, "i3", 0, 1)
        assert header["labels"] == {"item": "i3"}
        events = [event async for event in session.main.events()]
        counts = Counter(event.type for event in events)
        for kind in ("subagent/spawned", "subagent/started", "subagent/completed"):
            assert counts[kind] == 20
        assert counts["swarm/start"] == counts["swarm/end"] == 1
        end = next(event for event in events if event.type == "swarm/end")
        assert end.data["counts"] == {"completed": 20}
        assert end.data["agents"][row.agent_id]["seq"] == (row.last_seq or 0) + 1


async def test_concurrency_is_exact(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(9)], max_concurrency=3, **BARE)
        await stage.until_running(3)
        progress = await handle.refresh()
        assert (progress.running, progress.queued, progress.done, progress.total) == (3, 6, 0, 9)
        stage.gate.set()
        await handle.result(20)
        assert stage.most == 3


async def test_progress_costs_nothing_and_catches_up_while_it_is_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(9)], max_concurrency=3, **BARE)
        first = handle.progress()
        assert (first.total, first.done) == (9, 0)
        await stage.until_running(3)
        async with asyncio.timeout(10):
            while handle.progress().running != 3:
                await asyncio.sleep(0.01)
        stage.gate.set()
        await handle.result(20)
        last = handle.progress()
        assert (last.running, last.done, last.completed) == (0, 9, 9)


async def test_repeats_and_seeds_are_the_same_in_a_second_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        items = ["equal"] * 10
        runs = [
            await session.swarm("x {{item}}", items, repeats=4, seed=7, max_concurrency=40, **BARE) for _ in range(2)
        ]
        seeds = [[row.seed for row in report.rows] for report in runs]
        assert len(seeds[0]) == 40 == len(set(seeds[0]))
        assert seeds[0] == seeds[1]
        assert {request.sampling.seed for request in stage.requests} == set(seeds[0])
        stage.requests.clear()
        unsent = await session.swarm("x {{item}}", ["a"], **BARE)
        assert unsent.rows[0].seed is not None and stage.requests[0].sampling.seed is None
        fixed = await session.swarm("x {{item}}", ["a"], sampling=Sampling(seed=5), **BARE)
        assert fixed.rows[0].seed == 5 == stage.requests[1].sampling.seed


async def test_failures_are_data_and_retried_by_class(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        auth, script = Step.error("provider.auth", 401), Step.error("provider.bad_request", 400)
        stage.faults = {"a": [auth], "b": [script], "c": [script, script, script]}
        report = await session.swarm("{{item}}", ["a", "b", "c", "d"], retries=1, seed=3, **BARE)
        assert [row.status for row in report.rows] == ["failed", "completed", "failed", "completed"]
        assert [row.attempt for row in report.rows] == [1, 2, 2, 1]
        assert report.rows[0].error is not None and report.rows[0].error.error_class == "auth"
        first, second = report.rows[1].attempts
        assert first.status == "failed" and first.seed != second.seed and first.agent_id != second.agent_id
        assert not report.ok
        with pytest.raises(RunError) as caught:
            report.raise_for_status()
        assert caught.value.code == "swarm.failed"


async def test_lost_hosts_cost_an_interruption_and_no_row(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(30)], max_concurrency=12, **BARE)
        await stage.until_running(12)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        stage.running = 0
        stage.gate.set()
        report = await handle.result(40)
        assert [row.status for row in report.rows] == ["completed"] * 30
        assert [row.text for row in report.rows] == [f"did {n}" for n in range(30)]
        assert sum(row.interruptions for row in report.rows) == 12
        assert all(row.attempt == 1 for row in report.rows)
        events = [event async for event in session.main.events()]
        assert Counter(event.type for event in events)["subagent/spawned"] == 30
        assert [event.seq for event in events] == list(range(len(events)))
        progress = await handle.refresh()
        assert (progress.completed, progress.running, progress.interruptions) == (30, 0, 12)


async def test_restart_begins_again_as_a_new_attempt(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["a", "b"], on_interrupted="restart", seed=1, **BARE)
        await stage.until_running(2)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        stage.gate.set()
        report = await handle.result(40)
        for row in report.rows:
            assert row.status == "completed" and row.attempt == 2
            assert [one.status for one in row.attempts] == ["failed", "completed"]
            assert row.attempts[0].error is not None and row.attempts[0].error.code == "turn.interrupted"
            assert row.attempts[0].seed != row.attempts[1].seed


async def test_a_rollout_that_kills_its_hosts_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["poison"], **BARE)
        kills = 0
        async with asyncio.timeout(20):
            while not handle.done:
                if stage.running:
                    for host in await hosts_of(runtime, "agents"):
                        cluster_of(runtime).kill_host(host)
                    kills += 1
                await asyncio.sleep(0.02)
        assert kills >= 3
        (row,) = (await handle.result(40)).rows
        assert row.status == "failed" and row.error is not None
        assert row.error.code == "agent.revivals_exhausted" and row.error.error_class == "infra"
        assert row.interruptions >= 3


async def test_a_lost_session_host_begins_what_has_no_row_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(6)], max_concurrency=3, **BARE)
        await stage.until_running(3)
        for host in await hosts_of(runtime, "sessions"):
            cluster_of(runtime).kill_host(host)
        stage.gate.set()
        report = await handle.result(40)
        assert [row.status for row in report.rows] == ["completed"] * 6
        logs = await open_store(tmp_path / "home").list(session.id)
        assert len({log.stream.agent_id for log in logs}) == len(logs)


async def test_cancel_keeps_text_and_says_what_never_started(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(8)], max_concurrency=2, **BARE)
        await stage.until_running(2)
        await handle.cancel(5)
        report = await handle.result(20)
        assert report.totals["cancelled"] == 2 and report.totals["not_started"] == 6
        cancelled = next(row for row in report.rows if row.status == "cancelled")
        assert cancelled.last_seq is not None and cancelled.error is not None
        assert cancelled.error.error_class == "cancelled"
        untouched = next(row for row in report.rows if row.status == "not_started")
        assert untouched.attempt == 0 and untouched.stop == "cancelled"
        assert (await (await session.main.submit("still here")).result(1 if stage.gate.set() else 10)).text


async def test_drain_lets_what_runs_go_to_its_end(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(8)], max_concurrency=2, **BARE)
        await stage.until_running(2)
        await handle.cancel(mode="drain")
        stage.gate.set()
        report = await handle.result(20)
        assert report.totals["completed"] == 2 and report.totals["not_started"] == 6


async def test_leaving_a_swarm_cancels_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        task = asyncio.create_task(session.swarm("{{item}}", ["a", "b"], **BARE))
        await stage.until_running(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            while stage.running:
                await asyncio.sleep(0.005)


async def test_total_limits_end_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        report = await session.swarm(
            "{{item}}",
            [str(n) for n in range(30)],
            max_concurrency=2,
            total_limits=Limits(max_steps=5),
            **BARE,
        )
        assert report.totals["completed"] + report.totals["limit"] <= 5 + 2
        assert report.totals["not_started"] >= 23
        assert {row.stop for row in report.rows if row.status == "not_started"} == {"limit:max_steps"}
        stage.gate.clear()
        timed = await session.swarm(
            "{{item}}", ["a", "b", "c"], max_concurrency=2, total_limits=Limits(time_s=0.3), **BARE
        )
        assert [row.status for row in timed.rows] == ["limit", "limit", "not_started"]
        assert {row.stop for row in timed.rows} == {"limit:time_s"}


async def test_fail_on_stops_the_starting(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.faults = {str(n): [Step.error("provider.auth", 401)] for n in range(10)}
        report = await session.swarm("{{item}}", [str(n) for n in range(10)], max_concurrency=1, fail_on="2", **BARE)
        assert report.totals["failed"] == 2 and report.totals["not_started"] == 8


async def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        shared = Workdir.shared(str(tmp_path / "work"))
        cases = [
            ("swarm.no_placeholder", ("no placeholder", ["a"]), {}),
            ("items.unknown_column", ("{{nope}}", [{"a": 1}]), {}),
            ("items.empty", ("{{item}}", []), {}),
            ("items.duplicate_id", ("{{item}}", [Item(id="x", data="1"), Item(id="x", data="2")]), {}),
            ("swarm.bad_concurrency", ("{{item}}", ["a"]), {"max_concurrency": 0}),
            ("swarm.bad_repeats", ("{{item}}", ["a"]), {"repeats": 0}),
            ("swarm.bad_retry_class", ("{{item}}", ["a"]), {"retry_on": ["weather"]}),
            ("run.bad_id", ("{{item}}", ["a"]), {"run_id": "../x"}),
            ("swarm.shared_writes", ("{{item}}", ["a", "b"]), {"tools": ["Write"], "workdir": shared}),
            ("swarm.shared_writes", ("{{item}}", ["a", "b"]), {"tools": ["Bash"]}),
            ("tool.unknown", ("{{item}}", ["a"]), {"tools": ["Hammer"]}),
            ("model.not_configured", ("{{item}}", ["a"]), {"model": "nothing"}),
            ("profile.unknown", ("{{item}}", ["a"]), {"profile": "nobody"}),
        ]
        for code, (prompt, items), options in cases:
            with pytest.raises(KimiRayError) as caught:
                await session.start_swarm(prompt, items, **{**BARE, **options})
            assert caught.value.code == code
            assert caught.value.hint
        assert not stage.requests
        assert [row["agent_id"] for row in await session.agents()] == ["main"]


async def test_a_prompt_function_that_fails_half_way(tmp_path: Path) -> None:
    def prompt(item: Item) -> str:
        if item.data == "3":
            raise ValueError("three")
        return f"p {item.data}"

    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        handle = await session.start_swarm(prompt, [str(n) for n in range(6)], **BARE)
        with pytest.raises(RunError) as caught:
            await handle.result(20)
        assert caught.value.code == "swarm.prompt_failed"
        fine = await session.swarm(lambda item: f"q {item.data}", ["1"], **BARE)
        assert fine.rows[0].text == "did q 1"


async def test_rows_are_on_disk_before_anybody_hears_of_them(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        out = tmp_path / "out"
        stage.faults = {"b": [Step.error("provider.bad_request", 400)]}
        handle = await session.start_swarm("{{item}}", ["a", "b", "c"], retries=1, out=out, run_id="r1", **BARE)
        seen = 0
        async for row in handle:
            seen += 1
            assert row.key in {stored.key for stored in read_rows(out)}
        report = await handle.result()
        assert seen == 3 and report.run_dir == str(out)
        assert {(row.item_id, row.attempt) for row in read_attempts(out)} == {
            (one.item_id, number + 1) for one in report.rows for number in range(one.attempt)
        }
        manifest = read_manifest(out)
        assert manifest["run_id"] == "r1" == report.run_id and manifest["rollouts"] == 3
        with pytest.raises(RunError) as caught:
            await session.start_swarm("{{item}}", ["a"], out=out, **BARE)
        assert caught.value.code == "run.exists"


async def test_resume_runs_only_what_is_missing(tmp_path: Path) -> None:
    from kimi_ray.agent.profiles import resolve_profile
    from kimi_ray.runs import SwarmSettings, plan_run
    from kimi_ray.runs.execute import execute_run, open_run, reopen_run

    settings = SwarmSettings(profile=resolve_profile("bare"))
    plan = plan_run("{{item}}", [str(n) for n in range(6)], settings, seed=9, max_concurrency=1, fail_on="2")
    out = tmp_path / "out"
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        resolved = runtime.resolve_model(model)
        stage.faults = {str(n): [Step.error("provider.bad_request", 400)] for n in (1, 2)}
        sink = await open_run(plan, out, arguments={}, config={}, model=resolved)
        first = await execute_run(session, plan, resolved, sink)
        assert first.totals == {"completed": 1, "limit": 0, "failed": 2, "cancelled": 0, "not_started": 3}
        stage.requests.clear()
        resumed, sink = await reopen_run(plan, out)
        report = await execute_run(session, resumed, resolved, sink)
        assert [row.status for row in report.rows] == ["completed"] * 6
        assert sorted(stage.prompt(request) for request in stage.requests) == ["1", "2", "3", "4", "5"]
        assert report.rows[1].attempt == 2 and report.rows[0].attempt == 1
        rows = read_rows(out)
        assert sorted(row.item_id for row in rows) == sorted(row.item_id for row in report.rows)
        changed = plan_run("other {{item}}", [str(n) for n in range(6)], settings, seed=9)
        with pytest.raises(RunError) as caught:
            await reopen_run(changed, out)
        assert caught.value.code == "run.mismatch"


async def test_a_cold_child_can_be_asked_more(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        report = await session.swarm("say {{item}}", ["a", "b"], **BARE)
        child = session.agent(report.rows[1].agent_id or "")
        assert (await (await child.submit("and more")).result(20)).turn == 1
        assert len(stage.requests[-1].messages) == 3
        again = await session.swarm("say {{item}}", ["c"], **BARE)
        assert again.rows[0].agent_id == "agent-3"
        with pytest.raises(KimiRayError) as caught:
            await session.agent("agent-77").submit("hello")
        assert caught.value.code == "agent.not_found"
        rows = {row["agent_id"]: row for row in await session.agents()}
        assert rows["agent-2"]["live"] and not rows["agent-1"]["live"] and rows["main"]["live"]


async def test_agent_numbers_are_never_used_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s", model=model, profile="bare")
        await session.swarm("{{item}}", ["a", "b"], **BARE)
    async with running(tmp_path) as (runtime, _, _model):
        session = await runtime.workspace(tmp_path / "work").resume("s")
        report = await session.swarm("{{item}}", ["a", "b"], **BARE)
        assert sorted(row.agent_id or "" for row in report.rows) == ["agent-3", "agent-4"]
        state = json.loads(next((tmp_path / "home").glob("sessions/*/s/state.json")).read_text())
        assert state["agent_count"] in (3, 5)


async def test_dedicated_rollouts_have_hosts_of_their_own(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        before = set(await hosts_of(runtime, "agents"))
        handle = await session.start_swarm("{{item}}", ["a", "b", "c"], isolation="dedicated", **BARE)
        await stage.until_running(3)
        assert len(set(await hosts_of(runtime, "agents")) - before) >= 3
        stage.gate.set()
        assert (await handle.result(30)).ok
        async with asyncio.timeout(10):
            while any(host.endswith("-own") for host in await hosts_of(runtime, "agents")):
                await asyncio.sleep(0.02)


async def test_few_calls_for_many_rollouts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        (host,) = await hosts_of(runtime, "sessions")
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(400)], max_concurrency=100, **BARE)
        calls = 0
        async for _ in handle:
            if not handle.done:
                stats = await cluster_of(runtime).peer(host).call("stats", timeout_s=5, group="control")
                calls = max(calls, stats["agent_calls"])
                await asyncio.sleep(0.01)
        report = await handle.result(60)
        assert report.totals["completed"] == 400
        assert calls <= 0.2 * 400


async def test_total_limits_overshoot_by_a_request_per_agent_at_most(tmp_path: Path) -> None:
    def note(word: str) -> str:
        """Note a word."""
        return word

    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.faults = {
            str(n): [replace(Step.call("note", {"word": "x"}), latency_s=0.15) for _ in range(100)] for n in range(4)
        }
        report = await session.swarm(
            "{{item}}", ["0", "1", "2", "3"], tools=[note], total_limits=Limits(max_steps=12), **BARE
        )
        assert {row.stop for row in report.rows} == {"limit:max_steps"}
        # A step counts when it begins: its request may not be out yet.
        assert 12 - 4 <= len(stage.requests) <= 12 + 4


async def test_closing_the_runtime_under_a_swarm_ends_all_of_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session("s", model=model, profile="bare")
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", [str(n) for n in range(20)], max_concurrency=4, **BARE)
        await stage.until_running(4)
        await asyncio.wait_for(runtime.close(), 20)
        assert stage.running == 0
        with pytest.raises(KimiRayError):
            await handle.result(5)
            raise RunError("all rows came before the close", code="fine")
    assert not list((tmp_path / "home" / "owners").glob("s*"))
    async with running(tmp_path) as (runtime, stage, _):
        session = await runtime.workspace(tmp_path / "work").resume("s")
        events = [event.type async for event in session.main.events()]
        assert "swarm/end" in events
        assert events.count("subagent/spawned") == events.count("subagent/completed") + events.count("subagent/failed")


async def test_rows_that_cannot_be_kept_end_the_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_ray.runs.execute import RunSink

    async def full(*_args: object) -> None:
        raise RunError("no space", code="run.write_failed", hint="free some")

    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        monkeypatch.setattr(RunSink, "write", full)
        items = [str(n) for n in range(200)]
        handle = await session.start_swarm("{{item}}", items, max_concurrency=1, out=tmp_path / "out", **BARE)
        with pytest.raises(RunError) as caught:
            await handle.result(20)
        assert caught.value.code == "run.write_failed"
        async with asyncio.timeout(10):
            while (await handle.refresh()).running:
                await asyncio.sleep(0.02)
        assert len(stage.requests) < 200
        monkeypatch.undo()
        again = await session.swarm("{{item}}", ["x"], out=tmp_path / "out2", **BARE)
        assert again.ok


async def test_a_resumed_session_keeps_its_directory(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            "s", model=model, profile="bare", workdir=Workdir.none()
        )
        await session.close()
        (tmp_path / "other").mkdir()
        again = await runtime.workspace(tmp_path / "other").resume("s")
        assert again.cwd == str(tmp_path / "work")


async def test_limits_of_a_session_bound_its_tree(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile="bare", limits=Limits(max_steps=7))
        assert (await (await session.main.submit("one")).result(10)).state == "completed"
        report = await session.swarm("{{item}}", [f"a{n}" for n in range(4)], max_concurrency=1, **BARE)
        assert report.totals["completed"] == 4
        assert (await (await session.main.submit("two")).result(10)).state == "completed"
        report = await session.swarm("{{item}}", [f"b{n}" for n in range(4)], max_concurrency=1, **BARE)
        assert report.totals["completed"] == 1
        assert {row.stop for row in report.rows if row.status != "completed"} == {"limit:max_steps"}
        ended = await (await session.main.submit("three")).result(10)
        assert ended.stop == "limit:max_steps"
        assert ended.error is not None and ended.error["details"]["scope"] == "session"
        assert ended.error["details"]["used"] == 7
        with pytest.raises(KimiRayError) as refused:
            await session.swarm("{{item}}", ["c"], **BARE)
        assert refused.value.code == "limit.max_steps" and refused.value.details["scope"] == "session"
        await session.close()

        again = await workspace.resume(session.id, model=model)
        ended = await (await again.main.submit("four")).result(10)
        assert ended.stop == "limit:max_steps"
        with pytest.raises(KimiRayError) as refused:
            await again.swarm("{{item}}", ["d"], **BARE)
        assert refused.value.code == "limit.max_steps" and refused.value.details["used"] == 7


async def test_two_swarms_at_once_share_what_their_session_may_use(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile="bare", limits=Limits(max_steps=10))
        reports = await asyncio.gather(
            *(session.swarm("{{item}}", [f"{k}{n}" for n in range(40)], max_concurrency=2, **BARE) for k in "ab")
        )
        steps = sum(row.steps for report in reports for row in report.rows)
        assert 10 <= steps <= 10 + 4, "the overshoot is at most one request per running agent"
        assert all(len(report.rows) == 40 for report in reports)


async def test_a_session_that_may_call_no_tool_still_runs_swarms_and_calls_none(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile="bare", limits=Limits(max_tool_calls=0))
        report = await session.swarm("{{item}}", ["a", "b"], **BARE)
        assert report.totals["completed"] == 2


async def test_an_agents_own_swarm_is_told_in_its_log(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        assert (await session.main.swarm("{{item}}", ["a"], **BARE)).ok
        report = await session.agent("agent-1").swarm("{{item}}", ["b"], **BARE)
        handle = await session.agent("agent-2").start_swarm("{{item}}", ["c"], **BARE)
        assert report.ok and (await handle.result()).ok
        parents = {row["agent_id"]: row["parent_agent_id"] for row in await session.agents()}
        assert parents == {"main": None, "agent-1": "main", "agent-2": "agent-1", "agent-3": "agent-2"}
        told = [event.data["agent_id"] async for event in session.agent("agent-1").events() if event.type == SPAWNED]
        assert told == ["agent-2"]
