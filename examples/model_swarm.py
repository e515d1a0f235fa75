"""A model that starts a swarm of its own: one call of the tool AgentSwarm, and another that goes on with what failed.

    python examples/model_swarm.py

The models are scripted here, so that it runs offline; with a real one, say ``model="..."`` and leave the scripts out.
"""

from __future__ import annotations

import asyncio
import re

from kimi_ray import Profile, Runtime
from kimi_ray.llm import ChatRequest, Step

LEAD = Profile(
    name="lead",
    system_prompt="You split work into items and let subagents do it.",
    tools=("AgentSwarm",),
    subagents=("bare",),
)


def lead(request: ChatRequest) -> Step:
    """The main agent: a swarm, then whoever failed once more, then the last result as its answer."""
    if request.agent_id != "main":
        return subagent(request)
    last = request.messages[-1]["content"][0]
    if last["type"] != "tool-result":
        return Step.call(
            "AgentSwarm",
            {
                "description": "Name capitals",
                "prompt_template": "What is the capital of {{item}}? One word.",
                "items": ["Norway", "Peru", "Atlantis"],
                "subagent_type": "bare",
            },
        )
    text = "".join(block["text"] for block in last["content"])
    print(text, end="\n\n")
    failed = re.findall(r'agent_id="([^"]+)"[^>]* outcome="failed"', text)
    if failed:
        again = dict.fromkeys(failed, "Say what is known of it, if there is no capital.")
        return Step.call("AgentSwarm", {"description": "Ask again", "resume_agent_ids": again})
    return Step(text="All are answered.")


def subagent(request: ChatRequest) -> Step:
    """A subagent that fails at first where there is no answer."""
    prompt = request.messages[-1]["content"][0]["text"]
    answer = next((city for land, city in (("Norway", "Oslo"), ("Peru", "Lima")) if land in prompt), None)
    if answer is not None:
        return Step(text=answer)
    if "What is" in prompt:
        return Step.error("provider.bad_request", 400, message="I know no such country")
    return Step(text="It is a legend.")


async def main() -> None:
    async with Runtime.connect(address="in-process") as runtime:
        session = await runtime.workspace(".").create_session(profile=LEAD, model="scripted:model_swarm:lead")
        prompt = await session.main.submit("Which are the capitals of Norway, Peru and Atlantis?")
        print((await prompt.result()).text)


if __name__ == "__main__":
    asyncio.run(main())
