"""The plain data that passes from a reader to the rules and the conversion."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from kimi_ray.exchange.dsh.errors import Refusal

JsonObject = dict[str, Any]
Event = dict[str, Any]
"""An event of the harness: ``type, seq, time, data, ignorable?, surfaceOp?, sourceEventSeqs?``."""

Encoding = Literal["none", "zstd", "sqlite"]


@dataclass(slots=True)
class Stored:
    """What one artifact holds physically: its header and the events that are to be kept.

    ``set_aside`` names a tail that is left out, with its size: ``torn`` (a write that was cut short), ``garbage``
    (bytes after the last good frame, where the original gives up), ``rows`` (rows of a database). ``notes`` counts
    what reading the JSON lost.
    """

    header: JsonObject
    events: list[Event]
    set_aside: dict[str, int] = field(default_factory=dict[str, int])
    notes: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class Reading:
    """One session as the original's ``list``, ``readFrom``, ``inspect`` and ``load`` see it.

    ``stored`` are the events before repair with legacy shapes upgraded, ``closers`` what closes an interrupted turn.
    Either is None when that call refuses; ``error`` says why. ``header`` is None when it cannot be listed.
    """

    id: str | None
    source: str
    encoding: Encoding
    header: JsonObject | None = None
    stored: list[Event] | None = None
    closers: list[Event] | None = None
    error: Refusal | None = None
    set_aside: dict[str, int] = field(default_factory=dict[str, int])
    notes: Counter[str] = field(default_factory=Counter[str])

    @property
    def events(self) -> list[Event]:
        """What ``load`` returns. Only of a session without an error."""
        return [*(self.stored or ()), *(self.closers or ())]

    def to_data(self) -> JsonObject:
        """The session in the document of ``--dry-run --json``."""
        repaired = self.stored is not None and self.closers is not None
        return {
            "id": self.id,
            "header": self.header,
            "stored": None if self.stored is None else len(self.stored),
            "after_repair": len(self.events) if repaired else None,
            "repairs": [closer["type"] for closer in self.closers or ()],
            "error": None if self.error is None else self.error.to_data(),
        }
