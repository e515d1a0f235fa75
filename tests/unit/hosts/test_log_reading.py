"""Who follows a log is told what is durable, and no more: the rest may be written otherwise by the next life."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.hosts.log_reading import LogReader
from kimi_ray.hosts.specs import EventPage
from tests.unit.agent.bench import STREAM, AgentBench


async def test_an_event_is_told_when_it_is_durable() -> None:
    bench = AgentBench(["done"])
    bench.submit("one")
    await bench.result()
    await bench.journal.flush()
    store: Any = None  # all that is asked for is in memory
    reader, at = LogReader(store), bench.log.next_seq

    async def read(wait_s: float) -> EventPage:
        return await reader.read(STREAM, bench.agent, at, 10, 1 << 20, wait_s)

    assert (await read(0.0)).lines == ()
    bench.journal.append("runtime/activated", {"epoch": 2})
    page = await read(0.03)
    assert (page.lines, page.durable_seq, page.next_seq) == ((), at, at + 1)
    waiting = asyncio.create_task(read(10.0))
    await bench.journal.flush()
    assert (await waiting).lines == (bench.events[at].line,)
    bench.journal.append("runtime/activated", {"epoch": 3})
    assert len((await read(0.0)).lines) == 2, "who does not wait has it made durable"


async def test_an_outcome_names_a_durable_position() -> None:
    bench = AgentBench(["done"])
    bench.submit("one")
    await bench.result()
    await bench.journal.flush()
    at = bench.log.next_seq
    bench.journal.append("runtime/activated", {"epoch": 2})
    assert bench.agent.outcome("p0").seq == at


async def test_who_waits_for_a_life_that_another_follows_is_told_at_once() -> None:
    first, second = AgentBench(["done"]), AgentBench(["done"])
    store: Any = None
    reader = LogReader(store)
    waiting = asyncio.create_task(reader.read(STREAM, first.agent, first.log.next_seq, 10, 1 << 20, 10.0))
    await asyncio.sleep(0)
    await first.agent.close()
    await reader.read(STREAM, second.agent, second.log.next_seq, 10, 1 << 20, 0.0)
    async with asyncio.timeout(5):
        assert (await waiting).lines == ()
