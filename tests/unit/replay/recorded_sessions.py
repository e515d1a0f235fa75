"""Sessions recorded in this process, and replayed from their home."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kimi_ray.config import load_config
from kimi_ray.replay import HomeSource, ReplayOptions, ReplayReport, replay_session
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.store.open import open_store
from kimi_ray.tools import FunctionTool, tool

MODULE = "kimi_ray_test_replay"
FAST = {"durability": "none", "write_window_ms": 5, "close_timeout_s": 10.0}


class Facts:
    """What the tool ``look`` knows: a test changes it between the recording and the replay."""

    value = "forty-two"
    asked = 0


@tool
def look(what: str) -> str:
    """Look something up.

    Args:
        what: The thing.
    """
    Facts.asked += 1
    return f"{what} is {Facts.value}"


@tool
def fail() -> str:
    """Fail."""
    raise ValueError("as it must")


def scripted(script: Any, name: str = "script") -> str:
    """A model's name that plays a script."""
    module = sys.modules.setdefault(MODULE, types.ModuleType(MODULE))
    setattr(module, name, script)
    return f"scripted:{MODULE}:{name}"


@asynccontextmanager
async def recorded(
    tmp_path: Path, script: Any, *, tools: Sequence[FunctionTool] = (look,), profile: str = "bare", **settings: Any
) -> AsyncGenerator[Session]:
    """A session whose main agent plays a script; it is closed at the end."""
    (tmp_path / "work").mkdir(exist_ok=True)
    Facts.value, Facts.asked = "forty-two", 0
    async with Runtime.connect(tmp_path / "home", "in-process", config={**FAST, **settings}) as runtime:
        yield await runtime.workspace(tmp_path / "work").create_session(
            "s1", profile=profile, model=scripted(script), tools=tools or None
        )


async def replayed(tmp_path: Path, session_id: str = "s1", agent_id: str | None = None, **options: Any) -> ReplayReport:
    """The replay of a session of that home."""
    home = tmp_path / "home"
    return await replay_session(
        source_of(tmp_path),
        session_id,
        agent_id,
        options=ReplayOptions(**_with_tools(options)),
        config=load_config(home),
    )


def source_of(tmp_path: Path) -> HomeSource:
    """The home, for reading."""
    return HomeSource(open_store(tmp_path / "home"))


def _with_tools(options: dict[str, Any]) -> dict[str, Any]:
    return {"own_tools": (look, fail), **options}
