"""A compaction or an undo whose answer was lost with its host: the call is made again, and it is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Agent, AgentError, CompactionResult, PromptHandle, Runtime, UndoResult
from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.events import SessionEvent
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from tests.unit.runtime_fixtures import cluster_of, running

MODEL = f"scripted:{__name__}:talker"
GATE: dict[str, asyncio.Event] = {}
MUTE: set[str] = set()


async def talker(request: ChatRequest) -> Step:
    if request.purpose == "compaction":
        if request.session_id in MUTE:
            return Step.error("provider.auth", 401)
        return Step("## Request and intent\n- talk")
    gate = GATE.get(request.session_id)
    if gate is not None:
        await gate.wait()
    return Step(f"answer {request.turn} " + "word " * 40)


async def talked(runtime: Runtime, tmp_path: Path, turns: int = 3) -> Agent:
    session = await runtime.workspace(tmp_path / "work").create_session(model=MODEL, profile="bare")
    for number in range(turns):
        await (await session.main.submit(f"prompt {number}")).result()
    await session.flush()
    return session.main


class Faults:
    """Loses the agent's host, or only its answer, around chosen calls of the in-process cluster."""

    def __init__(self, runtime: Runtime, method: str) -> None:
        self.cluster = cluster_of(runtime)
        self.method = method
        self.asked = 0
        self.appends = 0
        self.kill_at: tuple[int, str] | None = None
        self.after_answer: Callable[[str], Awaitable[None]] | None = None
        self._call: Any = self.cluster._call  # pyright: ignore[reportPrivateUsage]
        self._host = ""
        self.cluster._call = self.call  # type: ignore[method-assign]

    async def call(self, name: str, method: str, args: Any, timeout_s: float, caller: Any) -> Any:
        if method == self.method:
            self.asked += 1
            self._host = name
            if self.after_answer is None or self.asked > 1:
                return await self._call(name, method, args, timeout_s, caller)
            with suppress(KimiRayError):
                await self._call(name, method, args, timeout_s, caller)
            await self.after_answer(name)
            raise RuntimeFault("the answer was lost", code="infra.actor_died")
        if method != "append" or not self._host or caller is None or caller.listing.name != self._host:
            return await self._call(name, method, args, timeout_s, caller)
        self.appends += 1
        at = self.appends
        if self.kill_at == (at, "before"):
            self.cluster.kill_host(self._host)
        answer = await self._call(name, method, args, timeout_s, caller)
        if self.kill_at == (at, "after"):
            self.cluster.kill_host(self._host)
        return answer


async def stored(agent: Agent, type: str) -> list[SessionEvent]:
    await agent.flush()
    return [event async for event in agent.events() if event.type == type]


async def check_compacted(agent: Agent, result: CompactionResult | None) -> None:
    """It took effect once, and the result is the one of the log."""
    assert result is not None
    events = {event.seq: event async for event in agent.events()}
    [replacing] = [event for event in events.values() if event.type == "user/message" and event.replaced is not None]
    assert replacing.seq == result.message_seq and replacing.replaced == result.shadowed_range
    assert events[result.start_seq].type == "compaction/start"
    for seq in (result.start_seq, result.summary_seq, result.end_seq):
        assert events[seq].data["compaction_id"] == result.compaction_id
    assert events[result.end_seq].type == "compaction/end" and "error" not in events[result.end_seq].data
    assert (result.trigger, result.summary) == ("manual", "## Request and intent\n- talk")
    assert result.message_tokens < result.shadowed_tokens
    assert result.shadowed_seqs == tuple(events[result.summary_seq].data["shadowed_seqs"])
    assert [message["source"]["kind"] for message in await agent.messages()] == ["compaction", "model"]


@pytest.mark.parametrize("lost", ["host", "answer"])
async def test_a_compaction_whose_answer_was_lost_gives_the_same_result_and_is_done_once(
    tmp_path: Path, lost: str
) -> None:
    async with running(tmp_path) as (runtime, _, _):
        agent = await talked(runtime, tmp_path)
        faults = Faults(runtime, "compact")

        async def lose(name: str) -> None:
            if lost == "host":
                faults.cluster.kill_host(name)

        faults.after_answer = lose
        result = await agent.compact("briefly")
        assert faults.asked == 2
        await check_compacted(agent, result)
        assert len(await stored(agent, "compaction/start")) == 1
        assert await agent.compact() is None


@pytest.mark.parametrize("method", ["compact", "undo"])
async def test_it_is_answered_although_a_turn_runs_by_then(tmp_path: Path, method: str) -> None:
    async with running(tmp_path) as (runtime, _, _):
        agent = await talked(runtime, tmp_path)
        gate = GATE[agent.stream.session_id] = asyncio.Event()
        faults = Faults(runtime, method)
        sent: list[PromptHandle] = []

        async def go_on(_name: str) -> None:
            sent.append(await agent.submit("go on"))

        faults.after_answer = go_on
        if method == "compact":
            assert await agent.compact() is not None
        else:
            result = await agent.undo()
            assert result.last_prompt is not None and result.last_prompt[0]["text"] == "prompt 1"
        assert faults.asked == 2 and (await sent[0].status()).state == "running"
        gate.set()
        assert (await sent[0].result()).state == "completed"
        assert len(await stored(agent, "compaction/start")) + len(await stored(agent, "surface/cut")) == 1


async def test_a_compaction_that_failed_tells_the_stored_error_and_asks_no_model_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, _):
        agent = await talked(runtime, tmp_path)
        MUTE.add(agent.stream.session_id)
        faults = Faults(runtime, "compact")

        async def die(name: str) -> None:
            faults.cluster.kill_host(name)

        faults.after_answer = die
        with pytest.raises(AgentError) as raised:
            await agent.compact()
        assert faults.asked == 2
        assert raised.value.code == "compaction.summary" and raised.value.details["cause"]["code"] == "provider.auth"
        [end] = await stored(agent, "compaction/end")
        assert end.data["error"]["message"] == raised.value.message
        with pytest.raises(AgentError):
            await agent.compact()  # another one is another one
        assert len(await stored(agent, "compaction/start")) == 2


async def test_a_call_that_is_repeated_while_the_first_is_under_way_waits_for_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, _):
        agent = await talked(runtime, tmp_path)
        services = agent.services
        asked = [
            services.courier.call(agent.route, "compact", agent.stream, None, "one", group="wait", timeout_s=20)
            for _ in range(3)
        ]
        first, *others = await asyncio.gather(*asked)
        assert others == [first, first]
        await check_compacted(agent, first)
        undos = [
            services.courier.call(agent.route, "undo", agent.stream, 1, name, group="store", timeout_s=20)
            for name in ("a", "b", "a")
        ]
        await (await agent.submit("one")).result()
        await (await agent.submit("two")).result()
        found: list[UndoResult] = await asyncio.gather(*undos)
        # The first is found behind another one, too.
        assert found[0].prompts == found[2].prompts != found[1].prompts
        assert len(await stored(agent, "surface/cut")) == 2


@pytest.mark.parametrize("method", ["compact", "undo"])
async def test_a_host_that_is_killed_around_any_write_to_the_store(tmp_path: Path, method: str) -> None:
    async with running(tmp_path, write_window_ms=0) as (runtime, _, _):
        at, side, done = 1, "before", 0
        while True:
            agent = await talked(runtime, tmp_path)
            faults = Faults(runtime, method)
            faults.kill_at = (at, side)
            if method == "compact":
                await check_compacted(agent, await agent.compact())
            else:
                result = await agent.undo()
                [cut] = await stored(agent, "surface/cut")
                assert list(result.prompts) == cut.data["prompts"] and result.last_prompt is not None
                assert result.last_prompt[0]["text"] == "prompt 1"
            killed = faults.asked > 1
            faults.cluster._call = faults._call  # type: ignore[method-assign]
            if not killed:
                break
            done += 1
            at, side = (at, "after") if side == "before" else (at + 1, "before")
        assert done >= 2, "no host was killed: look at the name of the call"
