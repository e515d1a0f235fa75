"""``agent.compact`` and ``agent.undo`` through the public API, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from dishka import Provider, provide

from kimi_ray import Agent, AgentError, ConfigError, Feature, LifecycleScope, Runtime, Summarizer, Summary, SummaryTask
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step

_MODULE = __name__
_gates: dict[str, asyncio.Event] = {}


async def talker(request: ChatRequest) -> Step:
    if request.purpose == "compaction":
        gate = _gates.get(request.session_id)
        if gate is not None:
            await gate.wait()
        return Step("## Request and intent\n- talk")
    return Step(f"answer {request.turn} " + "word " * 40)


class Short(Summarizer):
    """A summarizer of somebody else's."""

    async def summarize(self, task: SummaryTask) -> Summary:
        return Summary([{"type": "text", "text": f"{len(task.messages)} messages, {task.instruction}"}])


class _Own(Provider):
    scope = LifecycleScope.AGENT

    @provide(override=True)
    def summarizer(self) -> Summarizer:
        return Short()


class OwnSummaries(Feature):
    name: ClassVar[str] = "own-summaries"

    def services(self) -> list[Provider]:
        return [_Own()]


SETTINGS: dict[str, Any] = {
    "models": {"talker": {"provider": "scripted", "script": f"{_MODULE}:talker"}},
    "durability": "none",
    "write_window_ms": 5,
}


@asynccontextmanager
async def runtime(home: Path, **settings: Any) -> AsyncIterator[Runtime]:
    async with Runtime.connect(home=str(home), address="in-process", **(SETTINGS | settings)) as found:
        yield found


async def said(agent: Agent, *texts: str) -> None:
    for text in texts:
        await (await agent.submit(text)).result()


def words(messages: list[dict[str, Any]]) -> list[str]:
    return ["*" if m["source"].get("kind") == "compaction" else m["content"][0]["text"][:8] for m in messages]


async def test_compact_replaces_all_but_the_last_message_and_survives_a_restart(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        assert await session.main.compact() is None
        await said(session.main, "first", "second", "third")
        result = await session.main.compact("in one line")
        assert result is not None and result.trigger == "manual"
        assert result.summary.startswith("## Request") and result.message_tokens < result.shadowed_tokens
        before = await session.main.messages()
        assert words(before) == ["*", "answer 2"]
        assert [block["text"] for block in before[0]["content"][1:4]] == ["first", "second", "third"]
        session_id = session.id
        events = [event async for event in session.main.events()]
        start = next(event for event in events if event.type == "compaction/start")
        assert start.data["instruction"] == "in one line" and "turn" not in start.data
        await session.close()
    async with runtime(tmp_path) as two:
        session = await two.workspace(tmp_path).resume(session_id)
        assert await session.main.messages() == before
        await said(session.main, "fourth")
        assert words(await session.main.messages()) == ["*", "answer 2", "fourth", "answer 3"]


async def test_compact_waits_for_nobody_and_prompts_that_come_meanwhile_run_afterwards(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second")
        gate = _gates[session.id] = asyncio.Event()
        compacting = asyncio.ensure_future(session.main.compact())
        async with asyncio.timeout(10):
            async for event in session.main.events(follow=True):
                if event.type == "compaction/request":
                    break
        handle = await session.main.submit("third")
        for call in (session.main.compact(), session.main.undo()):
            with pytest.raises(AgentError) as raised:
                await call
            assert raised.value.code in ("compaction.busy", "agent.busy")
            assert raised.value.details["reason"] == "maintenance" and raised.value.retryable
        assert (await handle.status()).state == "pending"
        gate.set()
        assert (await compacting) is not None
        assert (await handle.result()).state == "completed"
        assert words(await session.main.messages()) == ["*", "answer 1", "third", "answer 2"]


async def test_a_cancel_ends_a_compaction_and_nothing_has_changed(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second")
        before = await session.main.messages()
        _gates[session.id] = asyncio.Event()
        compacting = asyncio.ensure_future(session.main.compact())
        async with asyncio.timeout(10):
            async for event in session.main.events(follow=True):
                if event.type == "compaction/request":
                    break
        await session.main.cancel()
        with pytest.raises(AgentError) as raised:
            await compacting
        assert raised.value.code == "compaction.cancelled"
        assert await session.main.messages() == before
        await session.main.flush()
        [end] = [event async for event in session.main.events() if event.type == "compaction/end"]
        assert end.data["error"]["code"] == "compaction.cancelled"
        _gates[session.id].set()
        assert await session.main.compact() is not None


async def test_a_feature_writes_the_summaries_in_its_own_way(tmp_path: Path) -> None:
    async with runtime(tmp_path, features=(f"{_MODULE}:OwnSummaries",)) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second")
        result = await session.main.compact("short")
        assert result is not None and result.summary == "3 messages, short"


async def test_undo_takes_prompts_back_and_a_compaction_is_its_bound(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second", "third")
        result = await session.main.undo(2)
        assert len(result.prompts) == 2 and result.last_prompt is not None
        assert result.last_prompt[0]["text"] == "first"
        assert words(await session.main.messages()) == ["first", "answer 0"]
        await said(session.main, "other")
        assert words(await session.main.messages()) == ["first", "answer 0", "other", "answer 3"]
        for count, reason in ((3, "insufficient"),):
            with pytest.raises(AgentError) as raised:
                await session.main.undo(count)
            assert (raised.value.code, raised.value.details["reason"]) == ("agent.undo_unavailable", reason)
        await session.main.compact()
        with pytest.raises(AgentError) as raised:
            await session.main.undo()
        assert raised.value.details["reason"] == "compaction_boundary"
        for count in (0, -1, True, "2"):
            with pytest.raises(ConfigError) as refused:
                await session.main.undo(count)  # type: ignore[arg-type]
            assert refused.value.code == "request.invalid"


async def test_a_document_tells_of_the_newest_prompt_that_is_left(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second")
        await session.main.undo()
        assert (await session.metadata())["last_prompt"] == "first"
        await session.main.undo()
        assert (await session.metadata())["last_prompt"] == ""
        with pytest.raises(AgentError) as raised:
            await session.main.undo()
        assert raised.value.details["reason"] == "empty"
