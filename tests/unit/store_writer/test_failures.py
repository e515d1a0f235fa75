"""Refused, lost, wrong and late: the write controller keeps what it has, in order, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kimi_ray.errors import LogError, RuntimeFault, StoreError
from kimi_ray.events import make_event
from tests.unit.store_writer.conftest import DISK, GONE, refused, task_of


async def test_a_failed_background_write_pauses_until_a_new_event(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    rig.store.refusals[log.stream] = [DISK]
    await rig.advance(0.201)
    assert log.writer.state == "paused"
    assert [error.code for error in log.failures] == ["store.disk_full"]
    await rig.advance(10)
    assert len(rig.store.calls) == 1
    log.add()
    assert log.writer.state == "window"
    await rig.advance(0.199)
    assert len(rig.store.calls) == 1
    await rig.advance(0.002)
    assert rig.batches()[1] == (0, 3, False)
    assert rig.stored(log) == log.lines
    assert log.writer.error is None


async def test_a_flush_that_meets_a_failing_background_write_tries_again_within(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.refusals[log.stream] = [DISK]
    rig.store.gate.clear()
    await rig.advance(0.201)
    flush = task_of(log.writer.flush())
    await rig.settle()
    rig.store.gate.set()
    await rig.done(flush)
    assert rig.batches() == [(0, 1, False), (0, 1, True)]
    assert log.failures == []


async def test_a_flush_is_tried_twice_then_tells_its_callers_and_keeps_the_events(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    rig.store.refusals[log.stream] = [DISK, DISK]
    first, second = task_of(log.writer.flush()), task_of(log.writer.flush())
    errors = [await refused(first, rig), await refused(second, rig)]
    assert [error.code for error in errors] == ["store.disk_full"] * 2
    assert errors[0] is not errors[1]
    assert len(rig.store.calls) == 2 and log.failures == [] and log.writer.state == "paused"
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == log.lines and rig.durable(log) == 2 and log.writer.state == "idle"


async def test_a_failed_batch_of_150_000_events_is_retained_and_rewritten_whole(rig: Any) -> None:
    log = rig.log()
    events = [make_event(seq, 1, "note/added", {"text": ""}) for seq in range(150_000)]
    for event in events:
        log.writer.enqueue(event)
    rig.store.refusals[log.stream] = [DISK]
    await rig.advance(0.201)
    assert log.writer.state == "paused" and rig.stored(log) == []
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == [event.line for event in events]
    assert log.writer.pending_bytes == rig.budget.retained == 0


async def test_a_lost_call_is_sent_again_from_what_is_not_durable(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    await rig.advance(0.201)  # written, not durable
    log.add(2)
    rig.store.failures.append(GONE)
    flush = task_of(log.writer.flush())
    await rig.settle()
    rig.store.restart()
    assert not flush.done() and rig.sender.last_error is GONE
    await rig.advance(0.1)
    await rig.done(flush)
    assert rig.batches() == [(0, 2, False), (2, 4, True), (0, 4, True)]
    assert rig.stored(log) == log.lines


async def test_a_store_that_came_back_without_the_unsynced_part_gets_it_again(rig: Any) -> None:
    log = rig.log()
    log.add()
    await log.writer.flush()
    log.add(2)
    await rig.advance(0.201)
    log.add(2)
    rig.store.restart()
    await rig.done(task_of(log.writer.flush()))
    assert rig.batches()[-2:] == [(3, 5, True), (1, 5, True)]
    assert rig.stored(log) == log.lines and rig.durable(log) == 5


async def test_a_restart_is_noticed_by_the_sync_alone(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    await rig.advance(0.201)
    rig.store.restart()
    await rig.advance(1.5)
    assert rig.batches() == [(0, 2, False), (2, 2, True), (0, 2, True)]
    assert rig.stored(log) == log.lines and rig.durable(log) == 2


async def test_a_store_without_acknowledged_events_ends_the_log_by_name(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    await log.writer.flush()
    rig.store.log(log.stream).lines.clear()
    log.add()
    error = await refused(task_of(log.writer.flush()), rig)
    assert error.code == "store.conflict" and error.details["expected"] == 0 and error.details["durable"] == 2
    assert log.writer.state == "failed" and log.writer.pending_bytes == rig.budget.retained == 0
    calls = len(rig.store.calls)
    log.add()
    await rig.advance(5)
    assert len(rig.store.calls) == calls
    assert (await refused(task_of(log.writer.flush()), rig)).code == "store.conflict"


async def test_a_gap_that_names_what_was_sent_is_no_endless_loop(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.refusals[log.stream] = [
        StoreError("hole", code="store.gap", details={"expected": 0}) for _ in range(1000)
    ]
    error = await refused(task_of(log.writer.flush()), rig)
    assert error.code == "store.gap" and len(rig.store.calls) == 2


async def test_a_store_that_names_ever_new_gaps_is_not_followed_for_ever(rig: Any) -> None:
    log = rig.log()
    log.add(3)
    rig.store.refusals[log.stream] = [
        StoreError("hole", code="store.gap", details={"expected": expected}) for expected in [1, 2] * 500
    ]
    error = await refused(task_of(log.writer.flush()), rig)
    assert error.code == "store.gap" and len(rig.store.calls) < 20
    rig.store.refusals.clear()
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == log.lines


async def test_fenced_is_the_end(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    rig.store.log(log.stream).epoch = 2
    flush, other = task_of(log.writer.flush()), task_of(log.writer.flush())
    error = await refused(flush, rig)
    assert error.code == "store.fenced" and error.details["lost_events"] == 2
    assert (await refused(other, rig)).code == "store.fenced"
    assert [e.code for e in log.fenced] == ["store.fenced"] and log.failures == []
    assert log.writer.state == "fenced" and rig.budget.retained == 0
    log.add(3)
    with pytest.raises(StoreError):
        log.writer.attach_blob("sha256:" + "0" * 64, b"x")
    with pytest.raises(StoreError):
        await log.writer.wait_for_room()
    await rig.advance(100)
    assert len(rig.store.calls) == 1 and len(log.fenced) == 1
    assert await log.writer.close() == 5


async def test_fenced_in_the_background_is_told_too(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.log(log.stream).epoch = 2
    await rig.advance(0.201)
    assert [error.code for error in log.fenced] == ["store.fenced"]


async def test_a_dead_store_times_the_flush_out_and_the_events_go_on_being_sent(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(store_timeout_s=5)
    log = rig.log()
    log.add(2)
    rig.store.down = GONE
    flush = task_of(log.writer.flush())
    await rig.advance(4.9)
    assert not flush.done()
    await rig.advance(0.2)
    error = await refused(flush, rig)
    assert error.code == "store.unavailable" and error.retryable
    assert error.details["stream"] == "s/main" and error.details["cause"]["code"] == "infra.actor_died"
    calls = len(rig.store.calls)
    await rig.advance(10)
    assert len(rig.store.calls) > calls
    rig.store.down = None
    await rig.advance(5)
    assert rig.stored(log) == log.lines and rig.durable(log) == 2 and log.writer.state == "idle"


async def test_an_unanswered_call_is_lost_after_its_time(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(call_timeout_s=3)
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    flush = task_of(log.writer.flush())
    await rig.advance(2.9)
    assert len(rig.store.calls) == 1
    await rig.advance(0.2)
    rig.store.gate.set()
    await rig.advance(0.1)
    await rig.done(flush)
    assert rig.batches() == [(0, 1, True), (0, 1, True)]
    assert rig.stored(log) == log.lines


async def test_a_busy_answer_holds_only_its_own_log(rig: Any) -> None:
    busy, other = rig.log("a"), rig.log("b")
    busy.add()
    other.add()
    rig.store.refusals[busy.stream] = [StoreError("busy", code="store.busy", retryable=True)] * 3
    waiting, done = task_of(busy.writer.flush()), task_of(other.writer.flush())
    await rig.done(done)
    other.add()
    await rig.done(task_of(other.writer.flush()))
    assert not waiting.done()
    await rig.advance(1)
    await rig.done(waiting)
    assert rig.stored(busy) == busy.lines


@pytest.mark.parametrize("code", ["store.disk_full", "store.io_failed", "store.permission_denied"])
async def test_a_disk_that_refuses_is_told_after_one_more_try_and_nothing_is_lost(rig: Any, code: str) -> None:
    log = rig.log()
    log.add(3)
    rig.store.refusals[log.stream] = [StoreError("no", code=code, retryable=True)] * 2
    with pytest.raises(StoreError) as refused:
        await rig.done(task_of(log.writer.flush()))
    assert refused.value.code == code
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == log.lines


@pytest.mark.parametrize("answer", ["short", "other", "stale", "not durable", "ahead", "far ahead"])
async def test_a_wrong_answer_is_an_error_and_no_loop(rig: Any, answer: str) -> None:
    log = rig.log()
    log.add(2)
    apply = rig.store.apply

    def wrong(batches: Any, sync: bool) -> Any:
        results = apply(batches, sync)
        if answer == "short":
            return []
        result = results[0]
        made = {
            "other": (("x", "main"), 2, 2),
            "stale": (result.stream, 0, 0),
            "not durable": (result.stream, 2, 0),
            "ahead": (result.stream, 3, 2),
            "far ahead": (result.stream, 9, 9),
        }[answer]
        return [type(result)(*made)]

    rig.store.apply = wrong
    error = await refused(task_of(log.writer.flush()), rig)
    ends = "ahead" in answer
    assert error.code == ("store.conflict" if ends else "store.bad_answer")
    assert len(rig.store.calls) == (1 if ends else 2)


async def test_an_exception_of_the_transport_reaches_the_flush_as_data(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.failures += [ValueError("broken"), ValueError("broken")]
    error = await refused(task_of(log.writer.flush()), rig)
    assert error.code == "internal" and error.details["exception"] == "ValueError"
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == log.lines


async def test_an_event_out_of_order_ends_the_log_instead_of_storing_a_hole(rig: Any) -> None:
    log = rig.log()
    log.add()
    with pytest.raises(StoreError) as caught:
        log.writer.enqueue(make_event(2, 0, "note/added", {"text": ""}))
    assert caught.value.code == "store.conflict"
    assert (await refused(task_of(log.writer.flush()), rig)).code == "store.conflict"
    assert [error.code for error in log.failures] == ["store.conflict"]
    assert not isinstance(caught.value, LogError)


async def test_a_paused_log_keeps_its_order_over_many_failures(rig: Any) -> None:
    log = rig.log()
    rig.store.refusals[log.stream] = [DISK] * 4
    for _ in range(4):
        log.add(3)
        await rig.advance(0.201)
        assert log.writer.state == "paused"
    assert [batch[:2] for batch in rig.batches()] == [(0, 3), (0, 6), (0, 9), (0, 12)]
    assert len(log.failures) == 4  # each once
    log.add()
    await rig.advance(0.201)
    assert rig.stored(log) == log.lines and log.writer.state == "idle" and log.writer.written_seq == 13


async def test_a_lost_answer_overlaps_with_what_came_since(rig: Any) -> None:
    log = rig.log()
    log.add(3)
    apply = rig.store.apply

    def lost(batches: Any, sync: bool) -> Any:
        rig.store.apply = apply
        apply(batches, sync)
        raise RuntimeFault("lost", code="infra.timeout", retryable=True)

    rig.store.apply = lost
    flush = task_of(log.writer.flush())
    await rig.settle()
    log.add(2)
    await rig.advance(0.1)
    await rig.done(flush)
    assert rig.batches() == [(0, 3, True), (0, 5, True)]
    assert rig.stored(log) == log.lines and log.writer.durable_seq == 5


async def test_a_store_with_other_events_where_ours_were_lost_ends_the_log(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    stored = rig.store.log(log.stream)
    stored.lines.append(b'{"seq":0,"other":1}')
    error = await refused(task_of(log.writer.flush()), rig)
    assert error.code == "store.conflict" and error.details["lost_events"] == 2
    assert log.writer.state == "failed" and stored.lines == [b'{"seq":0,"other":1}']


@pytest.mark.parametrize("wait", ["flush", "room", "close"])
async def test_a_time_out_retains_and_the_next_wait_succeeds(make_rig: Callable[..., Any], wait: str) -> None:
    rig = make_rig(store_timeout_s=3, close_timeout_s=3, call_timeout_s=1, log_max_bytes=100)
    log = rig.log()
    log.add(2, size=100)
    rig.store.gate.clear()  # calls hang
    make = {"flush": log.writer.flush, "room": log.writer.wait_for_room, "close": log.writer.close}[wait]
    waiting = task_of(make())
    await rig.advance(2.9)
    assert not waiting.done()
    await rig.advance(0.2)
    error = await refused(waiting, rig)
    assert error.code == "store.unavailable" and error.details["cause"]["code"] == "infra.timeout"
    assert log.writer.pending_bytes > 200 and len(rig.store.calls) > 1
    rig.store.gate.set()
    again = task_of(make())
    await rig.advance(2.5)
    await rig.done(again)
    assert rig.stored(log) == log.lines
