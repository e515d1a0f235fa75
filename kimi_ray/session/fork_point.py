"""Where a session is forked: ``3``, ``0.17``, ``^3``, or nothing for the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kimi_ray.errors import ConfigError
from kimi_ray.log.slicing import Where

_FORM = re.compile(r"\A(?P<before>\^)?(?P<turn>[0-9]{1,9})(?:\.(?P<step>[0-9]{1,9}))?\Z")
_MAX_TURN = 999_999_999

Kind = Literal["turn", "step", "before"]


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A point in an agent's log. ``str`` gives the canonical form.

    Attributes:
        kind: ``turn``: through the end of the turn; ``step``: through the step and its tool results; ``before``: as
            it was when the turn's prompt came.
        turn: Counted from 0.
        step: Counted from 0, within the turn; only of ``step``.
    """

    kind: Kind
    turn: int
    step: int = 0

    def __str__(self) -> str:
        if self.kind == "step":
            return f"{self.turn}.{self.step}"
        return f"^{self.turn}" if self.kind == "before" else str(self.turn)

    @property
    def where(self) -> Where:
        """The point in the words of ``kimi_ray.log.slicing``."""
        return Where(self.kind, self.turn, self.step)


def parse_fork_point(at: str | None = None, turn_index: int | None = None) -> ForkPoint | None:
    """Read a point; None is the whole.

    Args:
        at: ``"3"``, ``"0.17"`` or ``"^3"``.
        turn_index: The same as ``at=str(turn_index)``.

    Raises:
        ConfigError: ``request.invalid`` {at} for anything else; ``request.conflict`` when the two differ.
    """
    indexed: ForkPoint | None = None
    if turn_index is not None:
        if type(turn_index) is not int or not 0 <= turn_index <= _MAX_TURN:
            raise _invalid(turn_index)
        indexed = ForkPoint("turn", turn_index)
    if at is None:
        return indexed
    point = _parsed(at)
    if indexed is not None and indexed != point:
        raise ConfigError(
            f"at={at!r} and turn_index={turn_index} are two different points",
            code="request.conflict",
            hint="give one of them",
            details={"at": at, "turn_index": turn_index},
        )
    return point


def _parsed(at: object) -> ForkPoint:
    found = _FORM.match(at) if isinstance(at, str) else None
    if found is None or (found["before"] and found["step"] is not None):
        raise _invalid(at)
    turn = int(found["turn"])
    if found["step"] is not None:
        return ForkPoint("step", turn, int(found["step"]))
    return ForkPoint("before" if found["before"] else "turn", turn)


def _invalid(at: object) -> ConfigError:
    shown = at if isinstance(at, int | float | bool) else _text(at)
    return ConfigError(
        f"{shown!r} is no point to fork at",
        code="request.invalid",
        hint='write "3" for through turn 3, "0.17" for through step 17 of turn 0, "^3" for before turn 3',
        details={"at": shown},
    )


def _text(at: object) -> str:
    """As text that can be written down, and is not too long for a message."""
    return (at if isinstance(at, str) else repr(at))[:200].encode(errors="backslashreplace").decode()
