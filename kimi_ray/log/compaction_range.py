"""Which part of a surface a compaction takes: always from its beginning, never between a call and its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent
from kimi_ray.log.surface import tools_balanced


class PricedNode(NamedTuple):
    """A node of the surface and what it costs."""

    seq: int
    tokens: int


class Span(NamedTuple):
    """Nodes of a surface that follow each other, the first and the last included."""

    start: int
    """Seq of the first."""
    end: int
    """Seq of the last; after a replace it may be smaller than ``start``: a span is of places, not of numbers."""
    seqs: tuple[int, ...]
    tokens: int


def select_range(surface: Sequence[SessionEvent], prices: Sequence[PricedNode], retain_tokens: int) -> Span | None:
    """The span from the first node to where at least ``retain_tokens`` are left behind it (DSH 9.4).

    Args:
        surface: The nodes.
        prices: What each of them costs, in the same order.
        retain_tokens: What stays, counted from the end; with 0 the last node stays.

    Returns:
        The span, or None when there is nothing to take.

    Raises:
        LogError: ``log.bad_surface`` for prices of another surface.
    """
    if [node.seq for node in prices] != [node.seq for node in surface]:
        raise LogError("the prices are of another surface", code="log.bad_surface")
    keep, kept = len(prices), 0
    while keep > 0 and (keep == len(prices) or kept < retain_tokens):
        keep -= 1
        kept += prices[keep].tokens
    balanced = tools_balanced(surface)
    while keep > 0 and not balanced[keep]:
        keep -= 1
    return span_of(prices, 0, keep) if keep > 0 else None


def span_between(surface: Sequence[SessionEvent], prices: Sequence[PricedNode], start: int, end: int) -> Span:
    """The span between two nodes that are named by their seqs.

    Raises:
        LogError: ``log.bad_surface``: a seq is not on the surface, they stand the other way round, or the span would
            split a call from its result.
    """
    places = {node.seq: at for at, node in enumerate(surface)}
    missing = [seq for seq in (start, end) if seq not in places]
    if missing:
        raise LogError(f"{missing[0]} is not on the surface", code="log.bad_surface", details={"seq": missing[0]})
    first, last = places[start], places[end]
    balanced = tools_balanced(surface)
    if first > last or not (balanced[first] and balanced[last + 1]):
        why = "runs backwards on the surface" if first > last else "splits a tool call from its result"
        raise LogError(f"the span {start}..{end} {why}", code="log.bad_surface", details={"start": start, "end": end})
    return span_of(prices, first, last + 1)


def span_of(prices: Sequence[PricedNode], first: int, behind: int) -> Span:
    """The span of the nodes from index ``first`` up to, but not including, ``behind``."""
    nodes = prices[first:behind]
    seqs = tuple(node.seq for node in nodes)
    return Span(seqs[0], seqs[-1], seqs, sum(node.tokens for node in nodes))
