"""An agent is forked within its session while hosts are lost: its source's log tells of it all the same, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


async def told(session: Session) -> list[str]:
    return [event.data["agent_id"] async for event in session.main.events() if event.type == "subagent/spawned"]


async def host_of_main(runtime: Runtime, session_id: str) -> tuple[str, Any]:
    for name in await hosts_of(runtime, "agents"):
        core: Any = cluster_of(runtime)._held[name].core
        if any(stream.session_id == session_id for stream in core._agents):
            return name, core
    raise AssertionError


async def test_a_host_that_is_lost_behind_the_record_loses_nothing_of_the_fork(tmp_path: Path) -> None:
    async with running(tmp_path, write_window_ms=60_000, hosts_per_node=2) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("hello")).result(10)
        name, core = await host_of_main(runtime, session.id)
        record, flush, recorded = core.record, core.flush, False

        async def noting(*args: Any) -> int:
            nonlocal recorded
            recorded = True
            return await record(*args)

        async def dying(*args: Any) -> Any:
            if recorded:
                cluster_of(runtime).kill_host(name)
            return await flush(*args)

        core.record, core.flush = noting, dying
        forked = await session.fork_agent()
        assert recorded
        assert await told(session) == [forked.id]


async def test_a_fork_whose_record_failed_is_recorded_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("hello")).result(10)
        (name,) = await hosts_of(runtime, "sessions")
        host: Any = cluster_of(runtime)._held[name].core
        _, core = await host_of_main(runtime, session.id)
        record = core.record

        async def refused(*_args: Any) -> int:
            raise RuntimeFault("no", code="infra.out_of_memory")

        core.record = refused
        with pytest.raises(KimiRayError):
            await host.fork_agent(session.id, "main", "n1")
        core.record = record
        first = await host.fork_agent(session.id, "main", "n1")
        assert await host.fork_agent(session.id, "main", "n1") == first
        assert await told(session) == [first]
        assert first in (await session.metadata())["agents"]
