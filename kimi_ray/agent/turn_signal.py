"""How a running turn is stopped from outside: one cause, the first one, and a task that hears of it."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from kimi_ray.errors import KimiRayError


class TurnStopped(Exception):
    """Raised inside a turn once its signal is set."""


class TurnSignal:
    """The stop signal of one turn.

    ``stop`` sets it. Inside ``interruptible()`` the turn's task is then cancelled at once; elsewhere (in tools) the
    ``stopped`` event is what the running calls look at. The first cause wins.
    """

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.cause: str | None = None
        self.limit: KimiRayError | None = None
        self.fenced = False
        self._task: asyncio.Task[Any] | None = None
        self._delivered = False
        self._stopping: asyncio.Future[None] | None = None

    @property
    def stopping(self) -> asyncio.Future[None]:
        """Done when the signal is set."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
            if self.stopped.is_set():
                self._stopping.set_result(None)
        return self._stopping

    def stop(self, cause: str, *, limit: KimiRayError | None = None, fenced: bool = False) -> bool:
        """Ask the turn to end; returns whether this call was the first."""
        if self.stopped.is_set():
            self.fenced = self.fenced or fenced
            return False
        self.cause = cause
        self.limit = limit
        self.fenced = fenced
        self.stopped.set()
        if self._stopping is not None:
            self._stopping.set_result(None)
        self._deliver()
        return True

    def check(self) -> None:
        """Raise ``TurnStopped`` if the signal is set."""
        if self.stopped.is_set():
            raise TurnStopped

    def interruptible(self) -> Self:
        """A span in which ``stop`` cancels what the turn awaits: ``with signal.interruptible(): ...``

        Raises:
            TurnStopped: the span was ended by the signal, before or inside.
        """
        return self  # entered several times in each step: it makes no object

    def __enter__(self) -> None:
        self.check()
        self._task = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        task, self._task = self._task, None
        if kind is not None and self._delivered and task is not None and issubclass(kind, asyncio.CancelledError):
            task.uncancel()
            raise TurnStopped from None

    def _deliver(self) -> None:
        task = self._task
        if task is None or self._delivered:
            return
        if task is asyncio.current_task():
            # Stopped from inside of the span: a cancel now might arrive only when the span has been left.
            asyncio.get_running_loop().call_soon(self._deliver)
            return
        self._delivered = True
        task.cancel()
