"""Projections: whatever they are gone on from, a fold over the whole log gives the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent, make_event
from kimi_ray.log.projection_units import TodosProjection, ToolsProjection, UsageProjection
from kimi_ray.log.projections import Projections
from tests.unit.log.scripts import SCRIPTS, ask, begin, call, end, new_log, play, result, user


@dataclass(frozen=True)
class Counting:
    """Counts events of a type by their seq: every one that is seen twice or not at all shows."""

    key: str = "count"
    version: int = 1
    types: frozenset[str] = frozenset({"user/message", "turn/start", "note/added", "tool/result"})

    def start(self) -> Any:
        return []

    def apply(self, state: Any, event: SessionEvent) -> Any:
        return [*state, event.seq]

    def value(self, state: Any) -> Any:
        return state


UNITS = (UsageProjection(), TodosProjection(), ToolsProjection(), Counting())


def fold(events: list[SessionEvent], rows: Any = None, units: Any = UNITS) -> Projections:
    found = Projections(units, rows)
    for event in events[found.floor :]:
        found.apply(event)
    return found


def kept(found: Projections) -> Any:
    """A checkpoint as it comes back from a file."""
    return json.loads(json.dumps(found.checkpoint()))


@given(script=SCRIPTS, cuts=st.lists(st.integers(0, 1 << 16), max_size=4), mode=st.sampled_from(["apply", "feed"]))
def test_a_checkpoint_anywhere_and_a_full_fold_are_the_same(script: Any, cuts: list[int], mode: str) -> None:
    log = new_log()
    events: list[SessionEvent] = []
    live = Projections(UNITS)
    live.follow(log)
    log.observe(events.append)
    play(log, script)
    whole = fold(events).snapshot()
    assert live.snapshot() == whole and whole.as_of == len(events) - 1
    rows = None
    for at in [*sorted(cut % (len(events) + 1) for cut in cuts), len(events)]:
        found = Projections(UNITS, rows)
        part = events[found.floor : at]
        if mode == "feed":
            half = len(part) // 2
            found.feed([event.line for event in part[:half]])
            found.feed([event.line for event in part[half:]])
        else:
            for event in part:
                found.apply(event)
        rows = kept(found)
        assert found.snapshot() == fold(events[:at]).snapshot()
    if events:
        assert fold(events, rows).snapshot() == whole
    # units of different ages: one has its row from earlier, one none, one of another version
    if len(events) > 1:
        early = kept(fold(events[: len(events) // 2 + 1]))
        mixed = {**rows, "tools": early["tools"], "usage": {**early["usage"], "version": 0}}
        assert fold(events, mixed).snapshot() == whole


def worked() -> list[SessionEvent]:
    log = new_log()
    events: list[SessionEvent] = []
    log.observe(events.append)
    begin(log)
    user(log, "hi")
    log.append("todo/write", {"todos": [{"title": "one", "status": "pending"}]})
    usage = {"input": 3, "output": 2, "estimated": True}
    place = {"turn": 0, "step": 0, "timing": {}}
    log.append("llm/response", {**place, "attempt": 1, "error": {"code": "provider.overloaded"}})
    log.append("llm/response", {**place, "attempt": 2, "usage": usage})
    ask(log, "a", "b")
    call(log, "a")
    result(log, "a")
    call(log, "b")
    result(log, "b")
    end(log)
    return events


def test_what_the_units_say() -> None:
    events = worked()
    values = fold(events).snapshot().values
    assert values["usage"] == {
        "input": 3, "cached": 0, "cache_write": 0, "output": 2, "reasoning": 0, "estimated": True,
        "requests": 2, "failed_requests": 1, "turns": 1, "steps": 1,
    }  # fmt: skip
    assert values["todos"] == [{"title": "one", "status": "pending"}]
    assert values["tools"] == {"tools": {"t": {"calls": 2, "errors": 0, "run_ms": 0, "longest_ms": 0}}, "open": {}}
    seeded = [*events, make_event(len(events), 1, "log/end-seed", {})]
    copied = fold(seeded).snapshot().values
    assert copied["usage"]["requests"] == 0 and copied["tools"]["tools"] == {} and copied["todos"] == values["todos"]


def test_what_an_undo_takes_back_of_the_todo_list() -> None:
    log = new_log()
    events: list[SessionEvent] = []
    log.observe(events.append)
    for number in range(3):
        begin(log)
        user(log, f"{number}")
        log.append("todo/write", {"todos": [{"title": f"{number}", "status": "pending"}]})
        end(log)
    seqs = log.surface.seqs
    for start, left in ((2, "1"), (1, "0"), (0, None)):
        log.append("surface/cut", {}, surface={"replace": [seqs[start], seqs[start]]}, sources=[seqs[start]])
        todos = fold(events).snapshot().values["todos"]
        assert todos == (None if left is None else [{"title": left, "status": "pending"}])
        rows = kept(fold(events[:-1]))
        assert fold(events, rows).snapshot() == fold(events).snapshot()


def test_nothing_at_all() -> None:
    found = Projections(UNITS)
    assert (found.floor, found.next_seq, found.snapshot().as_of) == (0, 0, -1)
    rows = kept(found)
    assert rows["usage"]["seq"] == -1 and Projections(UNITS, rows).floor == 0
    assert Projections(()).snapshot().values == {}


def test_a_checkpoint_of_another_log_or_of_a_longer_one_is_refused() -> None:
    events = worked()
    rows = kept(fold(events))
    other = [*events[:-1], make_event(len(events) - 1, 7, events[-1].type, {"turn": 0, "reason": {"kind": "failed"}})]
    with pytest.raises(LogError, match=r"log\.stale_checkpoint") as caught:
        fold(other, rows)
    assert caught.value.hint
    found = Projections(UNITS, rows)
    with pytest.raises(LogError, match=r"log\.stale_checkpoint"):
        found.feed([other[-1].line])
    for short in ([], events[:3]):
        found = fold(short, rows)
        with pytest.raises(LogError, match=r"log\.stale_checkpoint"):
            found.snapshot()
        with pytest.raises(LogError, match=r"log\.stale_checkpoint"):
            found.checkpoint()


@pytest.mark.parametrize(
    "row",
    [
        None, 7, [], {}, {"version": 2, "seq": 3, "crc": 1, "state": 1}, {"version": 1, "seq": 3, "crc": 1},
        {"version": 1, "seq": "3", "crc": 1, "state": 1}, {"version": 1, "seq": -4, "crc": 1, "state": 1},
        {"version": 1, "seq": True, "crc": 1, "state": 0},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_counts_as_none(row: Any) -> None:
    events = worked()
    rows = {**kept(fold(events)), "count": row}
    found = Projections(UNITS, rows)
    assert found.floor == 0 and fold(events, rows).snapshot() == fold(events).snapshot()


def test_states_are_copies() -> None:
    events = worked()
    found = fold(events)
    rows, shown = found.checkpoint(), found.snapshot().values
    shown["todos"].append("x")
    rows["tools"]["state"]["open"]["x"] = "y"
    again = Projections(UNITS, rows)
    rows["count"]["state"].append(99)
    assert found.snapshot().values["todos"] == [{"title": "one", "status": "pending"}]
    assert found.snapshot().values["tools"]["open"] == {} and 99 not in again._states["count"]


def test_misuse() -> None:
    events = worked()
    with pytest.raises(LogError, match=r"log\.duplicate_projection"):
        Projections([Counting(), Counting()])
    with pytest.raises(LogError, match=r"log\.bad_envelope"):
        Projections(UNITS).apply(events[1])
    log = new_log()
    user(log, "x")
    with pytest.raises(LogError, match=r"log\.bad_envelope"):
        Projections(UNITS).follow(log)
    stop = fold([log.last]).follow(log)  # type: ignore[list-item]
    stop()


@dataclass(frozen=True)
class Broken(Counting):
    def apply(self, state: Any, event: SessionEvent) -> Any:
        return state["none"] if event.type == "turn/start" else {event.seq}


@pytest.mark.parametrize("mode", ["apply", "feed"])
def test_what_a_projection_raises_is_told_with_its_key_and_the_event(mode: str) -> None:
    log, events = new_log(), list[SessionEvent]()
    log.observe(events.append)
    begin(log)
    seq = next(event.seq for event in events if event.type == "turn/start")
    found = Projections([Broken()])
    with pytest.raises(LogError) as caught:
        if mode == "feed":
            found.feed([event.line for event in events])
        for event in events:
            found.apply(event)
    assert caught.value.code == "log.projection_failed" and caught.value.details == {"key": "count", "seq": seq}
    assert isinstance(caught.value.__cause__, TypeError | KeyError)


def test_a_state_that_is_no_json_is_in_no_checkpoint_and_what_is_no_projection_is_refused() -> None:
    found = Projections([Broken()])
    log, events = new_log(), list[SessionEvent]()
    log.observe(events.append)
    user(log, "hello")
    for event in events:
        found.apply(event)
    with pytest.raises(LogError) as caught:
        found.checkpoint()
    assert caught.value.code == "log.bad_projection" and caught.value.details == {"key": "count"}
    with pytest.raises(LogError) as caught:
        Projections([object()])  # type: ignore[list-item]
    assert caught.value.code == "log.bad_projection" and "start" in caught.value.details["missing"]
