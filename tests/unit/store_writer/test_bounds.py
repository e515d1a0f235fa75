"""Room: each bound is reached, and every wait for it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.sender import Sender
from kimi_ray.store.wire import pack_call
from tests.unit.store_writer.conftest import DISK, GONE, refused, task_of


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


async def test_a_log_that_waits_for_room_tries_a_refusing_disk_again_by_itself(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(log_max_bytes=100, store_timeout_s=30)
    log = rig.log()
    log.add(1, size=200)
    rig.store.refusals[log.stream] = [DISK] * 4
    room = task_of(log.writer.wait_for_room())
    await rig.advance(0.01)
    assert not room.done()
    await rig.advance(8.1)
    await rig.done(room)
    assert rig.stored(log) == log.lines and len(rig.store.calls) == 5


async def test_a_full_host_has_its_paused_logs_try_again(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(host_max_bytes=1000, store_timeout_s=30)
    hogs, log = [rig.log(f"hog{n}") for n in range(3)], rig.log("other")
    for hog in hogs:
        hog.add(1, size=500)
        rig.store.refusals[hog.stream] = [DISK] * 3
    await rig.advance(0.201)
    assert {hog.writer.state for hog in hogs} == {"paused"}
    await rig.advance(60)  # nobody needs the room: they stay paused
    assert len([batch for batch in rig.batches() if batch[1]]) == 3
    room = task_of(log.writer.wait_for_room())
    await rig.advance(5)
    await rig.done(room)
    assert all(rig.stored(hog) == hog.lines for hog in hogs)


async def test_a_disk_that_goes_on_refusing_is_the_cause_of_the_late_room(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(log_max_bytes=100, store_timeout_s=5)
    log = rig.log()
    log.add(1, size=200)
    rig.store.refusals[log.stream] = [DISK] * 1000
    room = task_of(log.writer.wait_for_room())
    await rig.advance(5.1)
    error = await refused(room, rig)
    assert error.code == "store.unavailable" and error.details["cause"]["code"] == "store.disk_full"
    assert len(rig.store.calls) < 40
    calls = len(rig.store.calls)
    await rig.advance(60)
    assert len(rig.store.calls) <= calls + 1 and log.writer.state == "paused"


@pytest.mark.parametrize("how", ["cancelled", "closed", "fenced", "late"])
async def test_the_wait_for_a_full_host_ends_too(make_rig: Callable[..., Any], how: str) -> None:
    rig = make_rig(host_max_bytes=1000, closing_reserve_bytes=0, store_timeout_s=5, call_timeout_s=60)
    hog, log = rig.log("hog"), rig.log("other")
    hog.add(1, size=2000)
    log.add()
    if how == "fenced":
        rig.store.log(log.stream).epoch = 2
        rig.store.refusals[hog.stream] = [DISK] * 1000
    else:
        rig.store.gate.clear()
    room = task_of(log.writer.wait_for_room())
    await rig.settle()
    if how == "cancelled":
        room.cancel()
        await rig.settle()
        assert room.cancelled()
    elif how == "closed":
        closing = task_of(log.writer.close(1))
        assert (await refused(room, rig)).code == "store.closed"
        await rig.advance(1.1)
        assert (await refused(closing, rig)).code == "store.unavailable"
    elif how == "fenced":
        assert (await refused(room, rig)).code == "store.fenced"
    else:
        await rig.advance(5.1)
        assert (await refused(room, rig)).code == "store.unavailable"
    rig.store.refusals.clear()
    rig.store.gate.set()
    await rig.advance(3)
    assert rig.stored(hog) == hog.lines


async def test_closing_brackets_have_a_reserve_of_the_host_too(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(host_max_bytes=1000, closing_reserve_bytes=500)
    hog, log = rig.log("hog"), rig.log("other")
    hog.add(1, size=1000)
    rig.store.gate.clear()
    waiting = task_of(log.writer.wait_for_room())
    await rig.done(task_of(log.writer.wait_for_room(closing=True)))
    hog.add(1, size=500)
    bracket = task_of(log.writer.wait_for_room(closing=True))
    await rig.settle()
    assert not waiting.done() and not bracket.done()
    rig.store.gate.set()
    await rig.advance(2)
    await rig.done(waiting)
    await rig.done(bracket)


async def test_a_full_queue_of_the_store_is_waited_out(make_rig: Callable[..., Any], tmp_path: Path) -> None:
    service = PersistenceService(str(tmp_path / "home"), queue_bytes=5000)
    rig = make_rig()
    gate, calls = asyncio.Event(), 0
    apply = rig.store.apply

    class Slow:
        async def append(self, batches: Any, *, sync: bool) -> Any:
            await gate.wait()
            return apply(batches, sync)

    service._store = Slow()

    async def transport(batches: Any, sync: bool) -> Any:
        nonlocal calls
        calls += 1
        return await service.append_call(pack_call(batches, sync=sync))

    one, two = (Sender(transport, rig.store.put_blobs, settings=rig.settings, clock=rig.clock) for _ in range(2))
    rig.sender = one
    first = rig.log("a")
    rig.sender = two
    second = rig.log("b")
    for log in (first, second):
        log.add(1, size=4000)
    flushes = [task_of(log.writer.flush()) for log in (first, second)]
    await rig.advance(0.5)
    assert calls > 2 and not any(flush.done() for flush in flushes)
    assert {sender.last_error.code for sender in (one, two) if sender.last_error} == {"store.busy"}
    gate.set()
    await rig.advance(2)
    for flush, log in zip(flushes, (first, second), strict=True):
        await rig.done(flush)
        assert rig.stored(log) == log.lines
