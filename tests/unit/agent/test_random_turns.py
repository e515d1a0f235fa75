"""Agents under random scripts, steers, cancels, faults, gates and crashes: what holds of every log, whatever happened.

Every turn and step is closed, every call answered exactly once, each prompt has exactly one final state and is said at
most once, no task is left, and every request is what the log alone says that it was.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from kimi_ray.agent.repeats import RepeatedCalls
from kimi_ray.agent.slots import PromptGate, RequestFailed, StepStarting, ToolDone, ToolGate, TurnStopping
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.events import SessionEvent
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.header import describe_request
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.log import EventLog, complete_tools
from kimi_ray.settings import Limits, PromptState
from kimi_ray.tools import ToolOutput
from kimi_ray.tools.contract import Accesses, ToolContext
from tests.conftest import Budget
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

FINAL: tuple[PromptState, ...] = ("completed", "failed", "cancelled", "blocked")
MODEL = ModelSettings(provider="scripted", max_attempts=3, retry_base_s=0.0005, record_chunks="all")


class Tool(Probe):
    """A tool that answers, fails, waits to be cancelled, or stops at nothing."""

    def __init__(self, name: str, rng: random.Random) -> None:
        super().__init__()
        self.name = name
        self._rng = rng

    def accesses(self, arguments: dict[str, object]) -> Accesses:
        return self._rng.choice([Accesses.none(), Accesses.all(), Accesses.reads("a"), Accesses.writes("a")])

    async def run(self, arguments: dict[str, object], context: ToolContext) -> ToolOutput:
        way = self._rng.random()
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        if way < 0.1:
            raise ValueError("a tool's own mistake")
        if way < 0.2:
            async with asyncio.timeout(5):
                await context.cancelled.wait()
        return ToolOutput("x" * self._rng.choice([0, 3, 20_000]))


class Chaos:
    """A random model, and random handlers of all slots of one bench."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.asked: list[tuple[int, ChatRequest]] = []
        self.tools = (Tool("Probe", rng), Tool("Other", rng))

    def bench(self, events: list[SessionEvent] | None = None) -> AgentBench:
        rng = self.rng
        limits = Limits(max_steps=rng.choice([5, 20]), max_tool_calls=15) if rng.random() < 0.2 else None
        bench = AgentBench(
            self.answer,
            tools=self.tools,
            limits=limits,
            model=MODEL,
            events=events,
            system="be random",
            chunk_chars=rng.choice([None, 3]),
            checkpoint=rng.choice(["request", "turn", "none"]),
        )
        self._bench = bench
        if rng.random() < 0.5:
            RepeatedCalls(bench.slots)
        for slot, handler in (
            (bench.slots.prompt, self._prompt),
            (bench.slots.step, self._step),
            (bench.slots.request_failed, self._failed),
            (bench.slots.tool, self._tool),
            (bench.slots.tool_done, self._done),
            (bench.slots.turn_stopping, self._stopping),
            (bench.slots.turn_started, self._told),
            (bench.slots.turn_ended, self._told),
            (bench.slots.prompt_queued, self._told),
            (bench.slots.leaving, self._told),
        ):
            if rng.random() < 0.5:
                slot.register("chaos", handler)  # type: ignore[arg-type]
        return bench

    async def answer(self, request: ChatRequest) -> Step:
        rng = self.rng
        self.asked.append((self._bench.log.next_seq, request))
        if rng.random() < 0.02:
            self._interfere()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        way = rng.random()
        if way < 0.05:
            await asyncio.sleep(60)
        if way < 0.12:
            return Step.error("provider.server", 500, retry_after_ms=1)
        if way < 0.16:
            return Step.error("provider.connection", after_chunks=2, text="broken in the middle")
        if way < 0.2:
            return Step.error(rng.choice(["provider.auth", "context.overflow", "provider.bad_request"]), 400)
        if way < 0.24:
            return Step("some of it", finish="filtered")
        if way < 0.28:
            return Step(rng.choice(["", "  "]))
        if way < 0.32:
            return Step("cut", tool_calls=(ToolCall("Probe", '{"a": '),), finish="max-tokens")
        if way < 0.65:
            calls = tuple(
                ToolCall(
                    rng.choice(["Probe", "Probe", "Other", "Unknown"]),
                    rng.choice(["{}", '{"a": 1}', '{"a": 2}', "[]", "{broken"]),
                    rng.choice([None, "same", f"c{rng.randrange(5)}"]),
                )
                for _ in range(rng.randrange(1, 5))
            )
            return Step(rng.choice(["", "let me see"]), tool_calls=calls)
        return Step("an answer", reasoning=rng.choice(["", "a thought"]))

    async def _sometimes(self) -> bool:
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.03:
            raise ValueError("a handler's own mistake")
        if self.rng.random() < 0.03:
            self._interfere()
        return self.rng.random() < 0.15

    def _interfere(self) -> None:
        """What a handler, or a model in this process, may do to the agent that waits for it."""
        agent = self._bench.agent
        known = list(self._bench.journal.fold.prompts)
        if self.rng.random() < 0.3:
            agent.cancel_step()
        elif self.rng.random() < 0.6:
            agent.cancel(self.rng.choice([None, *known]), self.rng.choice(["user", "parent"]))
        elif not agent.closed:
            agent.inbox.put(f"i{self.rng.random()}", "look here", {"kind": "task"})

    async def _prompt(self, gate: PromptGate) -> None:
        if await self._sometimes():
            gate.block("no")
        elif self.rng.random() < 0.1:
            gate.add("by the way", kind="hook_result")
        if self.rng.random() < 0.02:
            await asyncio.sleep(60)

    async def _step(self, event: StepStarting) -> None:
        await self._sometimes()

    async def _failed(self, event: RequestFailed) -> None:
        if await self._sometimes():
            event.again()

    async def _tool(self, gate: ToolGate) -> None:
        if await self._sometimes():
            gate.deny("not that")
        if self.rng.random() < 0.02:
            await asyncio.sleep(60)

    async def _done(self, done: ToolDone) -> None:
        if await self._sometimes():
            done.stop_turn = True
        elif self.rng.random() < 0.1:
            done.output = ToolOutput("another output")

    async def _stopping(self, event: TurnStopping) -> None:
        if await self._sometimes():
            event.go_on("not yet", kind=self.rng.choice(["stop_hook", "other"]), times=2)

    async def _told(self, _event: object) -> None:
        await self._sometimes()


async def disturb(bench: AgentBench, rng: random.Random, actions: int) -> None:
    """What users and programs do to an agent, at random moments."""
    agent, n = bench.agent, sum(event.type == "prompt/submitted" for event in bench.events)
    for _ in range(actions):
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        way = rng.random()
        known = list(bench.journal.fold.prompts)
        try:
            if way < 0.45:
                options: dict[str, Any] = {
                    "steer_if_active": rng.random() < 0.4,
                    "on_interrupt": rng.choice(["fail", "continue"]),
                }
                agent.submit((PromptSpec(f"p{n}", f"prompt {n}", **options),))
                n += 1
            elif way < 0.6 and known:
                agent.prompts.steer(rng.sample(known, min(len(known), rng.randrange(1, 3))))
            elif way < 0.75 and known:
                agent.cancel(rng.choice(known), rng.choice(["user", "parent"]))
            elif way < 0.77:
                agent.cancel(None, "user")
            elif way < 0.82:
                agent.cancel_step()
            elif way < 0.86:
                agent.submit((PromptSpec(f"c{rng.random()}", continuation=True),))
            elif way < 0.92:
                agent.inbox.put(f"n{rng.random()}", "something happened", {"kind": "task"}, wakes=rng.random() < 0.5)
            elif not agent.busy:
                agent.hold("test")
                await asyncio.sleep(0)
                agent.release("test")
        except AgentError as error:
            assert error.code == "prompt.not_found", error


def check(bench: AgentBench, asked: list[tuple[int, ChatRequest]]) -> None:
    """What holds of the log."""
    events = bench.events
    order, types = bench.log.order, Counter(event.type for event in events)
    assert order.open_turn is None and order.open_step is None
    assert types["turn/start"] == types["turn/end"]
    assert types["step/start"] == types["step/end"]
    wanted = [
        block["id"]
        for event in events
        if event.type == "assistant/message"
        for block in event.data["message"]["content"]
        if block["type"] == "tool-call"
    ]
    results = [event.data["message"]["source"]["call_id"] for event in events if event.type == "tool/result"]
    assert len(wanted) == len(set(wanted)), "two calls with one id"
    assert results == wanted, "answered once each, in the model's order"
    called = [event.data["call_id"] for event in events if event.type == "tool/call"]
    assert len(called) == len(set(called)) and set(called) <= set(wanted)
    submitted = [event.data["prompt_id"] for event in events if event.type == "prompt/submitted"]
    ended = [event.data["prompt_id"] for event in events if event.type == "prompt/completed"]
    assert sorted(ended) == sorted(submitted), "one final state each"
    assert all(event.data["state"] in FINAL for event in events if event.type == "prompt/completed")
    said = [event.data["id"] for event in events if event.type == "user/message"]
    assert len(said) == len(set(said)), "said at most once"
    attempts = [
        (event.data["turn"], event.data["step"], event.data["attempt"])
        for event in events
        if event.type == "llm/response"
    ]
    assert len(attempts) == len(set(attempts))
    _check_interrupted(events)
    sources = [m["source"].get("kind") for m in bench.log.messages() if "source" in m]
    assert ("interruption", "interruption") not in set(pairwise(sources))
    for seq, request in asked:
        _check_request(bench, events[:seq], request)


def _check_interrupted(events: list[SessionEvent]) -> None:
    """Behind a step that alone was interrupted the turn ends, or a step begins that has something new to say."""
    for event in events:
        if event.type != "step/end" or not event.data.get("interrupted"):
            continue
        following = (later for later in events[event.seq + 1 :] if later.type in ("step/start", "turn/end"))
        after = next(following)
        if after.type == "turn/end":
            continue
        kinds = ("user/message", "llm/response", "step/end")
        said = next(later for later in events[after.seq + 1 :] if later.type in kinds)
        assert said.type == "user/message" or "recovered_at" in said.data, "the turn went on with nothing"


def _check_request(bench: AgentBench, before: list[SessionEvent], request: ChatRequest) -> None:
    """The request, from the events before it alone."""
    messages = complete_tools(EventLog.restore(bench.log.header, before).messages())
    assert [message["id"] for message in request.messages] == [message["id"] for message in messages]
    for sent, kept in zip(request.messages, messages, strict=True):
        assert _whole(bench, kept) == _whole(bench, sent)
    header = next(event.data["header"] for event in reversed(before) if event.type == "request/header")
    described = describe_request(request, provider="scripted")
    for key, value in described.items():
        assert header[key] == bench.journal.value(value) if key in ("system", "tools") else header[key] == value


def _whole(bench: AgentBench, value: Any) -> Any:
    if isinstance(value, dict):
        if "$blob" in value:
            rest = {key: item for key, item in value.items() if key not in ("$blob", "bytes")}
            value = {**rest, "text": bench.store.blobs[value["$blob"]].decode()}
        return {key: _whole(bench, item) for key, item in value.items()}
    return [_whole(bench, item) for item in value] if isinstance(value, list) else value


async def live(chaos: Chaos, bench: AgentBench, rng: random.Random) -> None:
    """One life of an agent, to its end."""
    await disturb(bench, rng, rng.randrange(1, 25))
    calm = rng.random() < 0.5
    async with asyncio.timeout(20):
        for _ in range(rng.randrange(200)):
            if calm and not bench.agent.busy:
                break
            await asyncio.sleep(0.001 if calm else 0)
        await bench.agent.close()


async def one_round(rng: random.Random) -> None:
    chaos = Chaos(rng)
    bench = chaos.bench()
    await live(chaos, bench, rng)
    check(bench, chaos.asked)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks are left: {others}"
    # The process dies at some event, and the agent lives on.
    events = bench.events
    cut = rng.randrange(len(events) + 1)
    chaos.asked.clear()
    again = chaos.bench(events[:cut])
    again.store.blobs |= bench.store.blobs
    again.agent.revive()
    await live(chaos, again, rng)
    check(again, chaos.asked)
    assert [event.line for event in again.events[:cut]] == [event.line for event in events[:cut]]
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks are left: {others}"


@pytest.mark.parametrize("seed", range(12))
async def test_some_lives(seed: int) -> None:
    await one_round(random.Random(seed))


@pytest.mark.long
async def test_many_lives(budget: Budget) -> None:
    for rng in budget.rounds():
        try:
            await one_round(rng)
        except KimiRayError as error:
            raise AssertionError(f"round {budget.round}: {error}") from error
