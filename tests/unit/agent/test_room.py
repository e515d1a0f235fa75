"""At a bound of retained bytes the loop waits at every await, not only between steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step, ToolCall
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

RECORDED = ModelSettings(provider="scripted", record_chunks="all")


async def full_after(bench: AgentBench, chunks: int) -> int:
    """Let the bound be reached in the middle of an answer; how many events there are when nothing moves any more."""
    bench.submit("hi")
    await bench.until("assistant/chunk", count=chunks)
    bench.store.room.clear()
    before = -1
    while before != len(bench.store.lines):
        before = len(bench.store.lines)
        await asyncio.sleep(0.05)  # five chunks of the model
    return before


async def test_a_streamed_answer_waits_for_room() -> None:
    bench = AgentBench(["word " * 40], chunk_chars=5, tokens_per_s=500, model=RECORDED)
    waiting_at = await full_after(bench, 3)
    assert bench.types.count("assistant/chunk") < 20
    assert len(bench.store.lines) == waiting_at
    bench.store.room.set()
    outcome = await bench.result()
    assert outcome.result.state == "completed" and outcome.result.text == "word " * 40
    assert bench.types.count("assistant/chunk") == 40


async def test_a_cancel_interrupts_the_wait_and_keeps_the_text_so_far() -> None:
    bench = AgentBench(["word " * 5000], chunk_chars=5, tokens_per_s=500, model=RECORDED)
    await full_after(bench, 3)
    assert bench.agent.cancel("p0", "user") == ["p0"]
    assert (await bench.result()).result.state == "cancelled"
    [message] = bench.of("assistant/message")
    assert message["interrupted"] is True and message["message"]["content"][0]["text"].startswith("word ")
    assert bench.log.order.open_turn is None  # the brackets were closed without any room


async def test_a_wait_without_end_fails_the_turn_and_keeps_the_text_so_far() -> None:
    bench = AgentBench(["word " * 5000], chunk_chars=5, tokens_per_s=500, model=RECORDED)
    await full_after(bench, 3)
    bench.store.room_error = StoreError("no room", code="store.unavailable", retryable=True)
    bench.store.room.set()
    outcome = await bench.result()
    assert outcome.result.state == "failed"
    assert outcome.result.error is not None and outcome.result.error["code"] == "store.unavailable"
    [message] = bench.of("assistant/message")
    assert message["interrupted"] is True
    assert bench.types.count("llm/response") == 1


async def test_a_log_that_is_fenced_while_it_waits_gets_nothing_more() -> None:
    bench = AgentBench(["word " * 5000], chunk_chars=5, tokens_per_s=500, model=RECORDED)
    await full_after(bench, 3)
    bench.store.room_error = StoreError("another writer", code="store.fenced")
    bench.store.room.set()
    bench.agent.fence()
    await bench.agent.close()
    assert not {"assistant/message", "turn/end", "llm/response"} & set(bench.types)


@pytest.mark.parametrize("checkpoint", ["request", "none"])
async def test_a_tool_waits_for_room_before_its_body_runs(checkpoint: Any) -> None:
    probe = Probe()
    calls = Step(tool_calls=(ToolCall("Probe", "{}", "c0"),))
    bench = AgentBench([calls, "done"], tools=(probe,), checkpoint=checkpoint)
    bench.log.observe(lambda event: bench.store.room.clear() if event.type == "tool/call" else None)
    bench.submit("go")
    await bench.until("tool/call")
    for _ in range(50):
        await asyncio.sleep(0)
    assert probe.calls == []
    bench.store.room.set()
    assert (await bench.result()).result.state == "completed"
    assert len(probe.calls) == 1
