"""``index``: the newest sessions of a home with very many, through the store's process and read from beside it."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from statistics import median
from typing import Any

from pydantic_core import to_json

from kimi_ray.bench.host_logs import CALL_BOUND_S, bench_runtime
from kimi_ray.bench.processes import Meter, rss_mb
from kimi_ray.bench.report import BenchReport
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.ids import new_session_id, new_ulid, workspace_id
from kimi_ray.runtime import Runtime
from kimi_ray.session import new_document
from kimi_ray.store import open_store
from kimi_ray.store.documents import REVISION
from kimi_ray.store.session_index_file import INDEX_NAME
from kimi_ray.store.session_index_query import SessionQuery
from kimi_ray.store.session_index_reader import SessionsReader

_RECENT = 50
_READS = 30
_WRITES = 50
_WORKSPACES = 20
_FIRST_MS = 1_700_000_000_000


async def bench_index(*, sessions: int = 100_000, directory: str | None = None) -> BenchReport:
    """Milliseconds to list the 50 newest of many sessions through the runtime's store, the median of 30 calls.

    Beside it: building the index, the same from beside the store as commands do it, counts, a search, pages, and what
    the index adds to the writing of a document. The floor is the plain query of the same rows, on an open connection.

    Args:
        sessions: How many there are.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    async with bench_runtime("in-process", directory, {"shards": 1}) as runtime:
        home = runtime.config.home
        ids = await asyncio.to_thread(_fill, home, sessions)
        before_mb = rss_mb()
        began = time.perf_counter()
        status = await runtime.sessions.prepare()
        build_s = time.perf_counter() - began
        grew_mb = rss_mb() - before_mb
        _check(status.state == "ready" and status.sessions == sessions, f"the index is {status}")
        newest = [one.id for one in await runtime.sessions.list_recent(_RECENT)]
        _check(newest == ids[: -_RECENT - 1 : -1], "the newest sessions are not the newest")
        middle = ids[sessions // 2]
        rows = runtime.sessions
        with Meter() as meter:
            recent = await _timed(lambda: rows.list_recent(_RECENT))
            figures: dict[str, Any] = {
                "sessions": sessions,
                "build_s": build_s,
                "build_grew_mb": grew_mb,
                "slowest_ms": max(recent),
                "beside_ms": median(await _timed(lambda: _beside(home, newest))),
                "workspace_ms": median(await _timed(lambda: rows.list_recent(_RECENT, workspace_id=_place(3)))),
                "middle_ms": median(await _timed(lambda: rows.list_recent(_RECENT, after=middle))),
                "search_ms": median(await _timed(lambda: rows.list_recent(_RECENT, text="nowhere to be found"))),
                "count_ms": median(await _timed(rows.count)),
                "get_ms": median(await _timed(lambda: rows.get(middle))),
            }
        figures |= await _writes(runtime)
        floor = median(await asyncio.to_thread(_plain, f"{home}/{INDEX_NAME}", newest))
    return BenchReport(
        bench="index",
        value=median(recent),
        unit="ms",
        floor=floor,
        ratio=median(recent) / floor,
        wall_s=sum(recent) / 1000,
        cpu_s=meter.cpu_s,
        peak_pss_mb=meter.peak_pss_mb,
        figures=figures,
    )


def _place(number: int) -> str:
    return workspace_id(f"/work/project-{number}")


def _fill(home: str, sessions: int) -> list[str]:
    """Documents as the store writes them, the oldest first, without its syncs."""
    choose = random.Random(7)
    ids = [new_session_id() for _ in range(sessions)]
    for number in range(_WORKSPACES):
        os.makedirs(f"{home}/sessions/{_place(number)}")
    for number, session_id in enumerate(ids):
        place = choose.randrange(_WORKSPACES)
        value = new_document(
            session_id, workspace_id=_place(place), cwd=f"/work/project-{place}", now=_FIRST_MS + number * 1000,
            title=f"Session {number}", metadata={"run_id": f"run_{number // 100}"}, tags={"kind": f"k{number % 7}"},
        )  # fmt: skip
        value["last_prompt"] = f"Look at part {number} of the program, and say what is wrong with it. " * 4
        directory = f"{home}/sessions/{_place(place)}/{session_id}"
        os.mkdir(directory)
        with open(f"{directory}/state.json", "wb") as file:
            file.write(to_json({REVISION: 1, **value}) + b"\n")
    return ids


async def _timed(work: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds of each call."""
    walls: list[float] = []
    for _ in range(_READS):
        began = time.perf_counter()
        await work()
        walls.append((time.perf_counter() - began) * 1000)
    return walls


async def _beside(home: str, newest: list[str]) -> None:
    reader = SessionsReader(open_store(home))
    page = await reader.page(SessionQuery(limit=_RECENT))
    _check([one.id for one in page.items] == newest and reader.standing == "ready", "the reader beside was not served")


async def _writes(runtime: Runtime) -> dict[str, Any]:
    """What a document costs its writer, index and all; and that it is listed when its write is answered."""
    store = StoreCalls(runtime.connection.cluster, 1, CALL_BOUND_S)
    session_id, nonce = new_session_id(), new_ulid()
    grant = await store.open_session(session_id, nonce, _place(0), create=True)
    walls: list[float] = []
    for revision in range(_WRITES):
        value = new_document(session_id, workspace_id=_place(0), cwd="/work", now=2 * _FIRST_MS + revision)
        began = time.perf_counter()
        await store.write_document(session_id, value, grant.grant, nonce, revision)
        walls.append((time.perf_counter() - began) * 1000)
        (first,) = await runtime.sessions.list_recent(1)
        _check(
            (first.id, first.updated_at) == (session_id, 2 * _FIRST_MS + revision), "a written document is not listed"
        )
    await store.close_session(session_id, nonce)
    return {"write_ms": median(walls), "first_write_ms": walls[0]}


def _plain(path: str, newest: list[str]) -> list[float]:
    walls: list[float] = []
    statement = "SELECT id, summary FROM sessions WHERE archived != 1 ORDER BY updated_at DESC, id DESC LIMIT ?"
    rows: list[tuple[str, bytes]] = []
    with closing(sqlite3.connect(path)) as connection:
        for _ in range(_READS):
            began = time.perf_counter()
            rows = connection.execute(statement, (_RECENT + 1,)).fetchall()
            walls.append((time.perf_counter() - began) * 1000)
    _check(set(newest[:-1]) <= {row[0] for row in rows}, "the plain query found others")
    return walls


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise KimiRayError(what, code="bench.incomplete")
