"""What the tests of rollout functions share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.unit.runtime_fixtures import MODULE, Stage

BARE = {"profile": "bare"}


class Verdict(BaseModel):
    good: bool
    why: str


@dataclass
class Kept:
    """What a function that is lost, stuck or cancelled tells a test."""

    calls: int = 0
    cancelled: int = 0
    ended: int = 0


async def begin(runtime: Any, tmp_path: Path, model: str) -> Any:
    return await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")


async def events_of(session: Any, agent_id: str) -> list[Any]:
    return [event async for event in session.agent(agent_id).events()]


def stage_module(stage: Stage, answer: Any) -> None:
    """Let the scripted model ask another function."""
    sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
