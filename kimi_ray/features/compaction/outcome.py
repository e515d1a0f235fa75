"""What came of a compaction, read back from its events: for a call that is made again because its host was lost."""

from __future__ import annotations

from typing import Any

from kimi_ray.agent.context_commands import AskedCompaction
from kimi_ray.agent.journal import Journal
from kimi_ray.errors import error_from_data
from kimi_ray.features.compaction.words import CompactionResult
from kimi_ray.log import message_text, message_tokens


async def stored_outcome(journal: Journal, asked: AskedCompaction) -> CompactionResult | None:
    """The very result that the compaction gave, or would have given.

    Raises:
        KimiRayError: the error with which it ended.
        StoreError: a long summary could not be read.
    """
    start, summary, message, end = asked.start, asked.summary, asked.message, asked.end
    if summary is None or message is None:
        error: Any = None if end is None else end.data.get("error")
        if error is None:
            return None
        raise error_from_data(error)
    told = summary.data
    [whole] = await journal.resolve([{"content": told["summary"]}])
    return CompactionResult(
        told["compaction_id"],
        start.data["trigger"],
        start.seq,
        summary.seq,
        message.seq,
        message.seq if end is None else end.seq,
        (told["shadowed_range"]["start"], told["shadowed_range"]["end"]),
        tuple(told["shadowed_seqs"]),
        told["shadowed_tokens"],
        message_tokens(message.data),
        message_text(whole),
    )
