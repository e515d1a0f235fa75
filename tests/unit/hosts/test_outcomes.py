"""What a host remembers of what has ended: bounded for an agent and for the host, and the same when it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.errors import AgentError
from kimi_ray.hosts import outcomes as module
from kimi_ray.hosts.outcomes import Outcomes
from kimi_ray.settings import Usage
from kimi_ray.store.seam import Stream


def outcome(agent: str, n: int) -> Outcome:
    error = {"code": "limit.time_s", "message": "over", "details": {"used": 1.5}} if n % 2 else None
    result = PromptResult(
        prompt_id=f"p{n}",
        state="completed",
        text=f"text {n}",
        turn=n,
        usage=Usage(input=n),
        output=[{"n": n}],
        error=error,
    )
    return Outcome(Stream("s", agent), f"p{n}", result, n, 1, AgentTotals(turns=n, usage=Usage(output=n)))


def put(outcomes: Outcomes, agent: str, *numbers: int) -> None:
    for n in numbers:
        outcomes.put((Stream("s", agent), f"p{n}"), outcome(agent, n))


def known(outcomes: Outcomes, agent: str, count: int) -> list[int]:
    return [n for n in range(count) if outcomes.get((Stream("s", agent), f"p{n}")) is not None]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_OF_AGENT", 4)
    monkeypatch.setattr(module, "WHOLE", 2)


@pytest.mark.usefixtures("small")
def test_the_newest_of_an_agent_are_remembered_as_they_were() -> None:
    outcomes = Outcomes()
    put(outcomes, "a", *range(10))
    assert known(outcomes, "a", 10) == [6, 7, 8, 9]
    for n in range(6, 10):
        assert outcomes.get((Stream("s", "a"), f"p{n}")) == outcome("a", n)
    put(outcomes, "a", 9, 9, 9)  # told again: no other one goes
    assert known(outcomes, "a", 10) == [6, 7, 8, 9]


@pytest.mark.usefixtures("small")
def test_a_host_remembers_so_many_of_all_agents_and_lets_go_of_the_quietest() -> None:
    outcomes = Outcomes(6)
    put(outcomes, "quiet", 0, 1)
    for n in range(20):
        put(outcomes, "a", n)
        put(outcomes, f"once-{n}", 0)
        held: Any = outcomes._ended  # pyright: ignore[reportPrivateUsage]
        assert sum(map(len, held.values())) <= 6 and all(held.values())
        assert len(outcomes._whole) <= 2  # pyright: ignore[reportPrivateUsage]
    assert known(outcomes, "quiet", 2) == []
    assert known(outcomes, "a", 20) == [16, 17, 18, 19] and known(outcomes, "once-19", 1) == [0]


@pytest.mark.usefixtures("small")
async def test_who_waits_is_told_what_is_bytes_by_now() -> None:
    outcomes, stream = Outcomes(), Stream("s", "a")
    watch = outcomes.watches.take_up(None, 0)
    assert watch is not None
    watch.add(stream, "p0")
    watch.add(stream, "p9")
    put(outcomes, "a", 0, 1, 2)
    assert await watch.answer(5.0) == [outcome("a", 0)]
    watch.add(stream, "p0")
    outcomes.drop(stream, AgentError("gone", code="agent.not_found"))
    p0, p9 = sorted(await watch.answer(5.0), key=lambda end: end.prompt_id)
    assert p0 == outcome("a", 0) and p9.result.state == "failed"
