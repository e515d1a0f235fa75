"""An agent whose log begins with another's: what was open there is not run here, what was used there not counted."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.agent.fold import AgentFold
from kimi_ray.events import SessionEvent, make_event
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.log import interrupted_turn_closers
from kimi_ray.settings import Limits
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

SCRIPT = [Step(tool_calls=(ToolCall("Probe", "{}", "c1"),)), "after tools", "second"]


def _event(data: dict[str, Any]) -> SessionEvent:
    sources = tuple(data["sources"]) if "sources" in data else None
    return make_event(data["seq"], data["time"], data["type"], data["data"], data.get("surface"), sources)


def _own(_request: Any) -> str:
    return "own"


async def _source() -> list[SessionEvent]:
    bench = AgentBench(SCRIPT, tools=(Probe(),))
    bench.submit("one", "two", on_interrupt="continue")
    await bench.result("p1")
    return bench.events


def _seeded(events: list[SessionEvent]) -> list[SessionEvent]:
    """The events, closed as a fork closes them, and the mark."""
    whole = [*events, *map(_event, interrupted_turn_closers(events))]
    whole.append(make_event(len(whole), whole[-1].time if whole else 1, "log/end-seed", {}))
    return whole


async def test_at_every_cut_a_fork_runs_none_of_its_sources_prompts_and_counts_from_zero() -> None:
    events = await _source()
    for cut in range(len(events) + 1):
        seed = _seeded(events[:cut])
        bench = AgentBench(_own, tools=(Probe(),), events=seed)
        bench.agent.revive()
        assert not bench.agent.busy, cut
        assert bench.events == [] or [e.line for e in bench.events] == [e.line for e in seed], cut
        assert bench.journal.fold.totals().steps == 0 and bench.journal.fold.totals().usage.total == 0
        (prompt_id,) = bench.submit("mine")
        before = len(seed)
        await bench.result(prompt_id)
        own = bench.events[before:]
        assert [e.data["prompt_id"] for e in own if e.type == "prompt/completed"] == [prompt_id], cut
        assert bench.journal.fold.totals().turns == 1
        turns = [e.data["turn"] for e in bench.events if e.type == "turn/start"]
        assert turns == list(range(len(turns))), cut


async def test_limits_of_a_fork_count_from_the_fork() -> None:
    seed = _seeded(await _source())
    bench = AgentBench(_own, tools=(Probe(),), events=seed, limits=Limits(max_steps=1, max_turns=1))
    bench.agent.revive()
    (prompt_id,) = bench.submit("mine")
    result = (await bench.result(prompt_id)).result
    assert result.state == "completed", result.error


@pytest.mark.parametrize("header", [None, {"profile": {"name": "x"}, "model": "b", "workdir": {"prepared": "/own"}}])
def test_the_binding_behind_a_seed_is_the_headers(header: dict[str, Any] | None) -> None:
    fold = AgentFold(seed_bind=header)
    bind = {"profile": {"name": "x"}, "model": "a", "workdir": {"kind": "copy", "prepared": "/source"}}
    fold.apply(make_event(0, 1, "profile/bind", bind))
    fold.apply(make_event(1, 1, "profile/model", {"model": "c"}))
    assert fold.model_name == "c"
    fold.apply(make_event(2, 1, "log/end-seed", {}))
    assert fold.bind == header
    assert fold.model_name == ("c" if header is None else "b")
