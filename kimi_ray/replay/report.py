"""What a replay found."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field

from kimi_ray.replay.recording import Ending
from kimi_ray.settings import Settings

DivergenceKind = Literal["request", "extra_request", "missing_request", "compaction", "messages", "failed"]
"""``request``: a request is not the recorded one. ``extra_request``: one more than was recorded. ``missing_request``: a
recorded one was not made. ``compaction``: the conversation is shortened otherwise, or elsewhere. ``messages``: behind a
turn's last request something is not what was recorded. ``failed``: the replay itself failed."""


class Divergence(Settings):
    """Where a replay first left its recording."""

    kind: DivergenceKind
    session_id: str
    agent_id: str
    request: int
    """Its place among the requests of its agent, from 0; of ``messages``, that of the last one before."""
    turn: int
    """As they were recorded."""
    step: int | None = None
    attempt: int | None = None
    seq: int
    """Where the recording stood."""
    time: int
    """When that was recorded, epoch milliseconds."""
    field: str
    """For example ``messages[3].content[0].text``, ``tools[2].description``, ``system``."""
    what: str = ""
    """What stands there, in words: ``the result of count({"path":"a.txt"}), call_0_0_0``; may be empty."""
    recorded: Any = None
    replayed: Any = None
    message: str

    def __str__(self) -> str:
        return self.message


class AgentReplay(Settings):
    """How the replay of one agent went."""

    session_id: str
    agent_id: str
    turns: int = 0
    """Replayed turns, the one that diverged included."""
    ends: Ending = "complete"
    """How the recording ends."""
    ends_where: str = ""
    """In words, unless it is complete."""
    requests: int = 0
    """Requests that were made and are as they were recorded."""
    recorded_requests: int = 0
    summary_requests: int = 0
    """Requests for summaries that were made and are as they were recorded."""
    shortenings: int = 0
    """Places where the conversation was pruned or compacted again, as it was recorded."""
    shortenings_taken: int = 0
    """Such places that were taken from the recording: it does not say with which settings, or is another program's, or
    they were ignored."""
    tool_calls: int = 0
    """Calls whose results were replayed."""
    tools_run: int = 0
    """Of these, calls whose tools really ran."""
    tools_absent: tuple[str, ...] = ()
    """Tools that were offered and are not here, whether any were to run or not: what requests say of them, and their
    results, were the recorded ones."""
    ignored: dict[str, int] = Field(default_factory=dict)
    """Differences that were ignored, by field: in how many turns, and of a message 1."""
    divergence: Divergence | None = None
    error: dict[str, Any] | None = None
    """Why its log cannot be replayed, as data."""
    run_id: str | None = None
    """The run that it is a rollout of, as its log's header says; None of any other agent."""
    item_id: str | None = None
    """Of a rollout, its item."""
    repeat: int | None = None
    """Of a rollout, from 0."""
    workdir: dict[str, Any] | None = None
    """Where its tools worked when it was recorded: the fields of a ``Workdir``, and ``prepared``, its directory."""


class ReplayReport(Settings):
    """How a replay went: every agent's, main first."""

    agents: tuple[AgentReplay, ...] = ()

    @property
    def divergence(self) -> Divergence | None:
        """The first one, by the time of the recording."""
        return self.diverged[0].divergence if self.diverged else None

    @property
    def requests(self) -> int:
        """Requests that are as they were recorded, of all agents."""
        return sum(agent.requests for agent in self.agents)

    @property
    def diverged(self) -> tuple[AgentReplay, ...]:
        """Agents that left their recordings, in the order in which that was recorded."""
        found = [(agent.divergence.time, agent) for agent in self.agents if agent.divergence is not None]
        return tuple(agent for _, agent in sorted(found, key=lambda one: one[0]))

    @property
    def ignored(self) -> dict[str, int]:
        """Differences that were ignored, by field, of all agents."""
        total: Counter[str] = Counter()
        for agent in self.agents:
            total.update(agent.ignored)
        return dict(total)

    @property
    def tools_absent(self) -> tuple[str, ...]:
        """Tools that are not here, of all agents, by name: they were not compared with anything of today."""
        return tuple(sorted({name for agent in self.agents for name in agent.tools_absent}))

    @property
    def unfinished(self) -> tuple[AgentReplay, ...]:
        """Agents whose recordings end in the middle of something: lost their ends, or live, or were cut off."""
        return tuple(agent for agent in self.agents if agent.error is None and agent.ends != "complete")

    @property
    def ok(self) -> bool:
        """Whether all of it is as it was recorded, as far as that goes: see ``unfinished``."""
        return all(agent.divergence is None and agent.error is None for agent in self.agents)
