"""A model for ``test_context``: it chats, and writes no summary while the file that the first prompt names is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step

TALKER = "scripted:tests.actors.context_models:talk"


async def talk(request: ChatRequest) -> Step:
    """Chat, or a summary once the gate is gone."""
    if request.purpose == "step":
        return Step(f"answer {request.turn} " + "word " * 40)
    gate = Path(request.messages[0]["content"][0]["text"])
    async with asyncio.timeout(60):
        while gate.exists():
            await asyncio.sleep(0.02)
    return Step("## Request and intent\n- talk")
