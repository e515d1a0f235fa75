"""SIGKILLs in the middle of a swarm: of the store, of a host of agents, of the registry, of the session's host."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kimi_ray import Item, Profile, Runtime, Session, SwarmHandle, Workdir, Workspace
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import registry_name
from kimi_ray.runs.run_directory import read_rows
from kimi_ray.store import open_store
from tests.actors.conftest import until
from tests.actors.fault_models import COMMAND, ECHO, ONE_TOOL, look, running, wait_for
from tests.actors.faults import (
    assert_nothing_lost,
    assert_once,
    back,
    counts,
    hosts_of,
    kill,
    read_session,
    store_of,
)

AGENTS = 200
PROFILE = Profile(name="looker", system_prompt="You look at things.")
TURN = (
    "prompt/submitted",
    "prompt/started",
    "turn/start",
    "tool/call",
    "tool/result",
    "turn/end",
    "prompt/completed",
)


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config, hosts_per_node=2) as runtime:
        yield runtime


@pytest.fixture
def workspace(runtime: Runtime, tmp_path: Path) -> Workspace:
    (tmp_path / "work").mkdir()
    return runtime.workspace(tmp_path / "work")


async def lookers(session: Session, agents: int = AGENTS, **options) -> SwarmHandle:
    """A swarm whose agents each call one tool."""
    items = [Item(id=f"i{n}", data=f"thing {n}") for n in range(agents)]
    return await session.start_swarm(
        "{{item}}", items, profile=PROFILE, model=ONE_TOOL, tools=[look], max_concurrency=32, **options
    )


async def rows_reach(handle: SwarmHandle, count: int) -> None:
    """Wait until so many rows are there."""
    seen = 0
    async with asyncio.timeout(60):
        async for _ in handle:
            seen += 1
            if seen >= count:
                return


@pytest.mark.long
async def test_the_store_killed_three_times(runtime: Runtime, workspace: Workspace, config: RuntimeConfig) -> None:
    session = await workspace.create_session(model=ONE_TOOL, profile="bare")
    handle = await lookers(session)
    took = []
    for rows in (20, 80, 140):
        await rows_reach(handle, rows)
        assert not handle.done
        took.append(await back(runtime, store_of(runtime), await kill(runtime, store_of(runtime))))
    report = await handle.result(90)
    print("store back after", took, "swarm", report.wall_s)
    assert report.totals["completed"] == AGENTS == len(report.rows)
    assert len({row.agent_id for row in report.rows}) == AGENTS
    assert sum(row.interruptions for row in report.rows) == 0
    await session.flush()
    logs = await read_session(config.home, session.id)
    assert len(logs) == AGENTS + 1
    assert_nothing_lost(report.rows, logs)
    for row in report.rows:
        assert_once(logs[row.agent_id or ""], *TURN)
        assert row.tool_calls == 1 and row.steps == 2
    main = logs["main"]
    assert_once(main, "swarm/start", "swarm/end")
    for kind in ("subagent/spawned", "subagent/started", "subagent/completed"):
        named = Counter(event.data["agent_id"] for event in main if event.type == kind)
        assert len(named) == AGENTS and set(named.values()) == {1}, kind


async def test_a_host_of_agents_killed(
    runtime: Runtime, workspace: Workspace, config: RuntimeConfig, tmp_path: Path
) -> None:
    session = await workspace.create_session(model=ECHO, profile="bare")
    pid_file = tmp_path / "sleeper.pid"
    prompts = [f"sleeper {pid_file}", *(f"thing {n}" for n in range(AGENTS - 1))]
    items = [Item(id=f"i{n}", data=prompt) for n, prompt in enumerate(prompts)]
    await until(lambda: _two_hosts(runtime))
    handle = await session.start_swarm(
        "{{item}}",
        items,
        profile=PROFILE,
        model=COMMAND,
        tools=["Bash"],
        workdir=Workdir.copy(workspace.path),
        max_concurrency=32,
    )
    await rows_reach(handle, 40)
    sleeper = int(await asyncio.to_thread(wait_for, lambda: pid_file.exists() and pid_file.read_text().strip()))
    assert running(sleeper)
    victim = await _host_of_item(runtime, session, "i0")
    began = time.monotonic()
    await kill(runtime, victim)
    await asyncio.to_thread(wait_for, lambda: not running(sleeper), 10)
    print("command dead after", time.monotonic() - began)
    report = await handle.result(90)
    print("swarm", report.wall_s)
    assert report.totals["completed"] == AGENTS == len(report.rows)
    assert [row.item_id for row in report.rows] == [item.id for item in items]
    interrupted = {row.agent_id for row in report.rows if row.interruptions}
    assert report.rows[0].agent_id in interrupted
    assert len(interrupted) <= 32
    assert all(row.interruptions == 1 and row.attempt == 1 for row in report.rows if row.agent_id in interrupted)
    await session.flush()
    logs = await read_session(config.home, session.id)
    assert len(logs) == AGENTS + 1
    assert_nothing_lost(report.rows, logs)
    for row in report.rows:
        assert_once(logs[row.agent_id or ""], "prompt/submitted", "prompt/completed")
        assert counts(logs[row.agent_id or ""])["runtime/activated"] in (1, 2)
    result = next(event for event in logs[report.rows[0].agent_id or ""] if event.type == "tool/result")
    assert result.data["error"] == {"code": "tool.outcome_unknown"}
    suspended = {event.data["agent_id"] for event in logs["main"] if event.type == "subagent/suspended"}
    assert interrupted <= suspended and len(suspended) <= 32


async def test_the_registry_killed_is_not_noticed(
    runtime: Runtime, workspace: Workspace, config: RuntimeConfig
) -> None:
    session = await workspace.create_session(model=ONE_TOOL, profile="bare")
    registry = registry_name(runtime.connection.home_id)
    handle = await lookers(session, 100)
    await rows_reach(handle, 20)
    before = await kill(runtime, registry)
    report = await handle.result(60)
    print("swarm", report.wall_s)
    assert report.totals["completed"] == 100
    assert sum(row.interruptions for row in report.rows) == 0
    assert {row.attempt for row in report.rows} == {1}
    took = await back(runtime, registry, before)
    print("registry back", took)
    new = await workspace.create_session(model=ECHO, profile="bare")
    assert (await (await new.main.submit("hello")).result(30)).text == "did hello"
    hosts = {host["name"] for kind in ("agents", "sessions") for host in await hosts_of(runtime, kind)}
    listed = {
        host.name for host in await runtime.connection.cluster.list_hosts() if host.kind in ("agents", "sessions")
    }
    assert hosts == listed
    assert_nothing_lost(report.rows, await read_session(config.home, session.id))


async def test_the_sessions_host_killed(
    runtime: Runtime, workspace: Workspace, config: RuntimeConfig, tmp_path: Path
) -> None:
    session = await workspace.create_session(model=ONE_TOOL, profile="bare")
    handle = await lookers(session, 100, out=tmp_path / "run")
    await rows_reach(handle, 20)
    (host,) = [host["name"] for host in await hosts_of(runtime, "sessions") if session.id in host["sessions"]]
    began = time.monotonic()
    await kill(runtime, host)
    at_kill = len(read_rows(tmp_path / "run"))
    await rows_reach(handle, at_kill + 1)
    print("rows again after", time.monotonic() - began)
    report = await handle.result(60)
    print("swarm", report.wall_s)
    assert report.totals["completed"] == 100 == len(report.rows)
    assert len({row.agent_id for row in report.rows}) == 100
    assert sorted(row.item_id for row in read_rows(tmp_path / "run")) == sorted(f"i{n}" for n in range(100))
    (again,) = [host["name"] for host in await hosts_of(runtime, "sessions") if session.id in host["sessions"]]
    assert again != host
    assert (await (await session.main.submit("still here")).result(30)).state == "completed"
    assert await workspace.resume(session.id) is session
    await session.close()
    logs = await read_session(config.home, session.id)
    assert_nothing_lost(report.rows, logs)
    # What ran unseen at the kill was stopped, and runs again as a further attempt under another name.
    rolled = {row.agent_id for row in report.rows}
    left = set(logs) - rolled - {"main"}
    assert len(left) <= 2 * 32
    for agent_id in left:
        assert counts(logs[agent_id])["turn/start"] == counts(logs[agent_id])["turn/end"]
    store = open_store(config.home)
    seen = Counter(
        (log.header["item_id"], log.header["repeat"], log.header["attempt"])
        for log in await store.list(session.id)
        if log.header and log.stream.agent_id != "main"
    )
    assert max(seen.values()) == 1, [key for key, times in seen.items() if times > 1]


async def _two_hosts(runtime: Runtime) -> bool:
    return len(await hosts_of(runtime, "agents")) >= 2


async def _host_of_item(runtime: Runtime, session: Session, item_id: str) -> str:
    row = next(row for row in await session.agents() if row["item_id"] == item_id)
    for host in await hosts_of(runtime, "agents"):
        told = await runtime.connection.cluster.peer(host["name"]).call("ping", timeout_s=10, group="control")
        if (session.id, row["agent_id"]) in told["streams"]:
            return host["name"]
    raise AssertionError(f"nobody holds {item_id}")
