"""What a swarm says about its attempts: to the session's log, to their hosts, to their limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_ray.errors import AgentError
from kimi_ray.hosts.specs import LogEntry
from kimi_ray.hosts.swarm_attempts import Attempt, Ending, labels_of, run_request
from kimi_ray.hosts.swarm_words import SwarmSpec
from kimi_ray.runs.schedule import LimitHit, Spent
from kimi_ray.settings import Limits

_BATCH = 128
_BATCH_CHARS = 16 << 20


def header_of(spec: SwarmSpec, attempt: Attempt) -> dict[str, Any] | None:
    """The header of an attempt's log, for a host on which it may have to be made anew."""
    request = run_request(spec, attempt.rollout, attempt.agent_id, attempt.number, attempt.seed, send_seed=False)
    return request.agent.header


def spawned_event(spec: SwarmSpec, attempt: Attempt) -> LogEntry:
    """A child exists."""
    key = attempt.rollout.key
    data: dict[str, Any] = {
        "agent_id": attempt.agent_id,
        "profile": spec.profile.name,
        "labels": labels_of(spec, key),
        "item_id": key.item_id,
        "repeat": key.repeat,
        "attempt": attempt.number,
    }
    return LogEntry("subagent/spawned", data)


def ended_event(attempt: Attempt, ending: Ending, position: Mapping[str, int] | None = None) -> LogEntry:
    """``subagent/completed`` for an agent that says how it ended, well or not; else ``subagent/failed``.

    ``position`` is where the log of an agent stands that did not tell it.
    """
    outcome = ending.outcome
    if outcome is not None and outcome.seq >= 0 and ending.error is None:
        data: dict[str, Any] = {
            "agent_id": attempt.agent_id,
            "seq": outcome.seq,
            "epoch": outcome.epoch,
            "status": ending.stop,
        }
        if outcome.message_seq is not None:
            data["message_seq"] = outcome.message_seq
        return LogEntry("subagent/completed", data)
    error = ending.error or AgentError(f"{attempt.stream} ended: {ending.stop}", code=f"turn.{ending.stop}").to_data()
    data = {"agent_id": attempt.agent_id, "error": error}
    if outcome is not None and outcome.seq >= 0:
        data |= {"seq": outcome.seq, "epoch": outcome.epoch}
    elif position is not None:
        data |= position
    return LogEntry("subagent/failed", data)


def batches_of(attempts: list[Attempt]) -> list[list[Attempt]]:
    """Parts of a call's size: neither too many agents nor too much text in one."""
    parts: list[list[Attempt]] = []
    chars = 0
    for attempt in attempts:
        size = len(attempt.rollout.prompt)
        if not parts or len(parts[-1]) >= _BATCH or chars + size > _BATCH_CHARS:
            parts.append([])
            chars = 0
        parts[-1].append(attempt)
        chars += size
    return parts


def limits_left(own: Limits | None, total: Limits | None, spent: Spent, elapsed_s: float) -> Limits | None:
    """A rollout's limits under what is left of the run's: alone it cannot use more than that."""
    if total is None:
        return own
    used: dict[str, float] = {f"max_{name}": amount for name, amount in spent._asdict().items() if name != "working_s"}
    used["time_s"] = elapsed_s
    said = own.said() if own is not None else {}
    for name, amount in used.items():
        bound = getattr(total, name)
        # Of tool calls alone none may be left: a bound of 0 lets an agent run that asks for none.
        if bound is not None and (bound > amount or (bound == amount and name == "max_tool_calls")):
            said[name] = min(bound - amount, said.get(name, bound))
    return Limits.model_validate(said)


def run_limit(hit: LimitHit) -> AgentError:
    """Why the attempts of a run end when a total limit is reached."""
    return AgentError(
        f"the run's {hit.name} of {hit.value:g} is used up ({hit.used:g})",
        code=f"limit.{hit.name}",
        details={"name": hit.name, "value": hit.value, "used": hit.used, "scope": "swarm"},
    )
