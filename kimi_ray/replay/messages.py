"""The messages of a recording at any place of it, going forward."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_ray.events import SessionEvent
from kimi_ray.log import Message, Surface, complete_tools, derive_messages
from kimi_ray.replay.malformed import MALFORMED, shape_of, wrong_shape


class MovingSurface:
    """What the model saw, from the beginning of a log to its end.

    Args:
        events: All events of the log that were ever on the surface, in order.
    """

    def __init__(self, events: Sequence[SessionEvent]) -> None:
        self._events = events
        self._place = 0
        self._surface = Surface()
        self._messages: list[Message] = []
        """Of the first ``_through`` nodes, all calls among them answered: they stay so until a replace."""
        self._through = 0

    @property
    def generation(self) -> int:
        """Rises whenever something on the surface is replaced: messages before are then not those after."""
        return self._surface.generation

    @property
    def size(self) -> int:
        """The events on the surface."""
        return len(self._surface)

    def advance(self, seq: int) -> None:
        """Go on to before the event ``seq``; a place behind is left as it is."""
        events, surface = self._events, self._surface
        while self._place < len(events) and events[self._place].seq < seq:
            plan = surface.check(events[self._place])
            self._place += 1
            if plan is not None and surface.apply(plan):
                self._messages, self._through = [], 0

    def messages(self) -> list[Message]:
        """The messages as they go over the wire, every tool call answered; blobs are still references.

        Raises:
            LogError: ``log.bad_payload``: an event on the surface shows none.
        """
        surface, end = self._surface, len(self._surface)
        fresh = _messages_of([surface[index] for index in range(self._through, end)])
        if not surface.is_balanced(end, end):
            return [*self._messages, *fresh]
        self._messages.extend(fresh)
        self._through = end
        return list(self._messages)

    def between(self, first: int, last: int) -> list[Message]:
        """The messages of the nodes from one seq to another, as they would go over the wire alone."""
        seqs = self._surface.seqs
        if first not in seqs or last not in seqs:
            return []
        return _messages_of([self._surface[index] for index in range(seqs.index(first), seqs.index(last) + 1)])

    @property
    def settled(self) -> int:
        """So many messages at the beginning are the same at every later place, until ``generation`` changes."""
        return len(self._messages)


def _messages_of(nodes: Sequence[SessionEvent]) -> list[Message]:
    try:
        return complete_tools(derive_messages(nodes))
    except MALFORMED as error:
        for node in nodes:  # which of them it is
            with shape_of(f"event {node.seq} ({node.type})", seq=node.seq, type=node.type):
                complete_tools(derive_messages([node]))
        raise wrong_shape("what the events say together", error) from error
