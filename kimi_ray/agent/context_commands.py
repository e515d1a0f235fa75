"""What a log says of the compactions and undos that somebody asked for by name.

A call is made again when its host was lost before it answered; by its name it finds here what came of it, in whichever
life of the log, and is not done twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from kimi_ray.events import SessionEvent

T = TypeVar("T")

KEPT = 16
"""Of each kind so many newest ones are known: a call is made again at once, or never."""


@dataclass(slots=True)
class AskedCompaction:
    """The events of one compaction, those that are there."""

    start: SessionEvent
    summary: SessionEvent | None = None
    message: SessionEvent | None = None
    end: SessionEvent | None = None

    @property
    def settled(self) -> bool:
        """Whether it has ended, well or not, or has taken effect."""
        return self.end is not None or self.message is not None


@dataclass(slots=True)
class ContextCommands:
    """Follows a log for them."""

    compactions: dict[str, AskedCompaction] = field(default_factory=dict[str, AskedCompaction])
    """By the caller's name for it."""
    undos: dict[str, SessionEvent] = field(default_factory=dict[str, SessionEvent])
    """The ``surface/cut`` of each, by the caller's name for it."""
    _open: AskedCompaction | None = None

    def started(self, event: SessionEvent) -> None:
        """Follow a ``compaction/start``."""
        self._open = None
        name = event.data.get("command_id")
        if name is not None:
            self._open = AskedCompaction(event)
            self.compactions.pop(name, None)
            _keep(self.compactions, name, self._open)

    def summed(self, event: SessionEvent) -> None:
        """Follow a ``compaction/summary``."""
        if self._open is not None:
            self._open.summary = event

    def replaced(self, event: SessionEvent) -> None:
        """Follow a ``user/message`` that replaces others."""
        if self._open is not None and self._open.summary is not None:
            self._open.message = event

    def ended(self, event: SessionEvent) -> None:
        """Follow a ``compaction/end``."""
        if self._open is not None:
            self._open.end = event
            self._open = None

    def cut(self, event: SessionEvent) -> None:
        """Follow a ``surface/cut``."""
        name = event.data.get("undo_id")
        if name is not None:
            _keep(self.undos, name, event)

    def new_life(self) -> None:
        """Nobody goes on with a compaction that is open: one that has not taken effect never was."""
        self._open = None


def _keep(known: dict[str, T], name: str, value: T) -> None:
    known[name] = value
    if len(known) > KEPT:
        del known[next(iter(known))]
