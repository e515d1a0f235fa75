"""What a log says of the window that a model really has: a server that refused a request as too long has told it.

It is found again in every life of the log and in its forks, as long as the log is asked for the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

OF_REFUSED = 0.85
"""Where the server named no number: this share of the size that was refused."""


@dataclass(slots=True)
class _Known:
    named: int | None = None
    refused: int | None = None


@dataclass(slots=True)
class LearnedWindows:
    """Follows a log, by the names that the models have on the wire."""

    _models: dict[str, _Known] = field(default_factory=dict[str, _Known])
    _answered: dict[str, int] = field(default_factory=dict[str, int])

    def of(self, model: str) -> int | None:
        """The window in tokens; None: no request of that model was ever refused as too long.

        A number that the server named counts as it is. Else it is ``OF_REFUSED`` of the smallest size that was refused,
        but no less than what the server has answered.
        """
        known = self._models.get(model)
        if known is None:
            return None
        if known.named is not None:
            return known.named
        return None if known.refused is None else max(round(known.refused * OF_REFUSED), self._answered.get(model, 0))

    def failed(self, model: str, error: Mapping[str, Any]) -> None:
        """Follow a request that failed."""
        if error.get("code") == "context.overflow":
            window = cast("dict[str, Any]", error.get("details") or {}).get("window")
            known = self._models.setdefault(model, _Known())
            if type(window) is int and window > 0:
                known.named = window

    def mended(self, model: str, tokens: Any) -> None:
        """Follow the start of a compaction because of such a request, which had so many tokens."""
        if type(tokens) is int and tokens > 0:
            known = self._models.setdefault(model, _Known())
            known.refused = tokens if known.refused is None else min(tokens, known.refused)

    def answered(self, model: str, tokens: int) -> None:
        """Follow an answer: a server counted so many tokens of it and its request."""
        if tokens > self._answered.get(model, 0):
            self._answered[model] = tokens
