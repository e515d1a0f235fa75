"""Logs opened as an agent host opens them: claim, grant, log, write controller, and the one sender of the host."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from kimi_ray.agent.specs import AgentSpec
from kimi_ray.errors import KimiRayError
from kimi_ray.events import LogHeader, WriterRef
from kimi_ray.hosts.agent_services import OpenedLog
from kimi_ray.hosts.log_opening import LogOpener
from kimi_ray.hosts.ports import store_name
from kimi_ray.hosts.steady_calls import StoreCalls, shard_of
from kimi_ray.ids import MAIN, new_session_id, new_ulid
from kimi_ray.log import epoch_ms
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Profile
from kimi_ray.store.seam import Stream
from kimi_ray.version import __version__

WORKSPACE = "bench"
CALL_BOUND_S = 60.0


@asynccontextmanager
async def bench_runtime(
    address: str | None, directory: str | None, settings: dict[str, Any]
) -> AsyncGenerator[Runtime]:
    """A runtime with a home of its own below ``directory``; both are gone afterwards."""
    home = tempfile.mkdtemp(prefix="kimi-ray-bench-", dir=directory)
    try:
        async with Runtime.connect(home=home, address=address, **settings) as runtime:
            yield runtime
    finally:
        shutil.rmtree(home, ignore_errors=True)


class HostLogs:
    """The logs of one agent host, without the agents. Belongs to this process and loop."""

    def __init__(self, runtime: Runtime) -> None:
        config = runtime.config
        self._runtime = runtime
        self._cluster = runtime.connection.cluster
        self._store = StoreCalls(self._cluster, config.shards, CALL_BOUND_S)
        self._opener = LogOpener(self._cluster, self._store, config)
        self._claims: dict[str, str] = {}

    async def create(self) -> OpenedLog:
        """A new session with the log of its main agent."""
        session_id = new_session_id()
        header = LogHeader(
            session_id=session_id,
            agent_id=MAIN,
            created_at=epoch_ms(),
            writer=WriterRef(name="kimi-ray bench", version=__version__),
        )
        return await self._open(Stream(session_id, MAIN), header.to_data(), WORKSPACE)

    async def open(self, session_id: str) -> OpenedLog:
        """The log of a stored session's main agent."""
        return await self._open(Stream(session_id, MAIN), None, None)

    async def _open(self, stream: Stream, header: dict[str, Any] | None, workspace: str | None) -> OpenedLog:
        claim = self._claims[stream.session_id] = new_ulid()
        await self._store.open_session(stream.session_id, claim, workspace)
        spec = AgentSpec(
            stream=stream,
            nonce=new_ulid(),
            profile=Profile(name="bench"),
            model=self._runtime.resolve_model("scripted"),
            header=header,
            claim=claim,
        )
        opened = await self._opener.open(spec, _fenced)
        self._opener.publish(stream)
        return opened

    async def close(self) -> None:
        """Make every log durable and give grants and claims back."""
        streams = [Stream(session_id, MAIN) for session_id in self._claims]
        await asyncio.gather(*(self._opener.give_back(stream, force=False) for stream in streams))
        for session_id, claim in self._claims.items():
            await self._store.close_session(session_id, claim)
        self._claims.clear()
        await self._opener.close()

    async def claim(self, session_id: str) -> str:
        """Claim a session for a log to come; returns the claim's nonce."""
        nonce = self._claims[session_id] = new_ulid()
        await self._store.open_session(session_id, nonce, WORKSPACE)
        return nonce

    async def call_store(self, session_id: str, method: str, *args: Any) -> Any:
        """One call to the store that keeps a session."""
        shard = shard_of(session_id, self._runtime.config.shards)
        peer = self._cluster.peer(store_name(self._cluster.home_id, shard))
        return await peer.call(method, *args, timeout_s=CALL_BOUND_S)

    async def store_stats(self) -> dict[str, int]:
        """Commits, syncs, events and bytes of all shards so far."""
        total: dict[str, int] = {"commits": 0, "syncs": 0, "events": 0, "bytes": 0}
        for shard in range(self._runtime.config.shards):
            peer = self._cluster.peer(store_name(self._cluster.home_id, shard))
            told = await peer.call("stats", timeout_s=CALL_BOUND_S, group="control")
            for key in total:
                total[key] += int(told.get(key, 0))
        return total

    def append_calls(self) -> int:
        """Append calls that the host's senders made so far."""
        return int(self._opener.stats().get("calls", 0))


def log_files(home: str) -> list[str]:
    """The files that hold the logs of a home: one a log, or one a database."""
    return sorted(
        os.path.join(directory, name)
        for directory, _, names in os.walk(home)
        for name in names
        if name.startswith("wire.jsonl") or name.endswith((".db", ".db-wal"))
    )


def disk_bytes(home: str) -> int:
    """Bytes of all logs of a home."""
    return sum(os.stat(path).st_size for path in log_files(home))


def _fenced(error: KimiRayError) -> None:
    raise error
