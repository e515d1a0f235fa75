"""A Feature of your own: a capability, all of it in one class, as a package would ship it.

    python examples/own_feature.py

In a package of yours this file would be a module, and its pyproject.toml would say

    [project.entry-points."kimi_ray.features"]
    shop = "own_feature:ShopFeature"

Then every runtime that runs where the package is installed has it. Here the setting ``features`` names it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence

from dishka import Provider

import kimi_ray
from kimi_ray import AgentSlots, Feature, LifecycleScope, Profile, ToolGate
from kimi_ray.llm import ChatRequest, Step
from kimi_ray.tools import FunctionTool


class Stock:
    """What is in the shop. App scope: one for all agents of a process."""

    def __init__(self) -> None:
        self.pieces = {"apple": 5, "pear": 1}


class Sell(FunctionTool):
    """Agent scope: one for each agent that has the tool. The constructor says what it needs, and gets it."""

    def __init__(self, stock: Stock) -> None:
        super().__init__(self.sell)
        self._stock = stock

    async def sell(self, article: str, pieces: int) -> str:
        """Sell pieces of an article.

        Args:
            article: What.
            pieces: How many.
        """
        self._stock.pieces[article] -= pieces
        return f"sold {pieces} {article}, {self._stock.pieces[article]} left"


class HouseRules:
    """Agent scope, built with each agent: has a say before each tool call starts."""

    def __init__(self, slots: AgentSlots, stock: Stock) -> None:
        self._stock = stock
        slots.tool.register("house rules", self.judge)

    async def judge(self, call: ToolGate) -> None:
        if call.name == "sell" and call.arguments["pieces"] > self._stock.pieces.get(call.arguments["article"], 0):
            call.deny("The shop does not sell what it does not have.", by="house rules")


class ShopFeature(Feature):
    """What the package brings."""

    name = "shop"

    def services(self) -> Sequence[Provider]:
        stock = Provider(scope=LifecycleScope.APP)
        stock.provide(Stock)
        return [stock]

    def on_agent(self) -> Sequence[type]:
        return [HouseRules]

    def tools(self) -> dict[str, type]:
        return {"sell": Sell}

    def profiles(self) -> Sequence[Profile]:
        return [Profile(name="seller", system_prompt="You sell fruit.", tools=("sell",))]


def model(request: ChatRequest) -> Step:
    """A scripted model, for running without a network: sells as the prompt says, and tells what became of it."""
    last = request.messages[-1]["content"][0]
    if last["type"] == "tool-result":
        return Step(text=last["content"][0]["text"])
    return Step.call("sell", json.loads(last["text"]))


async def main() -> None:
    settings = {"features": ["own_feature:ShopFeature"]}  # or in config.toml
    async with kimi_ray.Runtime.connect(address="in-process", config=settings) as runtime:
        workspace = runtime.workspace(tempfile.gettempdir())
        session = await workspace.create_session(profile="seller", model="scripted:own_feature:model")
        for wish in ({"article": "apple", "pieces": 2}, {"article": "pear", "pieces": 3}):
            prompt = await session.main.submit(json.dumps(wish))
            print((await prompt.result()).raise_for_state().text)


if __name__ == "__main__":
    asyncio.run(main())
