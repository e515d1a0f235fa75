"""An agent's life in a session: its log is begun once, its number is nobody else's, and how it ends."""

from __future__ import annotations

from pathlib import Path

from tests.trees import types
from tests.unit.runtime_fixtures import running
from tests.unit.test_tree_recovery import headers_of, kill, logs_of


async def test_a_log_is_begun_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session(model=model, profile="bare")
        await (await session.main.submit("one")).result(10)
        await session.close()
        header = (await headers_of(tmp_path, session.id))["main"]
        before = (await logs_of(tmp_path, session.id))["main"]
        again = await work.resume(session.id)
        await again.close()
        after = (await logs_of(tmp_path, session.id))["main"]
        assert (await headers_of(tmp_path, session.id))["main"] == header
        # A life is one small event; nothing of the configuration is written again.
        assert [event.line for event in after[: len(before)]] == [event.line for event in before]
        assert types(after[len(before) :]) == ["runtime/activated"]


async def test_numbers_of_agents_are_never_used_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session(model=model, profile="bare")
        first = await session.swarm("{{item}}", ["a", "b"], profile="bare")
        assert sorted(str(row.agent_id) for row in first.rows) == ["agent-1", "agent-2"]
        await session.close()
        session = await work.resume(session.id)
        second = await session.swarm("{{item}}", ["c"], profile="bare")
        await kill(runtime, "sessions", "agents")
        third = await session.swarm("{{item}}", ["d"], profile="bare", parent="agent-2")
        assert [row.agent_id for row in (*second.rows, *third.rows)] == ["agent-3", "agent-4"]


async def test_at_the_close_the_queue_is_cancelled_before_what_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        assert (await session.swarm("{{item}}", ["a"], profile="bare")).ok
        stage.gate.clear()
        ids: dict[str, list[str]] = {}
        for name in ("main", "agent-1"):
            agent = session.agent(name)
            ids[name] = [(await agent.submit(f"{name} {n}")).id for n in range(3)]
        await stage.until_running(2)
        await session.close()
        assert stage.running == 0
        logs = await logs_of(tmp_path, session.id)
        for name, (active, *queued) in ids.items():
            ended = [event.data for event in logs[name] if event.type == "prompt/completed"][-3:]
            assert [data["prompt_id"] for data in ended] == [*queued, active], name
            assert {data["state"] for data in ended} == {"cancelled"}
            found = types(logs[name])
            assert found.count("turn/start") == found.count("turn/end"), name
