"""The model and the tool of the soak: every effect of a tool is noted in the world."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, tool_call
from kimi_ray.tools.contract import ToolContext
from tests.actors.fault_models import said
from tests.conformance.oracle_checker import Journal

LOOKER = "scripted:tests.cluster.soak_models:looker"
EFFECTS = "KIMI_RAY_TEST_EFFECTS"
"""Names the directory in which each host process notes what its tools did."""


def looker(request: ChatRequest) -> Step:
    """A turn: a model call that asks for a tool, the tool, a final answer; as slow as a quick model."""
    last = request.messages[-1]["content"][0]
    if last["type"] == "tool-result":
        return Step(text=f"did {said(request)}" * 5, latency_s=0.2)
    return Step(text="let me see", tool_calls=(tool_call("touch", {"what": said(request)}),), latency_s=0.2)


@functools.cache
def _journal() -> Journal:
    return Journal(Path(os.environ[EFFECTS]) / f"effects-{os.getpid()}-{os.urandom(4).hex()}")


async def touch(what: str, context: ToolContext) -> str:
    """Touch a thing.

    Args:
        what: What to touch.
    """
    _journal().did((context.session_id, context.agent_id), context.call_id)
    await asyncio.sleep(0.05)
    return f"{what}: fine"
