"""The engine: when there is something to compact, and what (DSH 9.6, 9.7)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.errors import KimiRayError
from kimi_ray.events import SessionEvent
from kimi_ray.features.compaction.checkpoint import is_checkpoint
from kimi_ray.features.compaction.compactor import Compactor
from kimi_ray.features.compaction.context_size import ContextSize
from kimi_ray.features.compaction.outcome import stored_outcome
from kimi_ray.features.compaction.pruner import Pruner
from kimi_ray.features.compaction.window import ContextWindow
from kimi_ray.features.compaction.words import CompactionResult, Trigger, busy, not_durable, not_enough
from kimi_ray.llm.context_window import CompactionSettings
from kimi_ray.log import Span, select_range, span_between, surface_prices

ROOM_BEFORE_ANOTHER = 0.25
"""Of the room that a failed compaction left up to the window, this share is filled before the next one is tried: a
model that cannot summarize is not asked before each request, and with less and less room more often."""

LEAST_BEFORE_ANOTHER = 0.02
"""It is at least this share of the window."""


class CompactionEngine:
    """Compacts one agent's conversation.

    Args:
        journal: The agent's log.
        size: How large its context is.
        pruner: Shortens tool results.
        compactor: Replaces spans.
        in_use: The agent's model, with its thresholds.
        window: What it has room for.
    """

    def __init__(
        self,
        journal: Journal,
        size: ContextSize,
        pruner: Pruner,
        compactor: Compactor,
        in_use: ModelInUse,
        window: ContextWindow,
    ) -> None:
        self._journal = journal
        self._size = size
        self._pruner = pruner
        self._compactor = compactor
        self._in_use = in_use
        self._window = window

    @property
    def settings(self) -> CompactionSettings:
        """Those of the model in use."""
        return self._in_use.model.settings.compaction

    @property
    def threshold(self) -> int | None:
        """The size of the next request at which a compaction is due; None: the model's window is not known."""
        return self._window.threshold

    async def relieve(self) -> CompactionResult | None:
        """Inside a turn: prune, then compact until the next request is below the threshold.

        Returns:
            The last compaction, or None when there was none: nothing is due, pruning was enough, or there was no
            summary the last time and the context has hardly grown since (``ROOM_BEFORE_ANOTHER``).

        Raises:
            AgentError: as ``Compactor.compact``; ``compaction.not_enough``.
        """
        threshold = self.threshold
        if threshold is None or self._size.total < threshold:
            return None
        self._check_free()
        for unseen in (False, True) if self.settings.prune else ():
            why = self._why(threshold)
            count = await self._pruner.prune(self.settings.prune_rule, unseen=unseen, why=why)
            if count and self._size.total < threshold:
                return None
        if self._failed_just_now:
            return None
        result: CompactionResult | None = None
        for _ in range(self.settings.retries + 1):
            found = await self._compact("pressure", self._window.retained, threshold=threshold)
            if found is None:
                break
            result = found
            if self._size.total < threshold:
                return result
        raise not_enough(self._size.total, threshold)

    def _why(self, threshold: int | None) -> dict[str, int]:
        why = {"tokens": self._size.total}
        return why if threshold is None else {**why, "threshold": threshold}

    @property
    def _failed_just_now(self) -> bool:
        """Whether a model that gave no summary would be asked for hardly more than what it failed at."""
        failed_at, window = self._journal.fold.failed_at, self._window.tokens
        if failed_at is None or window is None:
            return False
        grown = max((window - failed_at) * ROOM_BEFORE_ANOTHER, window * LEAST_BEFORE_ANOTHER)
        return self._size.total < failed_at + grown

    async def after_overflow(self) -> CompactionResult | None:
        """Inside a turn, a request was refused as too long: prune, and compact all but the last exchange.

        Raises:
            AgentError: as ``Compactor.compact``. What was pruned before stays so.
        """
        self._check_free()
        if self.settings.prune:
            await self._pruner.prune(self.settings.prune_rule, why=self._why(self.threshold))
        return await self._compact("overflow", 0, threshold=self.threshold)

    async def outcome(self, command_id: str) -> CompactionResult | None:
        """What came of a compaction that the log has already, durable when it returns; None: it has none of that
        name, or one that was cut off before it took effect.

        Raises:
            KimiRayError: the error with which it ended; ``compaction.persistence``.
        """
        asked = self._journal.fold.asked.compactions.get(command_id)
        if asked is None or not asked.settled:
            return None
        compaction_id = str(asked.start.data["compaction_id"])
        try:
            await self._journal.flush()
        except KimiRayError as error:
            raise _of_flush(compaction_id, error) from error
        return await stored_outcome(self._journal, asked)

    async def compact_now(
        self, instruction: str | None = None, command_id: str | None = None
    ) -> CompactionResult | None:
        """Between turns: compact all but the last message, and make it durable.

        Args:
            instruction: What the user wants of the summary.
            command_id: The caller's name for it, by which ``outcome`` finds it.

        Returns:
            None when there is nothing to compact; nothing was written then.

        Raises:
            AgentError: as ``Compactor.compact``; ``compaction.persistence``.
            StoreError: ``store.fenced``: another life of the log has it, and knows what came of it.
        """
        self._check_free()
        order = self._journal.log.order
        compaction_id: str | None = None
        failure: BaseException | None = None
        result: CompactionResult | None = None
        began = self._journal.log.next_seq
        try:
            result = await self._compact("manual", 0, instruction=instruction, command_id=command_id)
        except (KimiRayError, asyncio.CancelledError) as error:
            failure = error
        if self._journal.log.next_seq > began and order.open_compaction is None:
            try:
                await self._journal.flush()
            except KimiRayError as error:
                compaction_id = None if result is None else result.compaction_id
                failure = failure or _of_flush(compaction_id, error)
        if failure is not None:
            raise failure
        return result

    async def compact_region(self, start: int, end: int) -> CompactionResult:
        """Inside a turn: compact the span between two messages, named by their seqs.

        Raises:
            AgentError: as ``Compactor.compact``.
            LogError: ``log.bad_surface``: it is no span, or splits a call from its result.
        """
        self._check_free()
        span = span_between(list(self._journal.log.surface), self._size.prices(), start, end)
        return await self._compactor.compact(span, "region")

    async def _compact(
        self,
        trigger: Trigger,
        retain: int,
        *,
        instruction: str | None = None,
        threshold: int | None = None,
        command_id: str | None = None,
    ) -> CompactionResult | None:
        if self._journal.fold.header is None:
            return None
        surface = list(self._journal.log.surface)
        span = span_of_all(surface, self._size.estimated(retain), summaries=trigger == "overflow")
        if span is None:
            return None
        return await self._compactor.compact(
            span, trigger, instruction=instruction, threshold=threshold, command_id=command_id
        )

    def _check_free(self) -> None:
        compaction_id = self._journal.log.order.open_compaction
        if compaction_id is not None:
            raise busy(f"compaction {compaction_id} is under way", compaction_id=compaction_id)


def span_of_all(surface: Sequence[SessionEvent], retain: int = 0, *, summaries: bool = False) -> Span | None:
    """What a compaction takes of a surface; None: there is nothing to take.

    Args:
        surface: The nodes.
        retain: What stays, in tokens of the estimate, counted from the end; at least the last message does.
        summaries: Also nothing but the summary of an earlier one.
    """
    span = select_range(surface, surface_prices(surface), retain)
    if span is not None and not summaries and len(span.seqs) == 1 and is_checkpoint(surface[0]):
        return None
    return span


def _of_flush(compaction_id: str | None, error: KimiRayError) -> KimiRayError:
    """What a compaction tells that could not be made durable; a fenced log is gone on with elsewhere."""
    return error if error.code == "store.fenced" else not_durable(compaction_id, error)
