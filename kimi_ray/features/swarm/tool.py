"""The ``AgentSwarm`` tool: many subagents from one prompt template, run to their ends, told as one result."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots, ToolGate
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.subagents import Subagents
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError
from kimi_ray.features.swarm.arguments import (
    MAX_SUBAGENTS,
    PLACEHOLDER,
    RESUMED,
    AgentSwarmArguments,
    check_shape,
    swarm_tasks,
)
from kimi_ray.features.swarm.launcher import ITEM_LABEL, SubagentLauncher
from kimi_ray.features.swarm.result_text import render_results
from kimi_ray.features.swarm.scheduler import MonotonicClock, SwarmScheduler
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput

NAME = "AgentSwarm"
ONE = "Agent"
"""The tool for one subagent."""

OWN_MODEL = "primary"
"""Another word for the caller's own model."""

NOT_ALONE = f"{NAME} must be the only tool call of an answer: no call of this answer was started."
TWO_SWARMS = f"Call {NAME} once in an answer, one swarm at a time: no call of this answer was started."

DESCRIPTION = (
    f"Run many subagents that do the same kind of work on different things. Each of `items` makes a new "
    f"subagent; its prompt is prompt_template with every {PLACEHOLDER} replaced by the item, so the prompts "
    f"differ. resume_agent_ids goes on with subagents of earlier calls, such as those that failed: agent_id to "
    f"prompt. Both may be given; do not give resumed work again as an item. At most {MAX_SUBAGENTS} subagents; "
    f"they are started little by little, and the call returns when all have ended, with each one's answer or "
    f"error in the order asked. For a few tasks of different shapes use several Agent calls. {NAME} must be the "
    f"only tool call of an answer."
)

MAKING_S = 60.0
"""What an attempt has beyond the time of its subagent's work: to make the subagent, and to tell of its end."""


class AgentSwarm(BuiltinTool[AgentSwarmArguments]):
    """Subagents over items; ``validation.failed``, and what ``Subagents.plan`` raises. A failed subagent is data."""

    name = NAME
    description = DESCRIPTION
    writes = True

    def __init__(self, spec: AgentSpec, subagents: Subagents, journal: Journal, config: RuntimeConfig) -> None:
        self._spec = spec
        self._subagents = subagents
        self._journal = journal
        self._config = config
        kinds = "\n".join(f"- {profile.name}: {profile.description}" for profile in subagents.offered())
        if kinds and ONE not in spec.profile.tools:  # else that tool says it
            self.description = f"{DESCRIPTION}\nKinds of subagents:\n{kinds}"

    def touches(self, arguments: AgentSwarmArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        return Accesses.all()

    async def call(self, arguments: AgentSwarmArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        spec = self._spec
        check_shape(arguments, own_profile=spec.profile.name, own_models=(OWN_MODEL, spec.model.name))
        plan = None
        if arguments.things:
            model = None if arguments.model_name == OWN_MODEL else arguments.model_name
            plan = self._subagents.plan(arguments.profile_name, model, fork=bool(arguments.fork))
        tasks = swarm_tasks(
            arguments,
            profile=RESUMED if plan is None else plan.profile.name,
            resumed_items=await self._items_of(arguments.resumed, context.agent_id),
        )
        timeout_s = self._config.subagent_timeout_s
        scheduler = SwarmScheduler(
            tasks,
            SubagentLauncher(self._subagents, self._journal, plan, context.call_id, timeout_s),
            MonotonicClock(),
            max_concurrency=self._config.agent_swarm_max_concurrency,
            timeout_ms=round((timeout_s + MAKING_S) * 1000) if timeout_s else 0,
        )
        results = await scheduler.run(context.cancelled)
        return ToolOutput(render_results(results), meta={"counts": dict(Counter(result.status for result in results))})

    async def _items_of(self, agent_ids: tuple[str, ...], caller: str) -> dict[str, str | None]:
        """By agent id, what the caller's own children among these were made for."""

        async def item_of(agent_id: str) -> str | None:
            with suppress(KimiRayError):  # one that is not there, or no id at all, is the failure of its own task
                labels = await self._subagents.labels_of(agent_id)
                if labels.get("parent_agent_id") == caller:
                    return labels.get(ITEM_LABEL)
            return None

        found = await asyncio.gather(*(item_of(agent_id) for agent_id in agent_ids))
        return dict(zip(agent_ids, found, strict=True))


class OneSwarmAtATime:
    """Refuses every call of an answer in which ``AgentSwarm`` is not the only one."""

    def __init__(self, spec: AgentSpec, slots: AgentSlots, journal: Journal) -> None:
        self._journal = journal
        if NAME in spec.profile.tools:
            others = slots.tool.handlers
            slots.tool.register("agent_swarm", self._refuse, before=others[0] if others else None)

    async def _refuse(self, gate: ToolGate) -> None:
        if gate.batch == 1:
            return
        swarms = self._asked_for().count(NAME)
        if swarms:
            gate.deny(NOT_ALONE if swarms == 1 else TWO_SWARMS, code="validation.failed", by="agent_swarm")

    def _asked_for(self) -> list[str]:
        """The tools that the running step's answer calls."""
        surface = self._journal.log.surface
        for place in range(len(surface) - 1, -1, -1):
            event = surface[place]
            if event.type == "assistant/message":
                content = event.data["message"]["content"]
                return [str(block["name"]) for block in content if block["type"] == "tool-call"]
        return []
