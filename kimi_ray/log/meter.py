"""The token meter: how large the next request is, at any moment, without looking at the surface (DSH 9.10).

An event's price is taken when it comes onto the surface and given back when a replace or a cut takes it off. What a
server counted for a request is the base of everything behind it: the estimate is right there, and only what came and
went since is estimated, in the proportion of what was counted to what had been estimated. Nothing is remembered but
totals: what was taken off is in ``EventLog.replaced`` while the observers are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from kimi_ray.events import SURFACE_TYPES, SessionEvent, encode
from kimi_ray.log.compaction_range import PricedNode
from kimi_ray.log.estimate import FRAME_TOKENS, message_tokens, tokens_of
from kimi_ray.log.event_log import EventLog
from kimi_ray.log.messages import derive

LEAST_OF_ESTIMATE = 0.5
"""A server that counts less than this share of the estimate leaves something out, and is not believed."""

MOST_OF_ESTIMATE = 8.0
"""The estimate is never taken times more than this: no text has more than two tokens a character."""

_COUNTED = ("input", "cached", "cache_write", "output")


def event_tokens(event: SessionEvent) -> int:
    """The price of an event on the surface: of the message that it shows, 0 when it shows none."""
    message = derive(event)
    return 0 if message is None else message_tokens(message)


def surface_tokens(surface: Iterable[SessionEvent]) -> int:
    """The price of a whole surface, from scratch."""
    return sum(map(event_tokens, surface))


def surface_prices(surface: Iterable[SessionEvent]) -> list[PricedNode]:
    """The price of each node of a surface."""
    return [PricedNode(event.seq, event_tokens(event)) for event in surface]


def header_tokens(header: Mapping[str, Any] | None) -> int:
    """The estimate for what a request has besides its messages: the system prompt and the tools of a header."""
    if header is None:
        return 0
    return sum(_length_of(header[key]) + FRAME_TOKENS for key in ("system", "tools") if header.get(key))


def counted_tokens(usage: Mapping[str, Any] | None) -> int | None:
    """What a server counted for a request and its answer, or None if it did not."""
    if usage is None or usage.get("estimated"):
        return None
    return sum(usage.get(key) or 0 for key in _COUNTED) or None


@dataclass(slots=True)
class Counted:
    """Follows a log for the last answer of which a server counted the tokens: O(1), for reading back and for life.

    Attributes:
        seq: Of the ``assistant/message``, or None while there is none.
        tokens: What the server counted for that request and its answer.
    """

    seq: int | None = None
    tokens: int = 0
    _attempt: tuple[Any, Any, Any] | None = None
    _usage: Mapping[str, Any] | None = None

    def response(self, data: Mapping[str, Any]) -> None:
        """Follow an ``llm/response``."""
        self._attempt = (data.get("turn"), data.get("step"), data.get("attempt"))
        self._usage = None if "error" in data else data.get("usage")

    def message(self, event: SessionEvent) -> bool:
        """Follow an ``assistant/message``; returns whether a server counted it."""
        if event.replaced is not None:
            return False
        data = event.data
        said = self._usage if self._attempt == (data["turn"], data["step"], data.get("attempt")) else None
        tokens = None if data.get("interrupted") else counted_tokens(data.get("usage") or said)
        self._attempt = self._usage = None
        if tokens is None:
            return False
        self.seq, self.tokens = event.seq, tokens
        return True

    def forget(self) -> None:
        """What was counted is no measure any more: the requests have another header."""
        self.seq, self.tokens = None, 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """How large the next request is."""

    log_revision: int
    """The next seq of the log when it was measured."""
    baseline_kind: Literal["none", "estimated", "usage"]
    """``usage``: a server counted it; ``estimated``: the header's estimate; ``none``: no request was made yet."""
    baseline_tokens: int
    surface_delta_tokens: int
    """What came onto the surface since the baseline, less what went: the estimate times ``scale``."""
    surface_tokens: int
    """The estimate of all messages."""
    scale: float = 1.0
    """What a token of the estimate is by the server's count; 1 where nothing was counted."""

    @property
    def total_tokens(self) -> int:
        """The size of the next request, never below 0."""
        return max(0, self.baseline_tokens + self.surface_delta_tokens)


class TokenMeter:
    """Follows a log. What it costs does not grow with the log.

    Args:
        log: The log to follow, from here on; what is on its surface already is priced at the first look.
        header: The log's last ``request/header`` until here.
        counted: The last answer that a server counted until here. It counts if nothing was replaced behind it.
    """

    def __init__(
        self, log: EventLog, *, header: Mapping[str, Any] | None = None, counted: Counted | None = None
    ) -> None:
        self._log = log
        self._tokens: int | None = None if len(log.surface) else 0
        self._header = header
        self._header_tokens = header_tokens(header)
        self._counted = Counted()
        self._before = counted.seq if counted is not None else None
        self._before_tokens = counted.tokens if counted is not None else 0
        self._generation = log.surface.generation
        self._base: tuple[int, int, float] | None = None
        """What a server counted, the price of the surface at that moment, and the proportion of the two."""
        self.end: Callable[[], None] = log.observe(self._follow)
        """Stop following."""

    @property
    def tokens(self) -> int:
        """The estimated tokens of all messages on the surface."""
        if self._tokens is None:
            self._tokens = surface_tokens(self._log.surface)
        if self._before is not None:
            self._look_back(self._before)
        return self._tokens

    @property
    def total(self) -> int:
        """The size of the next request in tokens."""
        return self.measure().total_tokens

    def measure(self) -> Measurement:
        """The size of the next request, and what it is made of."""
        tokens = self.tokens
        if self._base is not None:
            counted, at, scale = self._base
            return Measurement(self._log.next_seq, "usage", counted, round((tokens - at) * scale), tokens, scale)
        kind: Literal["none", "estimated"] = "none" if self._header is None else "estimated"
        return Measurement(self._log.next_seq, kind, self._header_tokens, tokens, tokens)

    def _look_back(self, seq: int) -> None:
        """Take up what was counted before this meter was there."""
        self._before = None
        if self._generation != self._log.surface.generation:
            return
        at, is_there = 0, False
        for node in self._log.surface:
            if node.seq > seq:
                if node.replaced is not None:
                    return  # what the surface was then cannot be known any more
                continue
            at += event_tokens(node)
            is_there = is_there or node.seq == seq
        if is_there and self._base is None:
            self._rest_on(self._before_tokens, at)

    def _rest_on(self, counted: int, at: int) -> None:
        scale = counted / max(1, self._header_tokens + at)
        is_likely = scale >= LEAST_OF_ESTIMATE
        self._base = (counted, at, min(scale, MOST_OF_ESTIMATE)) if is_likely else None

    def _follow(self, event: SessionEvent) -> None:
        kind = event.type
        if kind in SURFACE_TYPES:
            if self._tokens is not None:
                total, self._tokens = self._tokens, None  # a price that cannot be told is told of at the next look
                self._tokens = total + event_tokens(event) - sum(map(event_tokens, self._log.replaced))
            if kind == "assistant/message" and self._counted.message(event):
                self._rest_on(self._counted.tokens, self.tokens)
        elif kind == "llm/response":
            self._counted.response(event.data)
        elif kind == "request/header":
            header = event.data["header"]
            if header != self._header:
                self._header, self._header_tokens = header, header_tokens(header)
                self._base = self._before = None


def _length_of(value: Any) -> int:
    if isinstance(value, str):
        return tokens_of(len(value))
    if isinstance(value, Mapping) and "$blob" in value:
        return tokens_of(cast("Mapping[str, int]", value)["bytes"])
    return tokens_of(len(encode(value)))
