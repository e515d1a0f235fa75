"""``Registry``: who lives where, who drives, and when the runtime ends.

Everything here is soft. A registry that comes back asks the hosts that exist by name, all at once; drivers come back
with their next ``renew``; sessions are told by the hosts that hold them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, ClassVar

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.hosts.boundary import unexpected
from kimi_ray.hosts.draining import Drains
from kimi_ray.hosts.driver_leases import DriverLeases
from kimi_ray.hosts.limiter_ledger import LimiterLedger
from kimi_ray.hosts.limiter_words import PlacesWanted, Portion
from kimi_ray.hosts.place_count import PlaceCount
from kimi_ray.hosts.pool import HostPool, PooledHost, named_node
from kimi_ray.hosts.ports import Cluster, Group, HostListing, NodeInfo, store_name
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.settings import Isolation

ASK_BOUND_S = 2.0
"""How long a host has for a ping before it counts as silent."""

LOOKS = 3
"""Silent hosts are asked so often before they are given up: a busy one is not a dead one."""

SHUNNED_S = 60.0
"""A node with a host that fell silent gets nothing new for so long, while there are others: Ray takes a minute to
believe that a frozen machine is gone."""

ROUND_S = 5.0
"""Nodes and the cluster's listing are read again this often."""

STORE_BOUND_S = 30.0
"""How long the registry's start waits for the stores."""


class Registry:
    """One per runtime. See ``PORT`` for what callers may use."""

    PORT: ClassVar[dict[str, Group]] = {
        "hello": "default",
        "renew": "control",
        "goodbye": "control",
        "place_session": "default",
        "find_session": "control",
        "hold_session": "control",
        "forget_session": "control",
        "place_agents": "default",
        "released": "control",
        "report_lost": "control",
        "share_places": "control",
        "leave_places": "control",
        "limiter_changes": "control",
        "drain_node": "wait",
        "undrain_node": "control",
        "status": "control",
        "shutdown": "default",
        "ping": "control",
    }

    def __init__(self, name: str, cluster: Cluster, config: RuntimeConfig) -> None:
        self._name = name
        self._cluster = cluster
        self._config = config
        self._nodes: list[NodeInfo] = []
        self._drivers = DriverLeases(config)
        closed: set[str] = set()
        self._pools = {
            kind: HostPool(
                kind,
                cluster,
                config,
                self._open_nodes,
                self._reread_nodes,
                environment=lambda: self._drivers.environment,
                evict=lambda name: self._spawn(self._stop(name)),
                closed=closed,
            )
            for kind in ("agents", "sessions")
        }
        self._place_count = PlaceCount(self._pools["agents"], self._ask, partial(self._let_go, "agents"))
        self._drains = Drains(cluster, dict(self._pools), self._stop)
        self._limiters = LimiterLedger()
        self._sessions: dict[str, str] = {}
        self._placing: dict[str, asyncio.Task[str]] = {}
        self._began = time.time()
        self._ending: asyncio.Task[list[dict[str, Any]]] | None = None
        self._doubted: dict[str, asyncio.Task[bool]] = {}
        self._silent_nodes: dict[str, float] = {}
        self._starting_stores: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, KimiRayError] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find what is there already, see that the stores run, warm the pools, watch."""
        await self._reread_nodes()
        self._start_stores(set())
        await self._recover()
        await self._drains.recover({node.node_id for node in self._nodes if node.alive})
        if self._starting_stores:
            # A store that cannot be placed now must not keep the registry from telling so.
            await asyncio.wait(self._starting_stores.values(), timeout=STORE_BOUND_S)
        self._drivers.hear()
        self._pools["sessions"].grow()
        if self._config.isolation == "shared":
            self._pools["agents"].grow()
        self._watch = asyncio.create_task(self._watch_all(), name="registry.watch")

    async def close(self) -> None:
        """Stop watching and starting; hosts live on. Idempotent."""
        own = asyncio.current_task()
        tasks = [task for task in (self._watch, *self._tasks) if task is not None and task is not own]
        for task in tasks:
            task.cancel()
        closing = (self._drains.close(), *(pool.close() for pool in self._pools.values()))
        await asyncio.gather(*tasks, *closing, return_exceptions=True)

    async def ping(self) -> dict[str, Any]:
        """Proof of life."""
        return {
            "kind": "registry",
            "agents": sum(host.load for host in self._pools["agents"].hosts.values()),
            "sessions": sorted(self._sessions),
            "node_id": self._cluster.node_id,
            "pid": os.getpid(),
        }

    # -- drivers ----------------------------------------------------------------------------------------------------

    async def hello(self, info: dict[str, Any]) -> dict[str, Any]:
        """A driver comes.

        Args:
            info: Its ``fingerprint`` (settings as JSON), the ``versions`` of its program, its resolved
                ``runtime_env`` and a digest of that as ``code``, and who it is (``pid``, ``host``).

        Returns:
            ``{lease_id, renew_s, home_id, home}``.

        Raises:
            RuntimeFault: ``runtime.mismatch`` {settings: {name: {mine, theirs}}}; ``runtime.ending``.
        """
        self._refuse_when_ending()
        self._drivers.check(info)
        lease_id = self._drivers.begin(info)
        return {
            "lease_id": lease_id,
            "renew_s": self._config.lease_timeout_s / 4,
            "home_id": self._cluster.home_id,
            "home": self._config.home,
        }

    async def renew(self, lease_id: str, info: dict[str, Any]) -> None:
        """A driver is still there. A lease that this registry does not know is taken in: it may have restarted."""
        self._refuse_when_ending()
        self._drivers.renew(lease_id, info)

    async def goodbye(self, lease_id: str) -> None:
        """A driver goes. Idempotent."""
        self._drivers.end(lease_id)

    # -- places -----------------------------------------------------------------------------------------------------

    async def place_session(self, session_id: str, isolation: Isolation | None = None) -> str:
        """The name of the session host to use: where the session lives, else a new place.

        The caller activates the session there; a place that is not used is given back with ``forget_session``.

        Raises:
            RuntimeFault: ``infra.unschedulable``, ``infra.timeout``, ``runtime.ending``.
        """
        self._refuse_when_ending()
        while (known := self._sessions.get(session_id)) is not None:
            # Opening a session takes long: whoever waits for it would find out late that the host is silent.
            if known not in self._pools["sessions"].hosts or not await self.report_lost(known):
                return known
        placing = self._placing.get(session_id)
        if placing is None:
            placing = self._placing[session_id] = self._spawn(self._place_session(session_id, isolation))
            placing.add_done_callback(lambda _: self._placing.pop(session_id, None))
        return await asyncio.shield(placing)

    async def find_session(self, session_id: str) -> str | None:
        """The session host that holds a session (or was chosen to), or None."""
        return self._sessions.get(session_id)

    async def hold_session(self, session_id: str, host: str) -> str:
        """The session host that a session belongs to: the one named already, else ``host``, which is about to open it.

        A caller may reach a host with a name that was forgotten meanwhile: without this two hosts could hold one id.
        """
        named = self._sessions.get(session_id)
        if named is None:
            named = self._sessions[session_id] = host
            known = self._pools["sessions"].hosts.get(host)
            if known is not None:
                known.load += 1
        return named

    async def forget_session(self, session_id: str, host: str | None = None) -> None:
        """A session is closed, or did not come to life; with ``host`` only if it is named for it. Idempotent."""
        named = self._sessions.get(session_id)
        if named is not None and host in (None, named):
            del self._sessions[session_id]
            self._let_go("sessions", named, 1)

    async def place_agents(self, wishes: list[PlaceAgent]) -> list[str]:
        """An agent host for each wish, in order. Each place counts until it is ``released`` or its host is lost.

        Raises:
            RuntimeFault: ``infra.unschedulable``, ``infra.timeout``, ``runtime.ending``; then none is taken.
        """
        self._refuse_when_ending()
        pool = self._pools["agents"]
        if any(wish.near is not None for wish in wishes):
            await self._reread_nodes()  # a node that has just gone must not be waited for
        takes = (
            pool.take(
                dedicated=self._is_dedicated(w.isolation), node_id=w.node_id, fingerprint=w.fingerprint, near=w.near
            )
            for w in wishes
        )
        found = await asyncio.gather(*takes, return_exceptions=True)
        hosts = [host for host in found if isinstance(host, PooledHost)]
        for failure in found:
            if isinstance(failure, BaseException):
                for host in hosts:
                    self._let_go("agents", host.name, 1)
                raise failure
        return [host.name for host in hosts]

    async def released(self, host: str, count: int = 1) -> None:
        """``count`` agents of a host are gone. A dedicated host that is empty then is stopped."""
        self._let_go("agents", host, count)

    async def report_lost(self, host: str) -> bool:
        """Somebody could not reach a host: look, and forget it when it is gone. Idempotent.

        Returns:
            Whether the host is gone for good.
        """
        if not any(host in pool.hosts for pool in self._pools.values()):
            return True
        doubt = self._doubted.get(host)
        if doubt is None:
            doubt = self._doubted[host] = self._spawn(self._look_after(host))
            doubt.add_done_callback(lambda _: self._doubted.pop(host, None))
        return await asyncio.shield(doubt)

    # -- places at model servers ------------------------------------------------------------------------------------

    async def share_places(self, holder: str, wishes: list[PlacesWanted]) -> list[Portion]:
        """A process's portions of the places at model servers, against its report (``LimiterLedger.exchange``)."""
        return self._limiters.exchange(holder, wishes)

    async def leave_places(self, holder: str) -> None:
        """A process needs no more places. Idempotent."""
        self._limiters.leave(holder)

    async def limiter_changes(self, since: int) -> tuple[int, list[dict[str, Any]]]:
        """What the limits did (``LimiterLedger.changes``)."""
        return self._limiters.changes(since)

    # -- nodes ------------------------------------------------------------------------------------------------------

    async def drain_node(self, node: str, deadline_s: float | None = None, force: bool = False) -> dict[str, Any]:
        """Empty a node: nothing new comes there, what is idle leaves at once and the rest when its work is done, then
        its hosts end. It stays drained, also when this registry restarts.

        Args:
            node: Its id, a unique beginning of that (8 characters or more), or its address.
            deadline_s: After so long what still runs is told, or cancelled with ``force``; None waits for all.

        Returns:
            How it stands: ``{node_id, done, moved, handed_over, stopped, running, pinned, sessions, cancelled,
            errors, ...}``, the four lists in the middle of agents and sessions that are still there. Where ``done`` is
            false the drain goes on behind.

        Raises:
            RuntimeFault: ``infra.unknown_node`` {nodes}; ``infra.last_node`` when nobody else could take the work.
        """
        self._refuse_when_ending()
        await self._reread_nodes()
        found = named_node(self._nodes, node)
        if not self._others(found.node_id):
            raise RuntimeFault(
                f"the node {found.node_id} at {found.address} is the last one that takes work",
                code="infra.last_node",
                hint="add a node first, or end the runtime with `kimi-ray down`",
                details={"node_id": found.node_id},
            )
        deadline = None if deadline_s is None else time.time() + deadline_s
        drain = await self._drains.begin(found.node_id, "request", deadline, force)
        await self._drains.wait(drain)
        return drain.report()

    async def undrain_node(self, node: str) -> None:
        """Let a drained node take work again. Idempotent.

        Raises:
            RuntimeFault: ``infra.unknown_node`` {nodes}.
        """
        await self._reread_nodes()
        await self._drains.undo(named_node(self._nodes, node).node_id)

    def _others(self, node_id: str) -> list[NodeInfo]:
        return [n for n in self._nodes if n.alive and n.node_id != node_id and n.node_id not in self._drains.nodes]

    async def _follow_cluster(self) -> None:
        """Nodes that the cluster itself is about to take away are drained while there is time."""
        self._drains.gone({node.node_id for node in self._nodes if node.alive})
        for node in self._nodes:
            if node.alive and node.draining and node.node_id not in self._drains.nodes and self._others(node.node_id):
                await self._drains.begin(node.node_id, "cluster", node.drain_deadline, False)

    # -- the whole --------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """What ``kimi-ray status`` shows, as JSON."""
        hosts = [
            {
                "name": host.name,
                "kind": pool.kind,
                "node_id": host.node_id,
                "pid": host.pid,
                "load": host.load,
                "dedicated": host.dedicated,
                "fingerprint": host.fingerprint,
                "environment": host.environment,
                "draining": host.node_id in self._drains.nodes,
                "sessions": sorted(s for s, name in self._sessions.items() if name == host.name),
            }
            for pool in self._pools.values()
            for host in pool.hosts.values()
        ]
        failures = {name: error.to_data() for name, error in self._failures.items()}
        failures |= {k: p.last_failure.to_data() for k, p in self._pools.items() if p.last_failure is not None}
        return {
            "home_id": self._cluster.home_id,
            "home": self._config.home,
            "began": self._began,
            "ending": self._ending is not None,
            "leases": self._drivers.report(),
            "hosts": hosts,
            "stores": [store_name(self._cluster.home_id, shard) for shard in range(self._config.shards)],
            "nodes": [
                {
                    "node_id": n.node_id,
                    "address": n.address,
                    "cpus": n.cpus,
                    "is_head": n.is_head,
                    "has_storage": n.has_storage,
                    "alive": n.alive,
                    "draining": drain.report() if (drain := self._drains.nodes.get(n.node_id)) is not None else None,
                }
                for n in self._nodes
            ],
            "limits": self._limiters.report(),
            "failures": failures,
        }

    async def shutdown(self) -> list[dict[str, Any]]:
        """End the runtime: hosts flush and stop, then the stores; this registry ends right after its answer.

        Returns:
            What could not be closed as it should, as errors' data (each with ``details.host``); it was ended anyway.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_all(), name="registry.end")
        failures = await asyncio.shield(self._ending)
        self._spawn(self._end_self())
        return failures

    async def _place_session(self, session_id: str, isolation: Isolation | None) -> str:
        host = await self._pools["sessions"].take(dedicated=self._is_dedicated(isolation))
        named = self._sessions.get(session_id)
        if named is not None:
            self._let_go("sessions", host.name, 1)  # a host took it (`hold_session`) meanwhile, where it counts
            return named
        self._sessions[session_id] = host.name
        return host.name

    def _refuse_when_ending(self) -> None:
        if self._ending is not None:
            raise RuntimeFault(
                "this runtime is just ending",
                code="runtime.ending",
                hint="connect again in a few seconds",
                retryable=True,
            )

    def _is_dedicated(self, isolation: Isolation | None) -> bool:
        return (isolation or self._config.isolation) == "dedicated"

    def _let_go(self, kind: str, host: str, count: int) -> None:
        pool = self._pools["sessions" if kind == "sessions" else "agents"]
        empty = pool.release(host, count)
        if empty is not None:
            self._spawn(self._stop(empty.name))

    def _open_nodes(self) -> list[NodeInfo]:
        """Living nodes that take work; those with a host that fell silent only when there are no others."""
        now = time.monotonic()
        shunned = {node for node, since in self._silent_nodes.items() if now - since < SHUNNED_S}
        open_nodes = [node for node in self._nodes if node.alive and node.node_id not in self._drains.nodes]
        answering = [node for node in open_nodes if node.node_id not in shunned]
        return answering or open_nodes

    async def _reread_nodes(self) -> None:
        self._nodes = await self._cluster.nodes()

    def _start_stores(self, there: set[str]) -> None:
        """Start the stores that do not exist and are not on their way."""
        for shard in range(self._config.shards):
            name = store_name(self._cluster.home_id, shard)
            if name not in there and name not in self._starting_stores:
                self._starting_stores[name] = self._spawn(self._start_store(name))

    async def _start_store(self, name: str) -> None:
        try:
            await self._cluster.start_host("store", name)
            self._failures.pop(name, None)
        except KimiRayError as error:
            self._failures[name] = error
        finally:
            self._starting_stores.pop(name, None)

    async def _recover(self) -> None:
        """Ask all hosts at once; silent ones are looked after behind the back of whoever waits for this start."""
        listed = [host for host in await self._cluster.list_hosts() if host.kind in self._pools]
        await asyncio.gather(*(self._adopt(host) for host in listed))

    async def _adopt(self, listing: HostListing) -> None:
        pool = self._pools["sessions" if listing.kind == "sessions" else "agents"]
        try:
            told = await self._ask(listing.name)
        except KimiRayError as error:
            if error.code == "infra.actor_died":
                return
            pool.adopt(listing.name, listing.node_id or "", self._config.agents_per_host, listing.pid)
            self._spawn(self._look_after(listing.name))
            return
        self._take_in(pool, listing.name, told)

    def _take_in(self, pool: HostPool, name: str, told: dict[str, Any]) -> None:
        sessions: list[str] = told.get("sessions") or []
        load = len(sessions) if pool.kind == "sessions" else int(told.get("agents") or 0)
        host = pool.adopt(name, str(told.get("node_id") or ""), load, told.get("pid"))
        host.fingerprint = str(told.get("fingerprint") or host.fingerprint)
        host.environment = str(told.get("environment") or "")
        if pool.kind == "sessions":
            for session_id in sessions:
                self._sessions.setdefault(session_id, name)

    async def _ask(self, host: str) -> dict[str, Any]:
        return await self._cluster.peer(host).call("ping", timeout_s=ASK_BOUND_S, group="control")

    async def _look_after(self, host: str) -> bool:
        """Ask a host that was silent; drop it when it is dead or stays silent."""
        silent = False
        for _ in range(LOOKS):
            try:
                told = await self._ask(host)
            except KimiRayError as error:
                if error.code == "infra.actor_died":
                    break
                await self._reread_nodes()
                silent = True
                continue
            for pool in self._pools.values():
                if host in pool.hosts and pool.hosts[host].pid != told.get("pid"):
                    self._take_in(pool, host, told)
            return False
        if silent:
            self._doubt_node_of(host)
        self._drop(host)
        self._spawn(self._kill(host))
        return True

    def _doubt_node_of(self, host: str) -> None:
        """A silent host may mean a silent machine: ask its other hosts, and start nothing there meanwhile."""
        hosts = [known for pool in self._pools.values() for known in pool.hosts.values()]
        node_id = next((known.node_id for known in hosts if known.name == host), None)
        if node_id is None:
            return
        self._silent_nodes[node_id] = time.monotonic()
        others = [known.name for known in hosts if known.node_id == node_id and known.name != host]

        async def ask() -> None:
            lost = await asyncio.gather(*(self.report_lost(name) for name in others))
            if not all(lost):
                self._silent_nodes.pop(node_id, None)

        if others:
            self._spawn(ask())

    def _drop(self, host: str) -> None:
        lost = [pool.kind for pool in self._pools.values() if pool.drop(host) is not None]
        if "sessions" in lost and self._place_count.wanted():
            self._spawn(self._place_count.run())
        self._sessions = {s: name for s, name in self._sessions.items() if name != host}

    async def _kill(self, host: str) -> None:
        """A host that is given up must not come back as a twin."""
        try:
            await self._cluster.stop_host(host)
        except RuntimeFault as error:
            if error.code != "infra.actor_died":
                raise

    async def _stop(self, host: str) -> list[dict[str, Any]]:
        """Let a host flush and end it; what went wrong is given back, not raised. A dead host has nothing to flush."""
        failures: list[dict[str, Any]] = []
        try:
            await self._cluster.peer(host).call("close", timeout_s=self._config.close_timeout_s, group="control")
        except KimiRayError as error:
            if error.code != "infra.actor_died":
                failures.append(error.with_details(host=host).to_data())
        await self._kill(host)
        self._drop(host)
        return failures

    async def _end_all(self) -> list[dict[str, Any]]:
        """End what there is, whatever of it cannot be ended; gives what went wrong."""
        failures: list[dict[str, Any]] = []

        async def stop_one(name: str) -> None:
            try:
                failures.extend(await self._stop(name))
            except KimiRayError as error:
                failures.append(error.with_details(host=name).to_data())

        async def stop(names: Iterable[str]) -> None:
            await asyncio.gather(*map(stop_one, names))

        async def left() -> list[str]:
            try:
                return [host.name for host in await self._cluster.list_hosts() if host.kind in self._pools]
            except KimiRayError as error:
                failures.append(error.with_details(host=self._name).to_data())
                return []

        for kind in ("sessions", "agents"):
            pool = self._pools[kind]
            await pool.close()
            await stop(list(pool.hosts))
        await stop(await left())
        await stop([store_name(self._cluster.home_id, shard) for shard in range(self._config.shards)])
        return failures

    async def _end_self(self) -> None:
        await asyncio.sleep(0.05)  # the answer to shutdown leaves first
        await self.close()
        await self._cluster.stop_host(self._name)

    async def _watch_all(self) -> None:
        """Notice dead hosts and nodes; end the runtime when no driver was heard for the lease's time."""
        pause = min(ROUND_S, self._config.lease_timeout_s / 4)
        while self._ending is None:
            await asyncio.sleep(pause)
            if self._drivers.all_gone():
                self._spawn(self.shutdown())
                return
            try:
                await self._round()
            except KimiRayError as error:
                self._failures["watch"] = error
            except Exception as error:  # noqa: BLE001  told by `status`: without its watch a runtime would never end
                self._failures["watch"] = unexpected(error, "the registry's watch")

    async def _round(self) -> None:
        known = {name for pool in self._pools.values() for name in pool.hosts}
        self._nodes, listed = await asyncio.gather(self._cluster.nodes(), self._cluster.list_hosts())
        there = {host.name for host in listed}
        self._failures.pop("watch", None)
        for name in known - there:
            self._drop(name)
        if self._ending is None:
            self._start_stores(there)
            await self._follow_cluster()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
