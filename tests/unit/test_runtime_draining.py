"""Hosts that let go of agents and sessions all the time: nobody who uses them notices, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kimi_ray import Profile, Runtime, Workdir
from kimi_ray.errors import ToolError
from kimi_ray.hosts import draining
from kimi_ray.tools import tool
from kimi_ray.tools.carried import CarriedTool, carried, fingerprint_of
from tests.actors.fault_models import ECHO, FAST_ECHO, LATENCY_S
from tests.actors.faults import counts, read_session

PROFILE = Profile(name="echo", system_prompt="You repeat.", tools=())
NOWHERE = Workdir.none()


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    monkeypatch.setattr(draining, "UNTOUCHED_S", 0.05)
    async with Runtime.connect(tmp_path / "home", "in-process", hosts_per_node=2, durability="none") as runtime:
        yield runtime


async def hosts(runtime: Runtime, kind: str) -> list[str]:
    return [host.name for host in await runtime.connection.cluster.list_hosts() if host.kind == kind]


async def let_go(runtime: Runtime) -> tuple[int, int, int]:
    """One look at all hosts of agents: how many left, run, are pinned."""
    sums = [0, 0, 0]
    for name in await hosts(runtime, "agents"):
        moved, running, pinned = await runtime.connection.cluster.peer(name).call("let_go", timeout_s=10)
        sums = [sums[0] + moved, sums[1] + len(running), sums[2] + len(pinned)]
    return sums[0], sums[1], sums[2]


async def hand_over(runtime: Runtime) -> tuple[list[str], list[str]]:
    gone: list[str] = []
    stay: list[str] = []
    for name in await hosts(runtime, "sessions"):
        handed, busy = await runtime.connection.cluster.peer(name).call("hand_over", timeout_s=10)
        gone, stay = gone + handed, stay + busy
    return gone, stay


@asynccontextmanager
async def disturbed(runtime: Runtime) -> AsyncIterator[dict[str, int]]:
    """Everything that may leave leaves, again and again."""
    done = {"moved": 0, "handed": 0}

    async def disturb() -> None:
        while True:
            done["moved"] += (await let_go(runtime))[0]
            done["handed"] += len((await hand_over(runtime))[0])
            await asyncio.sleep(0.01)

    task = asyncio.create_task(disturb())
    yield done
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_idle_agent_leaves_and_the_next_prompt_brings_it_back(runtime: Runtime, tmp_path: Path) -> None:
    session = await runtime.workspace(tmp_path).create_session(model=FAST_ECHO, profile="bare", workdir=NOWHERE)
    assert (await (await session.main.submit("one")).result(10)).text == "did one"
    assert await let_go(runtime) == (0, 1, 0)
    async with asyncio.timeout(5):
        while await let_go(runtime) != (1, 0, 0):
            await asyncio.sleep(0.01)
    assert await let_go(runtime) == (0, 0, 0)
    assert (await (await session.main.submit("two")).result(10)).text == "did two"
    log = (await read_session(runtime.config.home, session.id))["main"]
    assert counts(log)["runtime/activated"] == 2
    assert counts(log)["turn/end"] == 2


async def test_a_running_agent_stays_until_its_turn_ends(runtime: Runtime, tmp_path: Path) -> None:
    session = await runtime.workspace(tmp_path).create_session(model=ECHO, profile="bare", workdir=NOWHERE)
    prompt = await session.main.submit("slow")
    for _ in range(3):
        assert (await let_go(runtime))[:2] == (0, 1)
    assert LATENCY_S > 0
    assert (await prompt.result(10)).text == "did slow"
    async with asyncio.timeout(5):
        while not (await let_go(runtime))[0]:
            await asyncio.sleep(0.01)


async def test_an_agent_with_a_directory_of_its_own_stays(runtime: Runtime, tmp_path: Path) -> None:
    await runtime.workspace(tmp_path).create_session(model=FAST_ECHO, profile="bare")
    async with asyncio.timeout(5):
        while await let_go(runtime) != (0, 0, 1):
            await asyncio.sleep(0.01)


async def test_a_session_is_handed_over_and_its_main_lives_on(runtime: Runtime, tmp_path: Path) -> None:
    session = await runtime.workspace(tmp_path).create_session(model=FAST_ECHO, profile="bare", title="kept")
    await (await session.main.submit("one")).result(10)
    assert await hand_over(runtime) == ([session.id], [])
    assert not await runtime.is_live(session.id)
    await session.update(tags={"a": "b"})
    assert await runtime.is_live(session.id)
    assert (await (await session.main.submit("two")).result(10)).text == "did two"
    log = (await read_session(runtime.config.home, session.id))["main"]
    assert counts(log)["runtime/activated"] == 1, "its main agent was taken over where it lived"


async def test_a_session_with_a_swarm_stays_until_it_is_read(runtime: Runtime, tmp_path: Path) -> None:
    session = await runtime.workspace(tmp_path).create_session(model=ECHO, profile="bare")
    handle = await session.start_swarm("{{item}}", ["a", "b"], profile=PROFILE, workdir=NOWHERE)
    assert await hand_over(runtime) == ([], [session.id])
    assert (await handle.result(20)).totals["completed"] == 2
    async with asyncio.timeout(5):
        while (await hand_over(runtime))[0] != [session.id]:
            await asyncio.sleep(0.01)


async def test_prompts_and_swarms_go_on_while_everything_leaves(runtime: Runtime, tmp_path: Path) -> None:
    workspace = runtime.workspace(tmp_path)
    sessions = [await workspace.create_session(model=FAST_ECHO, profile="bare", workdir=NOWHERE) for _ in range(3)]
    async with disturbed(runtime) as done:

        async def prompts(session) -> list[str]:
            said: list[str] = []
            for n in range(25):
                said.append((await (await session.main.submit(f"say {n}")).result(20)).text)
                await asyncio.sleep(0.08)
            return said

        async def swarms() -> None:
            for _ in range(3):
                report = await sessions[0].swarm(
                    "{{item}}", [str(n) for n in range(30)], profile=PROFILE, workdir=NOWHERE, max_concurrency=8
                )
                assert report.totals["completed"] == 30
                for row in report.rows:
                    assert (row.error, row.interruptions, len(row.attempts)) == (None, 0, 1)

        results = await asyncio.gather(*(prompts(session) for session in sessions), swarms())
    for said in results[:3]:
        assert said == [f"did say {n}" for n in range(25)]
    assert done["moved"] > 5 and done["handed"] > 1
    for session in sessions:
        log = (await read_session(runtime.config.home, session.id))["main"]
        assert counts(log)["prompt/completed"] == 25 == counts(log)["prompt/submitted"]


@tool
def weigh(what: str) -> str:
    """Weigh something."""
    return what


async def test_a_host_checks_tools_and_tells_the_code_it_holds(runtime: Runtime, tmp_path: Path) -> None:
    await runtime.workspace(tmp_path).create_session(model=FAST_ECHO, tools=[weigh], workdir=NOWHERE)
    wanted = fingerprint_of(carried([weigh]))
    told = [
        await runtime.connection.cluster.peer(name).call("ping", timeout_s=10)
        for name in await hosts(runtime, "agents")
    ]
    assert {one["fingerprint"] for one in told if one["agents"]} == {wanted}
    broken = CarriedTool(weigh)
    broken._tool, broken._sealed = None, b"cno_such_module_anywhere\nf\n."
    (name, *_) = await hosts(runtime, "agents")
    with pytest.raises(ToolError) as caught:
        await runtime.connection.cluster.peer(name).call("check_tools", (broken,), timeout_s=10)
    assert caught.value.code == "tool.not_importable"
    assert (caught.value.details["tool"], caught.value.details["node_id"]) == ("weigh", "local")
