"""Logs on their way to an agent: one read, one reservation, and nothing kept that somebody else may have changed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.fold import AgentFold
from kimi_ray.errors import LogError, StoreError
from kimi_ray.events import LogHeader, WriterRef
from kimi_ray.hosts.prepared_logs import PreparedLogs
from kimi_ray.log import EventLog
from kimi_ray.store.seam import Stream, WriterGrant

A, B, C = (Stream("s", name) for name in ("a", "b", "c"))


class Shelf:
    """Stored logs: how many events each has, how often each was read, and what reading does besides."""

    def __init__(self, **events: int) -> None:
        self.events = events
        self.reads: list[Stream] = []
        self.failures: list[BaseException] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, stream: Stream, grant: WriterGrant) -> tuple[EventLog, AgentFold]:
        self.reads.append(stream)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        header = LogHeader(session_id=stream.session_id, agent_id=stream.agent_id, created_at=1, writer=WRITER)
        log = EventLog(header)
        log.read_back([LINE % seq for seq in range(self.events[stream.agent_id])])
        assert log.next_seq == grant.next_seq
        return log, AgentFold()


WRITER = WriterRef(name="k", version="t")
LINE = b'{"seq":%d,"time":1,"type":"user/message","data":{"id":"m","content":[]},"surface":"append"}'


def message(log: EventLog) -> None:
    log.append("user/message", {"id": "x", "content": []}, surface="append")


async def test_a_log_that_came_to_nothing_is_not_read_again() -> None:
    shelf = Shelf(a=3)
    logs = PreparedLogs(shelf.read)
    first = await logs.prepare(A, WriterGrant(1, 3))
    logs.rollback(first, closed=True)
    second = await logs.prepare(A, WriterGrant(2, 3))
    assert shelf.reads == [A]
    assert list(second.log.surface) == list(first.log.surface) and second.fold is first.fold
    assert second.log.surface[0] is first.log.surface[0]
    logs.publish(second)
    message(second.log)
    assert second.log.next_seq == 4
    with pytest.raises(LogError) as refused:
        message(first.log)
    assert refused.value.code == "log.detached"


async def test_a_reserved_log_refuses_events_until_it_is_published() -> None:
    logs = PreparedLogs(Shelf(a=3).read)
    reserved = await logs.prepare(A, WriterGrant(1, 3))
    with pytest.raises(LogError) as refused:
        message(reserved.log)
    assert refused.value.code == "log.reserved" and reserved.log.next_seq == 3
    logs.publish(reserved)
    message(reserved.log)
    logs.publish(reserved)
    logs.rollback(reserved, closed=True)
    assert logs.waiting_bytes == 0


@pytest.mark.parametrize(
    ("epoch", "events"),
    [(3, 3), (2, 4), (4, 5), (1, 3)],
    ids=["another was granted it", "another wrote", "both", "a log of the same name"],
)
async def test_what_somebody_else_may_have_changed_is_read_again(epoch: int, events: int) -> None:
    shelf = Shelf(a=3)
    logs = PreparedLogs(shelf.read)
    logs.rollback(await logs.prepare(A, WriterGrant(1, 3)), closed=True)
    assert logs.waiting_bytes > 0
    shelf.events["a"] = events
    again = await logs.prepare(A, WriterGrant(epoch, events))
    assert shelf.reads == [A, A] and again.log.next_seq == events
    assert logs.waiting_bytes == 0


async def test_nothing_waits_of_a_grant_that_was_not_given_back_nor_of_a_log_that_grew() -> None:
    shelf = Shelf(a=3)
    logs = PreparedLogs(shelf.read)
    logs.rollback(await logs.prepare(A, WriterGrant(1, 3)), closed=False)
    assert logs.waiting_bytes == 0
    reserved = await logs.prepare(A, WriterGrant(2, 3))
    reserved.log.publish()
    message(reserved.log)
    logs.rollback(reserved, closed=True)
    assert logs.waiting_bytes == 0


async def test_one_log_is_reserved_once_and_the_next_waits_for_it() -> None:
    shelf = Shelf(a=3, b=1)
    logs = PreparedLogs(shelf.read)
    shelf.gate.clear()
    first, second = (asyncio.ensure_future(logs.prepare(A, WriterGrant(1, 3))) for _ in range(2))
    other = asyncio.ensure_future(logs.prepare(B, WriterGrant(1, 1)))
    await asyncio.sleep(0)
    assert shelf.reads == [A, B]
    shelf.gate.set()
    reserved = await first
    await other
    assert not second.done() and shelf.reads == [A, B]
    logs.rollback(reserved, closed=False)
    await second
    assert shelf.reads == [A, B, A]


async def test_whoever_waits_for_a_read_that_fails_reads_for_itself() -> None:
    shelf = Shelf(a=3)
    logs = PreparedLogs(shelf.read)
    shelf.failures = [StoreError("away", code="store.unavailable"), StoreError("still", code="store.unavailable")]
    shelf.gate.clear()
    tries = [asyncio.ensure_future(logs.prepare(A, WriterGrant(1, 3))) for _ in range(3)]
    await asyncio.sleep(0)
    assert shelf.reads == [A]
    shelf.gate.set()
    done, waiting = await asyncio.wait(tries, timeout=5, return_when=asyncio.ALL_COMPLETED)
    assert len(done) == 3 and not waiting and shelf.reads == [A, A, A]
    assert sum(one.exception() is None for one in tries) == 1


async def test_a_cancelled_read_leaves_the_log_to_the_next() -> None:
    shelf = Shelf(a=3)
    logs = PreparedLogs(shelf.read)
    shelf.gate.clear()
    first, second = (asyncio.ensure_future(logs.prepare(A, WriterGrant(1, 3))) for _ in range(2))
    third = asyncio.ensure_future(logs.prepare(A, WriterGrant(1, 3)))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    await asyncio.wait([first, second], timeout=5)
    assert first.cancelled() and second.cancelled()
    shelf.gate.set()
    async with asyncio.timeout(5):
        reserved = await third
    logs.publish(reserved)
    assert shelf.reads == [A, A]


async def test_a_waiter_that_is_cancelled_takes_nothing_from_the_holder() -> None:
    logs = PreparedLogs(Shelf(a=3).read)
    reserved = await logs.prepare(A, WriterGrant(1, 3))
    waiter = asyncio.ensure_future(logs.prepare(A, WriterGrant(1, 3)))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter], timeout=5)
    assert not reserved.settled.done()
    logs.publish(reserved)


async def test_waiting_for_a_reservation_has_a_bound() -> None:
    logs = PreparedLogs(Shelf(a=3).read, patience_s=0.02)
    await logs.prepare(A, WriterGrant(1, 3))
    with pytest.raises(LogError) as refused:
        await logs.prepare(A, WriterGrant(2, 3))
    assert refused.value.code == "log.reserved" and refused.value.retryable


async def test_what_waits_has_a_bound_in_bytes_and_the_longest_wait_goes_first() -> None:
    shelf = Shelf(a=3, b=3, c=3)
    probe = PreparedLogs(shelf.read)
    probe.rollback(await probe.prepare(A, WriterGrant(1, 3)), closed=True)
    one = probe.waiting_bytes
    shelf.reads.clear()
    logs = PreparedLogs(shelf.read, max_bytes=2 * one)
    held = await logs.prepare(A, WriterGrant(1, 3))  # reserved: never dropped for others
    for stream in (B, C):
        logs.rollback(await logs.prepare(stream, WriterGrant(1, 3)), closed=True)
    assert logs.waiting_bytes == 2 * one
    logs.rollback(held, closed=True)
    assert logs.waiting_bytes == 2 * one
    shelf.reads.clear()
    for stream in (A, C, B):
        logs.publish(await logs.prepare(stream, WriterGrant(2, 3)))
    assert shelf.reads == [B]
    assert logs.waiting_bytes == 0


async def test_a_log_that_is_too_large_to_wait_does_not_push_the_others_out() -> None:
    shelf = Shelf(a=3, b=3000)
    logs = PreparedLogs(shelf.read, max_bytes=20_000)
    logs.rollback(await logs.prepare(A, WriterGrant(1, 3)), closed=True)
    small = logs.waiting_bytes
    logs.rollback(await logs.prepare(B, WriterGrant(1, 3000)), closed=True)
    assert logs.waiting_bytes == small


async def test_a_log_that_was_given_back_waits_under_its_own_grant() -> None:
    shelf = Shelf(a=3)
    logs = PreparedLogs(shelf.read)
    used = await logs.prepare(A, WriterGrant(1, 3))
    logs.publish(used)
    message(used.log)
    logs.keep(A, used.log, used.fold, 1)
    again: Any = await logs.prepare(A, WriterGrant(2, 4))
    assert shelf.reads == [A] and again.log.next_seq == 4 == again.log.first_live_seq
