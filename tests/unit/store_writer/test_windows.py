"""When a batch goes: fixed windows, the sync behind them, and flushes; on a clock that only the test moves."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.events import CORE, LogHeader, WriterRef
from kimi_ray.log import EventLog
from tests.unit.store_writer.conftest import task_of


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
        await rig.advance(0.010)
    assert rig.batches() == [(0, 20, False)]
    await rig.advance(0.5)
    assert len(rig.store.calls) == 1


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
    assert rig.stored(stored) == lines and not log.observer_errors


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


async def test_a_producer_that_never_stops_cannot_hold_a_flush(rig: Any) -> None:
    log = rig.log()
    log.add()
    apply = rig.store.apply

    def and_more(batches: Any, sync: bool) -> Any:
        results = apply(batches, sync)
        log.add(10)  # before the answer arrives there is always something new
        return results

    rig.store.apply = and_more
    targets: list[tuple[int, int]] = []
    for _ in range(5):
        target = log.writer.next_seq
        await rig.done(task_of(log.writer.flush()))
        targets.append((target, log.writer.durable_seq))
    assert all(durable == target for target, durable in targets)
    assert len(rig.store.calls) == 5 and log.writer.next_seq == 51


async def test_flushes_that_join_late_end_in_the_order_of_their_targets(rig: Any) -> None:
    log = rig.log()
    ended: list[int] = []

    async def flush(number: int) -> None:
        await log.writer.flush()
        ended.append(number)

    rig.store.gate.clear()
    tasks: list[Any] = []
    for number in range(6):
        log.add()
        tasks.append(task_of(flush(number)))
        await rig.settle()
    rig.store.gate.set()
    for task in tasks:
        await rig.done(task)
    assert ended == [0, 1, 2, 3, 4, 5]
    assert rig.batches() == [(0, 1, True), (1, 6, True)]


async def test_a_thousand_streaming_logs_share_their_syncs(rig: Any) -> None:
    logs, append = [rig.log(f"s{n}") for n in range(1000)], rig.store.append

    async def slow(batches: Any, sync: bool) -> Any:
        answered = asyncio.Event()
        rig.clock.call_later(0.005, answered.set)
        await answered.wait()
        return await append(batches, sync)

    rig.sender._transport = slow
    for _ in range(10):  # 2 s of 5 chunks a second each
        for log in logs:
            log.add()
        await rig.advance(0.2)
    await rig.advance(2)
    assert all(log.writer.durable_seq == 10 for log in logs)
    syncs = sum(len(call) for call, sync in rig.store.calls if sync)
    assert len(rig.store.calls) < 100 and syncs <= 4 * len(logs)
    assert all(rig.stored(log) == log.lines for log in logs)
