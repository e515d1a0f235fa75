"""A runtime in this process, and models that tests steer, for ``test_runtime_*``."""

from __future__ import annotations

import asyncio
import sys
import types
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.runtime import Runtime

MODULE = "kimi_ray_test_models"
FAST = {"durability": "none", "write_window_ms": 5, "close_timeout_s": 10.0}


class Stage:
    """Scripted models that look here for what to do; one for each test."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.running = 0
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: Counter[str] = Counter()
        self.faults: dict[str, list[Step]] = {}

    def prompt(self, request: ChatRequest) -> str:
        users = [m for m in request.messages if m["role"] == "user" and m["source"]["kind"] != "tool"]
        return "".join(block.get("text", "") for block in users[-1]["content"])

    async def answer(self, request: ChatRequest) -> Step:
        """Echo, once the gate is open; a prompt that is in ``faults`` fails so many times first."""
        self.requests.append(request)
        text = self.prompt(request)
        self.seen[text] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        waiting = self.faults.get(text)
        if waiting:
            return waiting.pop(0)
        return Step(text=f"did {text}")

    async def until_running(self, count: int) -> None:
        """Wait until so many requests are at the gate."""
        async with asyncio.timeout(10):
            await asyncio.sleep(0)  # whoever was made just before gets its turn
            while self.running < count:
                await asyncio.sleep(0.005)


def install(stage: Stage) -> str:
    """The model name that plays the stage."""
    module = types.ModuleType(MODULE)
    module.answer = stage.answer  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    return f"scripted:{MODULE}:answer"


@asynccontextmanager
async def running(tmp_path: Path, **settings: Any) -> AsyncGenerator[tuple[Runtime, Stage, str]]:
    """A runtime, its stage and the model's name. The workspace is ``tmp_path / "work"``."""
    stage = Stage()
    model = install(stage)
    (tmp_path / "work").mkdir(exist_ok=True)
    async with Runtime.connect(tmp_path / "home", "in-process", config={**FAST, **settings}) as runtime:
        try:
            yield runtime, stage, model
        finally:
            stage.gate.set()


def cluster_of(runtime: Runtime) -> LocalCluster:
    """The in-process cluster, to kill hosts in."""
    cluster = runtime.connection.cluster
    assert isinstance(cluster, LocalCluster)
    return cluster


async def hosts_of(runtime: Runtime, kind: str) -> list[str]:
    """The names of the hosts of a kind."""
    return [host.name for host in await cluster_of(runtime).list_hosts() if host.kind == kind]
