"""The process that ``bench loss`` kills: a host and its store, and a tally in shared memory that survives it."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from typing import Self

from kimi_ray.bench.event_streams import append_small
from kimi_ray.bench.host_logs import HostLogs
from kimi_ray.bench.workload import ONE_TOOL_MODEL
from kimi_ray.config import RuntimeConfig, load_config
from kimi_ray.hosts.boundary import Core
from kimi_ray.hosts.connection import Connection
from kimi_ray.hosts.local_cluster import CoreFactory, LocalCluster, build_core
from kimi_ray.hosts.ports import Cluster, HostKind, registry_name
from kimi_ray.hosts.store_host import StoreHost, store_options
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Profile
from kimi_ray.store.fs import FILE_MODE, RealFs
from kimi_ray.store.identity import open_identity
from kimi_ray.store.persistence import PersistenceService

SYNCED_NAME = "synced"
"""Notes of syncs, a line each: inode and size."""

FLUSH_EVERY = 50
PERIOD_S = 0.001
_HEAD = struct.Struct("<QQ")
_COUNT = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_MOST = 200_000


class Tally:
    """What the child did, in a mapped file: its writes are there for the parent the moment they are made."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls, path: str) -> Self:
        """A new one, all nought."""
        with open(path, "wb") as file:
            file.truncate(_HEAD.size + _MOST * _TIME.size)
        return cls.open(path)

    @classmethod
    def open(cls, path: str) -> Self:
        """One that exists."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    @property
    def done(self) -> int:
        """Events appended, or effects of tools."""
        return int(_HEAD.unpack_from(self._memory)[0])

    @property
    def promised(self) -> int:
        """How many of them must be found again after any kill and any power cut."""
        return int(_HEAD.unpack_from(self._memory)[1])

    def age_ms(self, number: int, now: float) -> float:
        """How long before ``now`` (monotonic seconds) number ``number`` was done; 0 when it never was."""
        if number >= self.done:
            return 0.0
        return (now - float(_TIME.unpack_from(self._memory, _HEAD.size + number * _TIME.size)[0])) * 1000

    def note(self) -> None:
        """One more is done."""
        number = self.done
        _TIME.pack_into(self._memory, _HEAD.size + number * _TIME.size, time.monotonic())
        _COUNT.pack_into(self._memory, 0, number + 1)

    def promise(self, number: int) -> None:
        """The first ``number`` must be found again."""
        _COUNT.pack_into(self._memory, _COUNT.size, number)


class NotingFs(RealFs):
    """Real files; each sync that returned is noted with the size that the file had before it."""

    def __init__(self, path: str) -> None:
        self._notes = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)

    def fsync(self, fd: int) -> None:
        """See ``Fs.fsync``."""
        found = os.fstat(fd)
        super().fsync(fd)
        os.write(self._notes, b"%d %d\n" % (found.st_ino, found.st_size))

    def fdatasync(self, fd: int) -> None:
        """See ``Fs.fdatasync``."""
        found = os.fstat(fd)
        super().fdatasync(fd)
        os.write(self._notes, b"%d %d\n" % (found.st_ino, found.st_size))


def main(home: str, work: str, durability: str, checkpoint: str) -> None:
    """Work until killed."""
    asyncio.run(_work(home, work, durability, checkpoint))


async def _work(home: str, work: str, durability: str, checkpoint: str) -> None:
    config = load_config(home, None, durability=durability, checkpoint=checkpoint, address="in-process")
    runtime = await _runtime(config)
    tally = Tally.open(f"{home}/tally")
    if work == "agent":
        await _run_agent(runtime, tally, checkpoint)
    else:
        await _append(runtime, tally, flushes=work == "flushes")


async def _runtime(config: RuntimeConfig) -> Runtime:
    """As ``connect_in_process``, with a store whose syncs are noted."""
    fs = NotingFs(f"{config.home}/{SYNCED_NAME}")
    identity = await asyncio.to_thread(open_identity, fs, config.home, store_options(config))

    def store(name: str, cluster: Cluster, settings: RuntimeConfig) -> Core:
        service = PersistenceService(settings.home, store_options(settings), fs=fs)
        return StoreHost(name, cluster, settings, service=service)

    def other(kind: HostKind) -> CoreFactory:
        return lambda name, cluster, settings: build_core(kind, name, cluster, settings)

    factories: dict[HostKind, CoreFactory] = {
        "store": store,
        **{k: other(k) for k in ("agents", "sessions", "registry")},
    }
    cluster = LocalCluster(identity.home_id, config, factories=factories)
    connection = Connection(cluster, config, in_process=True, owns_runtime=True, log_path=None, end=cluster.close)
    await cluster.start_host("registry", registry_name(identity.home_id))
    await connection.greet()
    return Runtime(connection, config)


async def _append(runtime: Runtime, tally: Tally, *, flushes: bool) -> None:
    """An event each millisecond; with ``flushes`` every 50th waits until it is durable."""
    opened = await HostLogs(runtime).create()
    while True:
        append_small(opened.log, 1)
        tally.note()
        if flushes and opened.log.next_seq % FLUSH_EVERY == 0:
            await opened.controller.flush()
            tally.promise(opened.log.next_seq)
        await asyncio.sleep(PERIOD_S)


async def _run_agent(runtime: Runtime, tally: Tally, checkpoint: str) -> None:
    """Turn after turn with one tool call each. What is counted is the tool's effect in the world."""

    async def look(what: str) -> str:
        """Look at something.

        Args:
            what: What to look at.
        """
        tally.note()
        if checkpoint == "request":
            tally.promise(tally.done)
        return f"{what}: fine"

    session = await runtime.workspace(runtime.config.home).create_session(
        profile=Profile(name="bench", system_prompt="You look at things."), model=ONE_TOOL_MODEL, tools=[look]
    )
    while True:
        handle = await session.main.submit("look")
        (await handle.result()).raise_for_state()
        if checkpoint != "none":
            tally.promise(tally.done)
