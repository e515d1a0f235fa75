"""Tools of Features that fold their agent's own log: in a replay that log is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dishka import Provider

from kimi_ray import AgentProjections, Feature, LifecycleScope
from kimi_ray.config import load_config
from kimi_ray.errors import RuntimeFault
from kimi_ray.events import SessionEvent
from kimi_ray.llm.script import Step
from kimi_ray.replay import ReplayOptions, ReplayReport, replay_session
from kimi_ray.replay.stage import MemoryStore
from kimi_ray.runtime import Runtime
from kimi_ray.store.seam import Stream
from kimi_ray.tools import FunctionTool
from tests.unit.replay.recorded_sessions import FAST, Scenes, scripted, source_of


@dataclass(frozen=True)
class Calls:
    """How often each tool was called, and how many prompts came."""

    key: str = "test.calls"
    version: int = 1
    types: frozenset[str] = frozenset({"tool/call", "prompt/submitted"})

    def start(self) -> dict[str, int]:
        return {}

    def apply(self, state: dict[str, int], event: SessionEvent) -> dict[str, int]:
        name = event.data.get("name", "prompts")
        return {**state, name: state.get(name, 0) + 1}

    def value(self, state: dict[str, int]) -> str:
        return str(sorted(state.items()))


class Asked(FunctionTool):
    """Tells what the log has: followed from the first call on, or read anew by each."""

    def __init__(self, projections: AgentProjections) -> None:
        super().__init__(self.asked)
        self._projections = projections
        self._followed: Any = None

    async def asked(self) -> str:
        """What was called."""
        if self._followed is None:
            self._followed = await self._projections.follow(Calls())
        again = await self._projections.follow(Calls())
        return f"{self._followed.snapshot().values['test.calls']} {again.snapshot().values['test.calls']}"


FEATURE = f"{__name__}:AskedFeature"


class AskedFeature(Feature):
    """Brings ``asked``."""

    name = "asked"

    def services(self) -> list[Provider]:
        return [Provider(scope=LifecycleScope.AGENT)]

    def tools(self) -> dict[str, type]:
        return {"asked": Asked}


async def _replay(tmp_path: Path, session_id: str = "s1") -> ReplayReport:
    options = ReplayOptions(tools="real")
    config = load_config(tmp_path / "home", {"features": [FEATURE]})
    return await replay_session(source_of(tmp_path), session_id, options=options, config=config)


async def test_a_tool_that_folds_its_own_log_finds_the_replayed_one(tmp_path: Path) -> None:
    scenes = Scenes()
    for name in ("one", "two", "three"):
        scenes.steps[name] = [Step.call("asked"), Step.call("asked"), "done"]
    (tmp_path / "work").mkdir()
    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST, features=[FEATURE]) as runtime:
        workspace = runtime.workspace(tmp_path / "work")
        model: Any = scripted(scenes.answer)
        session = await workspace.create_session("s1", profile="bare", model=model, tools=["asked"])
        await (await session.main.submit("one")).result(10)
        await (await session.main.submit("two")).result(10)
        forked = await workspace.fork("s1")
        await (await forked.main.submit("three")).result(10)
    report = await _replay(tmp_path)
    assert report.ok, report.divergence
    assert report.agents[0].tools_run == 4
    report = await _replay(tmp_path, forked.id)
    assert report.ok, report.divergence
    assert report.agents[0].tools_run == 2, "with what the seed has"


async def test_the_log_of_another_agent_is_not_there() -> None:
    memory = MemoryStore(Stream("s1", "main"), [b"a" * 10, b"b" * 10, b"c" * 10])
    assert await _lines(memory, 0) == [b"a" * 10, b"b" * 10, b"c" * 10]
    assert await _lines(memory, 1, limit=1) == [b"b" * 10]
    assert await _lines(memory, 0, max_bytes=25) == [b"a" * 10, b"b" * 10]
    assert await _lines(memory, 2, max_bytes=1) == [b"c" * 10], "a page has one event at least"
    assert await _lines(memory, 3) == []
    try:
        await memory.read_from(Stream("s1", "agent-1"), 0)
    except RuntimeFault as error:
        assert error.code == "runtime.closed" and "agent-1" in error.message
    else:
        raise AssertionError("another agent's log was read")


async def _lines(memory: MemoryStore, seq: int, **how: int) -> list[bytes]:
    page = await memory.read_from(memory.stream, seq, **how)
    assert page.first_seq == seq and page.next_seq == len(memory.lines)
    return list(page.lines)
