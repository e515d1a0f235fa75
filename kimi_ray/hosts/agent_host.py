"""The agent host: an actor's content, holding many agents. The core of ``AgentActor``.

Agents share the process, its event loop, one sender to each store shard, and the model connections; each has its own
log, queue, scope and identity, and none can see another's.
"""

from __future__ import annotations

import asyncio
import os
import platform
from typing import Any, ClassVar

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.specs import AgentProgress, AgentSpec, AgentTotals, LogEntry, Outcome, PromptStatus
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, KimiRayError, SessionError, StoreError, as_error, error_from_data
from kimi_ray.hosts.admission import Admission, take_each
from kimi_ray.hosts.agent_container import host_container
from kimi_ray.hosts.agent_services import AgentCallbacks, ModelPool, OpenedLog, SleepingWorkdirs, workdirs_base
from kimi_ray.hosts.agent_workdirs import AgentWorkdirs
from kimi_ray.hosts.context_calls import ContextCalls
from kimi_ray.hosts.draining import Leavers
from kimi_ray.hosts.features import Features, load_features
from kimi_ray.hosts.host_scopes import HostScopes
from kimi_ray.hosts.log_opening import LogOpener
from kimi_ray.hosts.log_reading import LogReader
from kimi_ray.hosts.outcomes import Outcomes
from kimi_ray.hosts.permission_calls import PermissionCalls
from kimi_ray.hosts.ports import Cluster, Group
from kimi_ray.hosts.prompt_ends import PromptEnds
from kimi_ray.hosts.quiescence import LEASE_S, Quiescence
from kimi_ray.hosts.specs import Ack, EventPage, RunRequest, Submit
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.hosts.stored_binding import binding_of
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.log import Message
from kimi_ray.scopes import dispose
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from kimi_ray.tools.carried import NEUTRAL, check_importable, fingerprint_of
from kimi_ray.tools.contract import Tool
from kimi_ray.version import __version__


class AgentHost:
    """Holds living agents.

    Args:
        name: The host's name.
        cluster: Where it lives and how it reaches others.
        config: The runtime's settings.
    """

    PORT: ClassVar[dict[str, Group]] = {
        "run_many": "default",
        "adopt": "default",
        "submit_many": "default",
        "make_workdirs": "default",
        "drop_workdirs": "default",
        "wait_any": "wait",
        "read_events": "wait",
        "cancel": "control",
        "cancel_step": "control",
        "prompt_status": "control",
        "record": "control",
        "messages": "control",
        "set_model": "control",
        "steer": "control",
        "progress": "control",
        "check_tools": "control",
        "let_go": "store",
        "totals": "control",
        "quiesce": "control",
        "check_quiescence": "control",
        "release_quiescence": "control",
        "spent_elsewhere": "control",
        "ping": "control",
        "stats": "control",
        "flush": "store",
        "close_agents": "store",
        "close": "control",
    }

    def __init__(self, name: str, cluster: Cluster, config: RuntimeConfig) -> None:
        self.name = name
        self._cluster = cluster
        self._config = config
        features = self._features = load_features(config)
        self._app = host_container(features, {RuntimeConfig: config, Cluster: cluster, Features: features})
        self._scopes = HostScopes(self._app, features)
        self._agents: dict[Stream, LiveAgent] = {}
        self.parts = (PermissionCalls(self._scopes, self._agents, self._agent), ContextCalls(self._scopes, self._agent))
        """What users ask of agents beside their work: answered like the methods here."""
        self._opening: dict[Stream, asyncio.Future[LiveAgent]] = {}
        self._burials: dict[Stream, asyncio.Task[Any]] = {}
        self._endings: set[asyncio.Task[Any]] = set()
        self._releasing: set[Stream] = set()
        self._claims: dict[Stream, str | None] = {}
        self._fingerprint = NEUTRAL
        self._leavers = Leavers(workspace_shared=config.workspace_shared)
        self._outcomes = Outcomes()
        self._ends = PromptEnds(self._agents, self._outcomes, self._gone)
        self._admission = Admission()
        self._quiescence = Quiescence(self._agents.get)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Make the host's own services."""
        self._store = await self._app.get(StoreCalls)
        self._opener = LogOpener(self._cluster, self._store, self._config, self._features.catalog)
        self._reader = LogReader(self._store)
        sleeping = await self._app.get(SleepingWorkdirs)
        self._workdirs = AgentWorkdirs(workdirs_base(self._cluster.home_id), self._store, sleeping)
        self._spawn(self._workdirs.sweep())

    async def close(self) -> None:
        """Close every agent (cancelled, flushed, its grant given back), then the host's services.

        Raises:
            StoreError: ``store.close_failed`` naming the streams that are not durable; all is closed even so.
        """
        if self._closed:
            return
        self._closed = True
        self._quiescence.close()
        acks = await self.close_agents(list(self._agents), False)
        if self._endings:
            # Private directories go with their agents: cut short, they would stay.
            await asyncio.wait(self._endings, timeout=self._config.close_timeout_s)
        await self._opener.close()
        for task in list(self._tasks):
            task.cancel()
        await self._scopes.close()
        await dispose(self._app, self.name)
        failed = {str(ack.stream): ack.error for ack in acks if ack.error is not None}
        if failed:
            raise StoreError(
                f"{len(failed)} logs could not be made durable: {', '.join(list(failed)[:5])}",
                code="store.close_failed",
                hint="what was not acknowledged is lost; details say why for each log",
                details={"streams": failed},
            )

    async def ping(self) -> dict[str, Any]:
        """That it lives, and how much it holds."""
        return {
            "kind": "agents",
            "name": self.name,
            "agents": len(self._agents),
            "sessions": [],
            "streams": [tuple(stream) for stream in self._agents],
            "fingerprint": self._fingerprint,
            "node_id": self._cluster.node_id,
            "pid": os.getpid(),
        }

    async def stats(self) -> dict[str, Any]:
        """Counters of the host: agents, retained bytes, calls to the store."""
        return {"agents": len(self._agents), **self._opener.stats()}

    # Work

    async def run_many(self, requests: list[RunRequest]) -> list[Ack]:
        """Bring agents to life, each with its prompts; answers once every accepted prompt is durable.

        One failing request is an error in its own answer. A request that was sent before is answered as before, also
        when all its prompts have ended and their agent was let go of: ``wait_any`` tells their ends.
        """
        return list(await asyncio.gather(*(self._run_one(request) for request in requests)))

    async def submit_many(self, submits: list[Submit]) -> list[Ack]:
        """Give prompts to living agents, in the order in which each caller numbered them."""
        return list(await asyncio.gather(*(self._submit_one(submit) for submit in submits)))

    async def wait_any(
        self, waits: list[tuple[Stream, str]], timeout_s: float, watch: str | None = None, answers: int = 0
    ) -> list[Outcome] | None:
        """The prompts among ``waits`` that have ended; waits for the first one, at most ``timeout_s``.

        Args:
            waits: The prompts; of a named watch those that it does not know yet.
            timeout_s: Seconds.
            watch: A name of the caller's under which the others stay waited for, for its next call.
            answers: How many answers it has had under this name; with 0, ``waits`` are all.

        Returns:
            None where the watch is not known like that any more: all its prompts are to be named, with 0 answers.
        """
        return await self._ends.wait(waits, timeout_s, self._store, watch, answers)

    async def cancel(
        self,
        stream: Stream,
        prompt_id: str | None,
        cause: str,
        limit: dict[str, Any] | None = None,
        claim: str | None = None,
    ) -> list[str]:
        """Cancel a prompt, or all of an agent; returns the ids that were hit. ``limit``: an error to end with.

        Raises:
            SessionError: ``session.fenced`` for the ``claim`` of a session that another host holds now.
        """
        self._check_claim(stream, claim)
        error = KimiRayError.from_data(limit) if limit is not None else None
        return self._agent(stream).cancel(prompt_id, cause, limit=error)

    async def prompt_status(self, stream: Stream, prompt_id: str) -> PromptStatus:
        """Where a prompt stands now. Raises ``prompt.not_found``."""
        return self._agent(stream).status(prompt_id)

    async def cancel_step(self, stream: Stream) -> bool:
        """Interrupt an agent's running step alone; returns whether one runs that is ended by this."""
        return self._agent(stream).cancel_step()

    async def steer(self, stream: Stream, prompt_ids: list[str]) -> None:
        """Let queued prompts join the running turn."""
        self._agent(stream).prompts.steer(prompt_ids)

    async def set_model(self, stream: Stream, model: ResolvedModel, claim: str | None = None) -> None:
        """Another model from the next turn on. Raises ``session.fenced`` as ``cancel``."""
        self._check_claim(stream, claim)
        pool = await self._app.get(ModelPool)
        self._agent(stream).set_model(model, pool.provider(model))

    async def record(self, stream: Stream, entries: list[LogEntry], claim: str | None = None) -> int:
        """Append the session's events to an agent's log; returns the next seq.

        Raises:
            SessionError: ``session.fenced`` when the agent was taken over under another claim than the caller's.
        """
        self._check_claim(stream, claim)
        return self._agent(stream).record(entries)

    async def messages(self, stream: Stream, at: int | None = None) -> list[Message]:
        """What the model would see now, blobs in place; ``at``: as it was when that seq was the next."""
        agent = self._agent(stream)
        if at is None or at >= agent.journal.log.next_seq:
            return await agent.journal.resolve(agent.journal.log.messages())
        await agent.journal.flush()
        return await agent.journal.resolve(await self._reader.messages_at(agent.stream, at))

    async def totals(self, stream: Stream) -> AgentTotals:
        """What an agent has used over its whole life."""
        agent = self._agent(stream)
        return agent.journal.fold.totals(agent.meter.cost_usd)

    async def spent_elsewhere(self, stream: Stream, totals: AgentTotals) -> None:
        """What the other agents of its tree have used by now: counted against its limits from the next check on."""
        self._agent(stream).meter.elsewhere = totals

    async def progress(self, streams: list[Stream]) -> list[AgentProgress]:
        """Where agents stand; those that do not live here are left out."""
        found = (self._agents.get(Stream(*stream)) for stream in streams)
        return [agent.watch() for agent in found if agent is not None]

    async def quiesce(self, streams: list[Stream], holder: str, lease_s: float = LEASE_S) -> list[Stream]:
        """Hold agents still for a holder (``Quiescence.quiesce``); returns those that live here."""
        held = self._quiescence.quiesce([Stream(*stream) for stream in streams], holder, lease_s)
        return self._leavers.keep(held, lease_s)

    async def check_quiescence(self, holder: str, lease_s: float | None = None) -> None:
        """Whether a hold lasted until now, and goes on for ``lease_s`` (``Quiescence.check``)."""
        self._quiescence.check(holder, lease_s)

    async def release_quiescence(self, holder: str) -> None:
        """End a hold. Idempotent."""
        self._quiescence.release(holder)

    async def read_events(
        self, stream: Stream, from_seq: int, max_events: int, max_bytes: int, wait_s: float
    ) -> EventPage:
        """Events from a cursor; waits up to ``wait_s`` for the first one. Also of a cold log of this home."""
        agent = self._agents.get(Stream(*stream))
        return await self._reader.read(Stream(*stream), agent, from_seq, max_events, max_bytes, wait_s)

    async def flush(self, streams: list[Stream]) -> list[tuple[int, int]]:
        """Make agents durable; returns each one's ``(next seq, epoch)``."""
        agents = [self._agent(stream) for stream in streams]
        positions = [(agent.journal.log.next_seq, agent.epoch) for agent in agents]
        await asyncio.gather(*(agent.journal.flush() for agent in agents))
        return positions

    async def close_agents(self, streams: list[Stream], force: bool, claim: str | None = None) -> list[Ack]:
        """End agents: queued prompts cancelled, the running turn cancelled, flushed, the grant given back.

        ``force`` gives up what cannot be made durable. On behalf of a ``claim`` that is not in force nothing is
        closed: ``session.fenced`` in each answer.
        """
        closing = (self._close_for(Stream(*stream), force, claim) for stream in streams)
        return list(await asyncio.gather(*closing))

    async def adopt(self, session_id: str, claim: str) -> list[str]:
        """The agents of a session that live here; from now on they obey this claim and no other.

        Raises:
            SessionError: ``session.fenced`` when another claim is in force.
        """
        coming = [future for stream, future in self._opening.items() if stream.session_id == session_id]
        if coming:
            await asyncio.wait(coming)  # their host asked under its own claim

        async def adopt_one(agent: LiveAgent) -> bool:
            if agent.closed or not await self._obeys(agent, claim):
                return False
            self._leavers.touch(agent.stream)
            await agent.journal.flush()  # what it accepted is in the store before anybody looks there for it
            return True

        there = [agent for stream, agent in self._agents.items() if stream.session_id == session_id]
        adopted = await asyncio.gather(*(adopt_one(agent) for agent in there))
        return [agent.stream.agent_id for agent, is_held in zip(there, adopted, strict=True) if is_held]

    async def check_tools(self, tools: tuple[Tool, ...], workdir: Workdir | None = None) -> None:
        """Import the user's tools here; raises ``tool.not_importable`` {tool, node_id}."""
        self._fingerprint = fingerprint_of(tools, workdir) or self._fingerprint
        check_importable(tools, self._cluster.node_id)

    async def let_go(self) -> tuple[int, list[Stream], list[Stream]]:
        """Let go of idle agents, for a node that is to be empty (``Leavers.leave``)."""
        return await self._leavers.leave(self._agents, self._opening, self._close_one)

    async def make_workdirs(self, wishes: list[tuple[Workdir, str, list[str]]]) -> list[dict[str, Any]]:
        """Make working directories on this node before their agents are there (``AgentWorkdirs.make``)."""
        for workdir, _, _ in wishes:
            self._fingerprint = fingerprint_of((), workdir) or self._fingerprint
        return await self._workdirs.make(wishes)

    async def drop_workdirs(self, session_ids: list[str]) -> int:
        """Remove this node's private directories of sessions; returns how many there were. Idempotent.

        Raises:
            ToolError: ``workdir.failed`` when one cannot be removed.
        """
        return await self._workdirs.drop(session_ids)

    # Bringing to life and letting go

    async def _run_one(self, request: RunRequest) -> Ack:
        stream = Stream(*request.agent.stream)
        try:
            agent = await self._living(request.agent)
            if agent is None and self._has_ended(request):
                return Ack(stream)
            agent = agent or await self._come(request.agent)
            if request.release:
                self._releasing.add(stream)
            agent.submit(request.prompts)
            await agent.journal.flush()
        except Exception as error:  # noqa: BLE001  one agent's failure is its own answer
            return Ack(stream, as_error(error).to_data())
        return Ack(stream)

    async def _submit_one(self, submit: Submit) -> Ack:
        stream = Stream(*submit.stream)
        try:
            async with self._admission.turn(submit.caller, stream, submit.number):
                agent = self._agent(stream)
                refused = take_each(agent, submit.prompts)
            await agent.journal.flush()
        except Exception as error:  # noqa: BLE001  as above: the prompts beside it are not to suffer
            return Ack(stream, as_error(error).to_data())
        return Ack(stream, refused=refused)

    def _has_ended(self, request: RunRequest) -> bool:
        """Whether these turns are over and told of in the log: what was only said of a prompt that failed has none."""
        ends = [self._outcomes.get((Stream(*request.agent.stream), prompt.prompt_id)) for prompt in request.prompts]
        return bool(ends) and all(end is not None and end.result.turn is not None for end in ends)

    async def _living(self, spec: AgentSpec) -> LiveAgent | None:
        """The agent if it lives here, under the claim of who asks."""
        stream = Stream(*spec.stream)
        if self._closed:
            raise AgentError(f"the host {self.name} is closing", code="agent.closed", retryable=True)
        while (living := self._agents.get(stream)) is not None:
            if living.closed:
                # It is just being closed, broke, or could not be made durable when it was closed: that comes first.
                ack = await self._close_one(stream, False)
                if ack.error is not None:
                    raise error_from_data(ack.error)
            elif self._opener.nonce_of(stream) == spec.nonce or await self._is_newest(living):
                if living.closed or (spec.claim is not None and not await self._obeys(living, spec.claim)):
                    continue
                self._leavers.touch(stream)
                return living
            elif self._agents.get(stream) is living:
                self._fenced(stream)
        return None

    async def _come(self, spec: AgentSpec) -> LiveAgent:
        stream = Stream(*spec.stream)
        pending = self._opening.get(stream)
        if pending is None:
            pending = self._opening[stream] = asyncio.ensure_future(self._bring_to_life(spec))
            pending.add_done_callback(lambda _done: self._opening.pop(stream, None))
        return await asyncio.shield(pending)

    async def _obeys(self, agent: LiveAgent, claim: str) -> bool:
        """Put a living agent under a claim, which must be in force; False if it does not live here any more.

        Raises:
            SessionError: ``session.fenced``.
        """
        stream = agent.stream
        if self._claims.get(stream) != claim:
            try:
                confirmed = await self._opener.confirm(stream, claim)
            except KimiRayError as error:
                if error.code != "store.not_found":
                    raise
                await agent.journal.flush()  # a new log is not to be seen before its first batch
                confirmed = await self._opener.confirm(stream, claim)
            if self._agents.get(stream) is not agent or agent.closed:
                return False
            if not confirmed:
                self._fenced(stream)
                return False
            self._claims[stream] = claim
        return True

    def _check_claim(self, stream: Stream, claim: str | None) -> None:
        """Refuse the host of a session that was taken over.

        Raises:
            SessionError: ``session.fenced``.
        """
        if claim is not None and self._claims.get(Stream(*stream), claim) not in (claim, None):
            raise SessionError(
                f"session {stream[0]} is held by another host now",
                code="session.fenced",
                details={"session_id": stream[0]},
            )

    async def _close_for(self, stream: Stream, force: bool, claim: str | None) -> Ack:
        if claim is not None and stream in self._agents:
            try:
                self._check_claim(stream, claim)
                # It may be that the other host has not come by yet: the store knows whose the session is.
                await self._opener.confirm(stream, claim)
            except KimiRayError as error:
                if error.code == "session.fenced" or not (force or error.code == "store.not_found"):
                    return Ack(stream, error.to_data())
        return await self._close_one(stream, force)

    async def _is_newest(self, agent: LiveAgent) -> bool:
        """Whether nobody else was granted the log of an agent that lives here."""
        try:
            return (await self._store.inspect(agent.stream)).epoch <= agent.epoch
        except KimiRayError as error:
            if error.code != "store.not_found":
                raise
            return True

    async def _bring_to_life(self, spec: AgentSpec) -> LiveAgent:
        stream = Stream(*spec.stream)
        burial = self._burials.get(stream)
        if burial is not None:
            await asyncio.wait([burial])  # it lets go of what is open under this name
        await self.check_tools(spec.code, spec.workdir)
        opened = await self._opener.open(spec, on_fenced=lambda _error: self._fenced(stream))
        log = opened.log
        if log.header.origin == "fork" and log.last_end_seed is None and log.next_seq < (log.header.seed_length or 0):
            await self._opener.give_back(stream, force=True)
            raise AgentError(
                f"the making of {stream} was interrupted",
                code="agent.not_found",
                hint="fork its source again",
                details={"session_id": stream.session_id, "agent_id": stream.agent_id},
            )
        named = opened.fold.model_name
        if spec.model_as_stored and named not in (None, spec.model.name):
            await self._opener.give_back(stream, force=True)
            raise AgentError(
                f"{stream} speaks to the model {named!r} by now, not to {spec.model.name!r}",
                code="agent.model_needed",
                hint="resolve the model and ask again",
                details={"model": named},
            )
        callbacks = AgentCallbacks(
            on_outcome=lambda prompt_id, outcome: self._outcomes.put((stream, prompt_id), outcome),
            on_idle=lambda: self._idle(stream),
        )
        try:
            context = {AgentSpec: spec, OpenedLog: opened, AgentCallbacks: callbacks}
            agent = await self._scopes.enter(stream, context, LiveAgent)
        except BaseException:
            await self._opener.give_back(stream, force=True)
            raise
        self._opener.publish(stream)
        self._agents[stream] = agent
        self._leavers.touch(stream)
        self._claims[stream] = spec.claim
        journal = agent.journal
        journal.append(
            "runtime/activated",
            {
                "epoch": opened.epoch,
                "node": self._cluster.node_id,
                "host": self.name,
                "pid": os.getpid(),
                "versions": {"kimi_ray": __version__, "python": platform.python_version()},
            },
        )
        bind = binding_of(spec, agent.workdir_path, created=agent.workdir_created)
        if bind != journal.fold.bind:
            journal.append("profile/bind", bind)
        if spec.permission_mode is not None and journal.fold.permission_mode is None:
            journal.append("permission/mode", {"mode": spec.permission_mode})
        agent.revive()
        return agent

    async def _close_one(self, stream: Stream, force: bool) -> Ack:
        coming = self._opening.get(stream)
        if coming is not None:
            await asyncio.wait([coming])  # or it would live on, and nobody know of it
        agent = self._agents.get(stream)
        if agent is None:
            return Ack(stream)
        # An agent whose last words cannot be kept still gives its log back, or the id were stuck here.
        for step in (agent.close, lambda: self._opener.give_back(agent.stream, force=force)):
            try:
                await step()
            except KimiRayError as error:
                if not force and error.code != "store.fenced":
                    return Ack(stream, error.to_data())
            finally:
                self._reader.wake(stream)  # however this ends, nothing more comes from this agent
        if self._agents.get(stream) is agent:
            del self._agents[stream]
            self._leavers.forget(stream)
            self._reader.forget(stream)
            self._releasing.discard(stream)
            self._claims.pop(stream, None)
            await self._scopes.leave(stream)
            self._outcomes.drop(stream, self._gone(stream))
        return Ack(stream)

    def _idle(self, stream: Stream) -> None:
        agent = self._agents.get(stream)
        if stream in self._releasing or (agent is not None and agent.failure is not None):
            # One that broke is let go too: whoever wants it again gets it revived from its log.
            self._opener.end(stream)
            self._ending(self._close_one(stream, False))

    def _fenced(self, stream: Stream) -> None:
        agent = self._agents.pop(stream, None)
        if agent is None:
            return
        agent.fence()
        self._reader.forget(stream)
        self._outcomes.drop(stream, agent.failure or self._gone(stream))
        burial = self._burials[stream] = self._ending(self._bury(stream, agent))
        burial.add_done_callback(lambda done: self._burials.get(stream) is done and self._burials.pop(stream))

    async def _bury(self, stream: Stream, agent: LiveAgent) -> None:
        await agent.close()
        await self._opener.give_back(stream, force=True)
        await self._scopes.leave(stream)

    def _ending(self, work: Any) -> asyncio.Task[Any]:
        task = self._spawn(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _agent(self, stream: Stream) -> LiveAgent:
        stream = Stream(*stream)
        agent = self._agents.get(stream)
        if agent is None or (agent.closed and agent.failure is None):
            raise self._gone(stream)
        self._leavers.touch(stream)
        return agent

    def _gone(self, stream: Stream) -> AgentError:
        return AgentError(
            f"the agent {stream} does not live on {self.name}",
            code="agent.not_found",
            hint="ask its session where it lives now",
            retryable=True,
        )
