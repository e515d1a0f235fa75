"""A budget in dollars and a time for a whole swarm: it is stopped within one request of each running agent."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from kimi_ray.llm.script import Step
from kimi_ray.runs.report import SwarmReport
from kimi_ray.settings import Limits, Usage
from tests.unit.runtime_fixtures import MODULE, Stage, running

REQUEST_USD = 0.001
AGENTS = 24


def note(word: str) -> str:
    """Note a word."""
    return word


def endless(stage: Stage, latency_s: float) -> None:
    """Agents that ask for a tool for ever; an answer costs ``REQUEST_USD``."""

    async def answer(request: object) -> Step:
        stage.requests.append(request)  # type: ignore[arg-type]
        call = Step.call("note", {"word": "x"})
        return Step(tool_calls=call.tool_calls, usage=Usage(output=1000), latency_s=latency_s)

    sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]


async def endless_swarm(
    tmp_path: Path, limits: Limits, latency_s: float, agents: int = AGENTS
) -> tuple[SwarmReport, int, float]:
    """The report, how many requests were made, and how long it took, in seconds."""
    models = {"m": {"provider": "scripted", "script": f"{MODULE}:answer", "price": {"output": REQUEST_USD * 1000}}}
    async with running(tmp_path, models=models) as (runtime, stage, _):
        endless(stage, latency_s)
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile="bare")
        began = time.monotonic()
        report = await session.swarm(
            "{{item}}",
            [str(n) for n in range(agents)],
            profile="bare",
            tools=[note],
            max_concurrency=agents,
            total_limits=limits,
        )
        return report, len(stage.requests), time.monotonic() - began


async def test_a_budget_stops_a_swarm_within_a_request_of_each_agent(tmp_path: Path) -> None:
    budget = 0.04
    report, requests, _ = await endless_swarm(tmp_path, Limits(max_cost_usd=budget), 1.0)
    assert Counter((row.status, row.stop) for row in report.rows) == {("limit", "limit:max_cost_usd"): AGENTS}
    assert report.cost_usd is not None
    assert budget <= report.cost_usd <= budget + AGENTS * REQUEST_USD + 1e-9
    # What is on its way when the budget is seen to be spent is cut off, and is not paid for.
    assert requests <= budget / REQUEST_USD + 2 * AGENTS


async def test_a_time_stops_a_swarm_in_the_middle_of_its_requests(tmp_path: Path) -> None:
    report, requests, took = await endless_swarm(tmp_path, Limits(time_s=0.8), 30.0)
    assert {(row.status, row.stop) for row in report.rows} == {("limit", "limit:time_s")}
    assert requests == AGENTS and 0.8 <= took < 10
