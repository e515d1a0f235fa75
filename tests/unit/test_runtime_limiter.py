"""Swarms against a server that bears eight requests at once: the limiter over real HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.hosts.ports import registry_name
from kimi_ray.runs.report import SwarmReport
from kimi_ray.runs.rows import ResultRow
from kimi_ray.runs.run_directory import read_manifest
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Limits
from tests.conftest import Budget
from tests.model_server import ModelServer
from tests.unit.runtime_fixtures import FAST, cluster_of

AGENTS = 200


async def swarm(
    tmp_path: Path, server: ModelServer, agents: int, **settings: Any
) -> tuple[SwarmReport, float, list[Any]]:
    """A swarm of bare agents with one request each; its report, its seconds, what the limits did."""
    table = {"base_url": server.url, "retry_base_s": 0.1, "retry_max_s": 2.0, "max_attempts": 50, **settings}
    config = {**FAST, "models": {"tiny": table}}
    home = tmp_path / "-".join(f"{key}={value}" for key, value in settings.items() if not isinstance(value, dict))
    async with Runtime.connect(home / "home", "in-process", config=config) as runtime:
        session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
        began = time.monotonic()
        report = await session.swarm(
            "say {{item}}", [str(n) for n in range(agents)], profile="bare", max_concurrency=agents
        )
        seconds = time.monotonic() - began
        peer = cluster_of(runtime).peer(registry_name(runtime.connection.cluster.home_id))
        _, changes = await peer.call("limiter_changes", 0, timeout_s=5)
    assert report.totals["completed"] == agents, report.totals
    return report, seconds, changes


def timing_gap(row: ResultRow) -> float:
    """How much of a row's wall time its parts do not explain, as a share."""
    told = row.timing
    parts = told.limiter_ms + told.model_ms + told.tools_ms + told.retry_wait_ms + told.store_ms
    return abs(told.wall_ms - parts) / max(1, told.wall_ms)


async def test_a_server_that_bears_eight_gets_eight(tmp_path: Path) -> None:
    async with ModelServer(bears=8, seconds=0.1) as server:
        report, _, changes = await swarm(tmp_path, server, 120)
    assert server.served == 120
    assert server.most == 8
    assert [change["reason"] for change in changes[:2]] == ["start", "cut"]
    assert {change["limit"] for change in changes[2:]} <= set(range(5, 12)), changes
    waited = [row.timing.limiter_ms for row in report.rows]
    assert max(waited) > 500, "the last ones waited for places"
    gaps = sorted(timing_gap(row) for row in report.rows)
    assert gaps[len(gaps) // 2] <= 0.05, gaps


async def test_max_connections_hold_over_all_hosts_of_the_runtime(tmp_path: Path) -> None:
    async with ModelServer(seconds=0.02) as server:
        table = {"base_url": server.url, "max_connections": 5}
        config = {**FAST, "models": {"tiny": table}, "hosts_per_node": 3, "agents_per_host": 10}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as runtime:
            session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
            report = await session.swarm("say {{item}}", list("abcdefghij") * 6, profile="bare", max_concurrency=60)
            hosts = [host for host in await cluster_of(runtime).list_hosts() if host.kind == "agents"]
    assert len(hosts) > 1
    assert report.totals["completed"] == 60
    assert server.most == 5
    assert server.refused == 0


async def test_a_lost_hosts_places_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.hosts.limiter_ledger.LEASE_S", 1.5)
    async with ModelServer(seconds=0.05) as server:
        config = {**FAST, "models": {"tiny": {"base_url": server.url, "max_connections": 2}}}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as runtime:
            session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
            handle = await session.start_swarm(
                "say {{item}}", list("abcdefghij") * 4, profile="bare", max_concurrency=40
            )
            async with asyncio.timeout(20):
                while server.served < 5:
                    await asyncio.sleep(0.01)
                agents = [host for host in await cluster_of(runtime).list_hosts() if host.kind == "agents"]
                cluster_of(runtime).kill_host(agents[0].name)
                report = await handle.result()
    assert report.totals["completed"] == 40


async def test_waiting_for_a_place_ends_with_a_limit_and_with_a_cancel_and_is_no_working_time(tmp_path: Path) -> None:
    async with ModelServer(seconds=0.15) as server:
        config = {**FAST, "models": {"tiny": {"base_url": server.url, "max_connections": 1}}}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as runtime:
            session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
            items = list("abcdef")
            bounded = {"profile": "bare", "max_concurrency": 6}
            rows = (await session.swarm("a {{item}}", items, limits=Limits(time_s=0.5), **bounded)).rows
            assert {row.status for row in rows} == {"completed", "limit"}
            rows = (await session.swarm("b {{item}}", items, limits=Limits(working_time_s=0.7), **bounded)).rows
            assert {row.status for row in rows} == {"completed"}, "the last one waited for longer than it may work"
            handle = await session.start_swarm("c {{item}}", items, **bounded)
            async for _ in handle:
                await handle.cancel(0.5)
                break
            rows = (await asyncio.wait_for(handle.result(), 10)).rows
            assert {row.status for row in rows} == {"completed", "cancelled"}
            assert (await session.swarm("d {{item}}", items, **bounded)).ok, "no place was lost"


async def test_a_scripted_model_has_no_limiter(tmp_path: Path) -> None:
    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as runtime:
        session = await runtime.workspace(tmp_path).create_session(model="scripted", profile="bare")
        report = await session.swarm("say {{item}}", list("abc"), profile="bare")
        assert report.ok
        events = [event async for event in session.agent(report.rows[0].agent_id or "").events()]
        told = next(event for event in events if event.type == "llm/response")
        assert "limiter_ms" not in told.data["timing"]
        peer = cluster_of(runtime).peer(registry_name(runtime.connection.cluster.home_id))
        assert await peer.call("limiter_changes", 0, timeout_s=5) == (0, [])


@pytest.mark.long
async def test_throughput_is_within_a_tenth_of_the_best_fixed_setting(tmp_path: Path, budget: Budget) -> None:
    """200 agents, a server that bears 8: fixed at 4, 8 and 16, and adaptive. With little time: 8 and adaptive."""
    plenty = budget.seconds >= 60
    ways: dict[str, dict[str, Any]] = {
        "4": {"max_connections": 4, "adaptive_connections": False},
        "8": {"max_connections": 8, "adaptive_connections": False},
        "16": {"max_connections": 16, "adaptive_connections": False},
        "adaptive": {},
    }
    if not plenty:
        del ways["4"], ways["16"]
    rounds: list[dict[str, float]] = []
    for number in range(budget.size(1, 3)):  # two processes share the cores when the budget is short
        (here := tmp_path / str(number)).mkdir()
        took: dict[str, float] = {}
        for name, settings in ways.items():
            async with ModelServer(bears=8, seconds=0.4 if plenty else 0.15) as server:
                _, took[name], changes = await swarm(here, server, AGENTS, **settings)
                print(name, round(took[name], 2), "s", server.refused, "refused", len(changes), "changes")
        print(json.dumps(took))
        rounds.append(took)
        best = min(seconds for name, seconds in took.items() if name != "adaptive")
        if took["adaptive"] <= best / (0.9 if plenty else 0.75):  # the start is a larger part of a short run
            return
    pytest.fail(f"adaptive was slower each time: {rounds}")


async def test_the_run_directory_has_the_limiters_history_and_its_summary(tmp_path: Path) -> None:
    async with ModelServer(bears=4, seconds=0.03, retry_after=0.1) as server:
        table = {"base_url": server.url, "retry_base_s": 0.05, "max_attempts": 50}
        config = {**FAST, "models": {"tiny": table, "calm": {"provider": "scripted"}}}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as runtime:
            session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
            swarm = {"profile": "bare", "max_concurrency": 30}
            out = [tmp_path / name for name in ("one", "two", "three")]
            for number, model in enumerate(("tiny", "tiny", "calm")):
                report = await session.swarm(
                    "say {{item}}", list("abcdefghij") * 3, model=model, out=out[number], **swarm
                )
                assert report.ok
    first = [json.loads(line) for line in (out[0] / "limiter.jsonl").read_text().splitlines()]
    assert [change["reason"] for change in first[:3]] == ["start", "pause", "cut"]
    assert all(set(change) >= {"time", "model", "reason", "limit", "in_use"} for change in first)
    assert all("key" not in change and change["model"] == "tiny" for change in first)
    told = read_manifest(out[0])["limiter"]
    assert told["first"] == 20
    assert told["last"] == first[-1]["limit"]
    assert told["cuts"] == sum(change["reason"] == "cut" for change in first)
    assert told["paused_s"] >= 0.1
    again = read_manifest(out[1])["limiter"]
    assert again["first"] == told["last"], "a run goes on with the limit that it finds"
    assert not (out[2] / "limiter.jsonl").exists()
    assert "limiter" not in read_manifest(out[2])
