"""Closing what a crash left open: every call gets its one answer, in order, and the second time there is nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.events import SessionEvent, event_from_data
from kimi_ray.log import EventLog, closing_events, interrupted_turn_closers
from tests.unit.log.scripts import HEADER, SCRIPTS, ask, begin, call, chunk, end, new_log, play, result, step, step_end


def recorded() -> tuple[EventLog, list[SessionEvent]]:
    log = new_log()
    told: list[SessionEvent] = []
    log.observe(told.append)
    return log, told


def kinds(closers: list[dict[str, Any]]) -> list[str]:
    return [closer["type"] for closer in closers]


def test_nothing_is_closed_where_nothing_is_open() -> None:
    log, told = recorded()
    assert interrupted_turn_closers([]) == []
    begin(log)
    ask(log, "a")
    end(log)
    assert interrupted_turn_closers(told) == []


def test_unanswered_calls_get_results_in_the_order_of_the_log() -> None:
    log, told = recorded()
    begin(log)
    ask(log, "c", "a", "b", "d")
    call(log, "a")
    call(log, "d")
    result(log, "d")
    closers = interrupted_turn_closers(told)
    assert kinds(closers) == ["tool/result"] * 3 + ["step/end", "turn/end"]
    assert [closer["data"]["message"]["source"]["call_id"] for closer in closers[:3]] == ["c", "a", "b"]
    assert [closer["seq"] for closer in closers] == list(range(len(told), len(told) + 5))
    assert {closer["time"] for closer in closers} == {told[-1].time}
    assert closers[-1]["data"]["reason"] == {"kind": "interrupted", "recovered_at": told[-1].time}


def test_a_started_call_has_an_unknown_outcome_and_cites_its_start_another_was_not_started() -> None:
    log, told = recorded()
    begin(log)
    ask(log, "started", "waiting")
    started = call(log, "started")
    first, second, *_ = interrupted_turn_closers(told, recovered_at=77)
    assert first["data"]["error"] == {"code": "tool.outcome_unknown"} and first["sources"] == [started.seq]
    assert second["data"]["error"] == {"code": "tool.not_started"} and "sources" not in second
    for closer in (first, second):
        block = closer["data"]["message"]["content"][0]
        assert block["is_error"] is True and closer["surface"] == "append"
        assert closer["data"]["recovered_at"] == 77 == closer["time"]
    ids = {closer["data"]["message"]["id"] for closer in (first, second)}
    assert len(ids) == 2


@pytest.mark.parametrize("turn_over", [False, True])
def test_calls_of_closed_steps_and_earlier_turns_are_not_answered_again(turn_over: bool) -> None:
    log, told = recorded()
    begin(log)
    ask(log, "old")
    if turn_over:
        end(log)
        begin(log)
    else:
        step_end(log)
        step(log)
    ask(log, "new")
    closers = interrupted_turn_closers(told)
    assert [c["data"]["message"]["source"]["call_id"] for c in closers if c["type"] == "tool/result"] == ["new"]


def test_between_steps_only_the_turn_is_closed_and_a_half_streamed_answer_becomes_no_message() -> None:
    log, told = recorded()
    begin(log)
    chunk(log, "half an ans")
    assert kinds(interrupted_turn_closers(told)) == ["step/end", "turn/end"]
    step_end(log)
    assert kinds(interrupted_turn_closers(told)) == ["turn/end"]


@given(SCRIPTS, st.data())
@settings(max_examples=60, deadline=None)
def test_any_beginning_of_a_log_is_closed_once_and_can_go_on(script: Any, data: st.DataObject) -> None:
    log, told = recorded()
    play(log, script)
    start = told[: data.draw(st.integers(0, len(told)))]
    closers = interrupted_turn_closers(start)
    closed = [*start, *map(event_from_data, closers)]
    assert interrupted_turn_closers(closed) == []
    assert interrupted_turn_closers([event.to_data() for event in start]) == closers
    again = EventLog.restore(HEADER, start)
    for event in closing_events(again.order, next_seq=again.next_seq, recovered_at=5):
        again.append(event["type"], event["data"], surface=event.get("surface"), sources=event.get("sources"))
    assert again.next_seq == len(closed) and again.order.open_turn is None
    begin(again)
