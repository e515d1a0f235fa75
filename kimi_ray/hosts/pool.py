"""Which host takes the next session or agent, and when another host is started.

The rules, in this order: a place is not waited for while some host is below its soft limit, but that of a burst on a
young pool (beyond ``YOUNG_LOAD`` on each host) waits for hosts on their way as long as a start takes (``SPREAD_S``), as
agents do not move afterwards; the emptiest host wins, so everybody has a process to itself until the pool is full; the
pool grows behind the callers' backs; a hard limit (``max_agents_per_host``) is kept by starting hosts beyond the pool's
size; ``dedicated`` is a host of one's own.
Counts are the pool's own: actors that ask for no CPU are not spread by Ray.

A warm process keeps the code it has imported, so a host belongs to one fingerprint: it takes that of the first agent
with tools of the user's and from then on takes only agents of the same, and those that need no such code. An idle host
of another fingerprint is stopped to make room. Hosts on nodes that are being drained take nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.hosts.ports import Cluster, HostEnvironment, NodeInfo
from kimi_ray.ids import new_ulid

PoolKind = Literal["agents", "sessions"]

DEDICATED_MARK = "-own"
"""End of a dedicated host's name: a registry that comes back knows it by that."""

STARTS_PER_NODE = 2
"""Hosts that start at once on one node: a start costs about a second of CPU."""

SHORT_ID = 8
"""So much of a node's id may stand for it."""

AGENT_HOSTS_PER_SESSION_HOST = 8
START_ATTEMPTS = 3

YOUNG_LOAD = 16
"""So many come to a host at once, also while others are on their way: a few sessions wait for nobody."""

SPREAD_S = 3.0
"""A start is waited for so long from its beginning, seconds, for the sake of an even load: a process that imports the
runtime takes one to two (m). One that takes longer is not worth it: its host gets what comes later."""


@dataclass(eq=False, slots=True)
class PooledHost:
    """A host that answers. ``load`` is what was placed and not yet released, ``taken`` what was ever placed.

    ``fingerprint`` is of the user's code that was loaded there (empty: none so far), ``environment`` names what its
    process runs in.
    """

    name: str
    node_id: str
    dedicated: bool
    pid: int | None = None
    load: int = 0
    taken: int = 0
    fingerprint: str = ""
    environment: str = ""


def _keep(_name: str) -> None:
    """Nobody stops what was evicted."""


@dataclass(slots=True)
class _Start:
    """A host on its way."""

    node_id: str
    dedicated: bool
    task: asyncio.Task[PooledHost]
    began: float


@dataclass(slots=True)
class HostPool:
    """The hosts of one kind.

    ``nodes`` gives the machines that take work, best known state; ``closed`` are those that do no more. What the
    user's code needs around it is ``environment``; ``evict`` is told of hosts that made room and are to be stopped.
    """

    kind: PoolKind
    cluster: Cluster
    config: RuntimeConfig
    nodes: Callable[[], list[NodeInfo]]
    reread_nodes: Callable[[], Awaitable[None]]
    environment: Callable[[], HostEnvironment] = HostEnvironment
    evict: Callable[[str], object] = _keep
    closed: set[str] = field(default_factory=set[str])
    hosts: dict[str, PooledHost] = field(default_factory=dict[str, PooledHost])
    last_failure: KimiRayError | None = None
    _starts: list[_Start] = field(default_factory=list[_Start])
    _gates: dict[str, asyncio.Semaphore] = field(default_factory=dict[str, asyncio.Semaphore])
    _waiting: int = 0
    _held_back: int = 0
    _closed: bool = False
    _wanted: str = ""

    def adopt(self, name: str, node_id: str, load: int, pid: int | None) -> PooledHost:
        """Take in a host that was there before this registry."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = PooledHost(name, node_id, name.endswith(DEDICATED_MARK))
        host.load, host.pid = load, pid
        return host

    def accepts(self, host: PooledHost, fingerprint: str) -> bool:
        """Whether an agent that needs this code may live on a host."""
        if not fingerprint:
            return True
        return host.fingerprint in ("", fingerprint) and host.environment == self.environment().digest

    def drop(self, name: str) -> PooledHost | None:
        """Forget a host."""
        return self.hosts.pop(name, None)

    async def take(
        self, *, dedicated: bool, node_id: str | None = None, fingerprint: str = "", near: str | None = None
    ) -> PooledHost:
        """A place for one more; counts it. ``near`` is a node that is tried first, if none is wanted and it is there.

        Raises:
            RuntimeFault: ``infra.unschedulable`` when the wanted node is not there; ``infra.node_draining`` when it
                takes nobody any more; why a host did not start.
        """
        if node_id is None and any(node.node_id == near for node in self.nodes()):
            # Why it cannot be there is in `last_failure`: anywhere is better than nowhere.
            with suppress(RuntimeFault):
                return await self.take(dedicated=dedicated, node_id=near, fingerprint=fingerprint)
        spread_until = time.monotonic() + SPREAD_S
        while True:
            if node_id in self.closed:
                raise RuntimeFault(
                    f"the node {node_id} is being drained, and what was asked for can only be there",
                    code="infra.node_draining",
                    hint="set workspace_shared = true if the nodes share working directories, or work on another node",
                    details={"node_id": node_id},
                )
            if dedicated:
                start = self._start(self._pick_node(node_id), dedicated=True, fixed=node_id is not None)
                host = await asyncio.shield(start)
                if host.node_id in self.closed:
                    continue  # it was closed meanwhile, and will see to it that this host ends
            else:
                host = self._best(node_id, fingerprint)
                if host is not None and host.load >= YOUNG_LOAD and (soon := self._soon(node_id, spread_until)):
                    if not await self._until_one_is_up(soon, node_id):
                        spread_until = 0.0  # it did not come up, or not in time
                    continue
                host = host or await self._wait_for_start(node_id, fingerprint)
            if host is not None:
                host.load += 1
                host.taken += 1
                host.fingerprint = fingerprint or host.fingerprint
                if not dedicated:
                    self.grow(fingerprint)
                return host

    def release(self, name: str, count: int) -> PooledHost | None:
        """Let go of places; gives the host back when it is dedicated and now empty (the caller stops it)."""
        host = self.hosts.get(name)
        if host is None:
            return None
        host.load = max(0, host.load - count)
        return self.hosts.pop(name) if host.dedicated and host.load == 0 else None

    def grow(self, fingerprint: str | None = None) -> None:
        """Start hosts in the background until one stands empty or the pool has its size.

        ``fingerprint``: one that an agent which needs this code could use; None is the one wanted last.
        """
        self._wanted = wanted = self._wanted if fingerprint is None else fingerprint
        idle = sum(host.load == 0 and self.accepts(host, wanted) for host in self._shared()) + len(self._coming())
        while idle == 0 and (self._has_room() or self._make_room(wanted, None)):
            node = self._growing_node()
            if node is None:
                return
            self._start(node, dedicated=False)
            idle += 1

    def size(self) -> int:
        """How many shared hosts the pool wants at most."""
        wanted = sum(self._per_node(node) for node in self._usable())
        return wanted if self.kind == "agents" else max(1, -(-wanted // AGENT_HOSTS_PER_SESSION_HOST))

    def starting_on(self, node_id: str) -> bool:
        """Whether a host is on its way there."""
        return any(start.node_id == node_id for start in self._starts)

    async def close(self) -> None:
        """Stop starting hosts; those on their way are let go of and told by name in the cluster's listing."""
        self._closed = True
        tasks = [start.task for start in self._starts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _usable(self) -> list[NodeInfo]:
        return usable_nodes(self.nodes())

    def _shared(self, node_id: str | None = None) -> list[PooledHost]:
        open_hosts = (host for host in self.hosts.values() if host.node_id not in self.closed)
        return [h for h in open_hosts if not h.dedicated and node_id in (None, h.node_id)]

    def _best(self, node_id: str | None, fingerprint: str) -> PooledHost | None:
        """The emptiest host that may take one more without waiting, or None."""
        candidates = self._below_hard_limit(node_id, fingerprint)
        if not candidates:
            return None
        best = min(candidates, key=_emptiest)
        if best.load < self.config.agents_per_host:
            return best
        # Beyond the soft limit a host that can still be started is better than a fuller one.
        may_grow = self._has_room() or self._coming(node_id) or self._useless(fingerprint, node_id)
        return None if may_grow else best

    def _below_hard_limit(self, node_id: str | None, fingerprint: str) -> list[PooledHost]:
        hard = self.config.max_agents_per_host
        able = (host for host in self._shared(node_id) if self.accepts(host, fingerprint))
        return [host for host in able if hard is None or host.load < hard]

    def _coming(self, node_id: str | None = None) -> list[_Start]:
        open_starts = (start for start in self._starts if start.node_id not in self.closed)
        return [s for s in open_starts if not s.dedicated and node_id in (None, s.node_id)]

    def _has_room(self) -> bool:
        return len(self._shared()) + len(self._coming()) < self.size()

    def _useless(self, fingerprint: str, node_id: str | None) -> list[PooledHost]:
        """Idle hosts that hold other code than is wanted now."""
        return [h for h in self._shared(node_id) if h.load == 0 and not self.accepts(h, fingerprint)]

    def _make_room(self, fingerprint: str, node_id: str | None) -> bool:
        """Have an idle host of another fingerprint stopped, so that a fresh one can take its place."""
        useless = self._useless(fingerprint, node_id)
        if not useless:
            return False
        del self.hosts[useless[0].name]
        self.evict(useless[0].name)
        return True

    def _soon(self, node_id: str | None, until: float) -> dict[asyncio.Task[PooledHost], float]:
        """The hosts on their way that are worth waiting for, and how long, seconds; not beyond a moment."""
        now = time.monotonic()
        left = {start.task: min(until, start.began + SPREAD_S) - now for start in self._coming(node_id)}
        return {task: left_s for task, left_s in left.items() if left_s > 0}

    async def _until_one_is_up(self, soon: dict[asyncio.Task[PooledHost], float], node_id: str | None) -> bool:
        """Whether one came up in time; more are started when many wait."""
        self._held_back += 1
        try:
            coming = len(self._coming(node_id))
            if self._held_back > coming * YOUNG_LOAD and coming < self._start_limit(node_id) and self._has_room():
                self._start(self._pick_node(node_id), dedicated=False, fixed=node_id is not None)
            done, _ = await asyncio.wait(soon, timeout=max(soon.values()), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._held_back -= 1
        return any(not task.cancelled() and task.exception() is None for task in done)

    async def _wait_for_start(self, node_id: str | None, fingerprint: str) -> PooledHost | None:
        """Wait until some host is up, starting as many as there are callers in here; a full host if none can start."""
        self._waiting += 1
        try:
            while len(self._coming(node_id)) < min(self._waiting, self._start_limit(node_id)):
                room = self._has_room() or self._make_room(fingerprint, node_id)
                if self._coming(node_id) and not room:
                    break
                self._start(self._pick_node(node_id), dedicated=False, fixed=node_id is not None)
            tasks = [start.task for start in self._coming(node_id)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting -= 1
        for task in done:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                fuller = self._below_hard_limit(node_id, fingerprint)
                if not fuller:
                    raise error
                return min(fuller, key=_emptiest)
        return None

    def _start_limit(self, node_id: str | None) -> int:
        return STARTS_PER_NODE * (1 if node_id is not None else max(1, len(self._usable())))

    def _pick_node(self, node_id: str | None) -> str:
        """The wanted node if it is alive, else the one with most room."""
        nodes = self._usable()
        if node_id is not None:
            return node_id
        if not nodes:
            raise RuntimeFault("no node of the cluster is alive", code="infra.unschedulable", retryable=True)
        return min(nodes, key=lambda node: (self._on(node.node_id) / self._per_node(node), node.node_id)).node_id

    def _growing_node(self) -> str | None:
        open_nodes = [
            node for node in self._usable() if self.kind == "sessions" or self._on(node.node_id) < self._per_node(node)
        ]
        ready = [n for n in open_nodes if sum(s.node_id == n.node_id for s in self._starts) < STARTS_PER_NODE]
        if not ready:
            return None
        return min(ready, key=lambda node: (self._on(node.node_id) / self._per_node(node), node.node_id)).node_id

    def _on(self, node_id: str) -> int:
        return sum(h.node_id == node_id for h in self.hosts.values()) + sum(s.node_id == node_id for s in self._starts)

    def _per_node(self, node: NodeInfo) -> int:
        return self.config.hosts_per_node or max(1, int(node.cpus))

    def _start(self, node_id: str, *, dedicated: bool, fixed: bool = False) -> asyncio.Task[PooledHost]:
        name = self._new_name(dedicated)
        task = asyncio.get_running_loop().create_task(self._started(name, node_id, dedicated, fixed), name=name)
        entry = _Start(node_id, dedicated, task, time.monotonic())
        self._starts.append(entry)
        task.add_done_callback(lambda _: self._start_ended(entry))
        return task

    async def _started(self, name: str, node_id: str, dedicated: bool, fixed: bool) -> PooledHost:
        """Start a host; another node is tried when the first cannot, unless the caller's wish was that node."""
        tried: set[str] = set()
        while True:
            environment = self.environment()
            try:
                async with self._gates.setdefault(node_id, asyncio.Semaphore(STARTS_PER_NODE)):
                    listing = await self.cluster.start_host(
                        self.kind, name, node_id=node_id, dedicated=dedicated, environment=environment
                    )
            except RuntimeFault:
                tried.add(node_id)
                await self.reread_nodes()
                others = [node for node in self._usable() if node.node_id not in tried]
                if fixed or not others or len(tried) >= START_ATTEMPTS:
                    raise
                node_id = min(others, key=lambda node: self._on(node.node_id)).node_id
                name = self._new_name(dedicated)
                continue
            host = PooledHost(name, listing.node_id or node_id, dedicated, listing.pid, environment=environment.digest)
            self.hosts[name] = host
            return host

    def _new_name(self, dedicated: bool) -> str:
        return f"{self.cluster.home_id}/{self.kind}-{new_ulid()}{DEDICATED_MARK if dedicated else ''}"

    def _start_ended(self, start: _Start) -> None:
        """A background start that failed is told by ``status``; a caller that waits for it gets the error itself."""
        self._starts.remove(start)
        error = None if start.task.cancelled() else start.task.exception()
        if isinstance(error, KimiRayError):
            self.last_failure = error
        elif not self._closed and any(host.load for host in self.hosts.values()):
            self.grow()


def _emptiest(host: PooledHost) -> tuple[int, bool, str]:
    """The order of choice: of equally loaded hosts those go first that hold code already, so fresh ones stay fresh."""
    return host.load, not host.fingerprint, host.name


def usable_nodes(nodes: Iterable[NodeInfo]) -> list[NodeInfo]:
    """Where hosts may go: living nodes, without the head unless it is alone."""
    alive = [node for node in nodes if node.alive]
    return [node for node in alive if not node.is_head] or alive


def named_node(nodes: Iterable[NodeInfo], name: str) -> NodeInfo:
    """The living node of an id, of a unique beginning of one, or of an address.

    Raises:
        RuntimeFault: ``infra.unknown_node`` {nodes}.
    """
    alive = [node for node in nodes if node.alive]
    found = [node for node in alive if node.node_id == name] or [
        node for node in alive if node.address == name or (len(name) >= SHORT_ID and node.node_id.startswith(name))
    ]
    if len(found) == 1:
        return found[0]
    raise RuntimeFault(
        f"{name!r} names {len(found) or 'no'} living nodes",
        code="infra.unknown_node",
        hint="kimi-ray status lists the nodes; give an id or a unique beginning of it",
        details={"nodes": [{"node_id": node.node_id, "address": node.address} for node in found or alive]},
    )
