"""Looking after the subagents that are at work: the session's limits, callers that are gone, children that rest.

Nothing here is asked for by anybody: a limit that is reached ends the runs, a run that nobody waits for any more is
ended and told, and of the children that have nothing to do only so many stay alive.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from kimi_ray.agent.fold import FINAL_STATES, PromptRecord
from kimi_ray.agent.specs import AgentProgress
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.session_closing import close_agents
from kimi_ray.hosts.stored_agents import StoredAgent, read_agent
from kimi_ray.hosts.subagent_accounts import SubagentAccounts
from kimi_ray.hosts.subagent_words import ChildRun, EndSubagent
from kimi_ray.hosts.swarm_attempts import spent_so_far
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession

_LOOK_S = 1.0
_COUNT_S = 0.1
_ASK_S = 5.0
_QUIET_MS = 30_000
_IDLE_KEPT = 64
"""So many children that have nothing to do are kept alive; the one that has rested longest is put to sleep."""


class SubagentWatch:
    """Looks after the runs in ``runs``, which changes under its eyes.

    Args:
        live: The session.
        runs: Who is at work, by agent id.
        end: Tells the end of a run.
    """

    def __init__(
        self, live: LiveSession, runs: Mapping[str, ChildRun], end: Callable[[EndSubagent], Awaitable[None]]
    ) -> None:
        self._live = live
        self._runs = runs
        self._end = end
        self.accounts = SubagentAccounts(live)
        """What is used, against the limits."""
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._sleeping: set[asyncio.Task[None]] = set()
        self._limit: KimiRayError | None = None
        self._watching: asyncio.Task[None] | None = None
        self.last_error: KimiRayError | None = None

    def begin(self, run: ChildRun) -> None:
        """A child is at work from now on."""
        self._idle.pop(run.agent_id, None)
        self.accounts.enter(run)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._look_after(), name="subagents")

    def stop(self) -> None:
        """Look after nothing any more."""
        for task in self._sleeping:
            task.cancel()
        if self._watching is not None:
            self._watching.cancel()

    async def is_busy(self, host: str, agent_id: str) -> bool:
        """Whether an agent does something now, as its host says."""
        return any(one.phase != "idle" for one in await self._ask(host, [agent_id]))

    async def _look_after(self) -> None:
        """While anybody runs: end those whose caller is gone, and all when the session's limit is reached."""
        while self._runs:
            bound = any(self.accounts.is_bound(run) for run in self._runs.values())
            await asyncio.sleep(_COUNT_S if bound else _LOOK_S)
            try:
                for run in await self._orphans():
                    await self._end_orphan(run)
                if bound:
                    await self._enforce_limits()
            except BaseException as error:
                if ends_this_task(error) or not isinstance(error, Exception):
                    raise
                # Whoever waits for the child hears of it; the next look tries again, or limits would bind nobody.
                self._note(error, "the watch of subagents")

    async def _orphans(self) -> list[ChildRun]:
        """The runs that nobody waits for any more."""
        found = [run for run in self._runs.values() if run.by_agent and self._is_orphan(run)]
        # A program that is gone tells nobody: its children have long ended, and are at work by our books alone. So are
        # those of a call that was given up while it began.
        told = await self._progress(list(self._runs))
        quiet = {Stream(*one.stream).agent_id for one in told if one.phase == "idle" and one.since_ms > _QUIET_MS}
        for run in [run for run in self._runs.values() if run.agent_id in quiet and run not in found]:
            record = (await self._stored(run))[1]
            if record is None or record.state in FINAL_STATES:  # else something has a say before its turn begins
                found.append(run)
        return found

    async def end_if_orphan(self, run: ChildRun) -> bool:
        """End a run now whose caller's turn is over; whether it was such a one."""
        if not run.by_agent or not self._is_orphan(run):
            return False
        await self._end_orphan(run)
        return True

    def _is_orphan(self, run: ChildRun) -> bool:
        """Whether the turn that waits for the child is over: its agent lives elsewhere by now, or nowhere."""
        if run.caller_host is None:
            return False
        host = self._live.host_of(run.caller)
        return host != run.caller_host and not (host is None and self._live.in_swarm(run.caller))

    async def _end_orphan(self, run: ChildRun) -> None:
        stream = Stream(self._live.id, run.agent_id)
        await self.cancel([run.agent_id], "caller lost")
        host = self._live.host_of(run.agent_id)
        if host is not None:
            try:
                await self._live.services.cluster.peer(host).call("flush", [stream], timeout_s=_ASK_S, group="store")
            except KimiRayError as error:
                if not is_lost(error.code) and error.code != "agent.not_found":
                    raise
        stored, record = await self._stored(run)
        ended = record is not None and record.state in FINAL_STATES
        await self._end(
            EndSubagent(
                run.caller,
                run.agent_id,
                run.run_id,
                str(record.state) if record is not None and ended else "cancelled",
                stored.seq if stored is not None else -1,
                stored.epoch if stored is not None else -1,
                error=record.error if record is not None and ended and record.state == "failed" else None,
            )
        )

    async def _stored(self, run: ChildRun) -> tuple[StoredAgent | None, PromptRecord | None]:
        stored = await read_agent(self._live.services.store, Stream(self._live.id, run.agent_id))
        return stored, stored.fold.prompts.get(run.run_id) if stored is not None else None

    async def _enforce_limits(self) -> None:
        accounts, runs = self.accounts, dict(self._runs)
        told = await self._progress([*runs, *(accounts.above(runs) - runs.keys())])
        progress = {Stream(*one.stream).agent_id: one for one in told}
        for agent_id, run in runs.items():
            if agent_id in progress and self._runs.get(agent_id) is run:
                self._limit = accounts.count(run, spent_so_far(progress[agent_id])) or self._limit
        await accounts.tell_above(runs)
        if self._limit is not None:
            await self.cancel(list(self._runs), "limit", self._limit.to_data())
        for agent_id, error in accounts.reached(self._runs, progress):
            await self.cancel([agent_id], "limit", error.to_data())

    async def _progress(self, agent_ids: list[str]) -> list[AgentProgress]:
        by_host: dict[str, list[str]] = {}
        for agent_id in agent_ids:
            host = self._live.host_of(agent_id)
            if host is not None:
                by_host.setdefault(host, []).append(agent_id)
        told = await asyncio.gather(*(self._ask(host, there) for host, there in by_host.items()))
        return [one for part in told for one in part]

    async def _ask(self, host: str, agent_ids: list[str]) -> list[AgentProgress]:
        streams = [Stream(self._live.id, agent_id) for agent_id in agent_ids]
        try:
            return await self._live.services.cluster.peer(host).call(
                "progress", streams, timeout_s=_ASK_S, group="control"
            )
        except KimiRayError as error:
            if not is_lost(error.code):
                raise
            return []

    def rest(self, agent_id: str) -> None:
        """A child has nothing to do; when too many have nothing, one is put to sleep."""
        self._idle[agent_id] = None
        self._idle.move_to_end(agent_id)
        if len(self._idle) > _IDLE_KEPT:
            rested, _ = self._idle.popitem(last=False)
            task = asyncio.get_running_loop().create_task(self._put_to_sleep(rested), name=f"sleep {rested}")
            self._sleeping.add(task)
            task.add_done_callback(self._sleeping.discard)

    async def _put_to_sleep(self, agent_id: str) -> None:
        """Close a child that rests; it comes back from its log when it is needed."""
        live, agent = self._live, self._live.agents.get(agent_id)
        if agent is None:
            return
        try:
            async with agent.lock:
                if agent_id in self._runs or live.recovery.is_addressed(agent_id):
                    return
                if await self.is_busy(agent.host, agent_id):
                    return
                await close_agents(live, agent.host, [agent.spec.stream], force=False)
                live.agents.pop(agent_id, None)
                live.drop_log(agent_id)
        except Exception as error:  # noqa: BLE001  kept, and logged if nobody foresaw it; it stays as it is
            self._note(error, f"putting {agent_id} to sleep")

    def _note(self, error: Exception, where: str) -> None:
        self.last_error = noted(error, where)

    async def cancel(self, agent_ids: list[str], cause: str, limit: dict[str, Any] | None = None) -> None:
        """Cancel what agents do; those that are nowhere do nothing."""
        live = self._live

        async def cancel_one(agent_id: str) -> None:
            host = live.host_of(agent_id)
            if host is None:
                return
            try:
                await live.services.cluster.peer(host).call(
                    "cancel", Stream(live.id, agent_id), None, cause, limit, timeout_s=_ASK_S, group="control"
                )
            except KimiRayError as error:
                if not is_lost(error.code) and error.code != "agent.not_found":
                    raise

        await asyncio.gather(*(cancel_one(agent_id) for agent_id in dict.fromkeys(agent_ids)))
