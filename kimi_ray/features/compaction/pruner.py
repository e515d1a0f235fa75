"""The pruner: long tool results on the surface are replaced by their heads and tails (DSH 9.9).

Each is a pair of events: ``compaction/prune`` says what it costs no more, the ``tool/result`` that replaces the other
one differs in its content alone. The whole result stays in the log. What a failure leaves behind is done.
"""

from __future__ import annotations

from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.errors import AgentError
from kimi_ray.events import thaw
from kimi_ray.log import PruneRule, message_tokens, pruned


class Pruner:
    """Prunes one agent's surface.

    Args:
        journal: The agent's log.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def prune(self, rule: PruneRule, *, unseen: bool = True, why: dict[str, int] | None = None) -> int:
        """Shorten every tool result that is too long; returns how many were.

        Args:
            rule: What stays of each.
            unseen: Also those behind the last answer, which no request had yet.
            why: ``tokens`` and ``threshold`` for the log, as in ``compaction/start``.

        Raises:
            AgentError: ``compaction.no_turn``: results are replaced in a turn only.
            LogError, StoreError: an event could not be appended, or a long text not be read.
        """
        journal = self._journal
        if journal.log.order.open_turn is None:
            raise AgentError("tool results are pruned in a turn only", code="compaction.no_turn")
        count = 0
        nodes = list(journal.log.surface)
        if not unseen:
            answers = [at for at, node in enumerate(nodes) if node.type == "assistant/message"]
            del nodes[answers[-1] if answers else 0 :]
        for node in nodes:
            if node.type != "tool/result" or _most_chars(node.data["message"]) <= rule.threshold:
                continue
            [whole] = await journal.resolve([node.data["message"]])
            content = pruned(whole["content"][0]["content"], rule)
            if content is None:
                continue
            data = thaw(node.data)
            data["message"]["content"][0]["content"] = [journal.block(block) for block in content]
            before = message_tokens(node.data["message"])
            if message_tokens(data["message"]) >= before:
                continue
            span = {"start": node.seq, "end": node.seq}
            gone = {"shadowed_range": span, "shadowed_seqs": [node.seq], "shadowed_tokens": before, **(why or {})}
            journal.append("compaction/prune", gone)
            journal.append("tool/result", data, surface={"replace": [node.seq, node.seq]}, sources=[node.seq])
            count += 1
        return count


def _most_chars(message: dict[str, Any]) -> int:
    """An upper bound of a result's characters that reads no blob: it has as many bytes, or more."""
    blocks: list[dict[str, Any]] = message["content"][0]["content"]
    return sum(len(block["text"]) if "text" in block else block["bytes"] for block in blocks if block["type"] == "text")
