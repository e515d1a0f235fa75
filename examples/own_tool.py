"""A tool of your own: a typed Python function.

    python examples/own_tool.py

The schema comes from the annotations, the description from the docstring. The function may be async or plain (then it
runs in a thread); what it raises becomes an error result that the model sees.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import kimi_ray
from kimi_ray import ToolContext
from kimi_ray.llm import ChatRequest, Step


async def measure(
    path: str, context: ToolContext, unit: Literal["words", "lines", "bytes"] = "words"
) -> dict[str, Any]:
    """Measure a text file.

    Args:
        path: The file, relative to the working directory.
        unit: What to count.
    """
    # Through the environment, so that it works wherever the agent's directory is, and within its rights.
    data = await context.environment.read_bytes(path)
    counts = {"words": len(data.split()), "lines": data.count(b"\n"), "bytes": len(data)}
    return {"path": path, "unit": unit, "count": counts[unit]}


def model(request: ChatRequest) -> Step:
    """A scripted model, for running without a network: asks for one measurement and tells it."""
    last = request.messages[-1]["content"][0]
    if last["type"] != "tool-result":
        return Step.call("measure", {"path": "own_tool.py", "unit": "lines"})
    told = json.loads(last["content"][0]["text"])
    return Step(text=f"{told['path']} has {told['count']} {told['unit']}.")


async def main() -> None:
    async with kimi_ray.Runtime.connect(address="in-process") as runtime:
        session = await runtime.workspace(Path(__file__).parent).create_session(
            profile="bare",
            model="scripted:own_tool:model",  # a real one: model="kimi-k2" with a [models.kimi-k2] table
            tools=[measure],  # names of built-in tools may stand beside it: tools=["Read", measure]
        )
        prompt = await session.main.submit("How long is own_tool.py?")
        result = (await prompt.result()).raise_for_state()
        print(result.text)

        # Everything is in the log: the call in the model's own words, and what came back.
        async for event in session.main.events():
            if event.type == "tool/call":
                print(f"{event.seq:>3} {event.type:<12} {event.data['name']} {event.data['arguments']}")
            elif event.type == "tool/result":
                print(f"{event.seq:>3} {event.type:<12} {event.data['message']['content'][0]['content'][0]['text']}")


if __name__ == "__main__":
    asyncio.run(main())
