"""An event loop without threads and without waiting: its clock jumps to the next alarm.

Blocking work that a store hands to executors runs where it is handed over, so a life of a store is one deterministic
sequence of file calls. When nothing can run any more, somebody waits without a bound: that is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from unittest import mock

P = ParamSpec("P")
R = TypeVar("R")

_THREADED = ("jsonl", "commit", "claims", "owners")


class InlineExecutor(ThreadPoolExecutor):
    """Runs what is submitted at once, in the caller."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """The finished future."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # as an executor's worker does
            future.set_exception(error)
        return future


class InlineSync:
    """A ``SyncStrategy`` whose jobs run at once."""

    def submit(self, job: Callable[[], None]) -> None:
        """See ``SyncStrategy.submit``."""
        job()

    def close(self) -> None:
        """Nothing is left to finish."""


class _Jumping(selectors.SelectSelector):
    """Instead of waiting, it sets the clock forward."""

    clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing can run any more: something waits without a bound")
        self.clock += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """One thread, simulated time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.set_default_executor(InlineExecutor(1))

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumping.clock

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """There is only one thread."""
        return self.call_soon(callback, *args, context=context)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run to the end."""
        return self.run_until_complete(work)


@contextlib.contextmanager
def simulated_loop() -> Generator[SimulatedLoop]:
    """A loop on which the JSONL store runs without threads."""
    with contextlib.ExitStack() as stack:
        for module in _THREADED:
            stack.enter_context(mock.patch(f"kimi_ray.store.{module}.ThreadPoolExecutor", InlineExecutor))
        loop = SimulatedLoop()
        stack.callback(loop.close)
        yield loop
