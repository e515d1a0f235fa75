"""The three benches of the main job: ``turns``, ``submit`` and ``swarm``. Each runs in a home of its own.

Every bench checks what it measured: all prompts completed, and the logs hold every turn.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import Any

from kimi_ray.agent.specs import PromptResult
from kimi_ray.bench.floor import StoredStream, plain_writes
from kimi_ray.bench.host_logs import bench_runtime
from kimi_ray.bench.processes import Meter
from kimi_ray.bench.report import BenchReport
from kimi_ray.bench.warm_up import WARM_UP_SESSIONS, agents_by_host, sessions_on_every_host
from kimi_ray.bench.workload import ONE_TOOL_MODEL, PLAIN_MODEL, look
from kimi_ray.errors import KimiRayError
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Checkpoint, Profile
from kimi_ray.store import open_store

PROFILE = Profile(name="bench", system_prompt="You look at things.")


async def bench_turns(
    *,
    sessions: int = 200,
    turns: int = 10,
    checkpoint: Checkpoint = "turn",
    address: str | None = None,
    directory: str | None = None,
) -> BenchReport:
    """Turns per second, durable: every agent gets all its prompts with one call.

    A turn is a model call, a tool call and a final model call of a scripted model without latency.

    Args:
        sessions: How many sessions, each with one agent.
        turns: Prompts of each.
        checkpoint: Where agents wait for durability.
        address: Where to run; None is a local Ray.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    return await _turns("turns", sessions, turns, checkpoint, address, directory, singly=False)


async def bench_submit(
    *,
    sessions: int = 200,
    turns: int = 10,
    checkpoint: Checkpoint = "turn",
    address: str | None = None,
    directory: str | None = None,
) -> BenchReport:
    """The turns of ``bench_turns``, each submitted and awaited singly by one driver. Arguments as there."""
    return await _turns("submit", sessions, turns, checkpoint, address, directory, singly=True)


async def bench_swarm(
    *,
    agents: int = 1000,
    max_concurrency: int = 256,
    address: str | None = None,
    directory: str | None = None,
) -> BenchReport:
    """Seconds from the call of a swarm of one-turn agents to its last row, on a warm runtime.

    Args:
        agents: How many rollouts.
        max_concurrency: How many at once.
        address: Where to run; None is a local Ray.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    items = [{"n": n} for n in range(agents)]
    async with bench_runtime(address, directory, {}) as runtime:
        workspace = runtime.workspace(runtime.config.home)
        warm = await sessions_on_every_host(
            runtime, lambda: workspace.create_session(profile=PROFILE, model=PLAIN_MODEL)
        )
        session = warm[0]
        options: dict[str, Any] = {"profile": PROFILE, "max_concurrency": max_concurrency, "model": PLAIN_MODEL}
        await session.swarm("Look at {{n}}", items[:WARM_UP_SESSIONS], **options)
        before = await _calls(runtime)
        with Meter() as meter:
            began = time.perf_counter()
            report = await session.swarm("Look at {{n}}", items, **options)
            wall_s = time.perf_counter() - began
        calls = await _calls(runtime) - before
        done = report.totals["completed"]
        if done != agents:
            raise KimiRayError(f"{done} of {agents} rollouts completed", code="bench.incomplete")
        streams, facts = await _stored(runtime.config.home, flushes=1)
        bare_s = await _bare_calls(runtime, agents)
    floor_s = await asyncio.to_thread(plain_writes, streams, directory)
    return BenchReport(
        bench="swarm",
        value=wall_s,
        unit="s",
        floor=floor_s,
        ratio=wall_s / floor_s,
        wall_s=wall_s,
        cpu_s=meter.cpu_s,
        peak_pss_mb=meter.peak_pss_mb,
        figures={
            "agents": agents,
            "max_concurrency": max_concurrency,
            "agents_per_s": agents / wall_s,
            "cpu_by_role": meter.cpu_by_role,
            "actor_calls_per_turn": calls.total() / agents,
            "actor_calls": dict(calls.most_common()),
            "bare_calls_s": bare_s,
            **facts,
        },
    )


async def _turns(
    name: str,
    sessions: int,
    turns: int,
    checkpoint: Checkpoint,
    address: str | None,
    directory: str | None,
    *,
    singly: bool,
) -> BenchReport:
    async with bench_runtime(address, directory, {"checkpoint": checkpoint}) as runtime:
        workspace = runtime.workspace(runtime.config.home)

        async def create() -> Session:
            return await workspace.create_session(profile=PROFILE, model=ONE_TOOL_MODEL, tools=[look])

        await _run(await sessions_on_every_host(runtime, create), 1, singly=singly)
        made = await asyncio.gather(*(create() for _ in range(sessions)))
        before = await _calls(runtime)
        with Meter() as meter:
            began = time.perf_counter()
            results = await _run(list(made), turns, singly=singly)
            wall_s = time.perf_counter() - began
        calls = await _calls(runtime) - before
        _check(results, sessions * turns)
        placed = await agents_by_host(runtime)
        streams, facts = await _stored(runtime.config.home, flushes=turns)
        bare_s = await _bare_calls(runtime, sessions * turns)
    floor_s = await asyncio.to_thread(plain_writes, streams, directory)
    total = sessions * turns
    return BenchReport(
        bench=name,
        value=total / wall_s,
        unit="turns/s",
        floor=total / floor_s,
        ratio=floor_s / wall_s,
        wall_s=wall_s,
        cpu_s=meter.cpu_s,
        peak_pss_mb=meter.peak_pss_mb,
        figures={
            "sessions": sessions,
            "turns": turns,
            "checkpoint": checkpoint,
            "agents_by_host": placed,
            "cpu_by_role": meter.cpu_by_role,
            "actor_calls_per_turn": calls.total() / total,
            "actor_calls": dict(calls.most_common()),
            "bare_calls_per_s": None if bare_s is None else total / bare_s,
            **facts,
        },
    )


async def _run(sessions: list[Session], turns: int, *, singly: bool) -> list[PromptResult]:
    async def one(session: Session) -> list[PromptResult]:
        if singly:
            return [await (await session.main.submit(f"look {turn}")).result() for turn in range(turns)]
        handles = await session.main.submit_many([f"look {turn}" for turn in range(turns)])
        return list(await asyncio.gather(*(handle.result() for handle in handles)))

    return [result for results in await asyncio.gather(*map(one, sessions)) for result in results]


def _check(results: list[PromptResult], expected: int) -> None:
    for result in results:
        result.raise_for_state()
    if len(results) != expected or any(result.tool_calls != 1 or result.steps != 2 for result in results):
        raise KimiRayError(f"{len(results)} of {expected} turns ran as they should", code="bench.incomplete")


async def _stored(home: str, *, flushes: int) -> tuple[list[StoredStream], dict[str, Any]]:
    """The logs as they are on the disk, and how large they are."""
    store = open_store(home)
    streams: list[StoredStream] = []
    events = stored = 0
    for log in await store.list():
        data = await store.read_raw(log.stream)
        streams.append(StoredStream(data, flushes))
        events += data.count(b'\n{"seq":')
        stored += len(data)
    blobs = sum(len(files) for _, _, files in os.walk(os.path.join(home, "blobs")))
    return streams, {
        "logs": len(streams),
        "events": events,
        "bytes": stored,
        "bytes_per_event": stored / max(1, events),
        "blobs": blobs,
    }


async def _calls(runtime: Runtime) -> Counter[str]:
    """Actor calls so far by method, of this driver and of every host; the pings that count them left out."""
    calls = await runtime.connection.actor_calls()
    del calls["ping"]
    return calls


async def _bare_calls(runtime: Runtime, count: int) -> float | None:
    """Seconds for as many empty actor calls from this driver, 32 in flight; None without Ray."""
    return await runtime.connection.bare_calls(count)
