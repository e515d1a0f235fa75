"""A scripted main that starts a swarm of its own, and subagents that wait for the test."""

from __future__ import annotations

import asyncio
import os

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from tests.actors.fault_models import said

LEAD = "scripted:tests.actors.swarm_models:lead"


async def lead(request: ChatRequest) -> Step:
    """Main: the prompt ``swarm COUNT FILE`` becomes a swarm, ``again ID...`` goes on with those subagents, and what it
    reads of them is its answer. Subagents answer once the file in their prompt is there."""
    text = said(request)
    if request.agent_id != "main":
        file = text.rpartition(" ")[2]
        while file.startswith("/") and not os.path.exists(file):
            await asyncio.sleep(0.05)
        return Step(text=f"did {text.partition(' ')[0]}")
    last = request.messages[-1]["content"][0]
    if last["type"] == "tool-result":
        return Step(text="".join(block["text"] for block in last["content"]))
    word, *rest = text.split()
    about: dict[str, object] = {"description": "Work"}
    if word == "again":
        return Step.call("AgentSwarm", about | {"resume_agent_ids": dict.fromkeys(rest, "again")})
    items = [f"item-{number}" for number in range(int(rest[0]))]
    about["subagent_type"] = "bare"
    return Step.call("AgentSwarm", about | {"prompt_template": f"{{{{item}}}} {rest[1]}", "items": items})
