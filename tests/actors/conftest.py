"""One local Ray for all tests here; each test has a namespace and a home of its own, so runtimes never meet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.actors import connect
from kimi_ray.actors.ray_session import close_session, open_session
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.connection import Connection
from kimi_ray.hosts.ports import is_lost
from kimi_ray.ids import new_ulid


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the local Ray, held for the whole test session."""
    session = open_session(RuntimeConfig(home=str(tmp_path_factory.mktemp("ray")), object_store_memory=100 << 20), None)
    yield session.address
    close_session(session)


@pytest.fixture
def config(local_ray: str, tmp_path: Path) -> RuntimeConfig:
    return RuntimeConfig(
        home=str(tmp_path / "home"), namespace=f"t{new_ulid()}", hosts_per_node=1, close_timeout_s=10, claim_timeout_s=8
    )


@pytest.fixture
async def joined(config: RuntimeConfig):
    """Connect to a runtime of the test's own, as often as wanted; it ends after the test."""
    joiner = Joiner(config)
    yield joiner
    await joiner.leave()


@pytest.fixture(scope="session")
def shared_config(local_ray: str, tmp_path_factory: pytest.TempPathFactory) -> RuntimeConfig:
    home = str(tmp_path_factory.mktemp("shared") / "home")
    return RuntimeConfig(home=home, namespace="shared", hosts_per_node=1, close_timeout_s=10, lease_timeout_s=40)


@pytest.fixture
async def shared(shared_config: RuntimeConfig):
    """Connect to the runtime that all tests share which leave it alive: starting one takes seconds."""
    joiner = Joiner(shared_config)
    yield joiner
    await joiner.leave(end_runtime=False)


class Joiner:
    """Calls give connections; ``leave`` ends those that are still open."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.open: list[Connection] = []

    async def __call__(self, **changes: Any) -> Connection:
        connection = await connect(self.config.model_copy(update=changes))
        self.open.append(connection)
        return connection

    async def leave(self, **how: Any) -> None:
        for connection in self.open:
            await connection.disconnect(**how)


async def until(condition: Callable[[], Awaitable[Any]], within_s: float = 30.0) -> Any:
    """The first true answer of ``condition``; lost calls are asked again."""
    ends = time.monotonic() + within_s
    while True:
        try:
            value = await condition()
            if value:
                return value
        except KimiRayError as error:
            if not is_lost(error.code):
                raise
        assert time.monotonic() < ends, "the condition did not come true in time"
        await asyncio.sleep(0.05)
