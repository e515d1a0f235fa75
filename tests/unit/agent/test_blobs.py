"""Long content lies in blobs: a turn finds them, whatever of them is in the store yet."""

from __future__ import annotations

import asyncio

from kimi_ray.agent.slots import StepStarting
from kimi_ray.llm.script import Step, ToolCall
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

LONG = "a long prompt " * 4000


async def test_a_long_prompt_that_comes_while_the_turn_before_it_is_stored_is_said() -> None:
    bench = AgentBench(["one", "two"], checkpoint="none")
    bench.store.disk.clear()
    bench.submit("short")
    await bench.until("prompt/completed")
    for _ in range(5):
        await asyncio.sleep(0)
    bench.submit(LONG)  # its blob is not among what the flush under way makes durable
    bench.store.disk.set()
    assert (await bench.result("p0")).result.text == "one"
    assert (await bench.result("p1")).result.text == "two"


async def test_a_prompt_that_is_cancelled_in_the_queue_takes_no_blob_of_the_running_turn_away() -> None:
    probe = Probe()
    probe.content = "a long result " * 2000
    probe.release.clear()
    calls = Step(tool_calls=(ToolCall("Probe", "{}", "c0"),))
    bench = AgentBench([calls, "done"], tools=(probe,), checkpoint="none")
    asked_again = asyncio.Event()

    async def hold(step: StepStarting) -> None:
        if step.step:
            await asked_again.wait()

    bench.slots.step.register("hold", hold)
    bench.submit("go", "later")
    await probe.started.wait()
    bench.store.disk.clear()
    bench.agent.cancel("p1", "user")
    for _ in range(5):
        await asyncio.sleep(0)  # its end is on its way to the store
    probe.release.set()
    await bench.until("step/start", count=2)
    bench.store.disk.set()
    assert (await bench.result("p1")).result.state == "cancelled"
    asked_again.set()
    assert (await bench.result("p0")).result.text == "done"


async def test_what_is_stored_is_not_kept_in_memory() -> None:
    bench = AgentBench(["one", "two"])
    bench.submit(LONG)
    await bench.result("p0")
    bench.submit("short")
    assert (await bench.result("p1")).result.text == "two"
    [digest] = bench.store.blobs
    bench.store.blobs[digest] = LONG.upper().encode()
    [said, _, _, _] = await bench.journal.resolve(bench.log.messages())
    assert said["content"][0]["text"] == LONG.upper()  # it was read again
