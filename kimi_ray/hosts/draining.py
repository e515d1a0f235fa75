"""Emptying a node that is to go: nobody new comes, who is there leaves when its work is done, then its hosts end.

Nothing is moved by force: an agent is flushed, its grant is given back and its host lets go of it; whoever wants it
next (a prompt, a swarm) brings it to life elsewhere, and a session is resumed elsewhere by its driver's next call. What
still runs at the deadline is told, or with ``force`` cancelled. Agents with a directory that is only there stay until
their work is done.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.pool import HostPool, PooledHost
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.agent.live_agent import LiveAgent
    from kimi_ray.hosts.specs import Ack

NOTE = "draining"
ROUND_S = 0.2
ASK_S = 30.0
SETTLED_S = 0.6
"""A host must have been empty for so long: places that were given before the drain may still be used."""

UNTOUCHED_S = 1.0
"""Longer than the calls of one operation on an agent are apart."""

DrainedBy = Literal["request", "cluster"]


@dataclass(slots=True)
class NodeDrain:
    """A node that takes nobody any more. ``deadline`` is epoch seconds, None for none."""

    node_id: str
    by: DrainedBy
    deadline: float | None = None
    force: bool = False
    began: float = field(default_factory=time.time)
    ended: float | None = None
    moved: int = 0
    handed_over: int = 0
    stopped: list[str] = field(default_factory=list[str])
    running: list[str] = field(default_factory=list[str])
    pinned: list[str] = field(default_factory=list[str])
    sessions: list[str] = field(default_factory=list[str])
    cancelled: list[str] = field(default_factory=list[str])
    errors: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.time() >= self.deadline

    def report(self) -> dict[str, Any]:
        """How it stands, as JSON: ``done`` when no host is left there."""
        return {
            "node_id": self.node_id,
            "by": self.by,
            "done": self.ended is not None,
            "deadline": self.deadline,
            "elapsed_s": round((self.ended or time.time()) - self.began, 3),
            "moved": self.moved,
            "handed_over": self.handed_over,
            "stopped": self.stopped,
            "running": self.running,
            "pinned": self.pinned,
            "sessions": self.sessions,
            "cancelled": self.cancelled,
            "errors": self.errors,
        }


class Drains:
    """The nodes of a runtime that are drained or being drained.

    Args:
        cluster: Where the hosts are; keeps the list, so that a registry that comes back knows it.
        pools: The hosts by kind; their ``closed`` nodes are kept here.
        stop: Lets a host flush and ends it; gives what went wrong as data.
    """

    def __init__(
        self,
        cluster: Cluster,
        pools: dict[str, HostPool],
        stop: Callable[[str], Awaitable[list[dict[str, Any]]]],
    ) -> None:
        self.nodes: dict[str, NodeDrain] = {}
        self._cluster = cluster
        self._pools = pools
        self._stop = stop
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._empty_since: dict[str, float] = {}

    async def recover(self, known: set[str]) -> None:
        """Go on with what an earlier registry had begun; nodes that are gone are forgotten."""
        text = await self._cluster.read_note(NOTE)
        rows: list[dict[str, Any]] = json.loads(text) if text else []
        for row in rows:
            if row["node_id"] in known:
                self._begin(NodeDrain(row["node_id"], row["by"], row["deadline"], row["force"], row["began"]))

    async def begin(self, node_id: str, by: DrainedBy, deadline: float | None, force: bool) -> NodeDrain:
        """Drain a node; one that is being drained already gets the new deadline and ``force``."""
        drain = self.nodes.get(node_id)
        if drain is None:
            drain = self._begin(NodeDrain(node_id, by, deadline, force))
        elif by == "request":
            drain.by, drain.deadline, drain.force = by, deadline, force
            if drain.ended is not None and self._hosts(node_id):
                drain.ended = None
                self._run_on(drain)
        await self._keep()
        return drain

    async def undo(self, node_id: str) -> None:
        """Let a node take work again. Idempotent."""
        task = self._tasks.pop(node_id, None)
        if task is not None:
            task.cancel()
        self.nodes.pop(node_id, None)
        for pool in self._pools.values():
            pool.closed.discard(node_id)
        await self._keep()

    async def wait(self, drain: NodeDrain) -> None:
        """Until no host is left there, or the deadline has passed and all that it allows was done."""
        task = self._tasks.get(drain.node_id)
        while drain.ended is None:
            if (drain.overdue and (not drain.force or drain.errors)) or task is None or task.done():
                return
            await asyncio.sleep(ROUND_S / 2)

    async def close(self) -> None:
        """Stop draining; the nodes stay noted. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def gone(self, alive: set[str]) -> None:
        """Nodes that are no more need no draining."""
        for node_id in [node_id for node_id, drain in self.nodes.items() if node_id not in alive and drain.ended]:
            del self.nodes[node_id]
            self._tasks.pop(node_id, None)

    def _begin(self, drain: NodeDrain) -> NodeDrain:
        self.nodes[drain.node_id] = drain
        for pool in self._pools.values():
            pool.closed.add(drain.node_id)
        self._run_on(drain)
        return drain

    def _run_on(self, drain: NodeDrain) -> None:
        self._tasks[drain.node_id] = asyncio.get_running_loop().create_task(
            self._run(drain), name=f"registry.drain {drain.node_id}"
        )

    async def _keep(self) -> None:
        rows = [
            {"node_id": d.node_id, "by": d.by, "deadline": d.deadline, "force": d.force, "began": d.began}
            for d in self.nodes.values()
        ]
        await self._cluster.keep_note(NOTE, json.dumps(rows))

    def _hosts(self, node_id: str) -> list[tuple[HostPool, PooledHost]]:
        pools = (self._pools["sessions"], self._pools["agents"])
        return [(pool, host) for pool in pools for host in pool.hosts.values() if host.node_id == node_id]

    async def _run(self, drain: NodeDrain) -> None:
        while drain.ended is None:
            try:
                await self._round(drain)
            except Exception as error:  # noqa: BLE001  the cluster did not answer, say: it is told, and tried again
                drain.errors["cluster"] = noted(error, f"draining {drain.node_id}").to_data()
            await asyncio.sleep(ROUND_S)

    async def _round(self, drain: NodeDrain) -> None:
        hosts = self._hosts(drain.node_id)
        if not hosts and not any(pool.starting_on(drain.node_id) for pool in self._pools.values()):
            drain.running, drain.pinned, drain.sessions = [], [], []
            drain.ended = time.time()
            return
        left = [await self._look(drain, pool, host) for pool, host in hosts]
        drain.running = [name for one in left for name in one["running"]]
        drain.pinned = [name for one in left for name in one["pinned"]]
        drain.sessions = [name for one in left for name in one["sessions"]]
        if drain.overdue and drain.force:
            drain.cancelled += [name for one in left for name in (*one["running"], *one["pinned"])]
            await asyncio.gather(*(self._end(drain, host) for _, host in hosts))

    async def _look(self, drain: NodeDrain, pool: HostPool, host: PooledHost) -> dict[str, list[str]]:
        """Let go of what is idle on a host; an empty one is ended."""
        left: dict[str, list[str]] = {"running": [], "pinned": [], "sessions": []}
        peer = self._cluster.peer(host.name)
        try:
            if pool.kind == "sessions":
                handed, busy = await peer.call("hand_over", timeout_s=ASK_S)
                drain.handed_over += len(handed)
                left["sessions"] = list(busy)
            else:
                moved, running, pinned = await peer.call("let_go", timeout_s=ASK_S, group="store")
                drain.moved += moved
                left["running"] = [str(Stream(*stream)) for stream in running]
                left["pinned"] = [str(Stream(*stream)) for stream in pinned]
        except KimiRayError as error:
            # A host that died needs no draining, one that is silent is asked again: the registry looks after both.
            if not is_lost(error.code):
                drain.errors[host.name] = error.to_data()
            return left
        if any(left.values()):
            self._empty_since.pop(host.name, None)
        elif time.monotonic() - self._empty_since.setdefault(host.name, time.monotonic()) >= SETTLED_S:
            await self._end(drain, host)
        return left

    async def _end(self, drain: NodeDrain, host: PooledHost) -> None:
        self._empty_since.pop(host.name, None)
        for failure in await self._stop(host.name):
            drain.errors[host.name] = failure
        for pool in self._pools.values():
            pool.drop(host.name)
        drain.stopped.append(host.name)


class Leavers:
    """Which agents of a host may leave it: those that nobody has had to do with for a while.

    An agent whose host is asked for something is about to be asked for more: a session that is just resumed, a rollout
    whose prompt is on its way.
    """

    def __init__(self, *, workspace_shared: bool) -> None:
        self._workspace_shared = workspace_shared
        self._touched: dict[Stream, float] = {}

    def touch(self, stream: Stream) -> None:
        """Somebody has to do with an agent."""
        self._touched[stream] = max(time.monotonic(), self._touched.get(stream, 0.0))

    def keep(self, streams: list[Stream], for_s: float) -> list[Stream]:
        """Somebody will have to do with these for so long; gives them back."""
        self._touched.update(dict.fromkeys(streams, time.monotonic() + for_s))
        return streams

    def forget(self, stream: Stream) -> None:
        """An agent is gone."""
        self._touched.pop(stream, None)

    async def leave(
        self,
        agents: Mapping[Stream, LiveAgent],
        opening: Collection[Stream],
        close: Callable[[Stream, bool], Awaitable[Ack]],
    ) -> tuple[int, list[Stream], list[Stream]]:
        """Close those that may leave.

        Args:
            agents: Those that live here.
            opening: Those that are being brought to life.
            close: Closes one; it takes nothing any more from the first step on.

        Returns:
            How many left, which still run, and which are idle and have their directory only here.
        """

        async def close_idle(stream: Stream) -> bool:
            # Between this look and the close nothing is awaited, so no prompt can come in between.
            agent = agents.get(stream)
            if agent is None or agent.busy or stream in opening:
                return agent is None
            return (await close(stream, False)).error is None

        leaving, running, pinned = self.split(agents)
        left = await asyncio.gather(*(close_idle(stream) for stream in leaving))
        kept = [stream for stream, gone in zip(leaving, left, strict=True) if not gone]
        return len(leaving) - len(kept), [*running, *kept, *opening], pinned

    def split(self, agents: Mapping[Stream, LiveAgent]) -> tuple[list[Stream], list[Stream], list[Stream]]:
        """``(leaving, running, pinned)``; one that was touched just now counts as running."""
        since = time.monotonic() - UNTOUCHED_S
        settled = (stream for stream, agent in agents.items() if not agent.busy and _is_durable(agent))
        quiet = {stream for stream in settled if self._touched.get(stream, 0.0) <= since}
        pinned = [stream for stream in agents if stream in quiet and self._is_pinned(agents[stream])]
        leaving = [stream for stream in agents if stream in quiet and stream not in pinned]
        return leaving, [stream for stream in agents if stream not in quiet], pinned

    def _is_pinned(self, agent: LiveAgent) -> bool:
        """Whether its directory is only here."""
        workdir = agent.spec.workdir
        if workdir is None or workdir.kind == "none" or agent.workdir_path is None:
            return False
        return workdir.kind != "shared" or not self._workspace_shared


def _is_durable(agent: LiveAgent) -> bool:
    """Whether nobody can wait for a flush of its log."""
    return agent.journal.durable_seq >= agent.journal.log.next_seq
