"""Why one session of a source cannot be read: ``unsupported`` (nothing is damaged) or ``corrupt``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RefusalClass = Literal["unsupported", "corrupt"]


@dataclass(slots=True)
class Refusal(Exception):
    """A session is refused. Becomes the ``error`` of its report.

    ``unsupported``: another program version could read it. ``corrupt``: bytes or rules are broken. ``at`` says where:
    some of ``file``, ``line`` (the header is line 1), ``byte`` (in the file; of a compressed log the frame's first),
    ``frame``, ``seq``, ``rowid``.
    """

    kind: RefusalClass
    message: str
    at: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.message

    def placed(self, **at: Any) -> Refusal:
        """The same with more said about the place."""
        self.at = {**at, **self.at}
        return self

    def to_data(self) -> dict[str, Any]:
        """The error as the report has it."""
        return {"class": self.kind, "message": self.message, "at": self.at}


def corrupt(message: str, **at: Any) -> Refusal:
    """A refusal for damage."""
    return Refusal("corrupt", message, at)


def unsupported(message: str, **at: Any) -> Refusal:
    """A refusal for what is whole and of another version."""
    return Refusal("unsupported", message, at)


class InvalidSession(ValueError):
    """A rule of the harness is broken; ``seq`` is the event's, or None when it is not about one."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq
