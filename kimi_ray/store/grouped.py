"""Callers that arrive while a run is in progress are served together by the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Grouped(Generic[T, R]):
    """Runs ``work(items)`` in a thread, one run at a time, for everyone who asked meanwhile."""

    def __init__(self, work: Callable[[list[T]], list[R]], executor: Executor) -> None:
        """
        Args:
            work: Answers each item, in order; what it raises goes to everyone of that run.
            executor: Where it runs.
        """
        self._work = work
        self._executor = executor
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._running = False

    async def submit(self, item: T) -> R:
        """The answer for ``item``."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._kick()
        return await future

    def _kick(self) -> None:
        if self._running or not self._waiting:
            return
        group, self._waiting = self._waiting, []
        self._running = True
        run = asyncio.get_running_loop().run_in_executor(self._executor, self._work, [item for item, _ in group])

        def finish(done: asyncio.Future[list[R]]) -> None:
            self._running = False
            error = done.exception() if not done.cancelled() else asyncio.CancelledError()
            answers = [] if error is not None else done.result()
            for index, (_, future) in enumerate(group):
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(answers[index])
            self._kick()

        run.add_done_callback(finish)
