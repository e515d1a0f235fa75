"""What a session had under way, as its document remembers it: whom to look after when its host was lost.

``in_flight`` names the subagents that were spoken to directly, since a prompt that one of them accepted must run after
a crash though nobody asks for that agent again, the swarms that have not ended, and the subagents at work for their
callers. It is written before the first prompt can be accepted, resp. the first child can exist, and is empty after a
clean close. Without it a returning session would have to fold the logs of all its agents, which may be thousands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

KEY = "in_flight"


@dataclass(frozen=True, slots=True)
class InFlight:
    """``agents`` that were addressed, and ``runs``: each open swarm's id, and each subagent's that is at work for its
    caller, with the agent that it belongs to."""

    agents: frozenset[str] = frozenset()
    runs: Mapping[str, str] = field(default_factory=dict[str, str])

    def __bool__(self) -> bool:
        return bool(self.agents or self.runs)


def in_flight(value: Mapping[str, Any]) -> InFlight:
    """What a document remembers; fields of another shape count as absent."""
    stored: Any = value.get(KEY)
    if not isinstance(stored, Mapping):
        return InFlight()
    said = cast("Mapping[str, Any]", stored)
    agents: Any = said.get("agents")
    runs: Any = said.get("runs")
    return InFlight(
        frozenset(name for name in cast("list[Any]", agents) if isinstance(name, str))
        if isinstance(agents, list)
        else frozenset(),
        {run_id: parent for run_id, parent in cast("Mapping[str, Any]", runs).items() if isinstance(parent, str)}
        if isinstance(runs, Mapping)
        else {},
    )


def with_in_flight(value: dict[str, Any], now: InFlight) -> bool:
    """Put it into a document; False when it is there already. ``updated_at`` stays."""
    data: dict[str, Any] = {}
    if now.agents:
        data["agents"] = sorted(now.agents)
    if now.runs:
        data["runs"] = dict(sorted(now.runs.items()))
    if value.get(KEY, {}) == data:
        return False
    if data:
        value[KEY] = data
    else:
        value.pop(KEY, None)
    return True
