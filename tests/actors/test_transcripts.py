"""The conversations of ``tests.unit.agent.conversations`` across actors: the same events as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.runtime import Runtime
from tests.unit.agent.conversations import SETTINGS, play_all, stored


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_conversations_across_actors_leave_the_stored_events(
    config: RuntimeConfig, tmp_path: Path, backend: str
) -> None:
    async with Runtime.connect(config=config, backend=backend, **SETTINGS) as runtime:
        played = await play_all(runtime, tmp_path)
    for name, lines in played.items():
        assert lines == stored(name), name
