"""The surface: which events the model sees now, folded from the log one event at a time.

``append`` puts an event at the end; ``replace`` puts one in the place of a span of current nodes and must cite every
event it shadows. ``surface/cut`` replaces a span and then shows nothing itself (an undo).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kimi_ray.errors import LogError
from kimi_ray.events import SURFACE_TYPES, SessionEvent


@dataclass(frozen=True, slots=True)
class SurfacePlan:
    """A checked transition, made by ``Surface.check`` and carried out by ``Surface.apply``."""

    event: SessionEvent
    start: int
    """Index of the first node to take out; the number of nodes for an append."""
    end: int
    """Index behind the last node to take out."""


class Surface:
    """The ordered seqs on the surface. ``generation`` rises with every replace."""

    __slots__ = ("_nodes", "generation")

    def __init__(self) -> None:
        self._nodes: list[SessionEvent] = []
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
        """Whether ``event`` may enter; changes nothing.

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
            return SurfacePlan(event, size, size)
        start, end = self._index_of(event, span[0]), self._index_of(event, span[1])
        if start > end:
            raise _bad(event, f"the span {span[0]}..{span[1]} runs backwards on the surface")
        shadowed = self._nodes[start : end + 1]
        cited = set(event.sources or ())
        missing = [node.seq for node in shadowed if node.seq not in cited]
        if missing:
            raise _bad(event, f"the replaced event {missing[0]} is not among the sources")
        if event.type == "tool/result":
            self._check_result_replace(event, shadowed)
        if event.type == "surface/cut" and not tools_balanced(self._nodes, start, end + 1):
            raise _bad(event, "the cut splits a tool call from its result")
        return SurfacePlan(event, start, end + 1)

    def apply(self, plan: SurfacePlan) -> None:
        """Carry out a plan. A plan must not be older than the last change."""
        shown = [] if plan.event.type == "surface/cut" else [plan.event]
        if plan.start == plan.end:
            self._nodes.extend(shown)
            return
        self._nodes[plan.start : plan.end] = shown
        self.generation += 1

    def _index_of(self, event: SessionEvent, seq: int) -> int:
        # From the end: replaces almost always touch recent nodes or the whole head.
        nodes = self._nodes
        for index in range(len(nodes) - 1, -1, -1):
            if nodes[index].seq == seq:
                return index
        raise _bad(event, f"{seq} is not on the surface")

    def _check_result_replace(self, event: SessionEvent, shadowed: list[SessionEvent]) -> None:
        if len(shadowed) != 1 or shadowed[0].type != "tool/result":
            raise _bad(event, "a tool/result replaces exactly one tool/result")
        if _without_content(event) != _without_content(shadowed[0]):
            raise _bad(event, "a replaced tool/result may change only its content")


def tools_balanced(nodes: list[SessionEvent], start: int, end: int) -> bool:
    """Whether the cuts before ``start`` and before ``end`` leave every tool call with its results."""
    open_calls = 0
    for index, node in enumerate(nodes[:end]):
        if index == start and open_calls:
            return False
        if node.type == "assistant/message":
            content = node.data["message"]["content"]
            open_calls += sum(1 for block in content if block["type"] == "tool-call")
        elif node.type == "tool/result":
            open_calls -= 1
    return open_calls == 0


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
