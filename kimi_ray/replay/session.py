"""Replaying a whole tree: every agent from its own log, against the same code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError
from kimi_ray.events import thaw
from kimi_ray.hosts.features import Features, load_features
from kimi_ray.replay.options import ReplayOptions
from kimi_ray.replay.player import AgentPlayer
from kimi_ray.replay.rebuild import agent_order
from kimi_ray.replay.report import AgentReplay, ReplayReport
from kimi_ray.replay.sources import Blobs, LogSource, load_recording
from kimi_ray.replay.stage import Stage
from kimi_ray.session.refusals import no_agent, no_session
from kimi_ray.store.seam import ListedLog, Stream

DEFAULT = ReplayOptions()


async def replay_agents(
    source: LogSource,
    session_id: str,
    agent_id: str | None = None,
    *,
    options: ReplayOptions = DEFAULT,
    config: RuntimeConfig,
    features: Features | None = None,
) -> AsyncIterator[AgentReplay]:
    """Replay the agents of a session, one after the other, main first; each is told when it is done.

    No model is reached, nothing is written, and with recorded tools nothing is run. What one agent did for another is
    in the log of each: the answers of subagents are recorded results in their parent's.

    Args:
        source: Where the logs are.
        session_id: Which session.
        agent_id: Only this agent.
        options: What is taken from the recording.
        config: The settings of today.
        features: What Features bring today; None loads them.

    Raises:
        SessionError: ``session.not_found``; AgentError: ``agent.not_found``.
        ConfigError: ``config.feature``, ``config.assembly``.
        Exception: What ``ReplayOptions.observe`` raised.
    """
    logs = {log.stream.agent_id: log for log in await source.list_logs(session_id)}
    if not logs:
        raise no_session(session_id)
    if agent_id is not None and agent_id not in logs:
        raise no_agent(Stream(session_id, agent_id))
    stage = Stage(config, features if features is not None else load_features(config))
    try:
        for found in sorted([agent_id] if agent_id is not None else logs, key=agent_order):
            stream = Stream(session_id, found)
            told, raised = _rollout(logs[found]), None
            try:
                recording = await load_recording(source, stream, logs)
                player = AgentPlayer(stream, recording, Blobs(source, session_id), options, stage)
                told["workdir"] = thaw((recording.bind or {}).get("workdir"))
                replayed, raised = await player.play(), player.raised
            except KimiRayError as error:
                replayed = AgentReplay(session_id=session_id, agent_id=found, error=error.to_data())
            if raised is not None:
                raise raised
            yield replayed.model_copy(update=told)
    finally:
        await stage.close()


async def replay_session(
    source: LogSource,
    session_id: str,
    agent_id: str | None = None,
    *,
    options: ReplayOptions = DEFAULT,
    config: RuntimeConfig,
    features: Features | None = None,
) -> ReplayReport:
    """``replay_agents``, to the end."""
    agents = replay_agents(source, session_id, agent_id, options=options, config=config, features=features)
    return ReplayReport(agents=tuple([agent async for agent in agents]))


def _rollout(log: ListedLog) -> dict[str, Any]:
    """What the log's header says of the rollout that it is of; nothing of a fork, which is none."""
    header = log.header or {}
    if "forked_from" in header or not isinstance(header.get("item_id"), str):
        return {}
    return {name: header.get(name) for name in ("run_id", "item_id", "repeat")}
