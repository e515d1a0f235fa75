"""A driver for the test of forks over nodes: grows a tree over 30 turns, forks it everywhere, tells the ids.

python -m tests.cluster.tree_driver ADDRESS HOME
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kimi_ray import Profile, Runtime, Workdir
from kimi_ray.bench.warm_up import sessions_on_every_host
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, tool_call
from kimi_ray.session_handle import Session
from tests.actors.fault_models import look, said
from tests.trees import GROWTH

TALK = "scripted:tests.cluster.tree_driver:talk"
PROFILE = Profile(name="talker", system_prompt="You talk.")
TURNS = 30
LONG_TURN = 17
STEPS = 6


def talk(request: ChatRequest) -> Step:
    """A turn: ``work N ...`` looks N times and then says so, anything else is answered at once."""
    text = said(request)
    looks = int(text.split()[1]) if text.startswith("work ") else 0
    begun = max(n for n, m in enumerate(request.messages) if m["role"] == "user" and m["source"]["kind"] != "tool")
    looked = sum(block["type"] == "tool-result" for m in request.messages[begun:] for block in m["content"])
    if looked < looks:
        return Step(tool_calls=(tool_call("look", {"what": f"{text}, look {looked}"}),))
    return Step(text=f"did {text}")


async def main(address: str, home: str) -> None:
    """Grow, fork, tell."""
    async with Runtime.connect(home, address=address, hosts_per_node=2, workspace_shared=True) as runtime:
        work = runtime.workspace(home)
        options: dict[str, Any] = {
            "profile": PROFILE, "model": TALK, "tools": [look], "workdir": Workdir.none(), "max_concurrency": 16
        }  # fmt: skip

        async def create() -> Session:
            return await work.create_session(model=TALK, profile=PROFILE, tools=[look], workdir=Workdir.none())

        # Both nodes have all their hosts before the tree that counts, or it would all be on the first.
        await sessions_on_every_host(runtime, create)
        session = await create()
        growth = {3 + 6 * n: one for n, one in enumerate(GROWTH)}
        for turn in range(TURNS):
            if turn in growth:
                parent, count = growth[turn]
                items = [f"work {n % 3} for {parent}" for n in range(count)]
                assert (await session.swarm("{{item}}", items, parent=parent, **options)).ok
            if turn == 20:
                # Not in main's causality: nobody above hears of it.
                await (await session.agent("agent-2").submit("aside")).result(60)
            steps = STEPS - 1 if turn == LONG_TURN else turn % 2
            prompt = await session.main.submit(f"work {steps} in turn {turn}")
            (await prompt.result(60)).raise_for_state()
        await session.flush()
        points = [str(turn) for turn in range(TURNS)] + [f"{LONG_TURN}.{step}" for step in range(STEPS)]
        points += [f"^{turn}" for turn in (0, 4, LONG_TURN)]
        forks = {at: (await runtime.forks.publish(session.id, at=at))[0].id for at in points}
        forks[""] = (await runtime.forks.publish(session.id))[0].id
        branch = (await runtime.forks.publish(session.id, agent_id="agent-1"))[0].id
        live = {}
        for at in ("9", f"{LONG_TURN}.2"):
            fork = await work.fork(session.id, at=at, tools=[look])
            live[at] = {"id": fork.id, "messages": await fork.main.messages()}
            await (await fork.main.continue_turn()).result(60)
            await fork.close()
        await session.close()
        told = {"session_id": session.id, "forks": forks, "branch": branch, "live": live}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
