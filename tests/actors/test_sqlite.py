"""The SQLite backend on a local Ray: a store process a shard, one of them killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from kimi_ray import Runtime
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.ports import store_name
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream
from kimi_ray.store.sharding import shard_of
from tests.actors.fault_models import ECHO


async def test_shards_are_served_by_processes_of_their_own(config: RuntimeConfig, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    async with Runtime.connect(config=config, backend="sqlite", shards=2) as runtime:
        work = runtime.workspace(tmp_path / "work")
        sessions = await asyncio.gather(*(work.create_session(model=ECHO, profile="bare") for _ in range(6)))
        ids = [session.id for session in sessions]
        assert {shard_of(session_id, 2) for session_id in ids} <= {0, 1}
        for session in sessions[:3]:
            assert (await (await session.main.submit("one")).result(60)).state == "completed"
        store = runtime.connection.cluster.peer(store_name(runtime.connection.home_id, 0))
        pid = (await store.call("ping", timeout_s=10, group="control"))["pid"]
        os.kill(pid, signal.SIGKILL)
        for session in sessions:
            assert (await (await session.main.submit("two")).result(60)).state == "completed"
        listed = await open_store(config.home).list()
        assert {row.stream.session_id for row in listed} == set(ids), "read from here, beside the writers"
    home = open_store(config.home)
    for session_id in ids:
        report = await home.verify(Stream(session_id, "main"))
        assert (report.ok, report.closed) == (True, True), report
