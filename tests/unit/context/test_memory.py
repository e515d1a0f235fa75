"""The memory of a long session is flat: what a turn leaves behind in the process is a few numbers."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

from kimi_ray import Agent, Runtime
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step

TURNS = 600
AT_ONCE = 30
BYTES_A_TURN = 1_000
"""Keys of what has ended, within their bound, and hashes of ids; an object for each prompt and its end is 5 kB."""


async def talker(request: ChatRequest) -> Step:
    if request.purpose == "compaction":
        return Step("## Request and intent\n- talk")
    return Step(f"answer {request.turn}")


async def said(agent: Agent, turns: int) -> None:
    for _ in range(0, turns, AT_ONCE):
        for prompt in await agent.submit_many([f"say something {n}" for n in range(AT_ONCE)]):
            result = await prompt.result()
            assert result.text.startswith("answer")
    await agent.compact()  # the conversation is as short as it was
    gc.collect()


async def test_turns_leave_little_behind(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "models": {
            "talker": {"provider": "scripted", "script": f"{__name__}:talker", "compaction": {"user_tokens": 50}}
        },
        "durability": "none",
        "write_window_ms": 2,
    }
    async with Runtime.connect(home=str(tmp_path / "home"), address="in-process", **settings) as runtime:
        session = await runtime.workspace(tmp_path).create_session(model="talker", profile="bare")
        tracemalloc.start()
        try:
            await said(session.main, TURNS // 2)
            before = tracemalloc.get_traced_memory()[0]
            await said(session.main, TURNS // 2)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < BYTES_A_TURN * TURNS // 2, f"{grown / (TURNS // 2):.0f} bytes a turn"
        first = next(iter([event async for event in session.main.events()]))
        assert first.seq == 0  # nothing was deleted for it
