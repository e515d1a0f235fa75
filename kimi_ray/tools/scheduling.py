"""Running the calls of one step: side by side where they may, in the model's order where it shows.

A call waits for every earlier call that conflicts with it, running or waiting, and for a free place. So a later call
never overtakes a conflicting one, and an independent one does not wait. Each call gets exactly one result, however
the step ends.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kimi_ray.cancelling import ends_this_task
from kimi_ray.tools.contract import Access, Accesses, Environment, KnowsFiles, ToolOutput
from kimi_ray.tools.results import error_output

MAX_CONCURRENCY = 10
GRACE_S = 2.0
_STOP_S = 2.0
"""How long a cancelled call may take to end before it is left behind."""


@dataclass(frozen=True, slots=True)
class ScheduledCall:
    """A call to be run: what it touches, and what runs it. ``run`` may raise; that becomes an error result."""

    accesses: Accesses
    run: Callable[[], Awaitable[ToolOutput]]


@dataclass(frozen=True, slots=True)
class _Claim:
    everything: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]


_NOTHING = _Claim(everything=False, reads=(), writes=())


def _claim(accesses: Accesses, root: str) -> _Claim:
    # case is folded: on some file systems two spellings are one file, and a needless wait harms nobody
    paths = [(a.mode, posixpath.normpath(posixpath.join(root, a.path)).casefold()) for a in accesses.paths]
    return _Claim(
        accesses.everything,
        tuple(path for mode, path in paths if mode == "read"),
        tuple(path for mode, path in paths if mode == "write"),
    )


def _overlap(one: str, other: str) -> bool:
    if one in (other, ".") or other == ".":
        return True
    return one.startswith(other.rstrip("/") + "/") or other.startswith(one.rstrip("/") + "/")


def _conflict(one: _Claim, other: _Claim) -> bool:
    if one.everything or other.everything:
        return True
    return any(_overlap(a, b) for a in one.writes for b in (*other.reads, *other.writes)) or any(
        _overlap(a, b) for a in one.reads for b in other.writes
    )


def conflict(one: Accesses, other: Accesses, *, root: str | None = None) -> bool:
    """Whether two calls may not run side by side: one writes where the other reads or writes, or touches everything.

    Paths are compared after normalisation against ``root``; ``by_file`` says before under which names a file is known.
    """
    return _conflict(_claim(one, root or ""), _claim(other, root or ""))


async def by_file(accesses: Sequence[Accesses], environment: Environment) -> list[Accesses]:
    """The same accesses by the files that they mean: two names of one file (through a link) become one.

    Looked up only where it matters: several calls, one of which writes, in an environment that knows its files.
    """
    paths = {access.path for one in accesses for access in one.paths}
    writes = any(access.mode == "write" for one in accesses for access in one.paths)
    if not writes or len(paths) <= 1 or not isinstance(environment, KnowsFiles):
        return list(accesses)
    ordered = list(paths)
    names = dict(zip(ordered, await environment.names_of(ordered), strict=True))
    return [
        Accesses(
            tuple(Access(access.mode, name) for access in one.paths for name in names[access.path]),
            everything=one.everything,
        )
        for one in accesses
    ]


async def run_calls(
    calls: Sequence[ScheduledCall],
    *,
    cancelled: asyncio.Event,
    stopped: asyncio.Future[None] | None = None,
    on_start: Callable[[int], None],
    commit: Callable[[int, ToolOutput], None],
    root: str | None = None,
    max_concurrency: int = MAX_CONCURRENCY,
    grace_s: float = GRACE_S,
) -> None:
    """Run all calls and commit all results.

    When ``cancelled`` is set nothing more starts (``tool.not_started``), what runs has ``grace_s`` seconds to end by
    itself and is then cancelled (``tool.cancelled``). Behind a call whose output says ``stop_batch`` nothing starts any
    more (``tool.not_started``). When this coroutine is cancelled the same happens without
    grace, the results are committed, and the cancellation goes on.

    Args:
        calls: In the model's order.
        cancelled: Set when nothing more is to start.
        stopped: Done when ``cancelled`` is set: whoever has it saves a task that waits for the event.
        on_start: Told the index of a call when it starts.
        commit: Told index and result, in the model's order, each index exactly once.
        root: The working directory that relative paths of accesses stand for.
        max_concurrency: Calls at a time.
        grace_s: Seconds.
    """
    batch = _Batch(calls, on_start, commit, root or "", max_concurrency)
    waiter = stopped if stopped is not None else asyncio.ensure_future(cancelled.wait())
    try:
        while batch.unfinished:
            if not cancelled.is_set():
                batch.start_ready()
            if cancelled.is_set() or not batch.running:
                break
            await asyncio.wait({waiter, *batch.running}, return_when=asyncio.FIRST_COMPLETED)
            batch.collect()
        if batch.unfinished:
            batch.give_up_waiting()
            if batch.running:
                await asyncio.wait(batch.running, timeout=grace_s)
                batch.collect()
    finally:
        if stopped is None:
            waiter.cancel()
        try:
            if batch.running:
                await batch.stop()
        finally:
            batch.settle()


class _Batch:
    __slots__ = ("_calls", "_claims", "_commit", "_next", "_on_start", "_outputs", "_places", "_waiting", "running")

    def __init__(
        self,
        calls: Sequence[ScheduledCall],
        on_start: Callable[[int], None],
        commit: Callable[[int, ToolOutput], None],
        root: str,
        places: int,
    ) -> None:
        self._calls = calls
        # One call alone conflicts with nobody: what it touches is not looked at.
        self._claims = [_claim(call.accesses, root) for call in calls] if len(calls) > 1 else [_NOTHING]
        self._on_start = on_start
        self._commit = commit
        self._places = places
        self._waiting = list(range(len(calls)))
        self._outputs: dict[int, ToolOutput] = {}
        self._next = 0
        self.running: dict[asyncio.Task[ToolOutput], int] = {}

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self.running)

    def start_ready(self) -> None:
        ahead = [self._claims[index] for index in self.running.values()]
        for index in list(self._waiting):
            if len(self.running) >= self._places:
                break  # before comparing: of a thousand calls each with each would hold up the loop for a minute
            claim = self._claims[index]
            blocked = any(_conflict(claim, earlier) for earlier in ahead)
            ahead.append(claim)
            if blocked:
                continue
            self._on_start(index)  # when it fails, the call has not been started
            self._waiting.remove(index)
            self.running[asyncio.create_task(_outcome(self._calls[index]))] = index

    def collect(self) -> None:
        for task in [task for task in self.running if task.done()]:
            index = self.running.pop(task)
            self._outputs[index] = output = _CANCELLED if task.cancelled() else task.result()
            if isinstance(output, ToolOutput) and output.stop_batch:  # pyright: ignore[reportUnnecessaryIsInstance]  of a user's tool
                self._skip(behind=index)
        self._commit_ready()

    def _skip(self, *, behind: int) -> None:
        for index in [index for index in self._waiting if index > behind]:
            self._waiting.remove(index)
            self._outputs[index] = _SKIPPED

    def give_up_waiting(self) -> None:
        for index in self._waiting:
            self._outputs[index] = _NOT_STARTED
        self._waiting = []
        self._commit_ready()

    async def stop(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.wait(self.running, timeout=_STOP_S)

    def settle(self) -> None:
        """A result for whatever has none yet."""
        for task, index in self.running.items():
            if task.done() and not task.cancelled():
                self._outputs[index] = task.result()
            else:
                task.cancel()
                self._outputs[index] = _CANCELLED
        self.running.clear()
        self.give_up_waiting()

    def _commit_ready(self) -> None:
        while self._next in self._outputs:
            index = self._next
            self._next += 1  # before the call: a commit that fails is not made twice
            self._commit(index, self._outputs.pop(index))


async def _outcome(call: ScheduledCall) -> ToolOutput:
    try:
        return await call.run()
    except BaseException as error:
        if ends_this_task(error):
            raise
        return error_output(error)


_NOT_STARTED = ToolOutput(
    "The call was not started: it was cancelled first.", is_error=True, error_code="tool.not_started"
)
_SKIPPED = ToolOutput(
    "The call was not started: an earlier call of the same answer ended them. Make it again if it is still needed.",
    is_error=True,
    error_code="tool.not_started",
)
_CANCELLED = ToolOutput(
    "The call was cancelled while it ran; what it did until then may have had effects.",
    is_error=True,
    error_code="tool.cancelled",
)
