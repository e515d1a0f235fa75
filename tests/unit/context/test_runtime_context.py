"""``agent.compact`` and ``agent.undo`` through the public API, in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from dishka import Provider, provide

from kimi_ray import (
    Agent,
    AgentError,
    ConfigError,
    Feature,
    LifecycleScope,
    LogError,
    Runtime,
    Summarizer,
    Summary,
    SummaryTask,
)
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
            assert "compaction: " not in raised.value.message and "prompts" not in str(raised.value.hint)
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
            assert refused.value.code == "request.invalid" and refused.value.details == {"count": count}


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


async def test_hooks_are_told_before_and_after_and_cannot_stop_it(tmp_path: Path) -> None:
    said_before, said_after = tmp_path / "before", tmp_path / "after"
    hooks = (
        {"event": "PreCompact", "command": f"cat > {said_before}; echo no >&2; exit 2"},
        {"event": "PreCompact", "matcher": "auto", "command": f"touch {tmp_path / 'never'}"},
        {
            "event": "PostCompact",
            "matcher": "manual",
            "command": f"cat > {said_after}.tmp; mv {said_after}.tmp {said_after}",
        },
    )
    async with runtime(tmp_path / "home", hooks=hooks) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second")
        result = await session.main.compact("briefly")
        assert result is not None
        before = json.loads(said_before.read_text())
        assert (before["hook_event_name"], before["trigger"], before["instruction"]) == (
            "PreCompact",
            "manual",
            "briefly",
        )
        assert before["token_count"] >= result.shadowed_tokens
        async with asyncio.timeout(20):
            while not said_after.exists():
                await asyncio.sleep(0.01)
        after = json.loads(said_after.read_text())
        assert (after["hook_event_name"], after["trigger"]) == ("PostCompact", "manual")
        assert after["estimated_token_count"] < before["token_count"]
        await session.main.flush()
        events = [event async for event in session.main.events()]
        invoked = [event for event in events if event.type == "hook/invoked"]
        assert result.start_seq < invoked[0].seq < result.summary_seq
        assert [event.data["event"] for event in invoked] == ["PreCompact", "PostCompact"]
    assert not (tmp_path / "never").exists()


async def test_a_fork_has_what_was_compacted_and_goes_on_by_itself(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        workspace = one.workspace(tmp_path)
        session = await workspace.create_session(model="talker", profile="bare")
        await said(session.main, "first", "second", "third")
        early = await workspace.fork(session.id, at="1")
        await session.main.compact()
        late = await workspace.fork(session.id)
        assert await late.main.messages() == await session.main.messages()
        assert words(await early.main.messages()) == ["first", "answer 0", "second", "answer 1"]
        assert await early.main.compact() is not None
        await said(late.main, "fourth")
        assert words(await late.main.messages()) == ["*", "answer 2", "fourth", "answer 3"]
        assert words(await session.main.messages()) == ["*", "answer 2"]


async def test_what_the_model_saw_before_a_compaction_can_still_be_seen(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        await said(session.main, "first", "second")
        before = await session.main.messages()
        result = await session.main.compact()
        assert result is not None
        assert await session.main.messages(seq=result.start_seq) == before
        assert await session.main.messages(seq=result.message_seq) == before
        assert words(await session.main.messages(seq=result.message_seq + 1)) == ["*", "answer 1"]


async def test_a_session_in_a_small_window_runs_on_and_on(tmp_path: Path) -> None:
    model = {
        "provider": "scripted",
        "script": f"{_MODULE}:talker",
        "max_context_tokens": 1_000,
        "compaction": {"prune_chars": 400, "prune_head_chars": 100, "prune_tail_chars": 50},
    }
    async with runtime(tmp_path, models={"talker": model}) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        for number in range(40):
            result = await (await session.main.submit(f"{number} " + "please " * 15)).result()
            assert result.state == "completed"
        events = [event async for event in session.main.events()]
        ends = [event for event in events if event.type == "compaction/end"]
        assert len(ends) >= 3 and not any("error" in end.data for end in ends)
        sizes = [event.data["usage"]["input"] for event in events if event.type == "llm/response"]
        assert max(sizes) < 1_000
        totals = sum(e.data["usage"]["input"] for e in events if e.type in ("llm/response", "compaction/response"))
        before = await session.main.messages()
        session_id = session.id
        await session.close()
        session = await one.workspace(tmp_path).resume(session_id)
        assert await session.main.messages() == before
        assert totals > sum(sizes)


@pytest.mark.parametrize(
    "table",
    [
        {"threshold_ratio": 1.5},
        {"retain_ratio": 0.9},
        {"retain_ratio": 0.1, "retain_tokens": 5},
        {"retain_tokens": 900},
        {"prune_head_chars": 8_000, "prune_tail_chars": 1_000},
        {"tresholds": 1},
    ],
)
async def test_thresholds_that_cannot_be_are_refused(tmp_path: Path, table: dict[str, Any]) -> None:
    model = {"provider": "scripted", "max_context_tokens": 1_000, "compaction": table}
    with pytest.raises(ConfigError) as raised:
        async with runtime(tmp_path, models={"m": model}):
            pass
    assert raised.value.code == "config.invalid"


async def test_an_instruction_that_is_none_is_refused_before_it_travels(tmp_path: Path) -> None:
    async with runtime(tmp_path) as one:
        session = await one.workspace(tmp_path).create_session(model="talker", profile="bare")
        with pytest.raises(ConfigError):
            await session.main.compact(3)  # type: ignore[arg-type]
        with pytest.raises(LogError):
            await session.main.compact("\ud800")
