"""Sessions rebuilt in memory, and what the model saw at any point of a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import AgentError, ConfigError, KimiRayError, SessionError
from kimi_ray.llm.script import Step
from kimi_ray.replay import rebuild_session
from kimi_ray.runtime import Runtime
from kimi_ray.store.seam import Stream
from tests.unit.replay.recorded_sessions import FAST, Scenes, look, recorded_in, source_of


def texts(messages: list[dict[str, Any]]) -> list[str]:
    """What each message says, in short."""
    said: list[str] = []
    for message in messages:
        block = message["content"][0]
        said.append(block.get("text") or block.get("name") or block["content"][0]["text"])
    return said


POINTS = {
    "^0": [],
    "0.0": ["go", "look", "a is forty-two"],
    "0.1": ["go", "look", "a is forty-two", "look", "b is forty-two"],
    "0.2": ["go", "look", "a is forty-two", "look", "b is forty-two", "done"],
    "0": ["go", "look", "a is forty-two", "look", "b is forty-two", "done"],
    "^1": ["go", "look", "a is forty-two", "look", "b is forty-two", "done"],
    "1": ["go", "look", "a is forty-two", "look", "b is forty-two", "done", "more", "did more"],
}


async def test_time_travel_live_cold_and_rebuilt_are_the_same(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("look", {"what": "a"}), Step.call("look", {"what": "b"}), "done"]
    async with recorded_in(tmp_path, scenes.answer) as (workspace, session):
        await (await session.main.submit("go")).result(10)
        await (await session.main.submit("more")).result(10)
        live = {at: await session.main.messages(at) for at in POINTS}
        assert {at: texts(messages) for at, messages in live.items()} == POINTS
        with pytest.raises(SessionError) as missing:
            await session.main.messages("2")
        assert missing.value.code == "session.fork_point_not_found" and "0 to 1" in str(missing.value.hint)
        for bad in ("", "x", "0.", "-1", "^0.1"):
            with pytest.raises(ConfigError) as refused:
                await session.main.messages(bad)
            assert refused.value.code == "request.invalid"
        now = await session.main.messages()
        events = [event async for event in session.main.events()]
        for what, code in (
            ({"at": 3}, "request.invalid"),
            ({"at": "1", "seq": 1}, "request.conflict"),
            ({"seq": len(events) + 1}, "request.out_of_range"),
            ({"seq": -1}, "request.out_of_range"),
            ({"seq": True}, "request.out_of_range"),
        ):
            with pytest.raises(ConfigError) as refused:
                await session.main.messages(**what)  # pyright: ignore
            assert refused.value.code == code
            with pytest.raises(ConfigError) as refused:
                await (await rebuild_session(source_of(tmp_path), "s1")).main.messages(**what)  # pyright: ignore
            assert refused.value.code == code
        assert await session.main.messages(seq=len(events)) == now
        assert await session.main.messages(seq=0) == []
        fork = await workspace.fork("s1", at="0.1", new_session_id="f", tools=[look])
        assert await fork.main.messages() == live["0.1"]
    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as runtime:
        main = (await runtime.replay("s1")).main
        assert await main.messages() == now == live["1"]
        for at, messages in live.items():
            assert await main.messages(at) == messages
        assert not await runtime.is_live("s1")


async def test_what_can_be_named(tmp_path: Path) -> None:
    scenes = Scenes()
    async with recorded_in(tmp_path, scenes.answer) as (_, session):
        await (await session.main.submit("go")).result(10)
        beside = await session.fork_agent()
        await (await beside.submit("beside")).result(10)
    [place] = (tmp_path / "home" / "sessions").glob("*/s1")
    async with Runtime.connect(tmp_path / "other", "in-process", config=FAST) as runtime:
        whole = await runtime.replay(place)
        assert list(whole.agents) == ["main", "agent-1"] and not whole.unreadable
        only = await runtime.replay(str(place / "agents" / "agent-1"))
        assert list(only.agents) == ["agent-1"]
        [log] = (place / "agents" / "main").iterdir()
        assert list((await runtime.replay(log)).agents) == ["main"]
        refused: list[tuple[Any, str]] = [
            ("s1", "session.not_found"),
            (tmp_path, "request.unknown_id"),
            (place.parent, "request.unknown_id"),
            ("runs/nope", "request.unknown_id"),
            ("@last", "request.unknown_id"),
            ("s1/", "request.unknown_id"),
            ("a/b/c", "request.unknown_id"),
            ("", "request.unknown_id"),
        ]
        for what, code in refused:
            with pytest.raises(KimiRayError) as error:
                await runtime.replay(what)
            assert error.value.code == code
    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as runtime:
        assert list((await runtime.replay("s1/agent-1")).agents) == ["agent-1"]
        assert list((await runtime.replay(Stream("s1", "main"))).agents) == ["main"]
        with pytest.raises(AgentError):
            await runtime.replay("s1/agent-7")
        with pytest.raises(AgentError):
            whole.agent("agent-7")
