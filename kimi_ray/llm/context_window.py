"""How an agent's context is kept inside of a model's window: the thresholds of each (``[models.X.compaction]``)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kimi_ray.log.pruning import PruneRule
from kimi_ray.settings import Settings


class CompactionSettings(Settings):
    """A ``[models.X.compaction]`` table. By itself nothing is compacted before the model has ``max_context_tokens``,
    or its server has refused a request as too long."""

    auto: bool = True
    """Prune and compact by itself, when the next request would be too large or was refused as too large."""
    threshold_ratio: float = Field(default=0.8, gt=0, le=1)
    """At this share of the window."""
    retain_ratio: float = Field(default=0.16, ge=0, lt=1)
    """What stays as it is, counted from the end, as a share of the window."""
    retain_tokens: int | None = Field(default=None, ge=0)
    """The same in tokens, in place of ``retain_ratio``."""
    user_tokens: int = Field(default=20_000, ge=0)
    """What is kept of the user's own messages word for word, in tokens; at most an eighth of the window."""
    summary_tokens: int = Field(default=8_192, ge=1)
    """The longest summary, in tokens."""
    retries: int = Field(default=1, ge=0)
    """Further compactions at once, while the first was not enough."""
    overflow_retries: int = Field(default=1, ge=0)
    """How often in a row a request that the server refused as too long is made again."""
    prune: bool = True
    """Shorten long tool results first."""
    prune_chars: int = Field(default=8_192, ge=1)
    """Tool results of more characters are shortened."""
    prune_head_chars: int = Field(default=4_096, ge=0)
    """What stays of their beginning."""
    prune_tail_chars: int = Field(default=1_024, ge=0)
    """What stays of their end."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.retain_tokens is not None and "retain_ratio" in self.model_fields_set:
            raise ValueError("retain_ratio and retain_tokens exclude each other")
        if self.retain_tokens is None and self.retain_ratio >= self.threshold_ratio:
            raise ValueError(f"retain_ratio ({self.retain_ratio:g}) must be below threshold_ratio")
        _ = self.prune_rule
        return self

    @property
    def prune_rule(self) -> PruneRule:
        """How tool results are shortened.

        Raises:
            ValueError: what is to stay does not fit into ``prune_chars``.
        """
        return PruneRule(self.prune_chars, self.prune_head_chars, self.prune_tail_chars)

    def threshold(self, window: int) -> int:
        """The size in tokens at which a compaction is due."""
        return int(window * self.threshold_ratio)

    def retained(self, window: int) -> int:
        """The tokens that stay behind a compaction."""
        return int(window * self.retain_ratio) if self.retain_tokens is None else self.retain_tokens

    def kept_user_tokens(self, window: int | None) -> int:
        """The tokens of the user's own messages that stay."""
        return self.user_tokens if window is None else min(self.user_tokens, window // 8)
