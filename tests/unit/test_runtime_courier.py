"""The courier against hosts that lose calls, answer late, and forget agents: order and exactly-once stay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, KimiRayError, RuntimeFault
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.specs import Ack, AgentTotals, Outcome, PromptResult, PromptSpec, Submit
from kimi_ray.store.seam import Stream


class Hosts:
    """Agent hosts with admission by number and idempotent prompts; ``faults`` decide what happens to each call."""

    home_id = "home"
    node_id = "local"

    def __init__(self) -> None:
        self.place: dict[Stream, str] = {}
        self.accepted: dict[Stream, list[str]] = {}
        self.lines: dict[tuple[str, str], int] = {}
        self.faults: list[str] = []
        self.calls: list[tuple[str, str, int]] = []
        self.resolved: list[str | None] = []
        self.watches: dict[str, list[tuple[Stream, str]]] = {}
        self.rng = random.Random(5)
        self.patient = False
        """Whether a call waits for ever for the one before it."""

    def peer(self, name: str) -> Any:
        return _Peer(self, name)

    async def resolve(self, stream: Stream, suspect: str | None) -> str:
        self.resolved.append(suspect)
        await asyncio.sleep(0.001)
        return self.place.setdefault(stream, "h1")

    def move(self, stream: Stream, host: str) -> None:
        self.place[stream] = host


class _Peer:
    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts = hosts
        self.name = name

    async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        hosts = self.hosts
        if method == "wait_any":
            await asyncio.sleep(0.001)
            named, _, watch, answers = args
            keys = [*(hosts.watches[watch] if answers else ()), *named]
            ended = [key for key in keys if key[1] in hosts.accepted.get(key[0], ())]
            hosts.watches[watch] = [key for key in keys if key not in ended]
            return [_done(*key) for key in ended]
        if method == "cancel":
            return []
        assert method == "submit_many"
        submits: list[Submit] = args[0]
        hosts.calls.append((self.name, method, sum(len(submit.prompts) for submit in submits)))
        await asyncio.sleep(hosts.rng.random() * 0.01)
        fault = hosts.faults.pop(0) if hosts.faults else ""
        if fault == "lost before":
            raise RuntimeFault("gone", code="infra.actor_died")
        acks = [self._admit(submit) for submit in submits]
        ends = asyncio.get_running_loop().time() + 0.3
        while any(isinstance(ack, int) for ack in acks):
            await asyncio.sleep(0.001)
            acks = [self._admit(each) if isinstance(ack, int) else ack for each, ack in zip(submits, acks, strict=True)]
            if hosts.patient or asyncio.get_running_loop().time() < ends:
                continue
            # As `Admission` does it: the call before was lost, and whoever sent this one begins a new lane.
            lost = AgentError("the call before did not come", code="agent.order_lost").to_data()
            acks = [
                Ack(each.stream, lost) if isinstance(ack, int) else ack for each, ack in zip(submits, acks, strict=True)
            ]
        if fault == "lost after":
            raise RuntimeFault("slow", code="infra.timeout")
        return acks

    def _admit(self, submit: Submit) -> Ack | int:
        hosts, stream = self.hosts, submit.stream
        if hosts.place.get(stream) != self.name:
            return Ack(stream, AgentError("moved", code="agent.not_found").to_data())
        line = (submit.caller, self.name)
        if submit.number > hosts.lines.get(line, 0):
            return submit.number
        hosts.lines[line] = submit.number + 1
        known = hosts.accepted.setdefault(stream, [])
        known.extend(prompt.prompt_id for prompt in submit.prompts if prompt.prompt_id not in known)
        return Ack(stream)


def _done(stream: Stream, prompt_id: str) -> Outcome:
    result = PromptResult(prompt_id=prompt_id, state="completed", stop="completed")
    return Outcome(stream, prompt_id, result, seq=1, epoch=1, totals=AgentTotals())


@asynccontextmanager
async def courier() -> AsyncGenerator[tuple[Courier, Hosts]]:
    hosts = Hosts()
    made = Courier(hosts, RuntimeConfig())  # type: ignore[arg-type]
    try:
        yield made, hosts
    finally:
        await made.close()


def stream(number: int) -> Stream:
    return Stream("s", f"agent-{number}")


async def test_one_tick_one_call_for_many_agents() -> None:
    async with courier() as (made, hosts):
        routes = [made.route(stream(n), lambda suspect, n=n: hosts.resolve(stream(n), suspect)) for n in range(50)]
        for route in routes:
            await made._host(route)
        entries = [entry for route in routes for entry in made.submit(route, [PromptSpec(f"p{route.stream.agent_id}")])]
        await asyncio.gather(*(entry.accepted for entry in entries))
        assert hosts.calls == [("h1", "submit_many", 50)]


@pytest.mark.parametrize("seed", range(4))
async def test_order_holds_over_lost_calls_and_moves(seed: int) -> None:
    rng = random.Random(seed)
    async with courier() as (made, hosts):
        hosts.rng = rng
        hosts.faults = [rng.choice(["", "", "lost before", "lost after"]) for _ in range(12)]
        target = stream(1)
        route = made.route(target, lambda suspect: hosts.resolve(target, suspect))
        entries = []
        for number in range(60):
            entries += made.submit(route, [PromptSpec(f"p{number:03}", text="x")])
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.05:
                hosts.move(target, rng.choice(["h1", "h2", "h3"]))
        await asyncio.wait_for(asyncio.gather(*(entry.accepted for entry in entries)), 20)
        assert hosts.accepted[target] == [f"p{number:03}" for number in range(60)]
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(made.outcome(route, entry.accepted, entry.prompt.prompt_id) for entry in entries)), 20
        )
        assert [outcome.prompt_id for outcome in outcomes] == hosts.accepted[target]


async def test_an_agent_that_cannot_be_found_refuses_what_is_queued_and_later_ones_may_work() -> None:
    async with courier() as (made, hosts):
        broken = True

        async def resolve(suspect: str | None) -> str:
            if broken:
                raise AgentError("no such agent", code="agent.not_found")
            return await hosts.resolve(stream(1), suspect)

        route = made.route(stream(1), resolve)
        entries = made.submit(route, [PromptSpec("a"), PromptSpec("b")])
        for entry in entries:
            with pytest.raises(KimiRayError) as caught:
                await asyncio.wait_for(entry.accepted, 5)
            assert caught.value.code == "agent.not_found"
        broken = False
        (entry,) = made.submit(route, [PromptSpec("c")])
        await asyncio.wait_for(entry.accepted, 5)
        assert hosts.accepted[stream(1)] == ["c"]


async def test_close_answers_everybody() -> None:
    async with courier() as (made, hosts):

        async def never(suspect: str | None) -> str:
            await asyncio.Event().wait()
            return ""

        route = made.route(stream(1), never)
        (entry,) = made.submit(route, [PromptSpec("a")])
        waiting = asyncio.create_task(made.outcome(route, entry.accepted, "a"))
        await asyncio.sleep(0.01)
        await made.close()
        with pytest.raises(KimiRayError) as caught:
            await asyncio.wait_for(waiting, 5)
        assert caught.value.code == "runtime.closed"
        with pytest.raises(KimiRayError):
            made.submit(route, [PromptSpec("b")])
        assert not hosts.calls


async def test_whoever_submits_while_the_runtime_closes_hears_of_it() -> None:
    async with courier() as (made, hosts):
        route = made.route(stream(1), lambda suspect: hosts.resolve(stream(1), suspect))
        await made._host(route)
        hosts.place[stream(1)] = "h1"
        hosts.lines[(route.caller, "h1")], hosts.patient = -1, True  # the call hangs: one before it never came
        (entry,) = made.submit(route, [PromptSpec("p")])
        waiting = asyncio.ensure_future(made.outcome(route, entry.accepted, "p"))
        while not hosts.calls:
            await asyncio.sleep(0.001)
        await made.close()
        async with asyncio.timeout(5):
            with pytest.raises(RuntimeFault) as raised:
                await asyncio.shield(entry.accepted)
            assert raised.value.code == "runtime.closed"
            with pytest.raises(RuntimeFault):
                await waiting


async def test_whoever_looks_for_an_agent_while_the_runtime_closes_hears_of_it_and_is_not_cancelled() -> None:
    async with courier() as (made, _hosts):
        looking = asyncio.Event()

        async def never(_suspect: str | None) -> str:
            looking.set()
            await asyncio.Event().wait()
            raise AssertionError

        route = made.route(stream(1), never)
        waiting = asyncio.ensure_future(made.call(route, "cancel", group="control"))
        (entry,) = made.submit(route, [PromptSpec("p")])
        await looking.wait()
        await made.close()
        async with asyncio.timeout(5):
            with pytest.raises(RuntimeFault) as raised:
                await waiting
            assert raised.value.code == "runtime.closed"
            with pytest.raises(RuntimeFault):
                await asyncio.shield(entry.accepted)


async def test_a_result_that_was_given_up_while_its_agent_was_looked_for_can_be_waited_for_again() -> None:
    async with courier() as (made, hosts):
        route = made.route(stream(1), lambda suspect: hosts.resolve(stream(1), suspect))
        (entry,) = made.submit(route, [PromptSpec("p")])
        await entry.accepted
        made._lose(route, "h1")
        first = asyncio.ensure_future(made.outcome(route, entry.accepted, "p"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert route.resolving is not None
        first.cancel()
        await asyncio.wait([first])
        async with asyncio.timeout(5):
            outcome = await made.outcome(route, entry.accepted, "p")
        assert outcome.result.state == "completed"


async def test_large_prompts_of_blocks_are_spread_over_calls_as_texts_are() -> None:
    async with courier() as (made, hosts):
        route = made.route(stream(1), lambda suspect: hosts.resolve(stream(1), suspect))
        await made._host(route)
        blocks = ({"type": "text", "text": "x" * (10 << 20)},)
        entries = made.submit(route, [PromptSpec(f"p{number}", content=blocks) for number in range(3)])
        await asyncio.gather(*(entry.accepted for entry in entries))
        assert sorted(count for _, _, count in hosts.calls) == [1, 1, 1]
        assert hosts.accepted[stream(1)] == ["p0", "p1", "p2"]


async def test_a_child_whose_caller_goes_before_it_began_leaves_no_route_behind() -> None:
    from kimi_ray.hosts.subagent_calls import RunWish, SubagentCalls

    ended = asyncio.Event()

    class Session:
        id = "s"

        async def call(self, method: str, *_args: Any, group: str = "default", timeout_s: float = 5.0) -> Any:
            if method == "begin_subagent":
                await asyncio.Event().wait()
            if method == "end_subagent":
                ended.set()
            return "h1"

    async with courier() as (made, _hosts):
        calls = SubagentCalls(made, Session(), "main", lambda name: None, by_agent=True)  # type: ignore[arg-type,return-value]
        running = asyncio.create_task(calls.run("agent-1", "do it", RunWish()))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        async with asyncio.timeout(5):
            await ended.wait()
            while made._tasks:
                await asyncio.sleep(0.001)
        assert not made._routes


async def test_an_error_that_nobody_foresaw_is_told_to_whoever_submits() -> None:
    async with courier() as (made, hosts):
        route = made.route(stream(1), lambda suspect: hosts.resolve(stream(1), suspect))
        await made._host(route)

        class Odd:
            name = "h1"

            async def call(self, *_args: Any, **_how: Any) -> Any:
                raise RecursionError("too deep")

        hosts.peer = lambda name: Odd()  # type: ignore[method-assign]
        (entry,) = made.submit(route, [PromptSpec("p")])
        async with asyncio.timeout(5):
            with pytest.raises(KimiRayError) as raised:
                await asyncio.shield(entry.accepted)
        assert raised.value.code == "internal"
