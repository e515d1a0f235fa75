"""Places at a model's server over two hosts on Ray: the cap holds while the registry and a host are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kimi_ray import Runtime
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import registry_name
from tests.actors.conftest import until
from tests.actors.faults import hosts_of, kill
from tests.model_server import ModelServer

AGENTS = 60


@pytest.mark.long
async def test_the_cap_holds_over_hosts_through_the_loss_of_the_registry_and_of_a_host(
    config: RuntimeConfig, tmp_path: Path
) -> None:
    async with ModelServer(seconds=0.2) as server:
        models = {"tiny": {"base_url": server.url, "max_connections": 4}}
        async with Runtime.connect(config=config, hosts_per_node=2, agents_per_host=30, models=models) as runtime:
            session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
            items = [str(number) for number in range(AGENTS)]
            handle = await session.start_swarm("say {{item}}", items, profile="bare", max_concurrency=AGENTS)

            async def served(count: int) -> None:
                async def enough() -> bool:
                    return server.served >= count

                await until(enough)

            await served(8)
            assert len(await hosts_of(runtime, "agents")) == 2
            await kill(runtime, registry_name(runtime.connection.cluster.home_id))
            await served(server.served + 8)
            assert server.most == 4, "also while the new registry hears what there is"
            victim = (await hosts_of(runtime, "agents"))[0]["name"]
            await kill(runtime, victim)
            report = await asyncio.wait_for(handle.result(), 60)
    assert report.totals["completed"] == AGENTS
    assert server.most <= 4, server.most
