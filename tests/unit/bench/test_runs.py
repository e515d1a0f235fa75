"""The benches of agents: they run on every host of the pool, check what they measured, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray.bench import runs
from kimi_ray.bench.host_logs import bench_runtime
from kimi_ray.bench.runs import bench_submit, bench_swarm, bench_turns
from kimi_ray.bench.warm_up import WARM_UP_SESSIONS, agents_by_host, sessions_on_every_host
from kimi_ray.bench.workload import ONE_TOOL_MODEL
from kimi_ray.errors import KimiRayError

SMALL: dict[str, Any] = {"sessions": 6, "turns": 2, "address": "in-process"}


@pytest.mark.parametrize("bench", [bench_turns, bench_submit])
async def test_turns_tell_where_their_agents_were(bench: Any, tmp_path: Path) -> None:
    report = (await bench(**SMALL, directory=str(tmp_path))).to_data()
    assert report["value"] > 0 and report["floor"] > 0
    placed = report["agents_by_host"]
    assert sum(placed) == report["logs"] >= SMALL["sessions"] + WARM_UP_SESSIONS
    assert max(placed) - min(placed) <= 1
    assert list(tmp_path.iterdir()) == []


async def test_a_swarm_is_counted(tmp_path: Path) -> None:
    report = (await bench_swarm(agents=6, max_concurrency=3, address="in-process", directory=str(tmp_path))).to_data()
    assert (report["unit"], report["agents"]) == ("s", 6) and report["value"] > 0


async def test_a_turn_that_did_not_run_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ONE_TOOL_MODEL", runs.PLAIN_MODEL)
    with pytest.raises(KimiRayError) as caught:
        await bench_turns(**SMALL, directory=str(tmp_path))
    assert caught.value.code == "bench.incomplete"


@pytest.mark.parametrize("hosts", [1, 3, 7])
async def test_warm_is_who_has_all_hosts(hosts: int, tmp_path: Path) -> None:
    async with bench_runtime("in-process", str(tmp_path), {"hosts_per_node": hosts}) as runtime:
        workspace = runtime.workspace(runtime.config.home)
        made = await sessions_on_every_host(runtime, lambda: workspace.create_session(model=ONE_TOOL_MODEL))
        placed = await agents_by_host(runtime)
    assert len(placed) == hosts and min(placed) >= 1
    assert len(made) == sum(placed) == max(hosts, WARM_UP_SESSIONS)
