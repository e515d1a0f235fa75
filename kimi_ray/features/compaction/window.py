"""The window that an agent's context is kept in: the model's as configured, or less where its server has refused it."""

from __future__ import annotations

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse


class ContextWindow:
    """The window of one agent's model.

    Args:
        journal: The agent's log, which knows what was refused.
        in_use: The model.
    """

    def __init__(self, journal: Journal, in_use: ModelInUse) -> None:
        self._journal = journal
        self._in_use = in_use

    @property
    def tokens(self) -> int | None:
        """In tokens; None: it is not known, and nothing was refused."""
        model = self._in_use.model
        told, learned = model.settings.max_context_tokens, self._journal.fold.windows.of(model.model)
        return min((size for size in (told, learned) if size is not None), default=None)

    @property
    def threshold(self) -> int | None:
        """The size of the next request at which a compaction is due; None: the window is not known."""
        window = self.tokens
        return None if window is None else max(1, self._in_use.model.settings.compaction.threshold(window))

    @property
    def retained(self) -> int:
        """What stays behind a compaction; of a window that is smaller than configured at most half of the threshold."""
        window, threshold = self.tokens, self.threshold
        if window is None or threshold is None:
            return 0
        kept = self._in_use.model.settings.compaction.retained(window)
        return kept if kept < threshold else threshold // 2

    @property
    def user_tokens(self) -> int:
        """What stays of the user's own messages."""
        return self._in_use.model.settings.compaction.kept_user_tokens(self.tokens)
