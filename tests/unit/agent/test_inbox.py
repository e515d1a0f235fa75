"""Notes of the runtime to an agent: they join a turn or begin one, each is told once, and none makes a turn repeat."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.agent.inbox import Inbox
from kimi_ray.llm.script import Step
from kimi_ray.settings import Limits
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

SOURCE = {"kind": "task", "task_id": "t"}


def said(bench: AgentBench) -> list[str]:
    return [data["content"][0]["text"] for data in bench.of("user/message")]


async def idle(bench: AgentBench) -> None:
    async with asyncio.timeout(10):
        while bench.agent.busy:
            await asyncio.sleep(0.005)


def test_keys() -> None:
    inbox, woken = Inbox(), []
    inbox.on_wake(lambda: woken.append(1))
    inbox.put("a", "one", SOURCE, wakes=False)
    assert inbox and not inbox.wants_turn and woken == []
    inbox.put("b", "two", SOURCE)
    inbox.put("a", "uno", SOURCE, wakes=False)
    assert inbox.wants_turn and woken == [1]
    assert inbox.withdraw("b") and not inbox.withdraw("b")
    assert [note.content[0]["text"] for note in inbox.take()] == ["uno"]
    assert not inbox and not inbox.wants_turn and not inbox.withdraw("a")
    inbox.put("c", "three", SOURCE)
    inbox.withdraw("c")
    assert not inbox.wants_turn  # nothing is left to begin a turn for


async def test_an_idle_agent_begins_a_turn() -> None:
    bench = AgentBench(["heard", "heard too"])
    bench.inbox.put("n", "something ended", SOURCE)
    await idle(bench)
    assert said(bench) == ["something ended"]
    assert bench.of("turn/start") == [{"turn": 0, "prompts": [], "continuation": "task"}]
    assert bench.of("turn/end")[0]["reason"] == {"kind": "completed"}
    assert bench.types.count("prompt/started") == 0
    bench.submit("hello")
    assert (await bench.result()).result.turn == 1


async def test_what_does_not_wake_waits_for_the_next_turn_and_goes_before_its_prompt() -> None:
    bench = AgentBench(["ok"])
    bench.inbox.put("n", "it was lost", SOURCE, wakes=False)
    await asyncio.sleep(0.02)
    assert not bench.agent.busy and bench.types == []
    bench.submit("hello")
    await bench.result()
    assert said(bench) == ["it was lost", "hello"] and len(bench.of("turn/start")) == 1


async def test_it_joins_a_running_turn_at_its_next_step() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "done"], tools=(probe,))
    bench.submit("go")
    await bench.until("tool/call")
    bench.inbox.put("n", "meanwhile", SOURCE)
    probe.release.set()
    await bench.result()
    await idle(bench)
    assert said(bench) == ["go", "meanwhile"] and len(bench.of("turn/start")) == 1
    kinds = bench.types
    assert kinds.index("tool/result") < len(kinds) - 1 - kinds[::-1].index("user/message")


async def test_a_turn_that_would_end_goes_on_for_it() -> None:
    bench = AgentBench(["first", "second"], tokens_per_s=200, chunk_chars=1)
    bench.submit("go")
    await bench.until("step/start")
    bench.inbox.put("n", "meanwhile", SOURCE)
    assert (await bench.result()).result.text == "second"
    assert len(bench.of("turn/start")) == 1 and len(bench.of("step/start")) == 2


async def test_a_turn_that_fails_before_it_could_tell_does_not_begin_again_and_again() -> None:
    bench = AgentBench(["one", "two"], limits=Limits(max_turns=1))
    bench.submit("go")
    await bench.result()
    bench.inbox.put("n", "late", SOURCE)
    await idle(bench)
    await asyncio.sleep(0.02)
    assert [data["reason"]["kind"] for data in bench.of("turn/end")] == ["completed", "limit"]
    assert bench.inbox and not bench.inbox.wants_turn  # for a turn that may come


async def test_a_model_that_fails_has_been_told_all_the_same() -> None:
    bench = AgentBench([Step.error("provider.auth"), "ok"])
    bench.inbox.put("n", "something ended", SOURCE)
    await idle(bench)
    assert [data["reason"]["kind"] for data in bench.of("turn/end")] == ["failed"]
    bench.submit("go")
    await bench.result()
    assert said(bench) == ["something ended", "go"]


async def test_a_prompt_that_waits_goes_first_and_takes_it_along() -> None:
    bench = AgentBench(["ok", "never"])
    bench.submit("go")
    bench.inbox.put("n", "something ended", SOURCE)
    await bench.result()
    await idle(bench)
    assert said(bench) == ["something ended", "go"] and len(bench.of("turn/start")) == 1


async def test_an_agent_that_is_held_or_closed_begins_none() -> None:
    bench = AgentBench(["ok"])
    bench.agent.hold("fork")
    bench.inbox.put("n", "something ended", SOURCE)
    await asyncio.sleep(0.02)
    assert bench.types == []
    bench.agent.release("fork")
    await idle(bench)
    assert said(bench) == ["something ended"]
    await bench.agent.close()
    before = len(bench.store.lines)
    bench.inbox.put("m", "too late", SOURCE)
    await asyncio.sleep(0.02)
    assert len(bench.store.lines) == before and not bench.agent.busy


async def test_a_cancelled_turn_is_followed_by_one_for_what_came_meanwhile() -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "heard"], tools=(probe,))
    bench.submit("go")
    await bench.until("tool/call")
    bench.inbox.put("n", "meanwhile", SOURCE)
    bench.agent.cancel(None, "user")
    await bench.result()
    await idle(bench)
    reasons: list[Any] = [data["reason"]["kind"] for data in bench.of("turn/end")]
    first, *_, last = said(bench)
    assert reasons == ["cancelled", "completed"] and (first, last) == ("go", "meanwhile")
