"""Frames and exports of logs that others wrote, and of random ones: nothing is lost and nothing counted twice."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_ray import frames
from kimi_ray.config import load_config
from kimi_ray.events import SessionEvent
from kimi_ray.exchange import export_conversations
from kimi_ray.exchange.dsh.importer import import_sessions
from kimi_ray.frames.places import HomePlace
from kimi_ray.hosts.store_host import store_options
from kimi_ray.log import EventLog, complete_tools, derive_messages
from kimi_ray.store import open_store
from kimi_ray.store.backend import open_store_for_writing
from tests.unit.frames.homes import Scribe, store_logs
from tests.unit.log.scripts import SCRIPTS, play
from tests.unit.replay.dsh_recordings import NAMES, rows_of, write_store


async def exported(home: Path, session_id: str, form: Any) -> list[Any]:
    out = io.BytesIO()
    report = await export_conversations(open_store(home), session_id, form, out)
    assert report.ok, report.problems
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", NAMES)
async def test_recordings_of_another_harness(name: str, tmp_path: Path) -> None:
    ids = write_store(name, tmp_path / "store", str(tmp_path))
    config = load_config(tmp_path / "home")
    store = await open_store_for_writing(config.home, store_options(config))
    imported = [one async for one in import_sessions(store, str(tmp_path / "store"))]
    await store.close()
    assert {one.outcome for one in imported} == {"imported"}
    found = frames.tables(ids, home=config.home)
    rows = [row for session in rows_of(name) for row in session[1:]]
    told = [row["data"] for row in rows if row["type"] == "assistant/message"]
    models = [one for one in found["model_calls"].to_pylist() if one["purpose"] == "step"]
    assert len(models) == len(told) and all(one["outcome"] == "answered" for one in models)
    inputs = [(data.get("usage") or {}).get("inputTokens") for data in told]
    assert [one["input_tokens"] for one in models] == inputs
    assert sum(row["input_tokens"] for row in found["rows"].to_pylist()) == sum(one or 0 for one in inputs)
    calls = {row["data"]["callId"]: row["data"]["name"] for row in rows if row["type"] == "tool/call"}
    assert {one["call_id"]: one["name"] for one in found["tool_calls"].to_pylist()} == calls
    for session_id in ids:
        assert await exported(tmp_path / "home", session_id, "openai")
        assert await exported(tmp_path / "home", session_id, "sharegpt")
        trajectories = await exported(tmp_path / "home", session_id, "atif")
        assert trajectories and all(one["schema_version"] == "ATIF-v1.8" for one in trajectories)
        if find_spec("atif"):
            from atif import Trajectory

            for one in trajectories:
                Trajectory.model_validate(one)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=SCRIPTS, crash=st.integers(0, 1 << 16))
def test_random_logs(script: Any, crash: int) -> None:
    scribe = Scribe()
    play(scribe.log, script)
    scribe.events = (
        scribe.events[: len(scribe.events) - crash % (len(scribe.events) + 1)] if crash % 3 == 0 else scribe.events
    )
    events = scribe.events
    if not events:
        return
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(store_logs(Path(home), [scribe]))
        found = frames.tables("session_one", home=home)
        stored = [line for run in HomePlace(home).lines(HomePlace(home).logs()[0].stream) for line in run]
        (openai,) = asyncio.run(exported(Path(home), "session_one", "openai"))
        (trajectory,) = asyncio.run(exported(Path(home), "session_one", "atif"))
    assert stored == [event.line for event in events]

    def of(*types: str) -> list[SessionEvent]:
        return [event for event in events if event.type in types]

    steps, models, tools, messages = (found[name].to_pylist() for name in frames.FRAMES[1:])
    assert [one["seq"] for one in steps] == [event.seq for event in of("step/start")]
    assert sum(one["state"] != "open" for one in steps) == len(of("step/end"))
    responses = of("llm/response")
    answers = [event for event in of("assistant/message") if event.surface == "append"]
    assert sum(one["output_tokens"] or 0 for one in models) == sum(event.data["usage"]["output"] for event in responses)
    assert {one["message_seq"] for one in models} - {None} == {event.seq for event in answers}
    asked = [
        block["id"] for event in answers for block in event.data["message"]["content"] if block["type"] == "tool-call"
    ]
    assert sorted(one["call_id"] for one in tools) == sorted(asked)
    answered = [event.seq for event in of("tool/result") if event.surface == "append"]
    assert sorted(one["result_seq"] for one in tools if one["status"] != "open") == answered
    assert [one["seq"] for one in messages] == [
        event.seq for event in of("user/message", "assistant/message", "tool/result", "surface/cut")
    ]
    gone = {seq for one in messages for seq in one["replaces"] or ()}
    log = EventLog.restore(scribe.header, events)
    assert {one["seq"] for one in messages if one["role"] != "cut"} - gone == set(log.surface.seqs)
    assert len(openai["messages"]) == len(complete_tools(derive_messages(log.surface)))
    assert [one["step_id"] for one in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1))
