"""Sessions recorded in this process, and replayed from their home."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from kimi_ray.config import load_config
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step
from kimi_ray.llm.wire import chat_body
from kimi_ray.replay import HomeSource, ReplayOptions, ReplayReport, rebuild_session, replay_session
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile, Workdir
from kimi_ray.store.open import open_store
from kimi_ray.tools import FunctionTool, tool
from kimi_ray.workspace_handle import Workspace

MODULE = "kimi_ray_test_replay"
FAST = {"durability": "none", "write_window_ms": 5, "close_timeout_s": 10.0}


class Facts:
    """What the tool ``look`` knows: a test changes it between the recording and the replay."""

    value = "forty-two"
    asked = 0


@tool
def look(what: str) -> str:
    """Look something up.

    Args:
        what: The thing.
    """
    Facts.asked += 1
    return f"{what} is {Facts.value}"


@tool
def fail() -> str:
    """Fail."""
    raise ValueError("as it must")


def scripted(script: Any, name: str = "script") -> str:
    """A model's name that plays a script."""
    module = sys.modules.setdefault(MODULE, types.ModuleType(MODULE))
    setattr(module, name, script)
    return f"scripted:{MODULE}:{name}"


@asynccontextmanager
async def recorded_in(
    tmp_path: Path,
    script: Any,
    *,
    tools: Sequence[FunctionTool] = (look,),
    profile: str | Profile = "bare",
    workdir: Workdir | None = None,
    **settings: Any,
) -> AsyncGenerator[tuple[Workspace, Session]]:
    """A workspace, and a session in it whose main agent plays a script; they are closed at the end."""
    (tmp_path / "work").mkdir(exist_ok=True)
    Facts.value, Facts.asked = "forty-two", 0
    async with Runtime.connect(tmp_path / "home", "in-process", config={**FAST, **settings}) as runtime:
        workspace = runtime.workspace(tmp_path / "work")
        yield (
            workspace,
            await workspace.create_session(
                "s1", profile=profile, model=scripted(script), tools=tools or None, workdir=workdir
            ),
        )


@asynccontextmanager
async def recorded(tmp_path: Path, script: Any, **how: Any) -> AsyncGenerator[Session]:
    """As ``recorded_in``, without the workspace."""
    async with recorded_in(tmp_path, script, **how) as (_, session):
        yield session


async def replayed(tmp_path: Path, session_id: str = "s1", agent_id: str | None = None, **options: Any) -> ReplayReport:
    """The replay of a session of that home."""
    home = tmp_path / "home"
    return await replay_session(
        source_of(tmp_path),
        session_id,
        agent_id,
        options=ReplayOptions(**_with_tools(options)),
        config=load_config(home),
    )


def source_of(tmp_path: Path) -> HomeSource:
    """The home, for reading."""
    return HomeSource(open_store(tmp_path / "home"))


def _with_tools(options: dict[str, Any]) -> dict[str, Any]:
    return {"own_tools": (look, fail), **options}


class Scenes:
    """A model that plays steps by prompt, keeps what it was asked, and waits where a test wants it to."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.steps: dict[str, list[Step | str]] = {}
        self.waiting = asyncio.Event()
        self.go_on = asyncio.Event()

    async def answer(self, request: ChatRequest) -> Step | str:
        """The next step of the newest prompt that has some left, else an echo."""
        self.requests.append(request)
        users = [one for one in request.messages if one["role"] == "user" and one["source"]["kind"] == "user"]
        for message in reversed(users):
            left = self.steps.get(message["content"][0]["text"])
            if left:
                step = left.pop(0)
                if step == "wait":
                    self.waiting.set()
                    await self.go_on.wait()
                    step = left.pop(0) if left else "went on"
                return step
        return f"did {users[-1]['content'][0]['text'][:20]}"

    async def until_waiting(self) -> None:
        """Return when a step waits."""
        async with asyncio.timeout(10):
            await self.waiting.wait()


async def assert_as_recorded(tmp_path: Path, scenes: Scenes | None = None, session_id: str = "s1") -> ReplayReport:
    """The session replays without a difference, and every request that was made is rebuilt to the byte."""
    report = await replayed(tmp_path, session_id)
    assert report.ok, report.divergence or report
    assert all(agent.requests == agent.recorded_requests for agent in report.agents)
    if scenes is not None:
        rebuilt = await rebuild_session(source_of(tmp_path), session_id)
        found = [one for agent in rebuilt.agents.values() async for one in agent.requests()]
        made = [one for one in scenes.requests if one.session_id == session_id]
        assert [_bytes(one.request) for one in found] == [_bytes(one) for one in made]
    return report


def _bytes(request: ChatRequest) -> bytes:
    place = (request.session_id, request.agent_id, request.turn, request.step, request.attempt)
    return to_json([place, chat_body(request, ModelSettings())])
