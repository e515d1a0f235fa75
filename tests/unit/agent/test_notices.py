"""Notices: told in order, by a task of the agent's own; what a handler does there harms nobody, and is in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kimi_ray.agent.live_agent as live_agent
import kimi_ray.agent.notices as notices
from kimi_ray.agent.slots import TurnEnded
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.llm.script import Step
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe


class Listener:
    """Hears of everything that is only told."""

    SLOTS = ("awake", "prompt_queued", "turn_started", "turn_ended", "leaving")

    def __init__(self, bench: AgentBench, *slots: str) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.came = asyncio.Event()
        for name in slots or self.SLOTS:
            getattr(bench.slots, name).register("listener", self._hears(name))

    def _hears(self, name: str) -> Any:
        async def hear(event: Any) -> None:
            await asyncio.sleep(0)
            self.heard.append((name, event))
            self.came.set()

        return hear

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.heard]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.heard) < count:
                self.came.clear()
                await self.came.wait()


async def test_a_life_is_told_in_order() -> None:
    bench = AgentBench([Step.call("Probe"), "one", "two"], tools=(Probe(),))
    listener = Listener(bench)
    bench.agent.revive()
    bench.submit("hello", "there")
    await bench.result("p1")
    await bench.agent.close(cause="bye")
    assert listener.names == [
        "awake",
        "prompt_queued",
        "turn_started",
        "turn_ended",
        "turn_started",
        "turn_ended",
        "leaving",
    ]
    awake, queued, first, ended, second, _, leaving = (event for _, event in listener.heard)
    assert awake.source == "startup"
    assert (queued.prompt_id, queued.queue_length) == ("p1", 2)
    assert (first.turn, first.origin, first.prompt) == (0, "user", "hello")
    assert (ended.turn, ended.reason) == (0, {"kind": "completed"})
    assert (second.turn, second.prompt) == (1, "there")
    assert leaving.reason == "bye"


@pytest.mark.parametrize(("lives", "source"), [(1, "startup"), (2, "resume"), (3, "resume")])
async def test_a_new_agent_starts_and_a_stored_one_resumes(lives: int, source: str) -> None:
    bench = AgentBench(["x"])
    for life in range(lives):
        bench = AgentBench(["x"], events=bench.events)
        bench.journal.append("runtime/activated", {"epoch": life + 1})
    listener = Listener(bench, "awake")
    bench.agent.revive()
    await listener.until(1)
    assert listener.heard[0][1].source == source


async def test_the_first_turn_waits_for_those_who_hear_that_the_agent_is_awake() -> None:
    bench = AgentBench(["x"])
    hear = asyncio.Event()

    async def slow(_event: object) -> None:
        await hear.wait()

    bench.slots.awake.register("slow", slow)
    bench.agent.revive()
    bench.submit("go")
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.types == ["prompt/submitted"]
    hear.set()
    assert (await bench.result()).result.state == "completed"


async def test_a_prompt_can_be_cancelled_while_the_agent_is_not_awake_yet() -> None:
    bench = AgentBench(["x"])

    async def never(_event: object) -> None:
        await asyncio.Event().wait()

    bench.slots.awake.register("never", never)
    bench.agent.revive()
    bench.submit("go")
    bench.agent.submit((PromptSpec("c", continuation=True),))
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.agent.cancel(None, "user")
    assert (await bench.result()).result.state == "cancelled"
    bench.agent.fence()
    async with asyncio.timeout(5):
        await bench.agent.close()


async def test_a_slow_listener_holds_no_turn_up() -> None:
    bench = AgentBench(["x", "y"])
    hear = asyncio.Event()

    async def slow(_event: object) -> None:
        await hear.wait()

    bench.slots.turn_started.register("slow", slow)
    bench.slots.turn_ended.register("slow", slow)
    bench.slots.prompt_queued.register("slow", slow)
    bench.submit("one", "two")
    assert (await bench.result("p1")).result.state == "completed"
    hear.set()
    await bench.agent.close()


async def test_a_listener_that_raises_is_a_note_and_harms_nothing() -> None:
    bench = AgentBench(["x"])

    async def broken(_event: object) -> None:
        raise ValueError("deaf")

    bench.slots.turn_ended.register("broken", broken)
    listener = Listener(bench, "leaving")
    bench.submit("one")
    assert (await bench.result()).result.state == "completed"
    await bench.agent.close()
    [note] = bench.of("note/added")
    assert "turn_ended" in note["text"] and "deaf" in note["text"]
    assert listener.names == ["leaving"]


async def test_a_listener_that_never_ends_is_given_up_at_the_end_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_agent, "LEAVING_S", 0.05)
    bench = AgentBench(["x"])
    stopped = asyncio.Event()

    async def hang(_event: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    bench.slots.leaving.register("hang", hang)
    bench.submit("one")
    await bench.result()
    async with asyncio.timeout(5):
        await bench.agent.close()
    assert stopped.is_set()
    assert len(bench.of("note/added")) == 1


async def test_a_listener_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "NOTICE_S", 0.02)
    bench = AgentBench(["x"])

    async def hang(_event: object) -> None:
        await asyncio.Event().wait()

    bench.slots.awake.register("hang", hang)
    bench.agent.revive()
    bench.submit("one")
    assert (await bench.result()).result.state == "completed"
    assert "awake" in bench.of("note/added")[0]["text"]


async def test_notices_that_nobody_keeps_up_with_are_dropped_and_told_as_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "MAX_WAITING", 3)
    bench = AgentBench(lambda _request: "x")
    bench.agent.hold("test")
    listener = Listener(bench, "prompt_queued")
    bench.submit(*"abcdefgh")
    await listener.until(3)
    assert len(bench.of("note/added")) == 1
    bench.agent.release("test")
    await bench.result("p7")
    await bench.agent.close()


async def test_a_fenced_agent_tells_nothing_more() -> None:
    bench = AgentBench(["x"])
    listener = Listener(bench, "turn_ended", "leaving")
    bench.submit("one")
    await bench.result()
    await listener.until(1)
    bench.agent.fence()
    await bench.agent.close()
    assert listener.names == ["turn_ended"]


async def test_a_queued_prompt_is_told_with_its_whole_text() -> None:
    bench = AgentBench(lambda _request: "x")
    listener = Listener(bench, "prompt_queued", "turn_started")
    bench.submit("one", "y" * 50_000)
    await bench.result("p1")
    await listener.until(3)
    texts = [len(event.content[0]["text"]) for name, event in listener.heard if name == "prompt_queued"]
    assert texts == [50_000]
    assert [len(event.prompt) for name, event in listener.heard if name == "turn_started"] == [3, 50_000]


@pytest.mark.parametrize("lost", [False, True])
async def test_behind_the_end_of_an_agent_nobody_is_told_anything(lost: bool) -> None:
    bench = AgentBench(["x"])
    listener = Listener(bench, "turn_ended")
    bench.submit("go")
    await bench.result()
    await listener.until(1)
    if lost:
        bench.agent.fence()
    await bench.agent.close()
    told = bench.agent._notices  # pyright: ignore[reportPrivateUsage]
    told.tell(bench.slots.turn_ended, TurnEnded(1, {"kind": "completed"}))
    assert told._teller is None or told._teller.done()  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(0)
    assert listener.names == ["turn_ended"]
