"""Undo: the last prompts of the user leave the surface, with all that came of them, by one ``surface/cut`` (K 7.4).

Nothing is deleted, and what the world has seen is not taken back: turns, tokens and files stay as they are. The todo
list is as it was before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.errors import AgentError, ConfigError
from kimi_ray.events import SessionEvent
from kimi_ray.log import UndoSpan, derive_messages, undo_span

_HINTS = {
    "empty": "there is no prompt in the conversation",
    "compaction_boundary": "what was said before a compaction cannot be taken back",
    "insufficient": "there are fewer prompts in the conversation",
}


@dataclass(frozen=True, slots=True)
class UndoResult:
    """What an undo took away, and what is now the last."""

    prompts: tuple[str, ...]
    """The ids of the prompts that are gone, oldest first."""
    last_prompt: tuple[dict[str, Any], ...] | None = None
    """The content of the newest prompt of the user that is left, blobs in place."""


class Undo:
    """Takes back prompts of one agent, one undo after the other.

    Args:
        journal: The agent's log.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.turn = asyncio.Lock()
        """Held by the undo that is under way."""

    async def done(self, undo_id: str) -> UndoResult | None:
        """What came of an undo that the log has already, durable when it returns; None: it has none of that name.

        Raises:
            StoreError: it is in the log, and the log is not durable yet.
        """
        cut = self._journal.fold.asked.undos.get(undo_id)
        if cut is None:
            return None
        await self._journal.flush()
        return UndoResult(tuple(cut.data["prompts"]), await self._last_prompt(cut.seq))

    async def undo(self, count: int, undo_id: str) -> UndoResult:
        """Take back the last prompts; durable when it returns. The agent stands still meanwhile.

        Args:
            count: How many.
            undo_id: The caller's name for it: one that the log has already is not done again.

        Raises:
            ConfigError: ``request.invalid``.
            AgentError: ``agent.undo_unavailable`` {reason}: ``empty``, ``insufficient``, ``compaction_boundary``.
            StoreError: it is in the log, and the log is not durable yet.
        """
        check_count(count)
        journal = self._journal
        done = await self.done(undo_id)
        if done is not None:
            return done
        span = undo_span_of(list(journal.log.surface), count)
        cut = journal.append(
            "surface/cut",
            {"reason": "undo", "prompts": list(span.prompts), "undo_id": undo_id},
            surface={"replace": [span.seqs[0], span.seqs[-1]]},
            sources=span.seqs,
        )
        await journal.flush()
        return UndoResult(span.prompts, await self._last_prompt(cut.seq))

    async def _last_prompt(self, seq: int) -> tuple[dict[str, Any], ...] | None:
        """The newest on the surface before an event."""
        for node in reversed(list(self._journal.log.surface)):
            if node.seq < seq and node.type == "user/message" and node.data["source"].get("kind") == "user":
                [whole] = await self._journal.resolve(derive_messages([node]))
                return tuple(whole["content"])
        return None


def undo_span_of(surface: Sequence[SessionEvent], count: int) -> UndoSpan:
    """What an undo of so many prompts takes off a surface.

    Raises:
        AgentError: ``agent.undo_unavailable`` {reason}.
    """
    span = undo_span(surface, count)
    if isinstance(span, str):
        raise AgentError(
            f"{count} prompt{'s' if count > 1 else ''} cannot be taken back: {_HINTS[span]}",
            code="agent.undo_unavailable",
            hint="fork before it: sessions fork ID --at ^N" if span == "compaction_boundary" else None,
            details={"reason": span, "count": count},
        )
    return span


def check_count(count: object) -> None:
    """Refuse what is no number of prompts.

    Raises:
        ConfigError: ``request.invalid``.
    """
    if type(count) is not int or count < 1:
        raise ConfigError(
            f"{count!r} prompts cannot be taken back",
            code="request.invalid",
            hint="give a whole number, at least 1",
            details={"count": count if isinstance(count, int | float | str | None) else repr(count)},
        )
