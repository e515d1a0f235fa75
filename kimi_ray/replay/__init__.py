"""Recordings: sessions rebuilt in memory, and run again against the code of today.

``rebuild_session`` makes a session of its events alone: the same messages, the same requests. ``replay_session`` runs
it: the loop, the tools and the settings of today, the model's answers by position, and names the first request that is
not the recorded one. What may enter: reading recordings, and what compares with them. Nothing here writes to a home or
reaches a model.
"""

from kimi_ray.replay.answers import answers_of, recorded_answers
from kimi_ray.replay.options import ReplayOptions, ToolMode
from kimi_ray.replay.rebuild import RecordedAgent, RecordedRequest, RecordedSession, rebuild_session
from kimi_ray.replay.recording import RecordedTurn, Recording
from kimi_ray.replay.report import AgentReplay, Divergence, DivergenceKind, ReplayReport
from kimi_ray.replay.session import replay_agents, replay_session
from kimi_ray.replay.sources import HomeSource, LogSource, load_recording

__all__ = [
    "AgentReplay",
    "Divergence",
    "DivergenceKind",
    "HomeSource",
    "LogSource",
    "RecordedAgent",
    "RecordedRequest",
    "RecordedSession",
    "RecordedTurn",
    "Recording",
    "ReplayOptions",
    "ReplayReport",
    "ToolMode",
    "answers_of",
    "load_recording",
    "rebuild_session",
    "recorded_answers",
    "replay_agents",
    "replay_session",
]
