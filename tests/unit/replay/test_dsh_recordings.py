"""Conversations that another harness recorded with a real model, imported and replayed against our loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.config import load_config
from kimi_ray.errors import ProviderError
from kimi_ray.events import SessionEvent
from kimi_ray.exchange.dsh.importer import import_sessions
from kimi_ray.hosts.store_host import store_options
from kimi_ray.llm.assemble import Assembler
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.recorded import RecordedProvider
from kimi_ray.replay import ReplayOptions, rebuild_session, recorded_answers, replay_session
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.seam import Stream
from tests.unit.replay.dsh_recordings import NAMES, rows_of, write_store
from tests.unit.replay.recorded_sessions import source_of

SCRIPTS_ONLY = "ralph-loop"
"""Its children are answers without the turns that asked for them, its main session is empty."""


async def imported(name: str, tmp_path: Path) -> list[str]:
    """The recording's sessions in a home; gives their ids, the main one first."""
    ids = write_store(name, tmp_path / "store", str(tmp_path))
    config = load_config(tmp_path / "home")
    store = await open_store_for_writing(config.home, store_options(config))
    try:
        done = [one async for one in import_sessions(store, str(tmp_path / "store"))]
    finally:
        await store.close()
    assert sorted(str(one.session_id) for one in done) == sorted(ids)
    assert {one.outcome for one in done} == {"imported"}
    return ids


def recorded_of(rows: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The assistant messages and the tool calls of a file, in order."""
    data = [(row["type"], row["data"]) for row in rows[1:]]
    answers = [_blocks(one["message"]["content"]) for kind, one in data if kind == "assistant/message"]
    calls = [(one["callId"], one["name"]) for kind, one in data if kind == "tool/call"]
    return answers, calls


def _blocks(content: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = []
    for block in content:
        if block["type"] == "tool-call":
            arguments = block["arguments"]
            found.append((block["id"], block["name"], arguments if isinstance(arguments, str) else None))
        else:
            found.append((block["type"], block["text"]))
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != SCRIPTS_ONLY])
async def test_every_answer_and_every_call_is_as_it_was_recorded(name: str, tmp_path: Path) -> None:
    ids = await imported(name, tmp_path)
    config = load_config(tmp_path / "home")
    for session_id, rows in zip(ids, rows_of(name), strict=True):
        seen: list[SessionEvent] = []
        options = ReplayOptions(observe=lambda _stream, event, seen=seen: seen.append(event))
        report = await replay_session(source_of(tmp_path), session_id, options=options, config=config)
        [agent] = report.agents
        assert report.ok, report.divergence or agent.error
        answers, calls = recorded_of(rows)
        assert agent.requests == agent.recorded_requests == len(answers) > 0
        made = [one.data["message"]["content"] for one in seen if one.type == "assistant/message"]
        assert [_blocks(content) for content in made] == answers
        started = [(one.data["call_id"], one.data["name"]) for one in seen if one.type == "tool/call"]
        assert started == calls and agent.tool_calls == len(calls)
        rebuilt = (await rebuild_session(source_of(tmp_path), session_id)).main
        assert [_blocks(one.answer) async for one in rebuilt.requests()] == answers


async def test_the_children_of_a_recording_know_their_parent(tmp_path: Path) -> None:
    main, *children = await imported("advanced-toolchain", tmp_path)
    assert len(children) == 2
    for child in children:
        parent = (await rebuild_session(source_of(tmp_path), child)).main.header.parent
        assert parent is not None and parent.session_id == main


async def test_answers_without_turns_are_played_from_their_chunks(tmp_path: Path) -> None:
    main, *children = await imported(SCRIPTS_ONLY, tmp_path)
    source = source_of(tmp_path)
    assert await recorded_answers(source, Stream(main, "main")) == []
    for child, rows in zip(children, rows_of(SCRIPTS_ONLY)[1:], strict=True):
        answers = await recorded_answers(source, Stream(child, "main"))
        provider = RecordedProvider({"main": answers})
        assert Counter(provider.left) == {"main": 1}
        assembler = Assembler()
        async for chunk in provider.stream(ChatRequest("m", None, [], agent_id="main")):
            assembler.add(chunk)
        [block] = [row["data"]["chunk"]["block"] for row in rows[1:] if row["data"]["chunk"]["type"] == "block-end"]
        assert assembler.result().content == [block]
        with pytest.raises(ProviderError) as exhausted:
            [_ async for _ in provider.stream(ChatRequest("m", None, [], agent_id="main"))]
        assert exhausted.value.code == "provider.recording_exhausted"
