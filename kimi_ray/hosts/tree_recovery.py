"""A session's tree after a loss: living agents are kept, accepted prompts run, parents hear of their children.

The document says what was under way (``session.in_flight``); the logs say the rest. One agent that cannot be brought
back is an entry in ``failures``: the rest of the tree goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.orphans import continued, going_on, run_so_far, stop_agents
from kimi_ray.hosts.stored_agents import read_agent, untold
from kimi_ray.hosts.swarm_words import SwarmSpec
from kimi_ray.ids import MAIN
from kimi_ray.session import InFlight, entry_of_log, in_flight
from kimi_ray.store.seam import ListedLog, Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession

_REVIVED_AT_ONCE = 16
_FENCED = ("session.fenced", "store.fenced")


class TreeRecovery:
    """What one live session remembers for the case that its host is lost, and does after it.

    Args:
        live: The session.
    """

    def __init__(self, live: LiveSession) -> None:
        self._live = live
        self.living: dict[str, str] = {}
        """Agents that an earlier host of this session left alive, with their hosts, until somebody needs them."""
        self.waiting: dict[str, str] = {}
        """Agents with accepted prompts whose model this session was not told how to reach, with its name."""
        self.failures: dict[str, KimiRayError] = {}
        """Why an agent could not be brought back."""
        self._agents: set[str] = set()
        self._runs: dict[str, str] = {}
        self._begun: set[str] = set()
        self._starting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._written: set[str] = set()
        self._reviving: asyncio.Task[Any] | None = None

    # -- in time ----------------------------------------------------------------------------------------------------

    async def remember_agent(self, agent_id: str) -> None:
        """An agent is spoken to directly: durable before the first prompt can be accepted."""
        if agent_id not in self._written:
            self._agents.add(agent_id)
            await self._write()
            self._written.add(agent_id)

    def is_addressed(self, agent_id: str) -> bool:
        """Whether somebody spoke to an agent directly in this life of the session."""
        return agent_id in self._agents

    async def remember_run(self, run_id: str, parent: str) -> None:
        """A swarm begins, or a subagent under its own id: durable before the child exists, resp. is spoken to."""
        if self._runs.get(run_id) != parent:
            self._runs[run_id] = parent
            await self._write()

    def has_begun(self, run_id: str) -> bool:
        """Whether a swarm of that name has begun in this life of the session."""
        return run_id in self._begun

    def begins(self, run_id: str) -> None:
        """A swarm begins: the next command with its name finds attempts of it."""
        self._begun.add(run_id)

    def starting(self, run_id: str) -> asyncio.Lock:
        """Held while a swarm begins: commands that want the same run come one after the other."""
        lock = self._starting.get(run_id)
        if lock is None:
            lock = self._starting[run_id] = asyncio.Lock()
        return lock

    async def forget_run(self, run_id: str) -> None:
        """A swarm has ended, and its parent's log says so durably."""
        if self._runs.pop(run_id, None) is not None:
            await self._write()

    def drop_run(self, run_id: str) -> None:
        """A run is over; the document says so with its next change: until then one too many is looked at."""
        self._runs.pop(run_id, None)

    async def _write(self) -> None:
        await self._live.document.set_in_flight(InFlight(frozenset(self._agents), dict(self._runs)))

    # -- afterwards -------------------------------------------------------------------------------------------------

    async def begin(self, living: dict[str, str]) -> None:
        """A session came back; ``living`` are its agents that hosts still hold, under its claim.

        Agents with accepted prompts come to life in the background. ``waiting`` names those whose model is missing.

        Raises:
            KimiRayError: the logs cannot be listed; ``session.fenced``.
        """
        live = self._live
        self.living = dict(living)
        logs = await live.services.store.list_logs(live.id)
        live.document.reconcile(
            [entry_of_log(log.stream.agent_id, log.header) for log in logs if log.header is not None]
        )
        before = in_flight(live.document.snapshot())
        self._runs = dict(before.runs)
        ready: list[str] = []
        for agent_id in sorted(before.agents):
            if agent_id not in living:
                stored = await read_agent(live.services.store, Stream(live.id, agent_id))
                if stored is None or not stored.is_open:
                    continue
            self._agents.add(agent_id)
            if await self._can_live(agent_id):
                ready.append(agent_id)
        self._written = set(self._agents)
        await self._settle(logs)
        if frozenset(self._agents) != before.agents:
            await self._write()
        if ready:
            self._reviving = asyncio.create_task(self._revive(ready), name=f"revive agents of {live.id}")

    async def settled(self) -> None:
        """Wait until the agents that ``begin`` brings to life are there, or cannot be."""
        if self._reviving is not None:
            await asyncio.wait([self._reviving])

    def stop(self) -> None:
        """Bring nobody back any more."""
        if self._reviving is not None:
            self._reviving.cancel()

    async def swarm(self, spec: SwarmSpec, running: Collection[str] = ()) -> SwarmSpec:
        """A swarm that may have begun under another host: what of it goes on in its logs, and the rest is closed.

        Args:
            spec: What is to run.
            running: Agents that a command before ran under this host until now: what they use is not counted yet.

        Raises:
            KimiRayError: an orphan could not be closed, a log not be read.
        """
        live = self._live
        await self.settled()
        logs = await live.services.store.list_logs(live.id)
        so_far = run_so_far(logs, spec.run_id)
        places = self.living | {agent_id: agent.host for agent_id, agent in live.agents.items()}
        going = await going_on(live.services.store, spec, so_far, places)
        kept = {one.agent_id for one, _ in going.values()}
        ended = {one.agent_id for one, _ in going.values() if one.ended is not None}
        # One that has ended has nothing to do any more, unless it was spoken to.
        spared = (kept - ended) | (ended & self._agents)
        orphans = {name: host for name, host in self.living.items() if name in so_far.agents and name not in spared}
        within_s = live.services.config.close_timeout_s + 5.0
        await stop_agents(live.services.cluster, live.id, orphans, live.spec.nonce, within_s)
        for agent_id in orphans if live.tree.bound else ():
            stored = await read_agent(live.services.store, Stream(live.id, agent_id))
            if agent_id in running and stored is not None:
                live.tree.include(stored.fold, live.price)
        for agent_id in so_far.agents - self._agents:
            self.living.pop(agent_id, None)
        if so_far.agents:
            await self._settle(logs, kept - ended)
        for one, stored in going.values():
            if one.ended is None:
                live.agents.pop(one.agent_id, None)
            if one.agent_id not in running:
                live.tree.exclude(one.agent_id, stored.fold, live.price)
        return continued(spec, so_far, {key: one for key, (one, _) in going.items()})

    async def finish(self) -> None:
        """The session closes: what was left alive is closed, parents hear the last of their children.

        Raises:
            KimiRayError: an agent could not be closed, a log not be written.
        """
        live = self._live
        self.stop()
        await self.settled()
        orphans = {name: host for name, host in self.living.items() if name not in live.agents}
        self.living.clear()
        within_s = live.services.config.close_timeout_s + 5.0
        await stop_agents(live.services.cluster, live.id, orphans, live.spec.nonce, within_s)
        if self._runs:
            await self._settle(await live.services.store.list_logs(live.id))

    async def forget_all(self) -> None:
        """Nothing is under way any more. The document writes it with its close."""
        self._agents.clear()
        self._runs.clear()
        await self._write()

    async def _can_live(self, agent_id: str) -> bool:
        try:
            await self._live.spec_for(agent_id, None)
        except AgentError as error:
            self._failed(agent_id, error)
            return False
        return True

    async def _revive(self, agent_ids: list[str]) -> None:
        gate = asyncio.Semaphore(_REVIVED_AT_ONCE)

        async def revive(agent_id: str) -> None:
            async with gate:
                try:
                    await self._live.agent_host(agent_id, None, None)
                except Exception as error:  # noqa: BLE001  told of this agent; the others are brought back all the same
                    self._failed(agent_id, noted(error, f"bringing {agent_id} back"))

        await asyncio.gather(*(revive(agent_id) for agent_id in agent_ids))

    async def _settle(self, logs: list[ListedLog], going: Collection[str] = ()) -> None:
        """Write into parents' logs what a lost host knew of their children and could not say any more."""
        live = self._live
        for parent in sorted(set(self._runs.values())):
            runs = [run_id for run_id, owner in self._runs.items() if owner == parent]
            try:
                if parent != MAIN:
                    await live.agent_host(parent, None, None)
                log = live.log_of(parent)
                await log.flush()
                told_by = Stream(live.id, parent)
                alive = {*self.living, *going, *live.subagents.running}
                log.add(await untold(live.services.store, told_by, runs, logs, alive))
                await log.flush()
            except KimiRayError as error:
                if error.code in _FENCED:
                    raise
                self._failed(parent, error)

    def _failed(self, agent_id: str, error: KimiRayError) -> None:
        if error.code == "agent.model_needed":
            self.waiting[agent_id] = str(error.details["model"])
        else:
            self.failures[agent_id] = error
