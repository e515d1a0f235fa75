"""A log with one event gone, or of another shape: what is told of it is one error with a name, never a bare one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.config import load_config
from kimi_ray.errors import KimiRayError, LogError
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.replay import RecordedSession, ReplayOptions, rebuild_session, replay_session
from tests.unit.replay.recorded_sessions import Scenes, look, recorded
from tests.unit.replay.test_replay_damage import Lines, whole_log


async def _talk(tmp_path: Path, *, compacted: bool = False) -> Lines:
    scenes = Scenes()
    two = (ToolCall("look", '{"what":"a"}'), ToolCall("look", '{"what":"b"}'))
    for number in range(2):
        scenes.steps[f"q{number} " + "please " * 30] = [Step(tool_calls=two), Step("ok " * 30)]

    async def answer(request: Any) -> Any:
        return Step("## s\n- x") if request.purpose == "compaction" else await scenes.answer(request)

    async with recorded(tmp_path, answer) as session:
        for number in range(2):
            await (await session.main.submit(f"q{number} " + "please " * 30)).result(10)
        if compacted:
            await session.main.compact()
    return await whole_log(tmp_path)


def _without(lines: list[bytes], gone: int) -> list[bytes]:
    """A log that never had this event: all behind it are numbered anew."""
    found: list[bytes] = []
    for seq, line in enumerate(lines[:gone] + lines[gone + 1 :]):
        event = json.loads(line)
        event["seq"] = seq
        if event.get("sources"):
            event["sources"] = [one - (one > gone) for one in event["sources"]]
        found.append(json.dumps(event, separators=(",", ":")).encode())
    return found


async def test_a_log_that_lacks_an_event_is_not_found_equal_with_fewer_requests_than_answers(tmp_path: Path) -> None:
    source = await _talk(tmp_path)
    lines = list(source.lines)
    types = [json.loads(line)["type"] for line in lines]
    told: list[str] = []
    for gone, kind in enumerate(types):
        if kind not in ("turn/start", "step/start", "step/end", "turn/end"):
            continue
        source.lines = _without(lines, gone)
        options = ReplayOptions(own_tools=(look,))
        report = await replay_session(source, "s1", options=options, config=load_config(tmp_path / "home"))
        if report.ok:
            assert report.requests == types.count("llm/response"), (gone, kind)
            continue
        found = report.divergence
        seqs = [] if found is None or found.kind != "failed" else found.replayed.get("details", {}).get("seqs", [])
        if seqs:
            told.append(kind)
            assert found is not None and found.replayed["code"] == "log.out_of_order"
            assert all(seq >= gone and types[seq + 1] == "llm/response" for seq in seqs)
    assert told.count("step/start") >= 2 and "turn/start" in told


async def _everything(session: RecordedSession) -> None:
    """All that can be asked of a session in memory."""
    for agent in session.agents.values():
        await agent.messages()
        async for _ in agent.requests():
            pass
        async for _ in agent.summary_requests():
            pass


HOSTILE: list[Any] = [None, -1, 1.5, True, "", "x", [], [[]], [1], {}, {"$blob": 3}, {"type": "text"}]
PLACES: dict[str, list[tuple[str | int, ...]]] = {
    "user/message": [("content",), ("content", 0), ("role",), ("content", 0, "type")],
    "assistant/message": [("message",), ("message", "content"), ("message", "content", 0), ("message", "role")],
    "tool/result": [
        ("message", "content"),
        ("message", "content", 0),
        ("message", "content", 0, "content"),
        ("message", "content", 0, "content", 0),
        ("message", "content", 0, "tool_call_id"),
    ],
    "request/header": [("header",), ("header", "system"), ("header", "tools"), ("header", "sampling")],
    "compaction/request": [("message",), ("message", "content"), ("model",), ("attempt",)],
    "compaction/start": [("shadowed_range",), ("shadowed_range", "start")],
    "llm/response": [("attempt",), ("error",)],
}


@pytest.mark.parametrize("kind", PLACES)
async def test_a_payload_of_another_shape_is_one_error_that_names_its_event(tmp_path: Path, kind: str) -> None:
    source = await _talk(tmp_path, compacted=True)
    session = await rebuild_session(source, "s1")
    assert not session.unreadable
    await _everything(session)
    lines = list(source.lines)
    seq = next(seq for seq, line in enumerate(lines) if json.loads(line)["type"] == kind)
    failures = 0
    for place in PLACES[kind]:
        for value in HOSTILE:
            event = json.loads(lines[seq])
            inside = event["data"]
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = value
            source.lines = [*lines[:seq], json.dumps(event, separators=(",", ":")).encode(), *lines[seq + 1 :]]
            session = await rebuild_session(source, "s1")
            error: KimiRayError | None = session.unreadable.get("main")
            try:
                await _everything(session)
            except KimiRayError as found:
                error = found
            failures += error is not None
            if isinstance(error, LogError):
                assert error.code in ("log.bad_payload", "log.bad_envelope"), (place, value, error)
    assert failures or kind == "llm/response"
