"""The token meter: how large the surface is, at any moment, without looking at it.

An event's price is taken when it comes onto the surface and given back when a replace or a cut takes it off. Nothing is
remembered but the total: what was taken off is in ``EventLog.replaced`` while the observers are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kimi_ray.events import SURFACE_TYPES, SessionEvent
from kimi_ray.log.estimate import message_tokens
from kimi_ray.log.event_log import EventLog
from kimi_ray.log.messages import derive


def event_tokens(event: SessionEvent) -> int:
    """The price of an event on the surface: of the message that it shows, 0 when it shows none."""
    message = derive(event)
    return 0 if message is None else message_tokens(message)


def surface_tokens(surface: Iterable[SessionEvent]) -> int:
    """The price of a whole surface, from scratch."""
    return sum(map(event_tokens, surface))


class TokenMeter:
    """Follows a log. What it costs does not grow with the log.

    Args:
        log: The log to follow, from here on; what is on its surface already is priced at the first look.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._tokens: int | None = None if len(log.surface) else 0
        self.end: Callable[[], None] = log.observe(self._follow)
        """Stop following."""

    @property
    def tokens(self) -> int:
        """The estimated tokens of all messages on the surface."""
        if self._tokens is None:
            self._tokens = surface_tokens(self._log.surface)
        return self._tokens

    def _follow(self, event: SessionEvent) -> None:
        if self._tokens is not None and event.type in SURFACE_TYPES:
            total, self._tokens = self._tokens, None  # a price that cannot be told is told of at the next look
            self._tokens = total + event_tokens(event) - sum(map(event_tokens, self._log.replaced))
