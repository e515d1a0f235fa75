"""How a running turn, or its running step alone, is stopped from outside: one cause, and a task that hears of it."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from kimi_ray.errors import KimiRayError


class TurnStopped(Exception):
    """Raised inside a turn once its signal is set."""


class StepStopped(TurnStopped):
    """Raised inside a step that alone is to end: the turn goes on."""


class TurnSignal:
    """The stop signal of one turn.

    ``stop`` sets it, ``stop_step`` for the running step alone. Inside ``interruptible()`` the turn's task is then
    cancelled at once; elsewhere (in tools) the ``stopped`` event is what the running calls look at. The first cause
    wins, and the end of the turn that of a step.
    """

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        """Set when what runs is to end; another one behind a step that was stopped alone."""
        self.cause: str | None = None
        self.limit: KimiRayError | None = None
        self.fenced = False
        self._ends = False
        self._task: asyncio.Task[Any] | None = None
        self._delivered = False
        self._stopping: asyncio.Future[None] | None = None

    @property
    def stopping(self) -> asyncio.Future[None]:
        """Done when ``stopped`` is set."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
            if self.stopped.is_set():
                self._stopping.set_result(None)
        return self._stopping

    def stop(self, cause: str, *, limit: KimiRayError | None = None, fenced: bool = False) -> bool:
        """Ask the turn to end; returns whether this call was the first."""
        if self._ends:
            self.fenced = self.fenced or fenced
            return False
        self._ends = True
        self.cause = cause
        self.limit = limit
        self.fenced = fenced
        self._set()
        return True

    def stop_step(self) -> bool:
        """Ask the running step alone to end; returns False if the turn is to end anyway."""
        if not self._ends:
            self._set()
        return not self._ends

    def step_ended(self) -> bool:
        """The step is over: what comes next is not stopped with it. Returns whether it alone was stopped."""
        if self._ends or not self.stopped.is_set():
            return False
        self.stopped = asyncio.Event()
        self._stopping = None
        self._delivered = False
        return True

    def check(self) -> None:
        """Raise ``TurnStopped`` if the signal is set, ``StepStopped`` if it is for the step alone."""
        if self._ends:
            raise TurnStopped
        if self.stopped.is_set():
            raise StepStopped

    def interruptible(self) -> Self:
        """A span in which a stop cancels what the turn awaits: ``with signal.interruptible(): ...``

        Raises:
            TurnStopped: the span was ended by the signal, before or inside.
        """
        return self  # entered several times in each step: it makes no object

    def __enter__(self) -> None:
        self.check()
        self._task = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        task, self._task = self._task, None
        if not self._delivered or task is None:
            return
        # Also when somebody inside has swallowed it, or made another error of it: the task itself goes on.
        task.uncancel()
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise (TurnStopped if self._ends else StepStopped) from None

    def _set(self) -> None:
        if not self.stopped.is_set():
            self.stopped.set()
            if self._stopping is not None:
                self._stopping.set_result(None)
        self._deliver()

    def _deliver(self) -> None:
        task = self._task
        if task is None or self._delivered or not self.stopped.is_set():
            return
        if task is asyncio.current_task():
            # Stopped from inside of the span: a cancel now might arrive only when the span has been left.
            asyncio.get_running_loop().call_soon(self._deliver)
            return
        self._delivered = True
        task.cancel()
