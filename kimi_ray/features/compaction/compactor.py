"""The transaction: one span of the surface is replaced by one message, wholly or not at all (DSH 9.2).

``compaction/start`` is the lock, and is appended before anything is asked. ``compaction/summary``, the ``user/message``
that replaces the span and ``compaction/end`` are appended in one go. Whatever fails before leaves the surface as it was
and one ``compaction/end`` with the error; if not even that can be appended, the start stays alone and holds the lock
until the log's next life.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.slots import AgentSlots, Compacted, Compacting
from kimi_ray.agent.summarizer import Summarizer, Summary, SummaryTask
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import AgentError, KimiRayError, LogError, as_error
from kimi_ray.events import SessionEvent
from kimi_ray.features.compaction.checkpoint import answers_in, checkpoint_message, users_words, within
from kimi_ray.features.compaction.context_size import ContextSize
from kimi_ray.features.compaction.summary_check import checked_summary
from kimi_ray.features.compaction.window import ContextWindow
from kimi_ray.features.compaction.words import (
    CompactionResult,
    Trigger,
    busy,
    cancelled,
    changed,
    failed_commit,
    failed_summary,
    not_smaller,
)
from kimi_ray.ids import new_message_id, new_ulid
from kimi_ray.log import Message, Span, complete_tools, derive_messages, message_text, message_tokens


class Compactor:
    """Compacts spans of one agent's surface.

    Args:
        journal: The agent's log.
        size: How large its context is.
        summarizer: Writes the summaries.
        in_use: The agent's model.
        slots: ``compacting`` is asked, ``compacted`` told.
        notices: Tells it.
        window: What the model has room for.
    """

    def __init__(
        self,
        journal: Journal,
        size: ContextSize,
        summarizer: Summarizer,
        in_use: ModelInUse,
        slots: AgentSlots,
        notices: Notices,
        window: ContextWindow,
    ) -> None:
        self._journal = journal
        self._size = size
        self._summarizer = summarizer
        self._in_use = in_use
        self._slots = slots
        self._notices = notices
        self._window = window

    async def compact(
        self,
        span: Span,
        trigger: Trigger,
        *,
        instruction: str | None = None,
        threshold: int | None = None,
        command_id: str | None = None,
    ) -> CompactionResult:
        """Replace a span by what the user said in it and a summary. Not flushed.

        Args:
            span: What; as the surface is now.
            trigger: Why. ``manual`` between turns, everything else inside one.
            instruction: What the user wants of the summary.
            threshold: At which size it was asked for.
            command_id: The caller's name for it, by which it is found again in the log.

        Raises:
            AgentError: ``compaction.busy``, ``compaction.no_turn``: nothing was appended; ``compaction.changed``,
                ``compaction.summary``, ``compaction.commit``.
            StoreError: ``store.fenced``.
            LogError: ``log.*`` when not even the start could be appended.
        """
        journal, order = self._journal, self._journal.log.order
        turn = order.open_turn
        if order.open_compaction is not None:
            raise busy(f"compaction {order.open_compaction} is under way", compaction_id=order.open_compaction)
        if trigger == "manual" and turn is not None:
            raise busy(f"turn {turn} is open", turn=turn)
        if trigger != "manual" and turn is None:
            raise AgentError(f"a compaction of the kind {trigger} needs a turn", code="compaction.no_turn")
        tokens = self._size.total
        compaction_id = f"compaction_{new_ulid().lower()}"
        facts: dict[str, Any] = {
            "turn": turn,
            "trigger": trigger,
            "instruction": None if instruction is None else journal.value(instruction, inline_bytes=4096),
            "shadowed_range": {"start": span.start, "end": span.end},
            "tokens": tokens,
            "threshold": threshold,
            "command_id": command_id,
        }
        known = {key: value for key, value in facts.items() if value is not None}
        start = journal.append("compaction/start", {"compaction_id": compaction_id, **known})
        how = "manual" if trigger == "manual" else "auto"
        seen = journal.log.surface.seqs
        try:
            if self._slots.compacting:
                await self._slots.compacting.run(Compacting(how, tokens, instruction))
            nodes = self._nodes(span)
            messages = await journal.resolve(complete_tools(derive_messages(nodes)))
            summary = await self._summary(compaction_id, messages, instruction)
            message = self._checkpoint(compaction_id, messages, summary, span)
            if self._is_changed(span, seen, whole=trigger != "manual"):
                raise changed(compaction_id)
        except BaseException as error:
            self._close(compaction_id, turn, error)
            raise
        result = self._commit(compaction_id, turn, trigger, span, start, summary, message)
        if self._slots.compacted:
            self._notices.tell(self._slots.compacted, Compacted(how, compaction_id, self._size.total))
        return result

    def _nodes(self, span: Span) -> list[SessionEvent]:
        wanted = set(span.seqs)
        return [node for node in self._journal.log.surface if node.seq in wanted]

    def _is_changed(self, span: Span, seen: tuple[int, ...], *, whole: bool) -> bool:
        seqs = self._journal.log.surface.seqs
        if whole:
            return seqs != seen
        at = seqs.index(span.start) if span.start in seqs else -1
        return at < 0 or seqs[at : at + len(span.seqs)] != span.seqs

    async def _summary(self, compaction_id: str, messages: list[Message], instruction: str | None) -> Summary:
        settings = self._in_use.model.settings
        task = SummaryTask(
            compaction_id,
            messages,
            instruction,
            max_tokens=settings.compaction.summary_tokens,
            window=self._window.tokens,
            scale=self._size.measure().scale,
        )
        try:
            return checked_summary(await self._summarizer.summarize(task))
        except BaseException as error:
            if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                raise
            failure = as_error(error)
            if failure.code == "store.fenced":
                raise
            raise failed_summary(compaction_id, failure) from error

    def _checkpoint(self, compaction_id: str, messages: list[Message], summary: Summary, span: Span) -> Message:
        """The message in its stored form; with less of the user's words where it would save nothing otherwise."""
        budget = self._size.estimated(self._window.user_tokens)
        words, tokens = users_words(messages), 0
        for share in (budget, budget // 4, 0):
            message = checkpoint_message(
                message_id=new_message_id(),
                compaction_id=compaction_id,
                summary=summary.content,
                kept=within(words, share),
                todos=self._journal.fold.todos,
                answers=answers_in(messages),
            )
            message["content"] = [self._journal.block(block) for block in message["content"]]
            tokens = message_tokens(message)
            if tokens < span.tokens:
                return message
        raise not_smaller(compaction_id, tokens, span.tokens)

    def _commit(
        self,
        compaction_id: str,
        turn: int | None,
        trigger: Trigger,
        span: Span,
        start: SessionEvent,
        summary: Summary,
        message: Message,
    ) -> CompactionResult:
        journal = self._journal
        told: dict[str, Any] = {
            "compaction_id": compaction_id,
            "summary": [journal.block(block) for block in summary.content],
            "shadowed_range": {"start": span.start, "end": span.end},
            "shadowed_seqs": list(span.seqs),
            "shadowed_tokens": span.tokens,
        }
        told |= {key: value for key, value in (("model", summary.model), ("usage", summary.usage)) if value is not None}
        try:
            summed = journal.append("compaction/summary", told)
            replacing = journal.append(
                "user/message",
                message,
                surface={"replace": [span.start, span.end]},
                sources=[start.seq, summed.seq, *span.seqs],
            )
        except KimiRayError as error:
            failure = _commit_error(compaction_id, error)
            self._close(compaction_id, turn, failure)
            raise failure from error
        try:
            end = journal.append("compaction/end", _bracket(compaction_id, turn))
        except KimiRayError as error:
            raise _commit_error(compaction_id, error) from error
        return CompactionResult(
            compaction_id,
            trigger,
            start.seq,
            summed.seq,
            replacing.seq,
            end.seq,
            (span.start, span.end),
            span.seqs,
            span.tokens,
            message_tokens(message),
            message_text({"content": summary.content}),
        )

    def _close(self, compaction_id: str, turn: int | None, error: BaseException) -> None:
        """Close the bracket with the error, if that can be."""
        if isinstance(error, asyncio.CancelledError):
            error = cancelled(compaction_id)
        elif not isinstance(error, Exception):
            return  # the process ends
        data = as_error(error).to_data()
        try:
            self._journal.append("compaction/end", {**_bracket(compaction_id, turn), "error": data})
        except KimiRayError as second:
            if isinstance(error, KimiRayError):
                error.with_details(end_failed=second.to_data())


def _bracket(compaction_id: str, turn: int | None) -> dict[str, Any]:
    return {"compaction_id": compaction_id} | ({} if turn is None else {"turn": turn})


def _commit_error(compaction_id: str, error: KimiRayError) -> KimiRayError:
    return failed_commit(compaction_id, error) if isinstance(error, LogError) else error
