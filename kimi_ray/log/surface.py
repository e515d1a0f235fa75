"""The surface: which events the model sees now, folded from the log one event at a time.

``append`` puts an event at the end; ``replace`` puts one in the place of a span of current nodes and must cite every
event it shadows. ``surface/cut`` replaces a span and then shows nothing itself (an undo).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kimi_ray.errors import LogError
from kimi_ray.events import SURFACE_TYPES, SessionEvent


class SurfacePlan(NamedTuple):
    """A checked transition, made by ``Surface.check`` and carried out by ``Surface.apply``."""

    event: SessionEvent
    start: int
    """Index of the first node to take out; the number of nodes for an append."""
    end: int
    """Index behind the last node to take out."""
    asks: int
    """Tool calls in the event."""


class Surface:
    """The ordered nodes on the surface. ``generation`` rises with every replace."""

    __slots__ = ("_asking", "_nodes", "_places", "_unanswered", "generation")

    def __init__(self) -> None:
        self._nodes: list[SessionEvent] = []
        self._places: dict[int, int] | None = None
        """Seq to index; made at the first replace and kept until a replace shifts the nodes behind it."""
        self._asking: dict[int, int] = {}
        """Seq to tool calls, of the nodes that ask for some: their data may be out of memory."""
        self._unanswered = 0
        """Tool calls on the surface less tool results on it."""
        self.generation = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[SessionEvent]:
        return iter(self._nodes)

    def __getitem__(self, index: int) -> SessionEvent:
        return self._nodes[index]

    @property
    def seqs(self) -> tuple[int, ...]:
        """The seqs on the surface, in order."""
        return tuple(node.seq for node in self._nodes)

    def check(self, event: SessionEvent) -> SurfacePlan | None:
        """Whether ``event`` may enter; changes nothing that can be seen.

        Returns:
            The plan for ``apply``, or None for an event that is not on the surface.

        Raises:
            LogError: ``log.bad_surface``.
        """
        if event.type not in SURFACE_TYPES:
            if event.surface is not None or event.sources is not None:
                raise _bad(event, f"{event.type} is not a surface type: it takes neither surface nor sources")
            return None
        span = event.replaced
        if span is None:
            if event.surface != "append":
                raise _bad(event, f"{event.type} needs surface: append or replace")
            if event.type == "surface/cut":
                raise _bad(event, "surface/cut is always a replace")
            if event.sources is not None and not event.sources and event.type != "assistant/message":
                raise _bad(event, "empty sources are for assistant/message only")
            size = len(self._nodes)
            return SurfacePlan(event, size, size, _calls_in(event))
        start, end = self._place_of(event, span[0]), self._place_of(event, span[1]) + 1
        if start >= end:
            raise _bad(event, f"the span {span[0]}..{span[1]} runs backwards on the surface")
        shadowed = self._nodes[start:end]
        cited = set(event.sources or ())
        missing = [node.seq for node in shadowed if node.seq not in cited]
        if missing:
            raise _bad(event, f"the replaced event {missing[0]} is not among the sources")
        if event.type == "tool/result":
            self._check_result_replace(event, shadowed)
        if event.type == "surface/cut" and not self.is_balanced(start, end):
            raise _bad(event, "the cut splits a tool call from its result")
        return SurfacePlan(event, start, end, _calls_in(event))

    def apply(self, plan: SurfacePlan) -> tuple[SessionEvent, ...]:
        """Carry out a plan, which must not be older than the last change; returns the nodes that it took out."""
        event, start, end, asks = plan
        if asks:
            self._asking[event.seq] = asks
        self._unanswered += self._unanswered_of(event)
        if start == end:
            if self._places is not None:
                self._places[event.seq] = start
            self._nodes.append(event)
            return ()
        shadowed = tuple(self._nodes[start:end])
        self._unanswered -= sum(map(self._unanswered_of, shadowed))
        for node in shadowed:
            self._asking.pop(node.seq, None)
        shows = event.type != "surface/cut"
        self._nodes[start:end] = [event] if shows else []
        if self._places is not None:
            if shows and end - start == 1:
                del self._places[shadowed[0].seq]
                self._places[event.seq] = start
            elif start + shows == len(self._nodes):
                # The end went: nothing behind it shifts.
                for node in shadowed:
                    del self._places[node.seq]
                if shows:
                    self._places[event.seq] = start
            else:
                self._places = None
        self.generation += 1
        return shadowed

    def is_balanced(self, start: int, end: int) -> bool:
        """Whether the cuts before index ``start`` and before ``end`` leave every tool call with its results.

        Counted from the end, so a cut near the end of a long surface costs what it takes out.
        """
        before_end = self._unanswered - sum(map(self._unanswered_of, self._nodes[end:]))
        return before_end == 0 and sum(map(self._unanswered_of, self._nodes[start:end])) == 0

    def _unanswered_of(self, node: SessionEvent) -> int:
        return -1 if node.type == "tool/result" else self._asking.get(node.seq, 0)

    def _place_of(self, event: SessionEvent, seq: int) -> int:
        places = self._places
        if places is None:
            places = self._places = {node.seq: index for index, node in enumerate(self._nodes)}
        place = places.get(seq)
        if place is None:
            raise _bad(event, f"{seq} is not on the surface")
        return place

    def _check_result_replace(self, event: SessionEvent, shadowed: list[SessionEvent]) -> None:
        if len(shadowed) != 1 or shadowed[0].type != "tool/result":
            raise _bad(event, "a tool/result replaces exactly one tool/result")
        if _without_content(event) != _without_content(shadowed[0]):
            raise _bad(event, "a replaced tool/result may change only its content")


def tools_balanced(nodes: Iterable[SessionEvent]) -> list[bool]:
    """For each cut of a surface (before each node, and behind the last), whether it leaves every call its results.

    Raises:
        LogError: ``log.bad_surface`` for a result without a call before it.
    """
    open_calls = 0
    balanced = [True]
    for node in nodes:
        open_calls += -1 if node.type == "tool/result" else _calls_in(node)
        if open_calls < 0:
            raise _bad(node, "a tool result stands before its call")
        balanced.append(open_calls == 0)
    return balanced


def _calls_in(event: SessionEvent) -> int:
    if event.type != "assistant/message":
        return 0
    return sum(1 for block in event.data["message"]["content"] if block["type"] == "tool-call")


def _without_content(event: SessionEvent) -> object:
    data = dict(event.data)
    message = dict(data["message"])
    block = dict(message["content"][0])
    block.pop("content", None)
    message["content"] = block
    data["message"] = message
    return data


def _bad(event: SessionEvent, what: str) -> LogError:
    return LogError(f"event {event.seq} ({event.type}): {what}", code="log.bad_surface", details={"seq": event.seq})
