"""Disturbing a runtime on Ray, and what must be true of its home afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kimi_ray import Runtime, open_store
from kimi_ray.events import SessionEvent, parse_event, parse_header
from kimi_ray.hosts.ports import store_name
from kimi_ray.log import EventLog
from kimi_ray.runs.rows import ResultRow
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import Stream
from tests.actors.conftest import until

PAGE = 5000


async def pid_of(runtime: Runtime, name: str) -> int:
    """The process of an actor."""
    peer = runtime.connection.cluster.peer(name)
    return (await peer.call("ping", timeout_s=10, group="control"))["pid"]


async def kill(runtime: Runtime, name: str) -> int:
    """SIGKILL an actor's process; gives its pid."""
    pid = await until(lambda: pid_of(runtime, name))
    os.kill(pid, signal.SIGKILL)
    return pid


async def hosts_of(runtime: Runtime, kind: str) -> list[dict[str, Any]]:
    """The hosts of a kind, as the registry knows them."""
    told = await until(lambda: runtime.connection.registry.call("status", timeout_s=10, group="control"))
    return [host for host in told["hosts"] if host["kind"] == kind]


async def back(runtime: Runtime, name: str, before: int) -> float:
    """Wait until an actor answers from another process; gives the seconds that took."""
    began = time.monotonic()

    async def is_other() -> bool:
        return await pid_of(runtime, name) != before

    await until(is_other)
    return time.monotonic() - began


def store_of(runtime: Runtime) -> str:
    """The name of the store's actor."""
    return store_name(runtime.connection.home_id, 0)


async def read_log(store: ReadStore, stream: Stream, header: dict[str, Any] | None = None) -> list[SessionEvent]:
    """A log from its file, verified and folded again under all order rules."""
    report = await store.verify(stream)
    assert report.ok, report.problems
    events: list[SessionEvent] = []
    while True:
        page = await store.read_from(stream, len(events), PAGE)
        events += [parse_event(line, at=len(events) + n) for n, line in enumerate(page.lines)]
        if len(events) >= page.next_seq:
            break
        assert page.lines, f"{stream} has a hole at {len(events)}"
    assert [event.seq for event in events] == list(range(report.events))
    log = EventLog(parse_header(header or (await store.inspect(stream)).header))
    for event in events:
        log.append(event.type, event.data, surface=event.surface, sources=event.sources)
    return events


async def read_session(home: str | Path, session_id: str) -> dict[str, list[SessionEvent]]:
    """All logs of a session by agent, each checked by ``read_log``."""
    store = open_store(home)
    logs = await store.list(session_id)
    assert [log.error for log in logs if log.error] == []
    return {log.stream.agent_id: await read_log(store, log.stream, log.header) for log in logs}


def assert_nothing_lost(rows: list[ResultRow] | tuple[ResultRow, ...], logs: dict[str, list[SessionEvent]]) -> None:
    """What every row was told is in its log."""
    for row in rows:
        assert row.status == "completed", row
        assert row.agent_id is not None and row.last_seq is not None
        events = logs[row.agent_id]
        assert row.last_seq < len(events), (row.agent_id, row.last_seq, len(events))
        told = [event.type for event in events[: row.last_seq + 1]]
        if row.interruptions and told[-1] == "runtime/activated":
            told.pop()  # it had ended when its host was killed, and was only asked again elsewhere
        assert told[-1] == "prompt/completed", (row.agent_id, told[-3:])


def counts(events: list[SessionEvent]) -> Counter[str]:
    """How often each type is in a log."""
    return Counter(event.type for event in events)


def assert_once(events: list[SessionEvent], *types: str) -> None:
    """Each of these types is there exactly once."""
    found = counts(events)
    assert {name: found[name] for name in types} == dict.fromkeys(types, 1)
