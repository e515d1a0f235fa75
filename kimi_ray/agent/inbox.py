"""What the runtime itself has to tell an agent: messages in the user's role that nobody submitted as a prompt.

A note joins the running turn at its next step; one that ``wakes`` begins a turn when the agent is idle. Notes are kept
in memory only: whoever puts one knows from the log whether it was told, and puts it again when the agent is revived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Note:
    """One message. ``source`` is that of its ``user/message``: its ``kind``, and facts about it."""

    key: str
    content: list[dict[str, Any]]
    source: dict[str, Any]


class Inbox:
    """The notes that wait for an agent's next step, in the order they came."""

    def __init__(self) -> None:
        self._notes: dict[str, Note] = {}
        self._wanted = False
        self._wake: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self._notes)

    @property
    def wants_turn(self) -> bool:
        """Whether an idle agent is to begin a turn for what waits here."""
        return self._wanted and bool(self._notes)

    @property
    def kind(self) -> str:
        """The source kind of the first note: why a turn for them begins."""
        first = next(iter(self._notes.values()), None)
        return "task" if first is None else str(first.source["kind"])

    def put(self, key: str, text: str, source: dict[str, Any], *, wakes: bool = True) -> None:
        """Leave a note; one of the same key that still waits is replaced.

        Args:
            key: What to withdraw it by.
            text: What the model reads.
            source: ``{"kind": ...}`` and whatever tells which message this is.
            wakes: Begin a turn for it if none runs.
        """
        self._notes[key] = Note(key, [{"type": "text", "text": text}], source)
        if wakes:
            self._wanted = True
            if self._wake is not None:
                self._wake()

    def withdraw(self, key: str) -> bool:
        """Take a note back; False when it was told already, or never put."""
        return self._notes.pop(key, None) is not None

    def take(self) -> list[Note]:
        """All that wait, for the step that is about to tell them."""
        notes = list(self._notes.values())
        self._notes.clear()
        self._wanted = False
        return notes

    def turn_begins(self) -> None:
        """A turn begins, for whatever reason: what waits joins it, and begins none of its own should it fail first."""
        self._wanted = False

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a note is to begin a turn. One listener: the agent."""
        self._wake = wake
