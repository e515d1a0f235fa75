"""Runs the attempts of a swarm by the port to subagents."""

from __future__ import annotations

import asyncio

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.subagents import SubagentPlan, Subagents
from kimi_ray.errors import AgentError, KimiRayError, error_from_data
from kimi_ray.features.swarm.scheduler import TIMED_OUT, Attempt, SwarmTask

ITEM_LABEL = "swarmItem"
"""The label of a subagent that says what it was made for; it stays when the subagent is resumed."""


class SubagentLauncher:
    """The children of one call of ``AgentSwarm``.

    Args:
        subagents: The caller's children.
        journal: The caller's log.
        plan: What new children are; None when all are resumed.
        call_id: The tool call.
        timeout_s: Longest run of an attempt, seconds; 0 is no bound.
    """

    def __init__(
        self, subagents: Subagents, journal: Journal, plan: SubagentPlan | None, call_id: str, timeout_s: float
    ) -> None:
        self._subagents = subagents
        self._journal = journal
        self._plan = plan
        self._call_id = call_id
        self._timeout_s = timeout_s
        self._making = asyncio.Lock()

    async def launch(self, attempt: Attempt) -> str:
        """See ``Launcher.launch``."""
        agent_id = attempt.agent_id
        if agent_id is None:
            agent_id = await self._agent(attempt.task)
            attempt.began(agent_id)
        result = await self._subagents.run(
            agent_id,
            None if attempt.again else attempt.task.prompt,
            timeout_s=self._timeout_s or None,
            on_started=attempt.ready,
            will_retry=True,
        )
        if result.status == "completed":
            return result.text
        if result.status == "timed_out":
            raise AgentError(TIMED_OUT, code="agent.timed_out")
        if result.error is not None:
            raise error_from_data(result.error)
        raise AgentError(f"the subagent ended {result.status}", code=f"prompt.{result.status}")

    def suspended(self, task: SwarmTask, agent_id: str, reason: str) -> None:
        """See ``Launcher.suspended``: ``run`` has written it."""

    def given_up(self, task: SwarmTask, agent_id: str, error: KimiRayError) -> None:
        """See ``Launcher.given_up``."""
        self._journal.append("subagent/failed", {"agent_id": agent_id, "error": error.to_data()})

    async def _agent(self, task: SwarmTask) -> str:
        if task.resume is not None:
            return (await self._subagents.check_resume(task.resume)).agent_id
        if self._plan is None:
            raise AssertionError("a new subagent without a plan")
        labels = {} if task.item is None else {ITEM_LABEL: task.item}
        async with self._making:  # one after the other, so that the same call gives each item the same agent id
            return await self._subagents.spawn(
                self._plan, description=task.description, labels=labels, call_id=self._call_id
            )
