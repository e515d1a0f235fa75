"""A scripted model that starts a command in the background, and says how often it was told of an end."""

from __future__ import annotations

import re

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step

WORKER = "scripted:tests.actors.task_models:worker"


async def worker(request: ChatRequest) -> Step:
    """The prompt ``start COMMAND`` runs it in the background; any other prompt, and an end, is answered by the
    statuses of all ends that the model was told of so far."""
    last = request.messages[-1]
    text = "".join(block.get("text", "") for block in last["content"])
    if last["source"]["kind"] == "user" and text.startswith("start "):
        about = {"command": text.removeprefix("start "), "run_in_background": True, "description": "a test"}
        return Step.call("Bash", about)
    told = [
        found
        for message in request.messages
        if message["role"] == "user" and message["source"]["kind"] == "task"
        for found in re.findall(r'type="task\.(\w+)"', message["content"][0]["text"])
    ]
    return Step(text=f"told {','.join(told) or 'nothing'}")
