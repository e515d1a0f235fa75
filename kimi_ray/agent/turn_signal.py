"""How a running turn is stopped from outside: one cause, the first one, and a task that hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

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
        self._task: asyncio.Task[None] | None = None
        self._delivered = False

    def stop(self, cause: str, *, limit: KimiRayError | None = None, fenced: bool = False) -> bool:
        """Ask the turn to end; returns whether this call was the first."""
        if self.stopped.is_set():
            self.fenced = self.fenced or fenced
            return False
        self.cause = cause
        self.limit = limit
        self.fenced = fenced
        self.stopped.set()
        self._deliver()
        return True

    def check(self) -> None:
        """Raise ``TurnStopped`` if the signal is set."""
        if self.stopped.is_set():
            raise TurnStopped

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """A span in which ``stop`` cancels what the turn awaits.

        Raises:
            TurnStopped: the span was ended by the signal, before or inside.
        """
        self.check()
        task = asyncio.current_task()
        self._task = task
        try:
            yield
        except asyncio.CancelledError:
            if not self._delivered or task is None:
                raise
            task.uncancel()
            raise TurnStopped from None
        finally:
            self._task = None

    def _deliver(self) -> None:
        if self._task is not None and not self._delivered:
            self._delivered = True
            self._task.cancel()
