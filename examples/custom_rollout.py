"""A rollout of your own: a function decides what the agent is asked, and what comes of it.

    python examples/custom_rollout.py

Each item is a sum. The agent answers in a form that is checked, hears whether it was right, and may try again; the
function scores what happened. It runs on the agent's own host, so a thousand of them run as a thousand agents do.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from pydantic import BaseModel

import kimi_ray
from kimi_ray import RolloutContext
from kimi_ray.llm import ChatRequest, Step

TRIES = 3
ITEMS: list[dict[str, Any]] = [{"a": 2, "b": 3}, {"a": 20, "b": 22}, {"a": 7, "b": 8}]


class Answer(BaseModel):
    """What the model is to answer: its JSON schema is what it sees."""

    value: int


async def rollout(ctx: RolloutContext) -> dict[str, Any]:
    """One attempt at one item."""
    right = ctx.item["a"] + ctx.item["b"]
    prompt = ctx.prompt
    for number in range(1, TRIES + 1):
        # A turn like any other: with the profile's tools, within the limits, in the log.
        result = await ctx.agent.ask(prompt, output_schema=Answer)
        value = result.output["value"]
        if value == right:
            ctx.score("right", 1.0)
            ctx.score("tries", number)
            return {"value": value, "tries": number}
        ctx.note(f"try {number}: {value} instead of {right}")
        prompt = f"{value} is wrong. Try again."
    ctx.score("right", 0.0)
    return {"value": None, "tries": TRIES}


def model(request: ChatRequest) -> Step:
    """A scripted model, for running without a network: right at once, at the second try, or never."""
    texts = [m["content"][0]["text"] for m in request.messages if m["role"] == "user" and m["source"]["kind"] == "user"]
    a, b = (int(word) for word in texts[0].split() if word.isdigit())
    wrong = 1 if a > 10 else 2 - len(texts) if a > 5 else 0
    return Step.call("final_answer", {"value": a + b + max(0, wrong)})


async def main() -> None:
    async with kimi_ray.Runtime.connect(tempfile.mkdtemp(), address="in-process") as runtime:
        session = await runtime.workspace(".").create_session(
            profile="bare",
            model="scripted:custom_rollout:model",  # a real one: model="kimi-k2" with a [models.kimi-k2] table
        )
        report = await session.swarm(
            "What is {{a}} plus {{b}} ?",
            ITEMS,
            rollout=rollout,  # or "package.module:function"
            profile="bare",
            limits=kimi_ray.Limits(max_steps=10, time_s=60),
            seed=1,  # ctx.rng and ctx.seed are the same in every run with this seed
        )
        for row in report.rows:
            print(f"{row.item['a']} + {row.item['b']}: {row.status}, {row.output}, scores {row.scores}")


if __name__ == "__main__":
    asyncio.run(main())
