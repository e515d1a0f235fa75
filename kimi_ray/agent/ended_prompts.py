"""What is left of prompts that ended long ago: their ids, their states, their turns, what they were about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast, get_args

from kimi_ray.agent.id_table import IdTable
from kimi_ray.settings import PromptState

_STATES: Final = cast("tuple[PromptState, ...]", get_args(PromptState))
_NO_TURN: Final = -1


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """A prompt, or a continuation, of long ago; the log has the rest of it."""

    state: PromptState
    turn: int | None
    content_hash: int


class EndedPrompts:
    """Those of one agent: 32 bytes each, in a table of which two fifths or more are free places."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = IdTable(3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EndedPrompts) and self._table == other._table

    __hash__ = None  # pyright: ignore[reportAssignmentType]  what changes has none

    def __len__(self) -> int:
        return len(self._table)

    def get(self, prompt_id: str) -> EndedPrompt | None:
        """What is known of it, or None for one that did not end here, or not long ago."""
        found = self._table.get(prompt_id)
        if found is None:
            return None
        state, turn, content_hash = found
        return EndedPrompt(_STATES[state], None if turn == _NO_TURN else turn, content_hash)

    def put(self, prompt_id: str, state: PromptState, turn: int | None, content_hash: int | None) -> None:
        """It ended, and its record goes."""
        self._table.put(prompt_id, _STATES.index(state), _NO_TURN if turn is None else turn, content_hash or 0)
