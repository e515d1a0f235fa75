"""The conversations of ``conversations.py`` in this process: their events are those of the stored transcripts.

``KIMI_RAY_TEST_WRITE_TRANSCRIPTS=1`` writes the transcripts anew (from JSONL): look at what has changed before you
commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.runtime import Runtime
from tests.unit.agent.conversations import CASES, SETTINGS, TRANSCRIPTS, WRITE, play_all, store, stored
from tests.unit.runtime_fixtures import FAST


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_conversations_leave_the_stored_events(tmp_path: Path, backend: str) -> None:
    async with Runtime.connect(
        tmp_path / "home", "in-process", config={**FAST, **SETTINGS, "backend": backend}
    ) as runtime:
        played = await play_all(runtime, tmp_path)
    if os.environ.get(WRITE) and backend == "jsonl":
        for name, lines in played.items():
            store(name, lines)
    for name, lines in played.items():
        assert lines == stored(name), name


def test_there_is_a_transcript_of_each_conversation_and_no_other() -> None:
    assert {path.stem for path in TRANSCRIPTS.glob("*.jsonl")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_transcript_obeys_the_rules_of_every_log(name: str) -> None:
    events: list[dict[str, Any]] = [json.loads(line) for line in stored(name)]
    types = [event["type"] for event in events]
    assert types.count("turn/start") == types.count("turn/end")
    assert types.count("step/start") == types.count("step/end")
    submitted = [event["data"]["prompt_id"] for event in events if event["type"] == "prompt/submitted"]
    ended = [event["data"]["prompt_id"] for event in events if event["type"] == "prompt/completed"]
    assert sorted(submitted) == sorted(ended)
    asked = [
        block["id"]
        for event in events
        if event["type"] == "assistant/message"
        for block in event["data"]["message"]["content"]
        if block["type"] == "tool-call"
    ]
    answered = [event["data"]["message"]["source"]["call_id"] for event in events if event["type"] == "tool/result"]
    assert asked == answered
