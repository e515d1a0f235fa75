"""The watch of subagents goes on, whatever one look does to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kimi_ray.hosts import subagent_watch
from kimi_ray.hosts.subagent_watch import SubagentWatch
from tests.unit.hosts.fakes import until


async def test_an_error_that_nobody_foresaw_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def host_of(_agent_id: str) -> str | None:
        nonlocal looks
        looks += 1
        raise ValueError("odd")

    live: Any = SimpleNamespace(id="s", host_of=host_of)
    run: Any = SimpleNamespace(agent_id="agent-1", by_agent=True, caller_host="h", caller="main")
    runs = {"agent-1": run}
    monkeypatch.setattr(subagent_watch, "_LOOK_S", 0.005)
    monkeypatch.setattr(subagent_watch, "_COUNT_S", 0.005)
    accounts: Any = SimpleNamespace(enter=lambda _run: None, is_bound=lambda _run: False)
    monkeypatch.setattr(subagent_watch, "SubagentAccounts", lambda _live: accounts)

    async def end(_end: Any) -> None:
        raise AssertionError

    watch = SubagentWatch(live, runs, end)
    watch.begin(run)
    try:
        await until(lambda: looks > 2)
    finally:
        watch.stop()
    assert watch.last_error is not None and watch.last_error.details["exception"] == "ValueError"
    assert "odd" in caplog.text
