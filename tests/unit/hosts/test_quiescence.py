"""Holding agents still: all or none, prompts that come meanwhile wait durably, a holder that dies holds nobody long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Peer
from kimi_ray.hosts.specs import Outcome, PromptSpec, RunRequest, Submit
from tests.unit.hosts.test_agent_host import Place


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    found = Place(tmp_path)
    await found.start()
    yield found
    await found.cluster.close()


async def _live(place: Place, *agents: str) -> Peer:
    host = place.peer()
    requests = [RunRequest(place.spec(name), (PromptSpec(f"{name}-0", "go"),)) for name in agents]
    acks = await host.call("run_many", requests, timeout_s=10)
    assert all(ack.error is None for ack in acks)
    await _ended(host, place, *((name, f"{name}-0") for name in agents))
    return host


async def _ended(host: Peer, place: Place, *prompts: tuple[str, str]) -> None:
    wanted = {(place.stream(agent), prompt) for agent, prompt in prompts}
    async with asyncio.timeout(10):
        while wanted:
            outcomes: list[Outcome] = await host.call("wait_any", list(wanted), 5.0, timeout_s=10)
            wanted -= {(outcome.stream, outcome.prompt_id) for outcome in outcomes}


async def _submit(host: Peer, place: Place, agent: str, prompt: PromptSpec) -> None:
    acks = await host.call("submit_many", [Submit(place.stream(agent), (prompt,))], timeout_s=10)
    assert acks[0].error is None


async def _types(place: Place, agent: str) -> list[str]:
    return [event.type for event in await place.lines(agent)]


@pytest.mark.parametrize("continuation", [False, True])
async def test_what_comes_meanwhile_is_durable_waits_and_then_runs(place: Place, continuation: bool) -> None:
    host = await _live(place, "main")
    stream = place.stream("main")
    assert await host.call("quiesce", [stream, place.stream("agent-7")], "h", timeout_s=5) == [stream]
    before = len(await place.lines())
    prompt = PromptSpec("late", "" if continuation else "late", continuation=continuation)
    await _submit(host, place, "main", prompt)
    assert "turn/start" not in [event.type for event in (await place.lines())[before:]]
    if not continuation:
        assert (await _types(place, "main")).count("prompt/submitted") == 2
    await host.call("check_quiescence", "h", timeout_s=5)
    await host.call("release_quiescence", "h", timeout_s=5)
    await _ended(host, place, ("main", "late"))
    await host.call("release_quiescence", "h", timeout_s=5)


async def test_all_or_none(place: Place) -> None:
    host = await _live(place, "main", "agent-1")
    await host.call("quiesce", [place.stream("agent-1")], "other", timeout_s=5)
    await _submit(host, place, "agent-1", PromptSpec("late", "late"))
    with pytest.raises(KimiRayError) as caught:
        await host.call("quiesce", [place.stream("main"), place.stream("agent-1")], "h", timeout_s=5)
    assert caught.value.code == "session.fork_active_turn" and caught.value.retryable
    assert caught.value.details["agents"] == ["agent-1"]
    with pytest.raises(KimiRayError, match="held still"):
        await host.call("check_quiescence", "h", timeout_s=5)
    await _submit(host, place, "main", PromptSpec("free", "free"))
    await _ended(host, place, ("main", "free"))


async def test_a_lease_that_runs_out_lets_go_and_is_told(place: Place) -> None:
    host = await _live(place, "main")
    await host.call("quiesce", [place.stream("main")], "dead", 0.05, timeout_s=5)
    await _submit(host, place, "main", PromptSpec("late", "late"))
    await _ended(host, place, ("main", "late"))
    with pytest.raises(KimiRayError) as caught:
        await host.call("check_quiescence", "dead", timeout_s=5)
    assert caught.value.code == "session.quiescence_lost"


async def test_two_holders_hold_until_the_last_lets_go(place: Place) -> None:
    host = await _live(place, "main")
    for holder in ("a", "b"):
        await host.call("quiesce", [place.stream("main")], holder, timeout_s=5)
    await _submit(host, place, "main", PromptSpec("late", "late"))
    await host.call("release_quiescence", "a", timeout_s=5)
    assert (await _types(place, "main")).count("turn/start") == 1
    await host.call("check_quiescence", "b", timeout_s=5)
    await host.call("release_quiescence", "b", timeout_s=5)
    await _ended(host, place, ("main", "late"))


async def test_asked_again_the_lease_begins_anew_and_covers_what_is_named_then(place: Place) -> None:
    host = await _live(place, "main", "agent-1")
    both = [place.stream("main"), place.stream("agent-1")]
    await host.call("quiesce", both, "h", 0.2, timeout_s=5)
    await _submit(host, place, "agent-1", PromptSpec("late", "late"))
    await host.call("quiesce", both[:1], "h", 30.0, timeout_s=5)
    await _ended(host, place, ("agent-1", "late"))
    await host.call("check_quiescence", "h", timeout_s=5)


async def test_an_agent_that_came_back_meanwhile_was_not_held(place: Place) -> None:
    host = await _live(place, "main")
    await host.call("quiesce", [place.stream("main")], "h", timeout_s=5)
    await host.call("close_agents", [place.stream("main")], False, timeout_s=10)
    with pytest.raises(KimiRayError) as caught:
        await host.call("check_quiescence", "h", timeout_s=5)
    assert caught.value.code == "session.quiescence_lost"
    await host.call("run_many", [RunRequest(place.spec("main", new=False), (PromptSpec("new", "x"),))], timeout_s=10)
    await _ended(host, place, ("main", "new"))
