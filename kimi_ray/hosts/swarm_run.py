"""The coordinator of one swarm: starts its rollouts on the agent hosts, waits for them, and accounts for every key.

``Schedule`` decides what starts next; here it is carried out. A child that fails is data in its row. A host that is
lost costs its rollouts an interruption: they go on elsewhere from their logs, or begin again as a new attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from kimi_ray.errors import KimiRayError, RunError, error_from_data
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import Ack, LogEntry, Outcome
from kimi_ray.hosts.swarm_attempts import (
    Attempt,
    Ending,
    attempt_row,
    ending_of,
    failed,
    going_on_request,
    host_lost,
    labels_of,
    run_request,
    spent_of,
    spent_so_far,
)
from kimi_ray.hosts.swarm_ends import SwarmEnds
from kimi_ray.hosts.swarm_events import batches_of, header_of, limits_left, run_limit, spawned_event
from kimi_ray.hosts.swarm_expected import SwarmExpected
from kimi_ray.hosts.swarm_places import SwarmPlaces
from kimi_ray.hosts.swarm_rows import RowBuffer
from kimi_ray.hosts.swarm_services import SwarmServices
from kimi_ray.hosts.swarm_waits import SwarmWaits
from kimi_ray.hosts.swarm_watch import SwarmWatch
from kimi_ray.hosts.swarm_words import CancelMode, KeyEnd, Rollout, RowPage, SwarmProgress, SwarmSpec
from kimi_ray.hosts.waiting import PromptKey
from kimi_ray.ids import new_ulid
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.schedule import LimitHit, Schedule, Spent, Start
from kimi_ray.session import AgentEntry
from kimi_ray.settings import Limits
from kimi_ray.store.seam import Stream

MAX_REVIVALS = 3
"""Losses of its host that a rollout survives. The next life fails its prompt (``agent.revivals_exhausted``)."""

_BACKLOG = 4000
_RUN_S = 120.0
_CONTROL_S, _CLOSE_S = 10.0, 35.0
_TICK_S = 0.1
_RESENDS = 5


class SwarmRun:
    """A running swarm. It begins when it is built, inside a running loop.

    Raises:
        RunError: what ``Schedule`` refuses (``swarm.bad_concurrency`` ...).
    """

    def __init__(self, spec: SwarmSpec, services: SwarmServices) -> None:
        self._spec = spec
        self._services = services
        self._schedule = Schedule(
            spec.keys,
            seed=spec.seed,
            clock=time.monotonic,
            max_concurrency=spec.max_concurrency,
            retries=spec.retries,
            retry_on=spec.retry_on,
            fail_on=spec.fail_on,
            total_limits=spec.total_limits,
            attempts_before=spec.attempts_before,
        )
        self._began = time.monotonic()
        self._data: dict[RolloutKey, Rollout] = {}
        self._starved: dict[RolloutKey, Start] = {}
        self._attempts: dict[str, Attempt] = {}
        self._extra: Counter[RolloutKey] = Counter()
        self._tried: dict[RolloutKey, tuple[int, float]] = {}
        self._waits = SwarmWaits(services.cluster, self._came_back, self._host_is_silent)
        self._places = SwarmPlaces(spec, services)
        self._expected = SwarmExpected(spec, services, self._places)
        self._watch = SwarmWatch(services.cluster, priced=spec.model.settings.price is not None)
        self._past = Spent()
        self._below: dict[str, Spent] = {}
        self._interruptions = 0
        self._keys_ended = 0
        self._ends = SwarmEnds(spec, services)
        self._cancel_running = False
        self._limit: KimiRayError | None = None
        self._changed = asyncio.Event()
        self._rows = RowBuffer(self._changed.set)
        self._fed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls = 0
        self._main = asyncio.get_running_loop().create_task(self._run(), name=f"swarm {spec.run_id}")

    @property
    def command(self) -> str:
        """The command that runs it."""
        return self._spec.command

    @property
    def spent_by_ended(self) -> Spent:
        """What its attempts that have ended used, with all below them."""
        return self._schedule.spent_by_ended

    @property
    def agent_calls(self) -> int:
        """Calls to agent hosts so far."""
        return self._calls + self._waits.calls + self._ends.calls

    @property
    def done(self) -> bool:
        """Whether every key has ended."""
        return self._rows.done

    def host_of(self, agent_id: str) -> str | None:
        """The host of a running rollout's agent, or None."""
        attempt = self._attempts.get(agent_id)
        if attempt is None:
            return self._expected.host_of(agent_id)
        return attempt.host if attempt.accepted else None

    def holds(self, agent_id: str) -> bool:
        """Whether an agent is one of a rollout that has not ended, even if no host has it just now."""
        return agent_id in self._attempts or agent_id in self._expected

    def limits_of(self, agent_id: str) -> Limits | None:
        """The limits of a rollout that has not ended."""
        attempt = self._attempts.get(agent_id)
        return attempt.request.agent.limits if attempt is not None else None

    def spend_below(self, agent_id: str, spent: Spent) -> None:
        """The subagents of a rollout, and theirs, have used so much by now: it counts as the rollout's."""
        if agent_id in self._attempts:
            self._below[agent_id] = spent

    def living(self) -> dict[str, list[Stream]]:
        """The agents that run now, by host."""
        found: dict[str, list[Stream]] = {}
        for agent_id, host in self._expected.living().items():
            found.setdefault(host, []).append(Stream(self._spec.session_id, agent_id))
        for attempt in self._attempts.values():
            if attempt.accepted:
                found.setdefault(attempt.host, []).append(attempt.stream)
        return found

    async def feed(self, rollouts: list[Rollout]) -> None:
        """The data of the next keys; returns when more is wanted (at most some thousand wait here)."""
        ready: list[tuple[Start, Rollout]] = []
        for rollout in rollouts:
            self._data[rollout.key] = rollout
            start = self._starved.pop(rollout.key, None)
            if start is not None:
                ready.append((start, rollout))
        if ready:
            self._spawn(self._launch(ready))
        while len(self._data) - len(self._attempts) > _BACKLOG and self._schedule.stopped is None and not self.done:
            self._fed.clear()
            await self._fed.wait()

    async def read(self, cursor: int, max_rows: int, wait_s: float) -> RowPage:
        """What has ended, from ``cursor`` on."""
        return await self._rows.read(cursor, max_rows, wait_s)

    async def progress(self) -> SwarmProgress:
        """Where it stands."""
        await self._watch.refresh(list(self._attempts.values()))
        return self._watch.picture(self._schedule, self._past, self._attempts, self._interruptions)

    def cancel(self, grace_s: float, mode: CancelMode) -> None:
        """Nothing new starts. ``cancel``: what runs is cancelled and has ``grace_s`` to say how it ended."""
        self._schedule.stop("cancelled")
        self._changed.set()
        self._fed.set()
        if mode == "cancel" and not self._cancel_running:
            self._cancel_running = True
            self._spawn(self._cancel_all(grace_s))

    def abandon(self, error: KimiRayError) -> None:
        """End everything at once; whoever reads gets the error. What runs on hosts is left to those who go on."""
        self._rows.finish(error)
        self._fed.set()
        for task in [self._main, *self._tasks, *self._ends.tasks]:
            task.cancel()

    async def hand_over(self, error: KimiRayError) -> dict[str, str]:
        """Let another command have the run: whoever reads here gets the error, and nothing starts any more.

        What is just being started or ended is waited for, so that the logs tell all of it.

        Returns:
            The hosts of the agents that live on; each has a place there.
        """
        self._schedule.stop("taken over")
        self._rows.finish(error)
        self._fed.set()
        self._main.cancel()
        while pending := {task for task in (self._main, *self._tasks, *self._ends.tasks) if not task.done()}:
            await asyncio.wait(pending)
        await self._waits.close()
        await self._places.give_back()
        running = {attempt.agent_id: attempt.host for attempt in self._attempts.values() if attempt.accepted}
        return self._expected.living() | running

    async def close(self) -> None:
        """Cancel it and wait until every key has ended, bounded; then nothing of it runs any more."""
        if not self.done:
            self.cancel(_CONTROL_S, "cancel")
            await asyncio.wait({self._main}, timeout=_CLOSE_S)
        tasks = [self._main, *self._tasks, *self._ends.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._waits.close()

    async def _run(self) -> None:
        spec = self._spec
        start = {"run_id": spec.run_id, "rollouts": len(spec.keys), "max_concurrency": spec.max_concurrency}
        self._services.record([LogEntry("swarm/start", {**start, "profile": spec.profile.name})])
        error: KimiRayError | None = None
        try:
            await self._until_all_ended()
            for key, made in self._schedule.not_started():
                # A key whose last attempt failed and was to be tried again has that attempt's row.
                tried = made > spec.attempts_before.get(key, 0)
                self._end_key(key, None if tried else self._schedule.stopped)
            if self._keys_ended != len(spec.keys):
                error = RunError(
                    f"{len(spec.keys)} rollouts were asked for and {self._keys_ended} ended",
                    code="swarm.incomplete",
                    hint="this is a defect of kimi_ray; the logs hold what was done",
                )
            await self._expected.stop()
            await self._places.give_back()
            await self._ends.finish(self._counts())
            await self._services.flush_log()
        except Exception as failure:  # noqa: BLE001  whoever reads the rows is told
            error = noted(failure, f"the swarm {spec.run_id}")
        finally:
            self._rows.finish(error)
            self._fed.set()
            await self._waits.close()

    async def _until_all_ended(self) -> None:
        while True:
            self._start_ready()
            if self._schedule.finished_all and not self._attempts:
                return
            self._changed.clear()
            wait_s = self._schedule.wait_s()
            tick_s = _TICK_S if self._counts_while_running() else None
            bounds = [bound for bound in (wait_s, tick_s) if bound is not None]
            try:
                # Not `wait_for`: where what it waits for comes together with a cancel, Python 3.11 drops the cancel.
                async with asyncio.timeout(min(bounds) if bounds else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if self._counts_while_running():
                await self._count_running()
            self._enforce(self._schedule.check_limits())

    def _check_tree(self) -> None:
        hit = self._services.spent(self._schedule.progress().spent)
        if hit is not None:
            self._schedule.stop(hit.stop)
            self._enforce(hit)

    def _start_ready(self) -> None:
        self._check_tree()
        ready: list[tuple[Start, Rollout]] = []
        while not self._rows.full and (start := self._schedule.next_start()) is not None:
            rollout = self._data.get(start.key)
            if rollout is None:
                self._starved[start.key] = start
            else:
                ready.append((start, rollout))
        if ready:
            self._fed.set()
            self._spawn(self._launch(ready))
        if self._schedule.stopped is not None:
            for key in list(self._starved):
                del self._starved[key]
                self._schedule.finished(key, "not_started", None)
                self._end_key(key, self._schedule.stopped)

    async def _launch(self, ready: list[tuple[Start, Rollout]]) -> None:
        known = [self._spec.going_on.get(start.key) for start, _ in ready]
        known = [
            one if one and one.number == s.attempt + self._extra[s.key] else None
            for one, (s, _) in zip(known, ready, strict=True)
        ]
        numbers = iter(await self._services.numbers(known.count(None)) if None in known else ())
        now = time.monotonic()
        used = self._schedule.progress().spent
        attempts: list[Attempt] = []
        for (start, rollout), one in zip(ready, known, strict=True):
            agent_id = f"agent-{next(numbers)}" if one is None else one.agent_id
            made, since = self._tried.get(start.key, (0, self._began))
            count = start.attempt + self._extra[start.key]
            seed = start.seed if count == start.attempt else self._spec.seed.of(*start.key, count)
            if rollout.sampling is not None and rollout.sampling.seed is not None:
                seed = rollout.sampling.seed
            send = start.send_seed or (rollout.sampling is not None and rollout.sampling.seed is not None)
            left = replace(
                rollout, limits=limits_left(rollout.limits, self._spec.total_limits, used, now - self._began)
            )
            request = run_request(self._spec, left, agent_id, count, seed, send)
            self._tried[start.key] = (made + 1, since)
            attempt = Attempt(rollout, count, seed, request, queued_s=max(0.0, now - since))
            if one is not None:
                self._expected.arrived(one.agent_id)
                attempt.request = going_on_request(request, one)
                attempt.host, attempt.adopted, attempt.lost = one.host or "", True, True
            self._attempts[attempt.agent_id] = attempt
            attempts.append(attempt)
        new = [a for a in attempts if not a.adopted]
        self._services.registered(
            [AgentEntry(a.agent_id, "sub", self._spec.parent, labels_of(self._spec, a.rollout.key)) for a in new]
        )
        self._services.record([spawned_event(self._spec, a) for a in new])
        for attempt, one in zip(tuple(attempts), known, strict=True):
            if one is not None and one.ended is not None:
                attempts.remove(attempt)
                attempt.told = True
                self._conclude(attempt, one.ended, placed=False)
        await self._place_and_begin(attempts)

    async def _place_and_begin(self, attempts: list[Attempt]) -> None:
        try:
            await self._places.take([attempt for attempt in attempts if not attempt.host])
        except KimiRayError as error:
            for attempt in attempts:
                self._finish(attempt, failed(error), placed=False)
            return
        by_host: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_host.setdefault(attempt.host, []).append(attempt)
        for host, group in by_host.items():
            for batch in batches_of(group):
                self._spawn(self._begin(host, batch))

    async def _begin(self, host: str, attempts: list[Attempt]) -> None:
        self._calls += 1
        try:
            acks: list[Ack] = await self._services.cluster.peer(host).call(
                "run_many", [attempt.request for attempt in attempts], timeout_s=_RUN_S
            )
        except KimiRayError as error:
            await self._unreachable(host, attempts, error)
            return
        running: list[Attempt] = []
        for attempt, ack in zip(attempts, acks, strict=True):
            if ack.error is not None:
                error = error_from_data(ack.error)
                if error.code == "session.fenced":
                    self._services.fenced(error)
                    return
                self._refused(attempt, error)
            elif not attempt.ended:
                running.append(attempt)
            else:
                # It was given up while it came to life.
                self._spawn(self._ends.close_agent(attempt))
        self._services.record(
            [
                LogEntry("subagent/started", {"agent_id": a.agent_id})
                for a in running
                if not a.accepted and not a.revivals and not a.adopted
            ]
        )
        for attempt in running:
            attempt.accepted = True
        self._waits.add(host, [attempt.wait_key for attempt in running])
        if self._cancel_running or self._limit is not None:
            await self._send_cancels(running)

    def _refused(self, attempt: Attempt, error: KimiRayError) -> None:
        """An agent did not come to life. Where a loss left open whether its log exists, the other way is tried."""
        agent = attempt.request.agent
        attempt.resends += 1
        if attempt.resends <= _RESENDS and error.code == "store.not_found" and attempt.lost:
            agent = replace(agent, header=header_of(self._spec, attempt), nonce=new_ulid())
            attempt.request = replace(attempt.request, agent=agent, release=False)
            self._spawn(self._begin(attempt.host, [attempt]))
        elif error.code == "store.exists" or (error.code == "workdir.lost" and attempt.lost):
            # A log of that name that is not this rollout's is never written to.
            self._again(attempt, failed(error))
        else:
            self._finish(attempt, failed(error))

    def _host_is_silent(self, host: str, error: KimiRayError, keys: list[PromptKey]) -> None:
        attempts = [a for stream, _ in keys if (a := self._attempts.get(stream.agent_id)) is not None]
        self._spawn(self._unreachable(host, attempts, error))

    def _came_back(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            attempt = self._attempts.get(outcome.stream.agent_id)
            if attempt is None or attempt.prompt_id != outcome.prompt_id:
                continue
            code = (outcome.result.error or {}).get("code")
            if outcome.seq < 0 and code in ("agent.not_found", "store.fenced", "agent.closed"):
                # The host lives and the agent does not: bring it back from its log.
                self._places.leave(attempt.host)
                self._spawn(self._revive([attempt]))
            else:
                self._conclude(attempt, outcome)

    def _conclude(self, attempt: Attempt, outcome: Outcome, *, placed: bool = True) -> None:
        """An agent told how it ended."""
        if self._spec.rollout is not None and (outcome.result.error or {}).get("code") == "turn.interrupted":
            # Its function was lost, and has no middle from which it could go on. Its log was looked at first: one that
            # has the function's end is not run again.
            self._again(attempt, ending_of(outcome))
        else:
            self._finish(attempt, ending_of(outcome), placed=placed)

    def _finish(self, attempt: Attempt, ending: Ending, *, placed: bool = True) -> None:
        if not self._close_attempt(attempt, ending, placed=placed):
            return
        row = attempt_row(self._spec, attempt, ending)
        self._rows.put(row)
        key = attempt.rollout.key
        below = self._below.pop(attempt.agent_id, Spent())
        totals = spent_of(ending.outcome.totals).plus(below) if ending.outcome is not None else None
        if self._schedule.finished(key, row.status, row.error, totals):
            self._end_key(key, None)
        else:
            self._tried[key] = (self._tried[key][0], time.monotonic())
        self._changed.set()

    def _again(self, attempt: Attempt, ending: Ending) -> None:
        """An interrupted rollout begins again as a new attempt, which is no retry: the schedule sees it running on."""
        key, rollout = attempt.rollout.key, attempt.rollout
        if self._schedule.stopped is not None or self._extra[key] >= MAX_REVIVALS:
            self._finish(attempt, ending)
            return
        if not self._close_attempt(attempt, ending, placed=True):
            return
        self._rows.put(attempt_row(self._spec, attempt, ending))
        below = self._below.pop(attempt.agent_id, Spent())
        self._schedule.begins_again(key, ending.outcome and spent_of(ending.outcome.totals).plus(below))
        base = attempt.number - self._extra[key]
        self._extra[key] += 1
        self._tried[key] = (self._tried[key][0], time.monotonic())
        start = Start(key, base, self._spec.seed.of(*key, base), self._spec.seed.sent)
        self._spawn(self._launch([(start, rollout)]))

    def _close_attempt(self, attempt: Attempt, ending: Ending, *, placed: bool) -> bool:
        """What every end of an attempt does, once: place, count, event."""
        if attempt.ended:
            return False
        attempt.ended = True
        self._attempts.pop(attempt.agent_id, None)
        self._waits.discard(attempt.host, attempt.wait_key)
        if placed and attempt.host:
            self._places.leave(attempt.host)
            if ending.outcome is not None and not attempt.request.release:
                self._spawn(self._ends.close_agent(attempt))
            if self._spec.isolation == "dedicated":
                # The process ends with its agent.
                self._spawn(self._places.give_back())
                self._spawn(self._waits.leave(attempt.host))
        if ending.outcome is not None:
            self._past = self._past.plus(spent_of(ending.outcome.totals))
        self._ends.tell(attempt, ending)
        return True

    def _end_key(self, key: RolloutKey, stop: str | None) -> None:
        self._rows.put(KeyEnd(key, stop))
        self._keys_ended += 1
        self._data.pop(key, None)
        self._tried.pop(key, None)
        self._extra.pop(key, None)

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {name: count for name, count in self._schedule.progress().done.items() if count}
        missing = len(self._spec.keys) - sum(counts.values())
        if missing:
            counts["not_started"] = counts.get("not_started", 0) + missing
        return counts

    async def _unreachable(self, host: str, attempts: list[Attempt], error: KimiRayError) -> None:
        """A call to a host failed: is it gone, or was it only slow?"""
        attempts = [attempt for attempt in attempts if not attempt.ended]
        if not is_lost(error.code):
            for attempt in attempts:
                self._finish(attempt, failed(error))
            return
        if await self._services.registry.report_lost(host):
            self._places.lost(host)
            await self._revive(attempts)
            return
        again: list[Attempt] = []
        for attempt in attempts:
            attempt.resends += 1
            if attempt.resends > _RESENDS:
                self._finish(attempt, failed(error))
            elif attempt.accepted:
                self._waits.add(host, [attempt.wait_key])
            else:
                again.append(attempt)
        for batch in batches_of(again):
            self._spawn(self._begin(host, batch))

    async def _revive(self, attempts: list[Attempt]) -> None:
        """Bring agents back elsewhere, or begin their rollouts again."""
        revived: list[Attempt] = []
        for attempt in attempts:
            if attempt.ended:
                continue
            was_running, attempt.accepted = attempt.accepted, False
            if was_running:
                attempt.revivals += 1
                self._interruptions += 1
            else:
                attempt.resends += 1
            ending = host_lost(attempt)
            attempt.host = ""  # its place went with the host
            if self._cancel_running:
                self._finish(attempt, Ending("cancelled"))
            elif attempt.revivals > MAX_REVIVALS + 1 or attempt.resends > _RESENDS:
                self._finish(attempt, ending)
            elif was_running and self._spec.on_interrupted == "restart" and self._spec.rollout is None:
                self._again(attempt, ending)
            else:
                # Whether its log exists is open until its prompt was accepted: `_refused` tries the other way then.
                attempt.lost = True
                attempt.request = replace(
                    attempt.request,
                    agent=replace(attempt.request.agent, header=None, nonce=new_ulid()),
                    release=False,
                )
                revived.append(attempt)
        self._services.record(
            [LogEntry("subagent/suspended", {"agent_id": a.agent_id, "reason": "host lost"}) for a in revived]
        )
        if revived:
            await self._place_and_begin(revived)

    def _counts_while_running(self) -> bool:
        limits = self._spec.total_limits
        if limits is None:
            return False
        return any(value is not None for name, value in limits.__dict__.items() if name != "time_s")

    async def _count_running(self) -> None:
        for progress in (await self._watch.refresh(list(self._attempts.values()), _TICK_S / 2)).values():
            attempt = self._attempts.get(progress.stream.agent_id)
            if attempt is not None:
                used = spent_so_far(progress).plus(self._below.get(attempt.agent_id, Spent()))
                self._enforce(self._schedule.spent(attempt.rollout.key, used))

    def _enforce(self, hit: LimitHit | None) -> None:
        """A total limit is reached: the running attempts end with it."""
        if hit is None or self._limit is not None:
            return
        self._limit = run_limit(hit)
        self._fed.set()
        self._spawn(self._send_cancels(list(self._attempts.values())))

    async def _cancel_all(self, grace_s: float) -> None:
        await self._send_cancels(list(self._attempts.values()))
        await asyncio.wait({self._main}, timeout=grace_s)
        # Where it ended otherwise, these are somebody else's by now.
        for attempt in [] if self._main.done() else list(self._attempts.values()):
            self._finish(attempt, Ending("cancelled"))

    async def _send_cancels(self, attempts: list[Attempt]) -> None:
        limit = self._limit.to_data() if self._limit is not None and not self._cancel_running else None
        await self._ends.cancel_agents([a for a in attempts if a.accepted and not a.cancelling and not a.ended], limit)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._main.done():
            # A step of the coordinator itself failed: the swarm says so instead of waiting for ever.
            self._main.cancel()
            known = error if isinstance(error, KimiRayError) else KimiRayError(repr(error), code="internal")
            self._rows.finish(known)
