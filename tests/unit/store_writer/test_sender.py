"""The sender: what travels together, what takes turns, and what happens when calls are lost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.bounded_call import Backoff, BoundedCall
from kimi_ray.store.clock import LoopClock
from kimi_ray.store.seam import AppendResult, Batch, Stream
from kimi_ray.store.sender import Sender
from kimi_ray.store.write_controller import WriteController
from tests.unit.store_writer.conftest import GONE, task_of


async def flush_all(rig: Any, logs: list[Any]) -> None:
    tasks = [task_of(log.writer.flush()) for log in logs]
    await rig.settle()
    for task in tasks:
        await rig.done(task)


async def test_a_hundred_flushes_of_one_tick_are_one_call(rig: Any) -> None:
    logs = [rig.log(f"s{n}") for n in range(100)]
    for _ in range(3):
        for log in logs:
            log.add(2)
        await flush_all(rig, logs)
    assert [len(call) for call, _ in rig.store.calls] == [100, 100, 100]
    assert all(rig.stored(log) == log.lines for log in logs)


async def test_what_gathers_during_a_call_is_the_next_one(rig: Any) -> None:
    logs = [rig.log(f"s{n}") for n in range(10)]
    rig.store.gate.clear()
    for log in logs:
        log.add()
    first = task_of(logs[0].writer.flush())
    await rig.settle()
    rest = [task_of(log.writer.flush()) for log in logs[1:]]
    await rig.settle()
    assert len(rig.store.calls) == 1
    rig.store.gate.set()
    for task in (first, *rest):
        await rig.done(task)
    assert [len(call) for call, _ in rig.store.calls] == [1, 9]
    assert rig.store.most_in_flight == 1


async def test_two_calls_in_flight_are_on_different_streams(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(calls_in_flight=2)
    logs = [rig.log(f"s{n}") for n in range(3)]
    rig.store.gate.clear()
    tasks = []
    for log in logs:
        log.add()
        tasks.append(task_of(log.writer.flush()))
        await rig.settle()
        log.add()
        tasks.append(task_of(log.writer.flush()))
        await rig.settle()
    assert rig.store.most_in_flight == 2
    [one, two] = [{batch.stream for batch in call} for call, _ in rig.store.calls]
    assert not one & two
    rig.store.gate.set()
    for task in tasks:
        await rig.done(task)
    assert rig.store.most_in_flight == 2
    assert all(rig.stored(log) == log.lines for log in logs)


async def test_background_batches_do_not_pay_for_the_sync_of_others(rig: Any) -> None:
    streaming = [rig.log(f"b{n}") for n in range(5)]
    flushing = rig.log("f")
    for log in streaming:
        log.add()
    rig.store.gate.clear()
    await rig.advance(0.201)
    for log in streaming:
        log.add()
    await rig.advance(0.201)
    flushing.add()
    flush = task_of(flushing.writer.flush())
    await rig.settle()
    rig.store.gate.set()
    await rig.done(flush)
    synced = [batch.stream for call, sync in rig.store.calls if sync for batch in call]
    assert synced == [flushing.stream]
    assert all(rig.stored(log) == log.lines for log in streaming)


async def test_neither_kind_starves_the_other(rig: Any) -> None:
    background, busy = rig.log("b"), [rig.log(f"f{n}") for n in range(2)]
    rig.store.gate.clear()
    background.add()
    for log in busy:
        log.add()
    flushes = [task_of(busy[0].writer.flush())]
    await rig.advance(0.201)
    flushes.append(task_of(busy[1].writer.flush()))
    await rig.settle()
    rig.store.gate.set()
    await rig.settle()
    assert [sync for _, sync in rig.store.calls] == [True, False, True]
    for flush in flushes:
        await rig.done(flush)


async def test_a_call_is_bounded_in_bytes_and_streams(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(batch_max_bytes=1000, call_max_bytes=3000, call_max_streams=7)
    logs = [rig.log(f"s{n}") for n in range(20)]
    for n, log in enumerate(logs):
        log.add(1, size=900 if n < 8 else 10)
    await flush_all(rig, logs)
    for call, _ in rig.store.calls:
        assert sum(len(batch.payload) for batch in call) <= 3000 and len(call) <= 7
    assert all(rig.stored(log) == log.lines for log in logs)


async def test_an_event_larger_than_a_batch_does_not_overfill_a_call(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(batch_max_bytes=100, call_max_bytes=3000)
    logs = [rig.log(f"s{n}") for n in range(4)]
    for log in logs:
        log.add(1, size=2000)
    await flush_all(rig, logs)
    assert [len(call) for call, _ in rig.store.calls] == [1, 1, 1, 1]


async def test_one_bad_log_does_not_fail_the_others(rig: Any) -> None:
    logs = [rig.log(f"s{n}") for n in range(5)]
    for log in logs:
        log.add()
    rig.store.log(logs[2].stream).epoch = 9
    tasks = [task_of(log.writer.flush()) for log in logs]
    await rig.settle()
    codes = [None if task.exception() is None else getattr(task.exception(), "code", "?") for task in tasks]
    assert codes == [None, None, "store.fenced", None, None]


async def test_lost_calls_are_repeated_with_growing_pauses(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.down = GONE
    flush = task_of(log.writer.flush())
    times: list[float] = []
    for _ in range(2000):
        before = len(rig.store.calls)
        await rig.advance(0.01)
        if len(rig.store.calls) > before:
            times.append(rig.clock.time)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) < 30
    assert all(gap <= 2.5 for gap in gaps) and gaps[-1] > 1.5 > gaps[1]
    rig.store.down = None
    await rig.advance(3)
    await rig.done(flush)
    assert rig.stored(log) == log.lines


async def test_after_a_success_the_pause_is_short_again(rig: Any) -> None:
    log = rig.log()
    for _ in range(3):
        log.add()
        rig.store.failures += [GONE, GONE]
        flush = task_of(log.writer.flush())
        await rig.advance(0.25)
        await rig.done(flush)


async def test_a_late_answer_of_a_lost_call_changes_nothing(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(call_timeout_s=1)
    log = rig.log()
    answers: list[asyncio.Future[None]] = []
    append = rig.store.apply

    async def slow(batches: list[Batch], sync: bool) -> list[AppendResult]:
        results = append(batches, sync)
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answers.append(gate)
        try:
            await asyncio.shield(gate)
        except asyncio.CancelledError:
            await asyncio.shield(gate)  # a transport that cannot be cancelled
        return results

    rig.sender._transport = slow
    log.add()
    flush = task_of(log.writer.flush())
    await rig.advance(1.2)
    assert len(answers) == 2 and not flush.done()
    log.add()
    answers[1].set_result(None)
    await rig.done(flush)
    assert log.writer.durable_seq == 1
    answers[0].set_result(None)
    await rig.settle()
    assert (log.writer.durable_seq, log.writer.written_seq, log.writer.next_seq) == (1, 1, 2)
    last = task_of(log.writer.flush())
    await rig.settle()
    answers[2].set_result(None)
    await rig.done(last)
    assert rig.stored(log) == log.lines


async def test_a_time_out_of_the_transport_is_a_lost_call(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.failures += [TimeoutError("slow"), asyncio.CancelledError()]
    flush = task_of(log.writer.flush())
    await rig.advance(1)
    await rig.done(flush)
    assert len(rig.store.calls) == 3


async def test_close_drains_all_and_stops(rig: Any) -> None:
    logs = [rig.log(f"s{n}") for n in range(5)]
    for log in logs:
        log.add()
    assert await rig.done(task_of(rig.sender.close())) == 0
    assert all(rig.durable(log) == 1 for log in logs)
    with pytest.raises(StoreError, match=r"store\.closed"):
        rig.log("late")
    assert rig.clock.alarms == 0


async def test_close_names_every_log_that_is_not_durable(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(close_timeout_s=2)
    good, bad, worse = rig.log("good"), rig.log("bad"), rig.log("worse")
    good.add()
    await good.writer.flush()
    bad.add()
    worse.add()
    rig.store.down = GONE
    close = task_of(rig.sender.close())
    await rig.advance(2.1)
    with pytest.raises(KimiRayError) as caught:
        await rig.done(close)
    assert caught.value.code == "store.unavailable"
    assert sorted(caught.value.details["streams"]) == ["bad/main", "worse/main"]
    rig.store.down = None
    again = task_of(rig.sender.close())
    await rig.advance(2.1)
    assert await rig.done(again) == 0
    assert rig.stored(bad) == bad.lines


async def test_close_by_force_ends_with_an_unanswered_call(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(close_timeout_s=1)
    log = rig.log()
    log.add(2)
    rig.store.gate.clear()
    close = task_of(rig.sender.close(force=True))
    await rig.advance(1.1)
    assert await rig.done(close) == 2
    await rig.settle()
    assert rig.store.in_flight == 0 and rig.clock.alarms == 0


async def test_a_bounded_call_reports_once(rig: Any) -> None:
    outcomes: list[Any] = []
    gate = asyncio.Event()

    async def stubborn() -> int:
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        return 7

    call = BoundedCall(stubborn, timeout_s=1, clock=rig.clock, on_done=outcomes.append, on_failed=outcomes.append)
    await rig.advance(1.1)
    assert [error.code for error in outcomes] == ["infra.timeout"]
    gate.set()
    await rig.settle()
    assert call.task.done() and len(outcomes) == 1


async def test_pauses_double_up_to_their_bound_with_jitter(rig: Any) -> None:
    resumed: list[float] = []
    jitter = iter([0.0, 0.999, 0.5, 0.5, 0.5, 0.5])
    backoff = Backoff(rig.clock, 1.0, 4.0, lambda: resumed.append(rig.clock.time), lambda: next(jitter))
    lengths: list[float] = []
    for _ in range(5):
        start = rig.clock.time
        backoff.pause()
        backoff.pause()
        await rig.advance(10)
        lengths.append(resumed[-1] - start)
    assert lengths == pytest.approx([0.8, 2 * 1.1996, 4, 4, 4])
    backoff.succeeded()
    backoff.pause()
    backoff.stop()
    await rig.advance(10)
    assert len(resumed) == 5 and not backoff.pausing


async def test_on_the_real_clock_a_background_write_arrives() -> None:
    arrived = asyncio.Event()

    async def transport(batches: list[Batch], sync: bool) -> list[AppendResult]:
        if sync:
            arrived.set()
        return [AppendResult(b.stream, b.next_seq, b.next_seq if sync else 0) for b in batches]

    async def no_blobs(_: dict[str, bytes]) -> None: ...

    from kimi_ray.events import make_event
    from kimi_ray.store.writer_settings import WriterSettings

    settings = WriterSettings(write_window_ms=5, sync_interval_ms=10)
    sender = Sender(transport, no_blobs, settings=settings, clock=LoopClock())
    writer = WriteController(Stream("s", "main"), epoch=1, nonce="n", first_seq=0, sender=sender)
    writer.enqueue(make_event(0, 0, "note/added", {"text": ""}))
    began = time.monotonic()
    async with asyncio.timeout(5):
        await arrived.wait()
    assert time.monotonic() - began >= 0.014
    await sender.close()
    assert writer.state == "closed"


async def test_a_thousand_logs_are_served_in_turn_beside_one_that_never_rests(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(call_max_streams=100)
    hot, others = rig.log("hot"), [rig.log(f"s{n}") for n in range(1000)]
    apply = rig.store.apply
    again: list[asyncio.Task[None]] = []

    def and_again(batches: list[Batch], sync: bool) -> list[AppendResult]:
        results = apply(batches, sync)
        if len(rig.store.calls) < 40:
            hot.add()
            again.append(task_of(hot.writer.flush()))
        return results

    rig.store.apply = and_again
    hot.add()
    first = task_of(hot.writer.flush())
    for log in others:
        log.add(2)
    waiting = [task_of(log.writer.flush()) for log in others]
    await rig.settle()
    served = {batch.stream: number for number, (call, _) in enumerate(rig.store.calls) for batch in call}
    assert max(served[log.stream] for log in others) <= 11
    for task in (first, *waiting):
        await rig.done(task)
    await rig.advance(1)
    for task in again:
        await rig.done(task)
    assert all(rig.stored(log) == log.lines for log in (hot, *others))


async def test_background_logs_are_served_beside_flushes_that_never_rest(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(call_max_streams=10)
    busy, background = [rig.log(f"f{n}") for n in range(20)], [rig.log(f"b{n}") for n in range(50)]
    for log in background:
        log.add()

    async def never_rests(log: Any) -> None:
        for _ in range(60):
            log.add()
            await log.writer.flush()

    gate = rig.store.gate
    gate.clear()
    tasks = [task_of(never_rests(log)) for log in busy]
    await rig.advance(0.201)
    gate.set()
    await rig.settle()
    lanes = [sync for _, sync in rig.store.calls]
    assert all(rig.stored(log) == log.lines for log in background)
    assert lanes[:10].count(False) >= 4  # they took turns
    await rig.advance(1)
    for task in tasks:
        await rig.done(task)


@pytest.mark.parametrize("force", [False, True])
async def test_a_closed_sender_leaves_no_task_and_no_alarm(make_rig: Callable[..., Any], force: bool) -> None:
    before = asyncio.all_tasks()
    rig = make_rig(close_timeout_s=1)
    logs = [rig.log(f"s{n}") for n in range(20)]
    for log in logs:
        log.writer.attach_blob("sha256:" + f"{len(log.stream.session_id)}" * 64, b"content")
        log.add(3)
    await rig.advance(0.201)
    if force:
        rig.store.gate.clear()
        rig.store.blob_gate.clear()
    for log in logs:
        log.add()
    flushes = [task_of(log.writer.flush()) for log in logs[:5]]
    await rig.settle()
    close = task_of(rig.sender.close(force=force))
    await rig.advance(1.1)
    discarded = await rig.done(close)
    assert discarded > 0 if force else discarded == 0
    outcomes = await asyncio.gather(*flushes, return_exceptions=True)
    assert {getattr(outcome, "code", None) for outcome in outcomes} == ({"store.closed"} if force else {None})
    await rig.settle()
    assert asyncio.all_tasks() == before
    assert rig.clock.alarms == 0 and rig.budget.retained == 0
