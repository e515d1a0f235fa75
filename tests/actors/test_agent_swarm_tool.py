"""A model's own swarm on Ray: hosts of agents are killed in the middle of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kimi_ray import Profile, Runtime, Session, Workspace
from kimi_ray.config import RuntimeConfig
from tests.actors.conftest import until
from tests.actors.faults import assert_once, counts, hosts_of, kill, read_session, store_of
from tests.actors.swarm_models import LEAD

PROFILE = Profile(name="lead", tools=("AgentSwarm",), subagents=("bare",))
ITEMS = 12


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config, hosts_per_node=2, agents_per_host=4) as runtime:
        yield runtime


@pytest.fixture
def workspace(runtime: Runtime, tmp_path: Path) -> Workspace:
    (tmp_path / "work").mkdir()
    return runtime.workspace(tmp_path / "work")


async def agents_at(runtime: Runtime, session: Session) -> dict[str, str]:
    """The host of each agent that is alive."""
    found: dict[str, str] = {}
    for agent in await session.agents():
        host = await session._link.call("find_agent", session.id, agent["agent_id"], group="control")
        if host is not None:
            found[agent["agent_id"]] = host
    return found


def outcomes(text: str) -> list[tuple[str, str, str]]:
    """Agent, outcome and answer of each subagent."""
    return re.findall(r'^<subagent [^>]*agent_id="([^"]+)"[^>]* outcome="(\w+)">(.*)</subagent>$', text, re.MULTILINE)


async def test_a_host_of_subagents_killed(
    runtime: Runtime, workspace: Workspace, config: RuntimeConfig, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    session = await workspace.create_session(model=LEAD, profile=PROFILE)
    prompt = await session.main.submit(f"swarm {ITEMS} {go}")

    async def spread() -> str | None:
        at = await agents_at(runtime, session)
        elsewhere = Counter(host for agent, host in at.items() if agent != "main" and host != at.get("main"))
        return next((host for host, count in elsewhere.items() if count >= 2), None)

    victim = await until(spread)
    await kill(runtime, victim)
    go.touch()
    result = await prompt.result(120)
    assert result.state == "completed", result
    assert "<summary>completed: 12</summary>" in result.text, result.text
    found = outcomes(result.text)
    assert [text for _, _, text in found] == [f"did item-{number}" for number in range(ITEMS)]
    await session.close()
    logs = await read_session(config.home, session.id)
    assert len(logs) == ITEMS + 1 == len({agent_id for agent_id, _, _ in found}) + 1
    for agent_id, _, _ in found:
        assert_once(logs[agent_id], "prompt/submitted", "prompt/completed")
    assert any(counts(logs[agent_id])["runtime/activated"] > 1 for agent_id, _, _ in found)
    main = logs["main"]
    for kind in ("subagent/spawned", "subagent/started", "subagent/completed"):
        named = Counter(event.data["agent_id"] for event in main if event.type == kind)
        assert len(named) == ITEMS and set(named.values()) == {1}, (kind, named)
    assert_once(main, "tool/call", "tool/result")


@pytest.mark.parametrize("what", ["session's host", "store"])
async def test_the_session_s_host_or_the_store_killed(
    runtime: Runtime, workspace: Workspace, config: RuntimeConfig, tmp_path: Path, what: str
) -> None:
    go = tmp_path / "go"
    session = await workspace.create_session(model=LEAD, profile=PROFILE)
    prompt = await session.main.submit(f"swarm {ITEMS} {go}")

    async def at_work() -> bool:
        return len(await agents_at(runtime, session)) > 6

    await until(at_work)
    (host,) = [host["name"] for host in await hosts_of(runtime, "sessions") if session.id in host["sessions"]]
    await kill(runtime, store_of(runtime) if what == "store" else host)
    go.touch()
    result = await prompt.result(120)
    assert result.state == "completed", result
    found = outcomes(result.text)
    assert [text for _, _, text in found] == [f"did item-{number}" for number in range(ITEMS)], result.text
    await session.close()
    logs = await read_session(config.home, session.id)
    for agent_id, _, _ in found:
        assert_once(logs[agent_id], "prompt/submitted", "prompt/completed")
    for kind in ("subagent/spawned", "subagent/completed"):
        named = Counter(event.data["agent_id"] for event in logs["main"] if event.type == kind)
        assert set(named) >= {agent_id for agent_id, _, _ in found} and set(named.values()) == {1}, (kind, named)


async def test_the_host_of_the_caller_killed(
    runtime: Runtime, workspace: Workspace, config: RuntimeConfig, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    session = await workspace.create_session(model=LEAD, profile=PROFILE)
    prompt = await session.main.submit(f"swarm {ITEMS} {go}")

    async def at_work() -> dict[str, str] | None:
        at = await agents_at(runtime, session)
        return at if len(at) > 5 else None

    at = await until(at_work)
    await kill(runtime, at["main"])
    result = await prompt.result(60)
    assert (result.state, (result.error or {}).get("code")) == ("failed", "turn.interrupted"), result
    made = sorted(agent["agent_id"] for agent in await session.agents() if agent["agent_id"] != "main")

    async def others_ended() -> bool:
        """Those whose host lives; nobody waits for them any more."""
        logs = await read_session(config.home, session.id)
        alive = [agent_id for agent_id in made if at.get(agent_id, at["main"]) != at["main"]]
        return all(counts(logs[agent_id])["turn/start"] == counts(logs[agent_id])["turn/end"] for agent_id in alive)

    await until(others_ended, 60)
    go.touch()
    again = await (await session.main.submit(" ".join(["again", *made]))).result(90)
    assert f"<summary>completed: {len(made)}</summary>" in again.text, again.text
    assert outcomes(again.text) == [(agent_id, "completed", "did again") for agent_id in made]
    await session.close()
    main = (await read_session(config.home, session.id))["main"]
    assert Counter(event.data["agent_id"] for event in main if event.type == "subagent/spawned") == Counter(made)
