"""What is in a batch: its bounds, packed chunks, and the blobs that go before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimi_ray.events import make_event
from tests.unit.store_writer.conftest import DISK, GONE, refused, task_of


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
