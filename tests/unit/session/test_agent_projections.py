"""A Feature's own projection over a living agent: what it says is what a fold of the stored log says, in every life."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dishka import Provider

from kimi_ray import AgentProjections, Feature, LifecycleScope, Profile, Projection, SessionEvent, Stream
from kimi_ray.llm import Step
from kimi_ray.session import ColdReader, project
from kimi_ray.store import open_store
from kimi_ray.tools import FunctionTool
from tests.unit.runtime_fixtures import running

FEATURE = f"{__name__}:LedgerFeature"


@dataclass(frozen=True)
class Said:
    """What was said to the tool, by the seq of its call: an event that is missed or seen twice shows."""

    key: str = "test.said"
    version: int = 1
    types: frozenset[str] = frozenset({"tool/call", "turn/start"})

    def start(self) -> Any:
        return {"turns": 0, "calls": []}

    def apply(self, state: Any, event: SessionEvent) -> Any:
        if event.type == "turn/start":
            return {**state, "turns": state["turns"] + 1}
        return {**state, "calls": [*state["calls"], [event.seq, str(event.data["name"])]]}

    def value(self, state: Any) -> Any:
        return state


UNIT: Projection = Said()


class Ledger:
    """Agent scope."""

    lives: list[Ledger] = []  # noqa: RUF012 - the test looks at what the runtime built

    def __init__(self, projections: AgentProjections) -> None:
        self._projections = projections
        self.found: Any = None
        Ledger.lives.append(self)

    async def told(self, rows: Any = None) -> Any:
        if self.found is None or rows is not None:
            self.found = await self._projections.follow(UNIT, rows=rows)
        return self.found.snapshot()


class Count(FunctionTool):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(self.count)
        self._ledger = ledger

    async def count(self) -> str:
        """Says what is known."""
        return json.dumps((await self._ledger.told()).values["test.said"])


class LedgerFeature(Feature):
    name = "ledger"

    def services(self) -> Sequence[Provider]:
        provider = Provider(scope=LifecycleScope.AGENT)
        provider.provide(Ledger)
        return [provider]

    def tools(self) -> dict[str, type]:
        return {"count": Count}

    def profiles(self) -> Sequence[Profile]:
        return [Profile(name="counter", tools=("count",))]


async def stored(home: Path, session_id: str) -> Any:
    found = await project(ColdReader(open_store(home)), Stream(session_id, "main"), (UNIT,))
    return found.snapshot().values["test.said"]


async def ask(session: Any, stage: Any, prompt: str) -> None:
    stage.faults[prompt] = [Step.call("count", {})]
    await (await session.main.submit(prompt)).result()


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_the_same_in_every_life(tmp_path: Path, backend: str) -> None:
    Ledger.lives.clear()
    async with running(tmp_path, features=[FEATURE], backend=backend) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        session = await workspace.create_session(model=model, profile="counter")
        for turn in range(3):
            await ask(session, stage, f"turn {turn}")
        (first,) = Ledger.lives
        await session.flush()
        live = (await first.told()).values["test.said"]
        assert live["turns"] == 3 and len(live["calls"]) == 3
        assert live == await stored(tmp_path / "home", session.id)
        rows = json.loads(json.dumps(first.found.checkpoint()))
        await session.close()

        again = await workspace.resume(session.id, model=model)
        await ask(again, stage, "turn 3")
        second = Ledger.lives[-1]
        assert second is not first
        live = (await second.told()).values["test.said"]
        assert (live["turns"], len(live["calls"])) == (4, 4)
        # from a checkpoint, from one of another version, from one of another log: never another answer
        for kept in (rows, {"test.said": {**rows["test.said"], "version": 0, "state": {"turns": 70, "calls": []}}},
                     {"test.said": {**rows["test.said"], "crc": 1, "state": {"turns": 70, "calls": []}}}):  # fmt: skip
            assert (await second.told(kept)).values["test.said"] == live
        await ask(again, stage, "turn 4")
        await again.flush()
        assert (await second.told()).values["test.said"] == await stored(tmp_path / "home", session.id)

        fork = await workspace.fork(again.id)
        await ask(fork, stage, "turn 5")
        await fork.flush()
        forked = (await Ledger.lives[-1].told()).values["test.said"]
        assert forked["turns"] == 6 and forked == await stored(tmp_path / "home", fork.id)


async def test_events_that_come_while_the_log_is_read_are_counted_once(tmp_path: Path) -> None:
    from kimi_ray.store.seam import Page
    from tests.unit.frames.homes import Scribe

    log = Scribe()
    log.plain_turn("one")

    class Reader:
        """A store that has what was flushed; the agent goes on while it answers."""

        async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 0) -> Page:
            stored = [event.line for event in log.events]
            if len(log.events) < 40:
                log.plain_turn("meanwhile")
            return Page(seq, tuple(stored[seq : seq + 5]), len(stored))

        async def list_logs(self, session_id: str) -> Any:
            raise NotImplementedError

    class Desk:
        def __init__(self) -> None:
            self.log = log.log

        async def flush(self) -> None:
            log.plain_turn("as it is flushed")

    found = await AgentProjections(Desk(), Reader(), Stream("session_one", "main")).follow(UNIT)  # type: ignore[arg-type]
    log.plain_turn("behind it")
    turns = sum(event.type == "turn/start" for event in log.events)
    assert found.snapshot().values["test.said"]["turns"] == turns > 4
    assert found.next_seq == len(log.events)
