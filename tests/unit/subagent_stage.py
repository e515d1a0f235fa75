"""What the tests of subagents share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_ray import Profile, PromptHandle, Runtime, Session
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.subagents import Subagents
from kimi_ray.hosts.agent_host import AgentHost
from kimi_ray.llm.script import Step
from kimi_ray.store.seam import Stream
from tests.unit.runtime_fixtures import Stage, cluster_of, hosts_of

ASKS = Profile(name="asks", system_prompt="You ask others.", tools=("Agent", "Read"), subagents=("coder", "asks"))
LONG = "a full account " * 20


def ask(prompt: str, **more: Any) -> Step:
    """A model's answer that starts a subagent."""
    return Step.call("Agent", {"prompt": prompt, "description": "a task", **more})


async def told(session: Session, agent_id: str = "main") -> list[tuple[str, dict[str, Any]]]:
    """What an agent's log says of its children."""
    return [
        (event.type, dict(event.data))
        async for event in session.agent(agent_id).events()
        if event.type.startswith("subagent/")
    ]


async def results(session: Session, agent_id: str = "main") -> list[str]:
    """The texts of the results of its tool calls."""
    found: list[str] = []
    async for event in session.agent(agent_id).events():
        if event.type == "tool/result":
            (part,) = event.data["message"]["content"]
            found.append("".join(block["text"] for block in part["content"]))
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


async def until_told(session: Session, kind: str, count: int = 1) -> dict[str, Any]:
    async with asyncio.timeout(15):
        while True:
            found = [data for type_, data in await told(session) if type_ == f"subagent/{kind}"]
            if len(found) >= count:
                return found[count - 1]
            await asyncio.sleep(0.02)


async def until_asked(session: Session, stage: Stage, prompt: str = "look") -> PromptHandle:
    """Main's model has asked for a subagent with this prompt, whose request is at the closed gate."""
    stage.faults["go"] = [ask(prompt)]
    stage.gate.clear()
    handle = await session.main.submit("go")
    await stage.until_running(1)
    stage.gate.set()
    stage.gate.clear()
    await until(lambda: stage.seen[prompt])
    return handle


async def begin(runtime: Runtime, tmp_path: Path, model: str, **more: Any) -> Session:
    return await runtime.workspace(str(tmp_path / "work")).create_session(**{"model": model, "profile": ASKS, **more})


async def holders(runtime: Runtime, session_id: str, agent_id: str) -> list[str]:
    """The hosts on which an agent lives."""
    found: list[str] = []
    for name in await hosts_of(runtime, "agents"):
        ping = await cluster_of(runtime).peer(name).call("ping", timeout_s=5.0, group="control")
        if (session_id, agent_id) in [tuple(stream) for stream in ping["streams"]]:
            found.append(name)
    return found


class Port:
    """An agent's ``Subagents`` and slots, taken from its host's scope."""

    @classmethod
    async def of(cls, runtime: Runtime, session: Session) -> tuple[Subagents, AgentSlots]:
        (name,) = await holders(runtime, session.id, "main")
        host = cluster_of(runtime)._held[name].core
        assert isinstance(host, AgentHost)
        scope = host._scopes._scopes[Stream(session.id, "main")]
        return await scope.get(Subagents), await scope.get(AgentSlots)
