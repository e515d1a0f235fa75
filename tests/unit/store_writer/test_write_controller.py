"""The write controller's states, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, LogError, RuntimeFault, StoreError
from kimi_ray.events import CORE, LogHeader, WriterRef, make_event
from kimi_ray.log import EventLog

DISK = StoreError("no space", code="store.disk_full")
GONE = RuntimeFault("the store's actor died", code="infra.actor_died")


def task_of(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def refused(task: asyncio.Future[Any], rig: Any) -> KimiRayError:
    with pytest.raises(KimiRayError) as caught:
        await rig.done(task)
    return caught.value


# Windows


async def test_the_window_is_fixed_by_the_first_event(rig: Any) -> None:
    log = rig.log()
    log.add()
    await rig.advance(0.150)
    log.add()
    await rig.advance(0.049)
    assert rig.store.calls == [] and log.writer.state == "window"
    await rig.advance(0.002)
    assert rig.batches() == [(0, 2, False)]
    assert (log.writer.written_seq, log.writer.durable_seq) == (2, 0)


async def test_twenty_events_in_one_window_are_one_batch(rig: Any) -> None:
    log = rig.log()
    for _ in range(20):
        log.add()
        await rig.advance(0.009)
    await rig.advance(0.2)
    assert rig.batches() == [(0, 20, False)]


async def test_events_during_a_write_form_the_next_batch_in_their_own_window(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    await rig.advance(0.201)
    assert log.writer.state == "writing"
    log.add(2)
    await rig.advance(0.1)
    rig.store.gate.set()
    await rig.advance(0.05)
    assert rig.batches() == [(0, 1, False)]
    await rig.advance(0.06)
    assert rig.batches() == [(0, 1, False), (1, 3, False)]


async def test_a_window_that_ends_during_a_write_is_followed_by_its_batch_at_once(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    await rig.advance(0.201)
    log.add()
    await rig.advance(0.5)
    assert len(rig.store.calls) == 1
    rig.store.gate.set()
    await rig.settle()
    assert rig.batches() == [(0, 1, False), (1, 2, False)]


async def test_what_was_only_written_is_synced_after_the_interval(rig: Any) -> None:
    log = rig.log()
    log.add()
    await rig.advance(0.201)
    await rig.advance(0.9)
    assert rig.batches() == [(0, 1, False)]
    assert log.writer.pending_bytes > 0
    await rig.advance(0.2)
    assert rig.batches() == [(0, 1, False), (1, 1, True)]
    assert (log.writer.durable_seq, log.writer.pending_bytes, log.writer.state) == (1, 0, "idle")
    await rig.advance(60)
    assert len(rig.store.calls) == 2 and rig.clock.alarms == 0


async def test_the_sync_takes_along_what_is_pending(rig: Any) -> None:
    log = rig.log()
    log.add()
    await rig.advance(1.1)
    log.add()
    await rig.advance(0.12)
    assert rig.batches() == [(0, 1, False), (1, 2, True)]
    assert log.writer.durable_seq == 2


async def test_a_log_feeds_its_controller_as_an_observer(rig: Any) -> None:
    header = LogHeader(session_id="s", agent_id="main", created_at=0, writer=WriterRef(name="t", version="0"))
    log, stored = EventLog(header, catalog=CORE), rig.log()
    log.observe(stored.writer.enqueue)
    lines = [log.append("note/added", {"text": "a"}).line for _ in range(3)]
    await stored.writer.flush()
    assert rig.stored(stored) == lines and log.observer_errors == []


# Flush


async def test_flush_cancels_the_wait_and_syncs(rig: Any) -> None:
    log = rig.log()
    log.add(3)
    await rig.done(task_of(log.writer.flush()))
    assert rig.batches() == [(0, 3, True)]
    assert rig.durable(log) == 3 and log.writer.state == "idle"


async def test_flush_with_nothing_pending_calls_nobody(rig: Any) -> None:
    log = rig.log()
    await log.writer.flush()
    log.add()
    await log.writer.flush()
    await log.writer.flush()
    assert len(rig.store.calls) == 1


async def test_flush_after_a_background_write_asks_only_for_the_sync(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    await rig.advance(0.201)
    await rig.done(task_of(log.writer.flush()))
    assert rig.batches() == [(0, 2, False), (2, 2, True)]
    assert log.writer.durable_seq == 2


async def test_concurrent_flushes_join_one_write(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    tasks = [task_of(log.writer.flush()) for _ in range(5)]
    for task in tasks:
        await rig.done(task)
    assert rig.batches() == [(0, 2, True)]


async def test_the_target_is_fixed_while_the_producer_goes_on(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    rig.store.gate.clear()
    flush = task_of(log.writer.flush())
    await rig.settle()
    log.add(3)
    assert log.writer.state == "flushing"
    rig.store.gate.set()
    await rig.done(flush)
    assert log.writer.durable_seq == 2 and log.writer.next_seq == 5
    assert rig.batches() == [(0, 2, True)]
    await rig.advance(0.201)
    assert rig.batches()[1:] == [(2, 5, False)]


async def test_a_flush_in_flight_covers_only_what_it_saw(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    first = task_of(log.writer.flush())
    await rig.settle()
    log.add()
    second = task_of(log.writer.flush())
    await rig.settle()
    rig.store.gate.set()
    await rig.done(first)
    await rig.done(second)
    assert rig.batches() == [(0, 1, True), (1, 2, True)]


async def test_a_cancelled_flush_leaves_the_others_alone(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    gone, kept = task_of(log.writer.flush()), task_of(log.writer.flush())
    await rig.settle()
    gone.cancel()
    await rig.settle()
    assert gone.cancelled() and not kept.done()
    rig.store.gate.set()
    await rig.done(kept)


# Failures


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
    assert rig.stored(log) == log.lines and rig.durable(log) == 2


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


# Batches


async def test_a_batch_is_bounded_and_a_large_event_goes_alone(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(batch_max_bytes=1000, call_max_bytes=8000)
    log = rig.log()
    log.add(6, size=300)
    log.add(1, size=5000)
    log.add(1)
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == log.lines
    sizes = [(len(batch.payload), len(batch.row_events)) for call, _ in rig.store.calls for batch in call]
    assert all(size <= 1000 or rows == 1 for size, rows in sizes)
    assert len(sizes) == 5


async def test_a_window_larger_than_a_batch_is_written_to_its_end(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(batch_max_bytes=1000, call_max_bytes=8000)
    log = rig.log()
    log.add(10, size=300)
    await rig.advance(0.201)
    assert rig.stored(log) == log.lines and len(rig.store.calls) > 3


async def test_streamed_chunks_travel_packed(rig: Any) -> None:
    log = rig.log()
    for seq in range(50):
        data = {"turn": 0, "step": 0, "attempt": 1, "chunk": {"type": "text-delta", "index": 0, "text": f"t{seq}"}}
        event = make_event(seq, seq, "assistant/chunk", data)
        log.lines.append(event.line)
        log.writer.enqueue(event)
    await log.writer.flush()
    [batch] = rig.store.calls[0][0]
    assert batch.row_events == (50,) and batch.next_seq == 50
    assert rig.stored(log) == log.lines


# Blobs


def digest(name: str) -> str:
    return "sha256:" + name * 64


async def test_a_blob_is_durable_before_its_event_is_sent(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    log.writer.attach_blob(digest("a"), b"content")
    log.add()
    rig.store.blob_gate.clear()
    flush = task_of(log.writer.flush())
    await rig.settle()
    assert rig.batches() == [(0, 2, True)]
    assert log.writer.durable_seq == 2 and not flush.done()
    rig.store.blob_gate.set()
    await rig.done(flush)
    assert rig.batches() == [(0, 2, True), (2, 3, True)]
    assert [what for what, _ in rig.store.trace] == ["batch", "blobs", "batch"]
    assert log.writer.pending_bytes == rig.budget.retained == 0


async def test_flush_covers_a_blob_without_an_event(rig: Any) -> None:
    log = rig.log()
    log.writer.attach_blob(digest("a"), b"content")
    await rig.done(task_of(log.writer.flush()))
    assert rig.store.blobs == {digest("a"): b"content"} and rig.store.calls == []


async def test_flush_waits_for_a_blob_that_came_after_the_last_event(rig: Any) -> None:
    log = rig.log()
    log.add()
    log.writer.attach_blob(digest("a"), b"content")
    rig.store.blob_gate.clear()
    flush = task_of(log.writer.flush())
    await rig.settle()
    assert log.writer.durable_seq == 1 and not flush.done()
    rig.store.blob_gate.set()
    await rig.done(flush)


async def test_a_blob_call_is_bounded_and_may_hold_one_larger_blob(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(call_max_bytes=1000)
    log = rig.log()
    for name, size in (("a", 600), ("b", 300), ("c", 300), ("d", 5000), ("e", 1)):
        log.writer.attach_blob(digest(name), b"x" * size)
        log.add()
    await rig.done(task_of(log.writer.flush()))
    assert [sorted(len(data) for data in call.values()) for call in rig.store.blob_calls] == [
        [300, 600], [300], [5000], [1],
    ]  # fmt: skip
    assert rig.stored(log) == log.lines


async def test_the_window_sends_blobs_too(rig: Any) -> None:
    log = rig.log()
    log.writer.attach_blob(digest("a"), b"content")
    log.add()
    await rig.advance(0.201)
    assert digest("a") in rig.store.blobs and rig.stored(log) == log.lines


async def test_content_is_sent_once_for_all_logs_and_never_again(rig: Any) -> None:
    logs = [rig.log(name) for name in "abc"]
    for log in logs:
        log.writer.attach_blob(digest("a"), b"content")
        log.add()
    flushes = [task_of(log.writer.flush()) for log in logs]
    for flush in flushes:
        await rig.done(flush)
    logs[0].writer.attach_blob(digest("a"), b"content")
    await logs[0].writer.flush()
    assert len(rig.store.blob_calls) == 1
    assert rig.budget.retained == 0


async def test_what_is_remembered_of_blobs_is_bounded_in_number_and_age(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(known_blobs=2, known_blob_ttl_s=100)
    log = rig.log()

    async def store(name: str) -> int:
        log.writer.attach_blob(digest(name), b"content")
        await rig.done(task_of(log.writer.flush()))
        return len(rig.store.blob_calls)

    assert [await store(name) for name in "abcbca"] == [1, 2, 3, 3, 3, 4]
    await rig.advance(101)
    assert await store("a") == 5


async def test_a_lost_blob_call_is_repeated_and_a_refused_one_fails_the_flush(rig: Any) -> None:
    log = rig.log()
    log.writer.attach_blob(digest("a"), b"content")
    log.add()
    rig.store.blob_failures += [GONE, GONE]
    flush = task_of(log.writer.flush())
    await rig.advance(1)
    await rig.done(flush)
    log.writer.attach_blob(digest("b"), b"more")
    log.add()
    rig.store.blob_failures += [DISK, DISK]
    assert (await refused(task_of(log.writer.flush()), rig)).code == "store.disk_full"
    assert rig.stored(log) == log.lines[:1] and log.writer.state == "paused"
    await rig.done(task_of(log.writer.flush()))
    assert rig.stored(log) == log.lines and digest("b") in rig.store.blobs


async def test_a_blob_without_anyone_waiting_is_not_sent(rig: Any) -> None:
    log = rig.log()
    log.writer.attach_blob(digest("a"), b"content")
    assert await log.writer.close(0, force=True) == 0
    await rig.advance(1)
    assert rig.store.blob_calls == [] and rig.budget.retained == 0


# Room


async def test_a_full_log_waits_for_room_and_gets_it_from_a_sync(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(log_max_bytes=1000, closing_reserve_bytes=500)
    log = rig.log()
    await log.writer.wait_for_room()
    log.add(1, size=1000)
    rig.store.gate.clear()
    room = task_of(log.writer.wait_for_room())
    await rig.settle()
    assert not room.done()
    await rig.done(task_of(log.writer.wait_for_room(closing=True)))
    rig.store.gate.set()
    await rig.done(room)
    assert rig.batches() == [(0, 1, True)] and log.writer.pending_bytes == 0


async def test_the_wait_for_room_ends_by_cancel_close_and_time(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(log_max_bytes=100, store_timeout_s=5, closing_reserve_bytes=0)
    log = rig.log()
    log.add(1, size=200)
    rig.store.down = GONE
    cancelled, timed = task_of(log.writer.wait_for_room()), task_of(log.writer.wait_for_room())
    await rig.settle()
    cancelled.cancel()
    await rig.settle()
    assert cancelled.cancelled() and not timed.done()
    await rig.advance(5.1)
    assert (await refused(timed, rig)).code == "store.unavailable"
    closed = task_of(log.writer.wait_for_room())
    await rig.settle()
    close = task_of(log.writer.close(1))
    assert (await refused(closed, rig)).code == "store.closed"
    await rig.advance(1.1)
    assert (await refused(close, rig)).code == "store.unavailable"


async def test_room_ends_when_the_log_is_fenced(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(log_max_bytes=100)
    log = rig.log()
    log.add(1, size=200)
    rig.store.log(log.stream).epoch = 2
    assert (await refused(task_of(log.writer.wait_for_room(closing=False)), rig)).code == "store.fenced"


async def test_a_full_host_makes_every_log_wait(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(host_max_bytes=1000)
    full, other = rig.log("a"), rig.log("b")
    full.add(1, size=1000)
    room = task_of(other.writer.wait_for_room())
    await rig.settle()
    assert not room.done()
    await rig.done(task_of(full.writer.flush()))
    await rig.done(room)


# Close


async def test_close_makes_everything_durable_and_detaches(rig: Any) -> None:
    log = rig.log()
    log.add(3)
    assert await rig.done(task_of(log.writer.close())) == 0
    assert rig.durable(log) == 3 and log.writer.state == "closed" and rig.sender.stats()["logs"] == 0
    assert rig.clock.alarms == 0
    assert await log.writer.close() == 0
    with pytest.raises(StoreError, match=r"store\.closed"):
        log.add()
    with pytest.raises(StoreError, match=r"store\.closed"):
        await log.writer.flush()


async def test_close_takes_along_what_is_appended_meanwhile(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    close = task_of(log.writer.close())
    await rig.settle()
    assert log.writer.state == "closing"
    log.add()
    rig.store.gate.set()
    assert await rig.done(close) == 0
    assert rig.stored(log) == log.lines


async def test_close_against_a_dead_store_ends_names_the_log_and_keeps_it(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(close_timeout_s=4)
    log = rig.log()
    log.add(2)
    rig.store.down = GONE
    close = task_of(log.writer.close())
    await rig.advance(3.9)
    assert not close.done()
    await rig.advance(0.2)
    error = await refused(close, rig)
    assert error.code == "store.unavailable"
    assert error.details["stream"] == "s/main" and error.details["retained_events"] == 2
    rig.store.down = None
    again = task_of(log.writer.close())
    await rig.advance(3)
    assert await rig.done(again) == 0
    assert rig.stored(log) == log.lines


async def test_only_force_discards(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    rig.store.down = GONE
    close = task_of(log.writer.close(1, force=True))
    await rig.advance(1.1)
    assert await rig.done(close) == 2
    assert rig.budget.retained == 0 and rig.clock.alarms <= 1  # the sender's own pause
    rig.store.down = None
    await rig.advance(10)
    assert rig.stored(log) == []
