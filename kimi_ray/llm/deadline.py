"""``asyncio.timeout`` for a stream: many short waits, one after the other, each with a bound of its own.

A timeout an answer's piece is a tenth of what reading the piece costs. Here one timer serves all the waits of an
answer: it looks at the bound when it goes off, and is set anew only if that was put off meanwhile.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self


class Deadline:
    """Bounds waits: ``with deadline.within(seconds): await ...``. Waits of one object do not overlap.

    As of ``asyncio.timeout``: what is awaited is cancelled at its bound, and ``TimeoutError`` leaves the ``with``; a
    cancel from elsewhere stays one. ``close`` lets go of the timer.
    """

    __slots__ = ("_at", "_cancels", "_due", "_expired", "_loop", "_task", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._at = 0.0
        self._cancels = 0
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer goes off."""

    def within(self, seconds: float) -> Self:
        """The bound of the next wait, from now on."""
        self._at = self._loop.time() + seconds
        return self

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancels, self._expired = task, task.cancelling(), False
        if self._timer is None or self._due > self._at:
            self._set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._expired and task is not None:
            only_ours = task.uncancel() <= self._cancels
            if only_ours and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def close(self) -> None:
        """Let go of the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self.close()
        self._due = self._at
        self._timer = self._loop.call_at(self._at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._at > self._due:
            self._set()
        else:
            self._expired = True
            self._task.cancel()
