"""Appending in the order of its steps: who may say no, who is told, and what holds while they are."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent, parse_event
from kimi_ray.log import EventLog
from kimi_ray.store.chunk_rows import pack_rows
from tests.unit.log.scripts import ask, begin, call, chunk, end, new_log, result, user


def test_what_is_appended_is_what_is_told_and_what_is_shipped() -> None:
    log = new_log()
    told: list[SessionEvent] = []
    log.observe(told.append)
    event = user(log, "x")
    assert told[0] is event and log.last is event and log.surface[0] is event
    assert told[0].line is event.line
    ((row, members),) = pack_rows(told)
    assert row == event.line + b"\n" and members == 1
    assert log.messages()[0] is event.data


def test_nobody_can_change_an_event_through_what_they_gave_or_got() -> None:
    log = new_log()
    deep: Any = {"a": [{"b": [1]}]}
    sources = [0]
    span: Any = {"replace": [0, 0]}
    user(log, "first")
    event = log.append("user/message", {"id": "m", "content": [deep]}, surface=span, sources=sources)
    line = event.line
    deep["a"][0]["b"].append(2)
    span["replace"][1] = 7
    sources.append(9)
    assert event.data["content"] == [{"a": [{"b": [1]}]}] and event.replaced == (0, 0) and event.sources == (0,)
    for change in (
        lambda: event.data["content"][0]["a"][0]["b"].append(3),
        lambda: event.surface["replace"].append(3),  # type: ignore[index]
        lambda: event.surface.clear(),  # type: ignore[union-attr]
        lambda: log.messages()[0].clear(),
        lambda: delattr(event, "data"),
        lambda: setattr(event, "line", b""),
    ):
        with pytest.raises((TypeError, AttributeError)):
            change()
    assert parse_event(line) == event and event.to_data() == parse_event(line).to_data()


def test_data_that_left_the_memory_comes_back_as_it_was_and_frozen() -> None:
    event = user(new_log(), "x")
    before = event.data
    event.unload()
    event.unload()
    assert event.data is not before and event.data == before and type(event.data) is type(before)
    assert event.data is event.data
    with pytest.raises(TypeError):
        event.data["id"] = "y"
    with pytest.raises(AttributeError):
        _ = event.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "data", "surface"),
    [
        ("turn/start", {}, None),
        ("assistant/message", {"turn": 0, "step": 0}, "append"),
        ("assistant/message", {"turn": 0, "step": 0, "message": {"content": [{"type": "tool-call"}]}}, "append"),
        ("assistant/message", {"turn": 0, "step": 0, "message": {"content": "text"}}, "append"),
        ("assistant/message", {"turn": 0, "step": 0, "message": []}, "append"),
        ("tool/result", {"turn": 0, "step": 0, "message": {"source": {}}}, "append"),
        ("tool/call", {"turn": 0, "step": 0}, None),
        ("compaction/end", {}, None),
    ],
)
def test_a_payload_of_another_shape_is_refused_before_the_commit(kind: str, data: Any, surface: Any) -> None:
    log = new_log()
    begin(log)
    if kind == "turn/start":
        end(log)
    told: list[SessionEvent] = []
    log.observe(told.append)
    before = (log.next_seq, log.surface.seqs, log.order.open_turn, log.order.open_step, dict(log.order.pending_calls))
    with pytest.raises(LogError) as refused:
        log.append(kind, data, surface=surface)
    assert refused.value.code == "log.bad_payload" and kind in refused.value.message
    after = (log.next_seq, log.surface.seqs, log.order.open_turn, log.order.open_step, dict(log.order.pending_calls))
    assert after == before and told == []
    user(log, "the next one works")


def test_a_veto_that_appends_or_raises_leaves_everything_as_it_was() -> None:
    log = new_log()
    codes: list[str] = []

    def veto(_event: SessionEvent) -> None:
        with pytest.raises(LogError) as nested:
            user(log, "inside")
        codes.append(nested.value.code)
        raise ValueError("no")

    lift = log.veto_with(veto)
    with pytest.raises(ValueError, match="no"):
        user(log, "x")
    assert codes == ["log.reentrant"] and log.next_seq == 0 and log.last is None
    lift()
    lift()
    assert user(log, "x").seq == 0


def test_an_observer_sees_the_log_with_the_event_in_it() -> None:
    log = new_log()
    seen: list[Any] = []
    log.observe(lambda event: seen.append((log.next_seq, log.last is event, len(log.surface), len(log.messages()))))
    user(log, "a")
    user(log, "b")
    user(log, "ab", surface={"replace": [0, 1]}, sources=[0, 1])
    assert seen == [(1, True, 1, 1), (2, True, 2, 2), (3, True, 1, 1)]
    assert log.replaced == ()


def test_one_that_is_ended_during_an_append_hears_of_it_to_the_end() -> None:
    log = new_log()
    told: list[str] = []
    end_second: list[Any] = []

    def first(event: SessionEvent) -> None:
        told.append(f"first {event.seq}")
        end_second[0]()
        log.observe(lambda later: told.append(f"third {later.seq}"))

    end_first = log.observe(first)
    end_second.append(log.observe(lambda event: told.append(f"second {event.seq}")))
    user(log, "x")
    end_first()
    user(log, "y")
    assert told == ["first 0", "second 0", "third 1"]


def test_the_same_observer_twice_is_two() -> None:
    log = new_log()
    told: list[int] = []

    def observe(event: SessionEvent) -> None:
        told.append(event.seq)

    end_one = log.observe(observe)
    log.observe(observe)
    user(log, "x")
    end_one()
    end_one()
    user(log, "y")
    assert told == [0, 0, 1]


def test_a_log_that_is_detached_during_an_append_tells_it_to_the_end_and_takes_no_more() -> None:
    log = new_log()
    told: list[str] = []

    def first(event: SessionEvent) -> None:
        told.append(f"first {event.seq}")
        log.detach()

    log.observe(first)
    log.observe(lambda event: told.append(f"second {event.seq}"))
    user(log, "x")
    assert told == ["first 0", "second 0"]
    for _ in range(2):
        with pytest.raises(LogError) as refused:
            user(log, "y")
        assert refused.value.code == "log.detached"
        log.detach()
    assert log.next_seq == 1 and len(told) == 2


def test_what_was_returned_never_grows() -> None:
    log = new_log()
    user(log, "a")
    messages, seqs = log.messages(), log.surface.seqs
    messages_before = list(messages)
    user(log, "b")
    user(log, "ab", surface={"replace": [0, 1]}, sources=[0, 1])
    assert messages == messages_before and seqs == (0,)
    messages.clear()
    assert len(log.messages()) == 1


def test_errors_of_observers_do_not_pile_up() -> None:
    log = new_log()

    def broken(_event: SessionEvent) -> None:
        raise ValueError("no")

    log.observe(broken)
    for _ in range(500):
        user(log, "x")
    assert len(log.observer_errors) == 100 and log.observer_errors[-1][0] == 499


def held(log: EventLog) -> int:
    """Events that the log keeps from being collected."""
    gc.collect()
    return sum(isinstance(thing, SessionEvent) for thing in gc.get_objects())


def test_what_is_not_on_the_surface_leaves_the_memory() -> None:
    log = new_log()
    before = held(log)
    for number in range(50):
        begin(log)
        for _ in range(20):
            chunk(log, "x")
        ask(log, f"c{number}")
        call(log, f"c{number}")
        result(log, f"c{number}")
        end(log)
        log.messages()
    assert len(log.surface) == 100
    assert held(log) - before <= 100 + 1  # the surface and the newest
    seqs = log.surface.seqs
    user(log, "all of it in a word", surface={"replace": [seqs[0], seqs[-1]]}, sources=seqs)
    assert held(log) - before == 1
