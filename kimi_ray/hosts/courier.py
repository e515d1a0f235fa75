"""The caller's side of the calls to agents, of a driver as of an agent with subagents: handles are many, calls are few.

All submits made in one turn of the loop to agents of one host leave in one call, numbered, so that they take effect in
the order in which they were made. All results that somebody waits for on one host are served by its ``OutcomeWaiter``.
When a host is lost, the session is asked for the agent's new place, what was not accepted is sent again in order, and
what was waited for is waited for there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.cancelling import ends_this_task
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, KimiRayError, RuntimeFault, error_from_data
from kimi_ray.hosts.boundary import unexpected
from kimi_ray.hosts.ports import Cluster, Group, Peer, is_lost
from kimi_ray.hosts.specs import Ack, Outcome, PromptSpec, Submit
from kimi_ray.hosts.steady_calls import RegistryCalls, StoreCalls
from kimi_ray.hosts.waiting import OutcomeWaiter, PromptKey
from kimi_ray.ids import new_ulid
from kimi_ray.store.seam import Stream

CALL_S = 60.0
_SUBMIT_CHARS = 16 << 20
_RESOLVES = 8
_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0
_BUSY = ("infra.pending_limit", "infra.object_store_full", "store.busy")

Resolve = Callable[[str | None], Coroutine[Any, Any, str]]
"""Gives the host of an agent; the argument is the host that could not be reached, or None."""


@dataclass(eq=False, slots=True)
class Entry:
    """A prompt on its way to its agent. ``index`` is its place among the route's prompts."""

    index: int
    prompt: PromptSpec
    accepted: asyncio.Future[None]


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False, slots=True)
class Route:
    """The way to one agent. A *lane* is its numbered sequence of calls to one host."""

    stream: Stream
    resolve: Resolve
    host: str | None = None
    caller: str = ""
    number: int = 0
    made: int = 0
    queue: list[Entry] = field(default_factory=list["Entry"])
    sending: int = 0
    lane_empty: asyncio.Event = field(default_factory=_set_event)
    suspect: str | None = None
    resolving: asyncio.Task[KimiRayError | None] | None = None
    misses: int = 0


class Courier:
    """All calls of one process to agents.

    Args:
        cluster: Where the hosts live.
        config: The runtime's settings.
    """

    def __init__(self, cluster: Cluster, config: RuntimeConfig) -> None:
        self.cluster = cluster
        self.config = config
        self.registry = RegistryCalls(cluster, config.store_timeout_s)
        self.store = StoreCalls(cluster, config.shards, config.store_timeout_s)
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self.last_error: KimiRayError | None = None
        """What went wrong where nobody waited for it, the newest."""
        self._routes: dict[Stream, Route] = {}
        self._waiters: dict[str, OutcomeWaiter] = {}
        self._unanswered: set[asyncio.Future[None]] = set()
        """Of the prompts that are on their way: whether each is accepted."""
        self._results: dict[PromptKey, asyncio.Future[Outcome]] = {}
        self._resolved_for: dict[PromptKey, int] = {}
        self._dirty: dict[Stream, Route] = {}
        self._flush: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.calls = 0
        """Calls to agent hosts so far."""

    def route(self, stream: Stream, resolve: Resolve, host: str | None = None) -> Route:
        """The one route to an agent."""
        route = self._routes.get(stream)
        if route is None:
            route = self._routes[stream] = Route(stream, resolve, host, caller=new_ulid())
        return route

    def forget(self, session_id: str) -> None:
        """A session is closed: its routes end, and whoever waits for its prompts hears it."""
        for stream in [stream for stream in self._routes if stream.session_id == session_id]:
            route = self._routes.pop(stream)
            self._fail(route, _closed(session_id))
        for key, future in list(self._results.items()):
            if key[0].session_id == session_id and not future.done():
                # Its agents were closed, so these prompts are cancelled; a waiter asks the log no more.
                future.set_exception(_closed(session_id))

    def drop(self, route: Route) -> None:
        """Nobody has to do with an agent any more; what was submitted and is not answered is not told."""
        self._routes.pop(route.stream, None)

    def check_loop(self) -> None:
        """Refuse another event loop than the one that connected: its futures would wait for ever, or break in the
        middle.

        Raises:
            RuntimeFault: ``runtime.wrong_loop``.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeFault(
                "this runtime lives on another event loop",
                code="runtime.wrong_loop",
                hint="connect in the loop (and the process, after a fork) that uses it; scripts use only run_sync",
            )

    def check_open(self) -> None:
        """As ``check_loop``, and refuse when the runtime was closed.

        Raises:
            RuntimeFault: ``runtime.wrong_loop``, ``runtime.closed``.
        """
        self.check_loop()
        if self.closed:
            raise _runtime_closed()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that this process owns; it is cancelled at the close."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def afterwards(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something to be sent for a caller who has gone (a cancel): a failure is kept in ``last_error``."""

        async def try_it() -> None:
            try:
                await work
            except KimiRayError as error:
                self.last_error = error

        if self.closed:
            work.close()
        else:
            self.spawn(try_it())

    async def close(self) -> None:
        """Stop waiting and sending. Idempotent."""
        self.closed = True
        if self._flush is not None:
            self._flush.cancel()
        waiters, self._waiters = list(self._waiters.values()), {}
        await asyncio.gather(*(waiter.close() for waiter in waiters))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gone = _runtime_closed()
        for future in (*self._unanswered, *self._results.values()):
            if not future.done():
                future.set_exception(gone)
                future.exception()

    # -- calls ------------------------------------------------------------------------------------------------------

    async def call(self, route: Route, method: str, *args: Any, group: Group, timeout_s: float = CALL_S) -> Any:
        """Call an agent's host for something that may be asked twice; the agent is brought back where needed.

        Raises:
            KimiRayError: what the host raised.
        """
        self.check_loop()
        for attempt in range(_RESOLVES):
            host = await self._host(route)
            try:
                self.calls += 1
                return await self._peer(host).call(method, *args, timeout_s=timeout_s, group=group)
            except KimiRayError as error:
                if attempt == _RESOLVES - 1 or not _elsewhere(error.code):
                    raise
            self._lose(route, host)
            await asyncio.sleep(min(_PAUSE_MAX_S, _PAUSE_S * 2**attempt))
        raise AssertionError

    def submit(self, route: Route, prompts: list[PromptSpec]) -> list[Entry]:
        """Put prompts on their way, behind all earlier ones of the route. Synchronous, on the loop."""
        self.check_open()
        entries: list[Entry] = []
        for prompt in prompts:
            accepted: asyncio.Future[None] = self.loop.create_future()
            # Nobody need await it: the error is then told by the result.
            accepted.add_done_callback(self._answered)
            self._unanswered.add(accepted)
            entries.append(Entry(route.made, prompt, accepted))
            route.made += 1
        route.queue.extend(entries)
        self._mark(route)
        return entries

    async def outcome(self, route: Route, entry_accepted: asyncio.Future[None], prompt_id: str) -> Outcome:
        """The end of a prompt, wherever its agent is by then."""
        self.check_open()
        if entry_accepted.done():
            entry_accepted.result()
        else:
            await asyncio.shield(entry_accepted)
        key = (route.stream, prompt_id)
        future = self._results.get(key)
        if future is None:
            future = self._results[key] = self.loop.create_future()
            future.add_done_callback(lambda done: self._forget_result(key, done))
            # Not awaited: whoever asks next relies on it that somebody waits, also when this caller gives up.
            if route.host is not None:
                self._waiter(route.host).add([key])
            else:
                self.spawn(self._wait_at(route, key))
        return await asyncio.shield(future)

    # -- sending ----------------------------------------------------------------------------------------------------

    def _mark(self, route: Route) -> None:
        self._dirty[route.stream] = route
        if self._flush is None:
            self._flush = self.loop.call_soon(self._send_all)

    def _send_all(self) -> None:
        self._flush = None
        dirty, self._dirty = self._dirty, {}
        by_host: dict[str, list[tuple[Route, Submit, list[Entry]]]] = {}
        for route in dirty.values():
            if not route.queue or route.resolving is not None:
                continue
            if route.host is None:
                self._start_resolving(route)
                continue
            for entries in _parts(route.queue):
                prompts = tuple(entry.prompt for entry in entries)
                submit = Submit(route.stream, prompts, route.caller, route.number)
                route.number += 1
                route.sending += 1
                route.lane_empty.clear()
                by_host.setdefault(route.host, []).append((route, submit, entries))
            route.queue = []
        for host, work in by_host.items():
            for part in _calls(work):
                self.spawn(self._send(host, part))

    async def _send(self, host: str, work: list[tuple[Route, Submit, list[Entry]]]) -> None:
        failure: KimiRayError | None = None
        acks: list[Ack] = []
        pause_s = _PAUSE_S
        while True:
            self.calls += 1
            try:
                acks = await self._peer(host).call("submit_many", [submit for _, submit, _ in work], timeout_s=CALL_S)
            except KimiRayError as error:
                if error.code in _BUSY:
                    await asyncio.sleep(pause_s)
                    pause_s = min(_PAUSE_MAX_S, pause_s * 2)
                    continue
                failure = error
            except Exception as error:  # noqa: BLE001  told to whoever submits: nobody else would ever answer
                failure = unexpected(error, f"submitting at {host}")
            break
        for number, (route, _, entries) in enumerate(work):
            route.sending -= 1
            if not route.sending:
                route.lane_empty.set()
            data = None if failure is not None else acks[number].error
            error = failure if failure is not None else error_from_data(data) if data is not None else None
            if error is None:
                route.misses = 0
                for place, entry in enumerate(entries):
                    if entry.accepted.done():
                        continue
                    if place in acks[number].refused:
                        entry.accepted.set_exception(error_from_data(acks[number].refused[place]))
                    else:
                        entry.accepted.set_result(None)
            elif _elsewhere(error.code) and route.misses < _RESOLVES:
                route.queue = sorted([*route.queue, *entries], key=lambda entry: entry.index)
                self._lose(route, host)
            else:
                for entry in entries:
                    if not entry.accepted.done():
                        entry.accepted.set_exception(error)
            if route.queue:
                self._mark(route)

    # -- places -----------------------------------------------------------------------------------------------------

    def _lose(self, route: Route, host: str) -> None:
        """The agent could not be reached there: its lane is over."""
        if route.host == host:
            route.host = None
            route.suspect = host
            route.misses += 1

    def _start_resolving(self, route: Route) -> None:
        route.resolving = self.spawn(self._resolve(route))

    async def _host(self, route: Route) -> str:
        while route.host is None:
            if route.resolving is None:
                self._start_resolving(route)
            task = route.resolving
            try:
                error = await asyncio.shield(task) if task is not None else None
            except asyncio.CancelledError as cancelled:
                if ends_this_task(cancelled):
                    raise
                raise _runtime_closed() from None  # it was the search that was ended
            if error is not None:
                raise error
        return route.host

    async def _resolve(self, route: Route) -> KimiRayError | None:
        """Find the agent; the error is given back, since perhaps nobody waits."""
        try:
            if route.misses > 1:
                await asyncio.sleep(min(_PAUSE_MAX_S, _PAUSE_S * 2**route.misses))
            # Calls of the old lane must be back before the new one begins: their prompts go first.
            await route.lane_empty.wait()
            host = await route.resolve(route.suspect)
        except KimiRayError as error:
            route.resolving = None
            self._fail(route, error)
            return error
        route.host, route.caller, route.number = host, new_ulid(), 0
        route.resolving = None
        if route.queue:
            self._mark(route)
        return None

    def _answered(self, accepted: asyncio.Future[None]) -> None:
        _seen(accepted)
        self._unanswered.discard(accepted)

    def _fail(self, route: Route, error: KimiRayError) -> None:
        queue, route.queue = route.queue, []
        for entry in queue:
            if not entry.accepted.done():
                entry.accepted.set_exception(error)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _forget_result(self, key: PromptKey, done: asyncio.Future[Outcome]) -> None:
        _seen(done)
        self._results.pop(key, None)
        self._resolved_for.pop(key, None)

    async def _wait_at(self, route: Route, key: PromptKey) -> None:
        try:
            host = await self._host(route)
        except KimiRayError as error:
            self._answer(key, error)
            return
        self._waiter(host).add([key])

    def _waiter(self, host: str) -> OutcomeWaiter:
        waiter = self._waiters.get(host)
        if waiter is None:

            def lost(error: KimiRayError, keys: list[PromptKey]) -> None:
                for key in keys:
                    self._wait_elsewhere(host, key, error)

            def came(outcomes: list[Outcome]) -> None:
                self._came(host, outcomes)

            waiter = self._waiters[host] = OutcomeWaiter(self._peer(host), came, lost, on_call=self._count)
        return waiter

    def _count(self) -> None:
        self.calls += 1

    def _came(self, host: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            key = (Stream(*outcome.stream), outcome.prompt_id)
            data = outcome.result.error
            if outcome.seq < 0 and data is not None and _elsewhere(str(data.get("code"))):
                self._wait_elsewhere(host, key, error_from_data(data))
                continue
            route = self._routes.get(key[0])
            if route is not None:
                route.misses = 0
            future = self._results.get(key)
            if future is not None and not future.done():
                future.set_result(outcome)

    def _wait_elsewhere(self, host: str, key: PromptKey, error: KimiRayError) -> None:
        route = self._routes.get(key[0])
        tries = self._resolved_for.get(key, 0) + 1
        self._resolved_for[key] = tries
        if route is None or not _elsewhere(error.code) or tries > _RESOLVES:
            self._answer(key, error)
            return
        self._lose(route, host)
        self.spawn(self._wait_at(route, key))

    def _answer(self, key: PromptKey, error: KimiRayError) -> None:
        future = self._results.get(key)
        if future is not None and not future.done():
            future.set_exception(error)

    def _peer(self, host: str) -> Peer:
        return self.cluster.peer(host)


def _elsewhere(code: str) -> bool:
    """Whether an error means that the agent is to be looked for somewhere else."""
    return is_lost(code) or code in ("agent.not_found", "agent.closed", "agent.order_lost", "store.fenced")


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _runtime_closed() -> RuntimeFault:
    return RuntimeFault("the runtime is closed", code="runtime.closed", hint="connect again")


def _closed(session_id: str) -> AgentError:
    return AgentError(
        f"session {session_id} was closed before the prompt ended", code="session.closed", hint="resume the session"
    )


def _chars(prompt: PromptSpec) -> int:
    blocks = prompt.content or ()
    return len(prompt.text) + sum(len(str(value)) for block in blocks for value in block.values())


def _parts(entries: list[Entry]) -> list[list[Entry]]:
    """Parts of a call's size."""
    parts: list[list[Entry]] = []
    chars = 0
    for entry in entries:
        size = _chars(entry.prompt)
        if not parts or chars + size > _SUBMIT_CHARS:
            parts.append([])
            chars = 0
        parts[-1].append(entry)
        chars += size
    return parts


def _calls(
    work: list[tuple[Route, Submit, list[Entry]]],
) -> list[list[tuple[Route, Submit, list[Entry]]]]:
    """The submits of one tick to one host: one call, unless together they are too large for one."""
    calls: list[list[tuple[Route, Submit, list[Entry]]]] = []
    chars = 0
    for one in work:
        size = sum(_chars(entry.prompt) for entry in one[2])
        if not calls or chars + size > _SUBMIT_CHARS:
            calls.append([])
            chars = 0
        calls[-1].append(one)
        chars += size
    return calls
