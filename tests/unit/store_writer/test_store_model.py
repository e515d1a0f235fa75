"""A seeded storm: a store that loses, delays, repeats and reorders answers, restarts without what it did not sync,
and logs that append, flush and attach blobs meanwhile.

At the end every stored log is what its writer appended, byte for byte; at every moment what a flush acknowledged is
durable in the store, with its blobs; every wait ends in its bound, granted or with a code; and a loop that asks for
room never finds more retained than the bounds say.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_ray.errors import RuntimeFault, StoreError
from kimi_ray.events import make_event
from kimi_ray.store.seam import AppendResult, Batch

STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("chunks"), st.integers(0, 2), st.integers(1, 6)),
    st.tuples(st.just("blob"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("flush"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("polite"), st.integers(0, 2), st.integers(1, 6)),
    st.tuples(st.just("cancel"), st.just(0), st.integers(0, 3)),
    st.tuples(st.just("advance"), st.just(0), st.sampled_from([10, 100, 250, 1100, 2500])),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("refuse"), st.integers(0, 2), st.integers(1, 2)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
)
WAIT_S = 30
LOG_BYTES, HOST_BYTES = 2000, 4000
FATE = st.sampled_from(["answer", "answer", "answer", "late", "lose before", "lose after", "twice", "fail", "hang"])


class Storm:
    """Between the sender and the model store: each call meets its fate."""

    def __init__(self, rig: Any, fates: list[str]) -> None:
        self.rig = rig
        self.fates = fates
        self.calm = False
        self.zombies: list[tuple[list[Batch], bool]] = []

    def next_fate(self) -> str:
        return "answer" if self.calm or not self.fates else self.fates.pop()

    async def append(self, batches: list[Batch], sync: bool) -> list[AppendResult]:
        store = self.rig.store
        fate = self.next_fate()
        if fate == "lose before":
            self.zombies.append((batches, sync))
            raise RuntimeFault("lost", code="infra.actor_died")
        if fate == "fail":
            raise StoreError("broken disk", code="store.io_failed")
        if fate == "hang":
            self.zombies.append((batches, sync))
            await asyncio.get_running_loop().create_future()
        results = store.apply(batches, sync)
        if fate == "lose after":
            raise RuntimeFault("lost", code="infra.timeout", retryable=True)
        if fate == "twice":
            results = store.apply(batches, sync)
        if fate == "late":
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.rig.clock.call_later(0.7, lambda: None if gate.done() else gate.set_result(None))
            await gate
        # A call that was given up long ago arrives after all, out of order.
        if self.zombies and fate == "twice":
            store.apply(*self.zombies.pop())
        return results

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        fate = self.next_fate()
        if fate.startswith("lose"):
            raise RuntimeFault("lost", code="infra.timeout", retryable=True)
        if fate == "fail":
            raise StoreError("broken disk", code="store.io_failed")
        if fate == "hang":
            await asyncio.get_running_loop().create_future()
        self.rig.store.blobs.update(blobs)


async def run(rig_type: Any, steps: list[tuple[str, int, int]], fates: list[str], in_flight: int) -> None:
    rig = rig_type(
        calls_in_flight=in_flight, call_timeout_s=2, batch_max_bytes=400, call_max_bytes=1000, store_timeout_s=WAIT_S,
        log_max_bytes=LOG_BYTES, host_max_bytes=HOST_BYTES, closing_reserve_bytes=0,
    )  # fmt: skip
    storm = Storm(rig, list(fates))
    rig.sender._transport = storm.append
    rig.sender.outbox._transport = storm.put_blobs
    logs = [rig.log(f"s{n}") for n in range(3)]
    blobs_of: dict[Any, dict[int, str]] = {log: {} for log in logs}
    flushes: list[asyncio.Task[None]] = []
    polite: dict[Any, asyncio.Task[None]] = {}

    async def bounded(wait: Any, *codes: str) -> bool:
        """Whether it was granted; it ends in its time, or with one of these codes."""
        began = rig.clock.now()
        try:
            await wait
        except StoreError as error:
            assert error.code in codes, error
            return False
        finally:
            assert rig.clock.now() - began <= WAIT_S + 0.01
        return True

    async def flush(log: Any) -> None:
        target, blobs = len(log.lines), dict(blobs_of[log])
        if await bounded(log.writer.flush(), "store.io_failed", "store.unavailable"):
            assert rig.store.log(log.stream).durable >= target
            assert set(blobs.values()) <= rig.store.blobs.keys()

    async def add_politely(log: Any, count: int) -> None:
        """A loop that asks for room before each event."""
        for _ in range(count):
            if await bounded(log.writer.wait_for_room(), "store.unavailable"):
                assert log.writer.pending_bytes < LOG_BYTES and rig.budget.retained < HOST_BYTES
                log.add(1, size=150)
            await asyncio.sleep(0)

    def check() -> None:
        retained = 0
        for log in logs:
            stored = rig.store.log(log.stream)
            assert stored.lines == log.lines[: len(stored.lines)]
            assert log.writer.durable_seq <= stored.durable
            assert log.writer.durable_seq <= log.writer.written_seq <= log.writer.next_seq == len(log.lines)
            for seq, blob in blobs_of[log].items():
                assert blob in rig.store.blobs or seq >= len(stored.lines)
            assert not log.fenced
            retained += log.writer.pending_bytes
        assert rig.budget.retained == retained

    for what, which, amount in steps:
        log = logs[which]
        if what == "add":
            log.add(amount, size=amount * 30)
        elif what == "chunks":
            for _ in range(amount):
                seq = len(log.lines)
                chunk = {"type": "text-delta", "index": 0, "text": f"t{seq}"}
                event = make_event(seq, seq, "assistant/chunk", {"turn": 0, "step": 0, "attempt": 1, "chunk": chunk})
                log.lines.append(event.line)
                log.writer.enqueue(event)
        elif what == "blob":
            digest = f"sha256:{amount}"
            log.writer.attach_blob(digest, b"x" * 50 * amount)
            blobs_of[log][len(log.lines)] = digest
            log.add()
        elif what == "flush":
            flushes.append(asyncio.get_running_loop().create_task(flush(log)))
            await asyncio.sleep(0)
        elif what == "polite":
            if log not in polite or polite[log].done():
                polite[log] = asyncio.get_running_loop().create_task(add_politely(log, amount))
                flushes.append(polite[log])
        elif what == "cancel":
            if amount < len(flushes):
                flushes.pop(amount).cancel()
        elif what == "advance":
            await rig.advance(amount / 1000)
        elif what == "restart":
            rig.store.restart()
        elif what == "refuse":
            rig.store.refusals[log.stream] = [StoreError("broken disk", code="store.io_failed")] * amount
        else:
            await rig.settle()
        check()

    storm.calm = True
    rig.store.refusals.clear()
    await rig.advance(10 if not flushes else WAIT_S)
    for task in flushes:
        await rig.done(task)
    last = [asyncio.get_running_loop().create_task(log.writer.flush()) for log in logs]
    await rig.advance(10)
    for task in last:
        await rig.done(task)
    check()
    for log in logs:
        stored = rig.store.log(log.stream)
        assert stored.lines == log.lines and stored.durable == len(log.lines)
        assert set(blobs_of[log].values()) <= rig.store.blobs.keys()
    assert rig.budget.retained == 0
    close = asyncio.get_running_loop().create_task(rig.sender.close())
    assert await rig.done(close) == 0
    assert rig.clock.alarms == 0


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=st.lists(STEP, max_size=30), fates=st.lists(FATE, max_size=25), in_flight=st.integers(1, 2))
def test_the_stored_log_is_what_was_appended_and_a_flush_is_durable(
    make_rig: Any, steps: list[tuple[str, int, int]], fates: list[str], in_flight: int
) -> None:
    asyncio.run(run(make_rig, steps, fates, in_flight))
