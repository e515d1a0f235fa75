"""Random lives of an agent with a small window, cut off between any two events, brought back and played on.

Whatever happens: no request has an unpaired call or result, a compaction is whole or not there, and every request is
what the log alone says it was, to the byte on the wire.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import KimiRayError
from kimi_ray.events import SessionEvent, make_event
from kimi_ray.features.compaction import Undo
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.log import EventLog, interrupted_turn_closers, tools_balanced
from kimi_ray.tools import tool
from tests.unit.context.stage import ContextBench, bare, rebuilt, rebuilt_bodies, small
from tests.unit.log.scripts import HEADER


@tool
async def fetch(size: int) -> str:
    """Fetch something.

    Args:
        size: How much.
    """
    return "y" * size


class Model:
    """Answers by a number that goes on from life to life, so that a life is played anew in the same way."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, request: ChatRequest) -> Step:
        at = self.seed * 7 + request.turn * 5 + request.step * 3 + request.attempt
        if request.purpose == "compaction":
            return Step.error("provider.auth", 401) if at % 5 == 0 else Step("Summary. " * (at % 4 + 1))
        if at % 11 == 0 and request.attempt == 1:
            return Step.error("context.overflow", 400)
        if request.step < at % 3:
            calls = tuple(
                ToolCall("fetch", f'{{"size": {(at * 37 + n * 211) % 1500}}}', f"c{request.turn}.{request.step}.{n}")
                for n in range(at % 2 + 1)
            )
            return Step("Let me look.", tool_calls=calls)
        return Step("wörd 語 " * (at % 50 + 1), reasoning="Hm." if at % 3 == 0 else "")


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["say", "say", "say", "compact", "undo"]), st.integers(1, 40)), min_size=3, max_size=9
)


def bench_of(model: Model, events: list[SessionEvent] | None = None, *, fork: bool = False) -> ContextBench:
    if fork and events:
        events = [*events, *map(_closer, interrupted_turn_closers(events))]
        events.append(make_event(len(events), events[-1].time, "log/end-seed", {}))
    bench = ContextBench(model, tools=(fetch,), model=small(compaction={"prune_chars": 300}), events=events)
    if events:
        bench.log.append("runtime/activated", {"epoch": 2})
        bench.agent.revive()
    return bench


def _closer(data: dict[str, Any]) -> SessionEvent:
    sources = tuple(data["sources"]) if "sources" in data else None
    return make_event(data["seq"], data["time"], data["type"], data["data"], data.get("surface"), sources)


async def act(bench: ContextBench, what: str, number: int) -> None:
    try:
        if what == "say":
            await bench.say("please " * number)
        elif what == "compact":
            await bench.compact()
        else:
            undo = Undo(bench.journal)
            await bench.agent.maintain("undo", lambda: undo.undo(number % 3 + 1, f"u{bench.log.next_seq}"))
    except KimiRayError as error:
        assert error.code.startswith(("compaction.", "agent.undo_unavailable", "agent.busy")), error


def check(events: list[SessionEvent], requests: list[ChatRequest]) -> None:
    log = EventLog.restore(HEADER, [])
    open_start: str | None = None
    for event in events:
        log.adopt(event)
        assert all(count is not None for count in tools_balanced(log.surface))  # raises for a result without a call
        if event.type == "compaction/start":
            open_start = event.data["compaction_id"]
        elif event.type in ("compaction/end", "runtime/activated"):
            open_start = None
        elif event.type == "user/message" and event.replaced is not None:
            assert event.data["source"]["compaction_id"] == open_start
            [summary] = [one for one in events if one.seq == (event.sources or ())[1]]
            assert summary.type == "compaction/summary" and summary.seq == event.seq - 1
            assert list((event.sources or ())[2:]) == summary.data["shadowed_seqs"]
    for request in requests:
        answered: list[str] = []
        wanted: list[str] = []
        for message in request.messages:
            if message["role"] == "assistant":
                assert not wanted
                wanted = [block["id"] for block in message["content"] if block["type"] == "tool-call"]
            elif message["source"].get("kind") == "tool":
                assert wanted and message["source"]["call_id"] == wanted.pop(0)
                answered.append(message["source"]["call_id"])
            else:
                assert not wanted
        assert not wanted and len(set(answered)) == len(answered)


async def live(seed: int, actions: list[tuple[str, int]], cuts: list[int] | None = None) -> None:
    """Play a life, then another one behind each cut; None: behind every event."""
    model = Model(seed)
    bench = bench_of(model)
    for what, number in actions:
        await act(bench, what, number)
    events = bench.events
    check(events, bench.requests)
    assert [bare(request) for request in bench.requests] == rebuilt(events, bench.store.blobs)
    assert bench.wire == rebuilt_bodies(events, bench.store.blobs)
    assert EventLog.restore(HEADER, events).messages() == bench.log.messages()
    if cuts is None:
        places = [(cut, fork) for cut in range(len(events) + 1) for fork in (False, True)]
    else:
        places = [(cut % (len(events) + 1), cut % 2 == 0) for cut in cuts]
    for cut, fork in places:
        kept = events[:cut]
        again = bench_of(model, kept, fork=fork)
        async with asyncio.timeout(10):
            for what, number in actions[:3]:
                await act(again, what, number)
            while again.agent.busy:
                await asyncio.sleep(0)
        known = len(rebuilt(kept))
        check(again.events, again.requests)
        assert [bare(request) for request in again.requests] == rebuilt(again.events)[known:]
        assert again.wire == rebuilt_bodies(again.events)[known:]
        assert again.log.order.open_compaction is None and not again.log.observer_errors
        await again.agent.close()
    await bench.agent.close()


@given(st.integers(0, 1_000), ACTIONS, st.lists(st.integers(0, 10_000), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_any_life_cut_off_anywhere(seed: int, actions: list[tuple[str, int]], cuts: list[int]) -> None:
    asyncio.run(live(seed, actions, cuts))


def test_one_life_cut_off_between_all_its_events() -> None:
    actions: list[tuple[str, int]] = [("say", 30), ("say", 40), ("say", 40), ("compact", 1), ("say", 40), ("undo", 3)]
    asyncio.run(live(3, actions))


def test_a_life_has_all_that_is_tested_here() -> None:
    async def types() -> set[str]:
        found: set[str] = set()
        for seed in range(6):
            bench = bench_of(Model(seed))
            for what, number in [("say", 30)] * 8 + [("compact", 1), ("say", 9), ("undo", 3)]:
                await act(bench, what, number)
            found.update(bench.types)
            found.update(f"trigger {start['trigger']}" for start in bench.of("compaction/start"))
            found.update("failed" for end in bench.of("compaction/end") if "error" in end)
            await bench.agent.close()
        return found

    wanted: set[Any] = {"compaction/prune", "surface/cut", "failed", "tool/result", "compaction/summary"}
    wanted |= {"trigger pressure", "trigger overflow", "trigger manual"}
    assert wanted <= asyncio.run(types())
