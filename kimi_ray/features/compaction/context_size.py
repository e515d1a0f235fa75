"""How large an agent's context is: its token meter, which begins to count when somebody first asks."""

from __future__ import annotations

from kimi_ray.agent.journal import Journal
from kimi_ray.log import Measurement, PricedNode, TokenMeter, surface_prices


class ContextSize:
    """The size of the next request of one agent. Until it is asked for the first time it costs nothing.

    Args:
        journal: The agent's log.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._meter: TokenMeter | None = None

    @property
    def total(self) -> int:
        """In tokens: what a server counted, and the estimate of what came and went since."""
        return self.measure().total_tokens

    def measure(self) -> Measurement:
        """The size and what it is made of."""
        if self._meter is None:
            fold = self._journal.fold
            self._meter = TokenMeter(self._journal.log, header=fold.header, counted=fold.counted)
        return self._meter.measure()

    def begin_anew(self) -> None:
        """Know of the log what a new life of its agent knows, that has only read it."""
        if self._meter is not None:
            self._meter.end()
            self._meter = None

    def estimated(self, tokens: int) -> int:
        """So many tokens of the server's as tokens of the estimate, in which spans and messages are measured."""
        return round(tokens / self.measure().scale)

    def prices(self) -> list[PricedNode]:
        """What each node of the surface costs, by the estimate."""
        return surface_prices(self._journal.log.surface)
